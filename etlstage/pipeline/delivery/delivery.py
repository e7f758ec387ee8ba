"""
State directory: its lock, the fence against older runs, and the commit record.

Two runs of one pipeline would begin at the same position, load everything twice, and
store their positions over each other's. So a run holds the lock of the state directory.
A holder that was stopped keeps it; it is taken over by raising the fence, after which
it can't commit.

An epoch is what one commit covers. The sink makes it durable under its number, so that
it can be written again in the same place; then one record is stored, see ``record.py``.
The record decides: an epoch that is written and not recorded is written again. What
belongs behind the record, as to show an epoch, is performed then, and by each start
that finds the record: once more does no harm.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import sleep
from typing import BinaryIO, Final, Self

from etlstage.errors import StateUnusable, os_reason
from etlstage.pipeline.delivery.folder import make_ours, opened
from etlstage.pipeline.delivery.holder import LOCK, Holder
from etlstage.pipeline.delivery.record import CommitRecord, fence_of

__all__ = ("Bounds", "Delivery", "take_over", "unusable")

# Who asks whether a run has the lock shares it with others for a moment.
_LOOKS: Final = 10
_LOOK: Final = 0.05  # seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """When an epoch ends: at the position at which one of these is reached."""

    messages: int = 1_000_000
    bytes: int = 128 << 20
    seconds: float = 60.0


EDGE_BOUNDS: Final = Bounds(messages=100_000, bytes=16 << 20, seconds=1.0)
"""Of epochs that end in a durable edge: what is behind it waits for each."""


class Delivery:
    """
    Owns a state directory, while it is entered: its lock, its fence, its record.

    The lock is the kernel's, and goes with our process, however that ends; no worker
    inherits it. What stands in the file is only for who finds it locked.

    Args:
        folder: The state directory; made, for us alone, if it is not there.
        exactly_once: Whether each epoch is to be loaded once, and not at least once.
        whole: Whether records have accounts and dead letters at least once, too, so that
            a run that was interrupted goes on.
        bounds: Of its epochs.

    Attributes:
        record: What was committed last; to be read once it is entered.
        at: For tests: called with each step of a commit: ``begin``, ``written`` behind
            the sink, ``committed`` where the sink does that itself, ``aside`` before
            the record counts, ``recorded``, and ``performed`` behind it.

    Raises:
        StateUnusable: On entering, if another run has it, or it can't be ours.

    """

    def __init__(
        self,
        folder: Path,
        *,
        exactly_once: bool = False,
        whole: bool = False,
        bounds: Bounds | None = None,
    ) -> None:
        self.folder: Path = folder
        self.exactly_once: bool = exactly_once
        self.whole: bool = whole or exactly_once
        self.bounds: Bounds = bounds or Bounds()
        self.record: CommitRecord = CommitRecord()
        self.at: Callable[[str], None] = _unheard
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Take the state directory."""
        with ExitStack() as stack:
            try:
                make_ours(self.folder)
                # The lock first: a run that is alive must not be fenced off by chance.
                self._lock(stack)
                self.record = CommitRecord.fenced(self.folder)
            except OSError as error:
                raise unusable(self.folder, error) from error
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Let others have it."""
        self._stack.close()

    @classmethod
    def joined(cls, folder: Path, fence: int) -> Self:
        """
        Return what commits for a run that holds the directory, in whatever process.

        Args:
            folder: The state directory.
            fence: That of the run.

        Raises:
            StateUnusable: If another run has taken over.

        """
        delivery = cls(folder)
        delivery.record = replace(CommitRecord.latest(folder), fence=fence)
        delivery.check()
        return delivery

    def reread(self) -> None:
        """Record what was committed for us: see :meth:`joined`."""
        self.record = replace(CommitRecord.latest(self.folder), fence=self.record.fence)

    def begin(
        self,
        run: str,
        *,
        stages: Sequence[str],
        letters: Mapping[str, int],
        output: str = "",
        input: str = "",  # noqa: A002 - as the record has it
        anew: bool = False,
    ) -> bool:
        """
        Begin a run, and return whether it goes on with one that was interrupted.

        Args:
            run: What sets it apart, if it is a new one.
            stages: Names of its stages.
            letters: Bytes of the dead letters of each stage.
            output: Where it loads, as reports have it.
            input: What it reads, for a human.
            anew: Whether the source has forgotten how far it was read.

        Raises:
            StateUnusable: If another pipeline was interrupted, or the record can't be stored.

        """
        found = CommitRecord(fence=self.record.fence) if anew else self.record
        same = self.whole and found.delivery == self._promise
        # A run without an epoch and without accounts has promised nothing: of that one
        # there is nothing to go on with.
        if (not found.ended or found.pending) and (
            found.epoch or same or found.delivery == "exactly-once"
        ):
            self._check_same(found, stages, output)
            self.record = replace(self.record, output=output, input=input)
            return True
        # A load that resumes keeps its name: by that its sink finds what was written and
        # not recorded, and replaces it.
        record = CommitRecord(
            fence=found.fence,
            delivery=self._promise,
            whole=self.whole,
            load=found.load if found.resumes else secrets.token_hex(4),
            run=run,
            epoch=found.epoch if found.resumes else 0,
            position=found.position,
            output=output,
            input=input,
            last=found.last_load,
            ended=False,
            # Where the load goes on, what belongs behind its record may not be done.
            intents=found.intents if found.resumes else None,
            accounts={stage: [] for stage in stages},
            letters=dict(letters),
        )
        self._store(record)
        return False

    def next(
        self,
        position: object,
        *,
        accounts: Mapping[str, Sequence[int]] | None = None,
        letters: Mapping[str, int] | None = None,
        ended: bool = False,
        intents: object = None,
    ) -> CommitRecord:
        """
        Return the record of an epoch that is durable.

        Args:
            position: From where the source reads on.
            accounts: What each stage has counted before it; None: as before.
            letters: Bytes of the dead letters of each stage before it; likewise.
            ended: Whether the run has come to its end. A load that does not go on then
                is over only with :meth:`settle`.
            intents: What the sink needs for that, plain JSON.

        """
        now = self.record
        return replace(
            now,
            epoch=now.epoch + 1,
            position=position,
            accounts=now.accounts if accounts is None else accounts,
            letters=now.letters if letters is None else {**now.letters, **letters},
            ended=ended,
            pending=ended and position is None,
            intents=intents,
        )

    def commit(self, position: object, *, ended: bool = False) -> None:
        """Record what :meth:`next` returns; raises as :meth:`keep`."""
        self.keep(self.next(position, ended=ended))

    def keep(self, record: CommitRecord) -> None:
        """
        Record that an epoch is durable.

        Args:
            record: As :meth:`next` has made it.

        Raises:
            StateUnusable: If another run has taken over, or it can't be stored.

        """
        self._store(record, self.at)
        self.at("recorded")

    def adopt(self, note: str) -> None:
        """
        Go on behind an epoch that a sink has committed and that is not recorded.

        Args:
            note: What it was given with the epoch.

        Raises:
            StateUnusable: If that can't be understood, or it can't be stored.

        """
        try:
            record = CommitRecord.of_note(note, fence=self.record.fence)
        except ValueError as error:
            raise StateUnusable(
                f"can't read what was noted with the epochs of load {self.record.load}"
                f" ({error}): 'etlstage state reset {shlex.quote(str(self.folder))}'"
                " starts from the beginning"
            ) from error
        # Behind a crash between the sink's commit and our record the sink knows more.
        if record.epoch > self.record.epoch:
            self.keep(record)

    def settle(self) -> None:
        """
        Record that a load that has ended is over; raises as :meth:`keep`.

        The last that a run does. One that is killed before does not know that all is
        loaded, and who starts it again does not want another load.
        """
        if self.record.pending:
            self.at("ended")
            self._store(replace(self.record, pending=False))

    def renew(self) -> None:
        """Have the next run begin another load, from where this one has read."""
        now = self.record
        # A name under which nothing was loaded can be used again.
        if now.epoch:
            last = {"load": now.load, "epoch": now.epoch}
            last |= {"input": now.input, "output": now.output}
            self._store(replace(now, load=secrets.token_hex(4), epoch=0, last=last))

    def end(self) -> None:
        """Record that the run has come to its end; raises as :meth:`keep`."""
        self._store(replace(self.record, ended=True))

    def check(self) -> None:
        """
        Assert that no other run has taken over.

        Raises:
            StateUnusable: If somebody has.

        """
        if fence_of(self.folder) != self.record.fence:
            raise StateUnusable(
                f"another run has taken over the state directory {self.folder}: nothing"
                f" is committed behind epoch {self.record.epoch} by this one"
            )

    def _store(
        self, record: CommitRecord, at: Callable[[str], None] | None = None
    ) -> None:
        """Record it, unless somebody has taken over, before that or meanwhile."""
        self.check()
        # Another run may take over behind that look: it has read what was before this
        # record, which has a lower fence and does not count. So we look again, lest we
        # report an epoch as committed that it loads once more.
        try:
            self._write(record, at)
        finally:
            self.check()
        self.record = record

    def _write(self, record: CommitRecord, at: Callable[[str], None] | None) -> None:
        record.store(self.folder, at)

    @property
    def _promise(self) -> str:
        return "exactly-once" if self.exactly_once else "at-least-once"

    def _check_same(
        self, found: CommitRecord, stages: Sequence[str], output: str
    ) -> None:
        """Assert that we can go on where a run was interrupted."""
        # Where it has loaded matters, too: only there its sink finds what to replace.
        if found.delivery != self._promise:
            differs = f"its delivery was {found.delivery}"
        elif self.whole and list(found.accounts) != list(stages):
            differs = f"its stages were {', '.join(found.accounts)}"
        elif found.epoch and output != found.output:
            differs = f"it has loaded into {found.output}, and not into {output}"
        else:
            return
        raise StateUnusable(
            f"the run {found.run} that was interrupted in {self.folder} can't be"
            f" resumed: {differs};"
            " complete it as it was, or delete its record by 'etlstage state reset"
            f" {shlex.quote(str(self.folder))}'"
        )

    def _lock(self, stack: ExitStack) -> None:
        """Hold the lock until the stack is closed."""
        while True:
            flags = os.O_RDWR | os.O_CREAT
            file = stack.enter_context(opened(self.folder / LOCK, flags))
            self._flock(file)
            # A process that was forked off meanwhile shares it with us.
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
            with suppress(FileNotFoundError):
                if os.path.samestat(
                    os.fstat(file.fileno()), (self.folder / LOCK).stat()
                ):
                    break
            # Meanwhile it was taken over: we hold the lock of a file that is gone.
        file.truncate()
        file.write(json.dumps(Holder.here()._asdict()).encode())
        file.flush()

    def _flock(self, file: BinaryIO) -> None:
        for _ in range(_LOOKS):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not _shared(file):
                    break
                sleep(_LOOK)
            else:
                return
        holder = Holder.read(file)
        about = f" ({holder})" if holder is not None else ""
        raise StateUnusable(
            f"another run uses the state directory {self.folder}{about}: wait until it"
            " has ended, shut it out with 'etlstage state take-over', or set another"
            " state"
        )


def take_over(folder: Path) -> CommitRecord:
    """
    Take a state directory from who holds it: he can't commit any more.

    Returns:
        What he has committed. The next run goes on from there.

    Raises:
        StateUnusable: If it can't be read, or written.

    """
    try:
        record = CommitRecord.fenced(folder)
        # The holder keeps the lock of a file that no other run opens.
        (folder / LOCK).unlink(missing_ok=True)
    except OSError as error:
        raise unusable(folder, error) from error
    return record


def _shared(file: BinaryIO) -> bool:
    """Return whether no process holds a lock exclusively."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def _unheard(_step: str) -> None:
    pass


def unusable(folder: Path, error: OSError) -> StateUnusable:
    """Return the error of a state directory that can't be ours."""
    return StateUnusable(
        f"can't use the state directory {folder}: {os_reason(error)}; set another state"
    )
