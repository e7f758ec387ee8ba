"""
Cases that have failed, each kept by itself, to be played again.

A case is two files below ``.etlstage/failures``: what it is, as JSON, and a recording
of how it went, for ``etlstage replay FILE``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Final

import anyio

from etlstage.errors import ConfigError
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.protocol.registry import dialect_from_plain
from etlstage.stage import Stage
from etlstage.testing.conversation import WorkerUnderTest
from etlstage.testing.fuzzing.case import Case, CaseFailed, Kind, converse, end
from etlstage.testing.fuzzing.oracle import Oracles, verify
from etlstage.testing.recording.recorder import RecordedLaunch
from etlstage.testing.recording.recording import Entry, Recording
from etlstage.testing.transcript import cut
from etlstage.transport import LaunchRequest, launch_over_pipes

__all__ = ("FOLDER", "Failure", "Failures")

FOLDER: Final = Path(".etlstage", "failures")
_VERSION: Final = 1
_DRIVERS: Final = {Mode.BATCH_SUPERVISOR: "supervisor", Mode.BATCH_WORKER: "worker"}


@dataclass(frozen=True)
class Failure:
    """A case that has failed."""

    stage: Stage
    """Command and dialect."""
    case: Case
    oracles: Oracles
    kind: Kind
    """What the worker was found to do."""
    timeout: float = 5.0
    path: Path = FOLDER
    """The file that says so; beside it is the recording."""

    @property
    def recording(self) -> Path:
        """How the case went."""
        return self.path.with_suffix(".rec")

    def play(self, times: int = 1) -> CaseFailed | None:
        """Play the case to fresh processes; return how it failed, if it did."""
        for _ in range(times):
            try:
                verify(
                    self.stage, self.case, timeout=self.timeout, **self.oracles.given
                )
            except CaseFailed as failed:
                return failed
        return None

    def written(self) -> Iterator[str]:
        """Yield what is written before each wait for replies, equal ones together."""
        dialect = self.case.on(self.stage).dialect
        lines = []
        for step in self.case.steps:
            wire = dialect.raw(step.messages)
            lines.append(
                " | ".join(dialect.shown(part) for part in cut(wire, step.cuts))
            )
        number = 1
        for line, same in groupby(lines):
            last = number + len([*same]) - 1
            yield f"{number}-{last}. {line}" if last > number else f"{number}. {line}"
            number = last + 1
        yield f"{number}. the end of the input"

    def program(self) -> Iterator[str]:
        """Yield the lines of a program that fails as the case does."""
        case = self.case
        names = "Case, Step, verify" if case.steps else "Case, verify"
        if case.markers != Markers():
            yield "from etlstage.protocol.marker import Markers"
        yield f"from etlstage.testing import {names}"
        yield ""
        dialect = self.stage.dialect
        assert isinstance(dialect, MarkerDialect)
        batch = {"batch": _DRIVERS[dialect.mode]} if dialect.mode in _DRIVERS else {}
        given = {**batch, **self.oracles.given}
        more = "".join(f", {name}={value!r}" for name, value in given.items())
        yield f"verify({[*self.stage.command]!r}, {case!r}{more})"

    def drop(self) -> None:
        """Forget it."""
        self.path.unlink(missing_ok=True)
        self.recording.unlink(missing_ok=True)


class Failures:
    """
    The cases that are kept in a folder.

    Args:
        folder: It is made when there is something to keep.

    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder

    def __iter__(self) -> Iterator[Failure]:
        """Yield what is kept; raise ConfigError for a file that can't be read."""
        for path in sorted(self._folder.glob("*.json")):
            yield _read(path)

    def of(self, command: Sequence[str]) -> Iterator[Failure]:
        """Yield what is kept of one worker."""
        return (kept for kept in self if kept.stage.command == tuple(command))

    def keep(self, failure: Failure) -> Failure:
        """
        Keep a case, and record how it goes.

        Raises:
            ConfigError: If the folder can't be written.

        """
        plain = {
            "version": _VERSION,
            "command": list(failure.stage.command),
            "dialect": failure.stage.dialect.plain(),
            "kind": failure.kind.label,
            "timeout": failure.timeout,
            "case": failure.case.to_plain(),
            "oracles": asdict(failure.oracles),
        }
        text = json.dumps(plain, indent=2) + "\n"
        number = hashlib.sha256(text.encode()).hexdigest()[:8]
        kept = replace(
            failure, path=self._folder / f"{failure.kind.label}-{number}.json"
        )
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            kept.path.write_text(text, encoding="utf-8")
            kept.recording.unlink(missing_ok=True)
            anyio.run(_record, kept).save(kept.recording)
        except OSError as error:
            said = (error.strerror or str(error)).lower()
            raise ConfigError(f"{self._folder} can't be written: {said}") from None
        return kept


def _read(path: Path) -> Failure:
    try:
        plain = json.loads(path.read_bytes())
        dialect = dialect_from_plain(plain["dialect"])
        assert plain["version"] == _VERSION, "of another version"
        return Failure(
            Stage(name="worker", command=tuple(plain["command"]), dialect=dialect),
            Case.from_plain(plain["case"]),
            Oracles(**plain["oracles"]),
            {kind.label: kind for kind in Kind}[plain["kind"]],
            plain["timeout"],
            path,
        )
    except (OSError, LookupError, TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{path} is no case that was kept: {error!r}") from None


class _Notes:
    """What passes while a case is played."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.exit: int | None = None
        self.stopped = False

    def add(self, entry: Entry, /) -> None:
        self.entries.append(entry)

    def end(self, exit_: int | None, /, *, stopped: bool) -> None:
        self.exit, self.stopped = exit_, stopped


async def _record(failure: Failure) -> Recording:
    notes = _Notes()

    def begin(_request: LaunchRequest) -> _Notes:
        return notes

    stage = failure.case.on(failure.stage)
    launch = RecordedLaunch(launch_over_pipes, begin)
    with suppress(CaseFailed):
        async with WorkerUnderTest(
            stage, launch=launch, timeout=failure.timeout
        ) as worker:
            await converse(worker, failure.case.steps)
            await end(worker)
    return Recording(
        stage=stage.name,
        dialect=stage.dialect,
        command=stage.command,
        entries=tuple(notes.entries),
        exit=notes.exit,
        stopped=notes.stopped,
    )
