"""
The record of a run's progress and results.

A record is one file, replaced as a whole with each commit; what it holds has happened,
whatever other files exist. Its name has the fence, a number that rises with each run
that takes the state directory. Only the file with the highest fence counts, so a run
that was fenced off can still write its own file without harm.

::

    record.3.json
    {"format": 1, "fence": 3, "delivery": "exactly-once", "whole": true,
     "load": "5f2d01c3", "run": "a97b3e10", "epoch": 17, "position": 4000, "ended": false,
     "output": "parquet /data/birds",
     "accounts": {"extract": [0, 0, ...], "clean": [4000, 3990, 10, ...]},
     "letters": {"clean": 10240}, "crc32": 2748391021}

The checksum ``crc32`` is that of the other content, as JSON in the same order. A record
of an earlier version, or in a sink's note, has none.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, Self
from zlib import crc32

from etlstage.disk import sync
from etlstage.errors import StateUnusable, os_reason
from etlstage.pipeline.delivery.folder import opened
from etlstage.pipeline.delivery.place import same_output
from etlstage.pipeline.delivery.position import load, put
from etlstage.telemetry.log import Log

__all__ = ("RECORDS", "CommitRecord", "StoppedAt", "fence_of")

StoppedAt = Literal["", "end", "limit"]
"""Where a run stopped reading: at the end of its input, at a limit, or elsewhere."""

RECORDS: Final = "record.*.json"
"""The pattern of their file names."""
_STORED: Final = re.compile(r"record\.(\d+)\.json")
_FENCE: Final = re.compile(r"record\.(\d+)\.(?:json|claim)")
_LEFT: Final = re.compile(r"record\.(\d+)\.(?:json|new|claim)")
_FORMAT: Final = 1

_log = Log()


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitRecord:
    """How far a run has come."""

    fence: int = 0
    """The fence of the run that wrote it; the run with the highest may commit."""
    delivery: str = "at-least-once"
    """The delivery guarantee: ``at-least-once`` or ``exactly-once``."""
    whole: bool = False
    """Whether an interrupted run can resume, with letters cut back to ``letters``."""
    load: str = ""
    """The name of the load, common to its epochs over all runs of it."""
    run: str = ""
    """Identifies the run, over all its starts; its dead letters have the same value."""
    epoch: int = 0
    """The last durable epoch of the load; epochs are counted from 1."""
    position: object = None
    """Where the source resumes; None: at the beginning."""
    output: str = ""
    """The destination, as in reports."""
    moved_from: str = ""
    """The destination before, while the load has loaded nothing into this one."""
    ended: bool = True
    """Whether the run completed; else it was interrupted."""
    stopped_at: StoppedAt = ""
    """Where a run that completed stopped reading; empty if it was drained."""
    pending: bool = False
    """Whether a load has ended and is not over: the actions that follow its record may
    not be done, or the run was killed before its own end."""
    unperformed: bool = False
    """Whether a run has ended at a position, and the actions that follow its record may
    not be done."""
    intents: object = None
    """What the sink needs for the actions that follow the record; plain JSON."""
    accounts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By stage, its counts up to the position, see ``ledger.py``."""
    input: str = ""
    """The input, for humans."""
    last: Mapping[str, object] = field(default_factory=dict)
    """The last load that ended before this one: ``load``, ``epoch``, ``input`` and
    ``output``; empty if there was none."""
    letters: Mapping[str, int] = field(default_factory=dict)
    """By stage, the size in bytes of its letter file up to the position."""

    @property
    def resumes(self) -> bool:
        """Whether the next start continues the same load."""
        return not self.ended or self.pending or self.position is not None

    def moved_to(self, output: str) -> str:
        """Return the destination before, if the load continues in another one."""
        before = self.moved_from or self.output
        goes_on = self.resumes and self.epoch and not same_output(before, output)
        return before if goes_on else ""

    @property
    def interrupted(self) -> bool:
        """Whether a run has not completed, or what follows its end may not be done."""
        return not self.ended or self.pending or self.unperformed

    @property
    def last_load(self) -> Mapping[str, object]:
        """The last load that ended, in the form of :attr:`last`; perhaps this one."""
        if self.resumes or not self.load:
            return self.last
        names = ("load", "epoch", "input", "output")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def latest(cls, folder: Path) -> Self:
        """
        Return the valid record of a state directory; an empty one if there is none.

        Raises:
            StateUnusable: If it can't be read or understood.

        """
        stored = _highest(folder, _STORED)
        if not stored:
            return cls()
        path = _path(folder, stored)
        try:
            return cls._of(load(path))
        except OSError as error:
            if (
                isinstance(error, FileNotFoundError)
                and _highest(folder, _STORED) > stored
            ):
                return cls.latest(folder)  # another run has replaced it meanwhile
            raise StateUnusable(f"can't read {path}: {os_reason(error)}") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise StateUnusable(
                f"can't read {path} ({error}): to start from the beginning, remove what"
                " an interrupted load has written, and set another state"
            ) from error

    @classmethod
    def of_note(cls, note: str, *, fence: int) -> Self:
        """Return the record in a sink's note; raises ValueError if it is not one."""
        try:
            return replace(cls._of(json.loads(note)), fence=fence)
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error

    @property
    def note(self) -> str:
        """The record, for a sink to keep."""
        return json.dumps(self._plain)

    def store(self, folder: Path, at: Callable[[str], None] | None = None) -> None:
        """
        Write the record, durably: after a crash it is this one or the one before.

        Args:
            folder: The state directory.
            at: For tests: called once the file is written but not in its place yet.

        Raises:
            StateUnusable: If it can't be written; then the one before counts.

        """
        path = _path(folder, self.fence)
        try:
            plain = self._plain
            put(path, {**plain, "crc32": _crc(plain)}, at)
            self._sync(folder)
        except OSError as error:
            raise StateUnusable(
                f"can't store the record of epoch {self.epoch} in {path}:"
                f" {os_reason(error)}: the next run resumes from the record that is"
                " stored then; make room, or move the directory and set state to its"
                " new place"
            ) from error
        # Only now: until this record is durable, an older one is the only one.
        for old in folder.glob("record.*"):
            found = _LEFT.fullmatch(old.name)
            if found is not None and int(found[1]) < self.fence:
                with suppress(OSError):  # it does no harm
                    old.unlink(missing_ok=True)

    @classmethod
    def fenced(cls, folder: Path) -> Self:
        """
        Raise the fence, and return what was committed under the previous one.

        A run that raises it at the same moment gets another fence, and the higher one
        counts. The claim raises the fence before the record is read, so no other run
        commits after that.

        Raises:
            OSError: If nothing can be written there.
            StateUnusable: Likewise, or what is there can't be read or understood.

        """
        fence = 0
        while True:
            fence = max(fence, fence_of(folder)) + 1
            with suppress(FileExistsError), _claimed(folder, fence):
                found = cls.latest(folder)
                # Otherwise another run stored its record between our check and our
                # claim: under a lower fence we would lose its commits, so claim again.
                if found.fence < fence:
                    record = replace(found, fence=fence)
                    record.store(folder)
                    return record

    @property
    def _plain(self) -> dict[str, Any]:
        return {"format": _FORMAT, **asdict(self)}

    def _sync(self, folder: Path) -> None:
        try:
            sync(folder)
        except OSError as error:
            if not self.ended:
                raise
            # Raising would report the run as failed, and it would be started again. The
            # record in place has its end, so everything would be loaded a second time.
            # If a crash undoes the record, only its epoch is loaded again, in place.
            _log.warning(
                "the record of the run's end may be lost if the machine crashes",
                folder=str(folder),
                error=os_reason(error),
            )

    @classmethod
    def _of(cls, plain: object) -> Self:
        if not isinstance(plain, dict):
            raise TypeError("it is not a JSON object")
        values = dict(plain)
        stored = values.pop("crc32", None)
        own = _crc(values)
        if (found := values.pop("format", None)) != _FORMAT:
            raise ValueError(f"its format is {found!r}, expected {_FORMAT}")
        if stored not in (None, own):
            raise ValueError(f"its crc32 is {stored!r}, but its content has {own}")
        for key in values.keys() - {known.name for known in fields(cls)}:
            raise ValueError(f"its key {key!r} is unknown")
        record = cls(**values)
        if not record._sound:
            raise TypeError("its values are not of the right types")
        return record

    @property
    def _sound(self) -> bool:
        # Check what is compared or used as a name; the source checks its position.
        if not all(
            isinstance(m, dict) for m in (self.accounts, self.letters, self.last)
        ):
            return False
        accounts = self.accounts.values()
        if not all(isinstance(account, list) for account in accounts):
            return False
        numbers = self.fence, self.epoch, *self.letters.values()
        counts = (n for account in accounts for n in account)
        names = self.load, self.run, self.delivery
        texts = self.output, self.moved_from, self.input, self.stopped_at
        return (
            all(isinstance(n, int) for n in (*numbers, *counts))
            and all(isinstance(t, str) for t in (*names, *texts))
            and all(re.fullmatch(r"[\w-]*", name) for name in names)
        )


def fence_of(folder: Path) -> int:
    """Return the highest fence in a state directory, 0 if there is none."""
    return _highest(folder, _FENCE)


def _highest(folder: Path, names: re.Pattern[str]) -> int:
    found = (names.fullmatch(path.name) for path in folder.glob("record.*"))
    return max((int(match[1]) for match in found if match is not None), default=0)


@contextmanager
def _claimed(folder: Path, fence: int) -> Iterator[None]:
    """Claim a fence while entered; raises FileExistsError if another run has it."""
    claim = folder / f"record.{fence}.claim"
    with opened(claim, os.O_RDWR | os.O_CREAT | os.O_EXCL):
        try:
            yield
        finally:
            claim.unlink(missing_ok=True)


def _crc(plain: object) -> int:
    # Without sorted keys: a position's may be numbers, whose order is another as texts.
    return crc32(json.dumps(plain).encode())


def _path(folder: Path, fence: int) -> Path:
    return folder / f"record.{fence}.json"
