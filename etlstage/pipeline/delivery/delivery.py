"""
State directory: its lock, the fence against older runs, and the commit record.

Two concurrent runs of one pipeline would begin at the same position, load everything
twice, and overwrite each other's positions. So a run holds the lock of the state
directory. A holder that was stopped keeps the lock; another run takes over by raising
the fence, after which the old holder can't commit.

An epoch is what one commit covers. The sink makes it durable under its number, so that
it can be written again in the same place; then one record is stored, see ``record.py``.
The record decides: an epoch that is written but not recorded is written again. Actions
that must follow the record, such as making an epoch visible, are performed after it,
and again by each start that finds the record: repeating them does no harm.
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
from etlstage.pipeline.delivery.holder import LOCK, Holder, holder_of
from etlstage.pipeline.delivery.place import loaded_elsewhere, same_output
from etlstage.pipeline.delivery.record import CommitRecord, StoppedAt, fence_of

__all__ = ("Bounds", "Delivery", "StateHeld", "take_over", "unusable")

# A process that checks whether a run has the lock holds it, shared, for a moment.
_LOOKS: Final = 10
_LOOK: Final = 0.05  # seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """When an epoch ends: at the position at which one of these is reached."""

    messages: int = 1_000_000
    bytes: int = 128 << 20
    seconds: float = 60.0


class StateHeld(StateUnusable):
    """Raised when another run has the state directory."""


EDGE_BOUNDS: Final = Bounds(messages=100_000, bytes=16 << 20, seconds=1.0)
"""For epochs that end in a durable edge: the next part waits for each of them."""


class Delivery:
    """
    Owns a state directory, while entered: its lock, its fence, its record.

    The lock is the kernel's: it is released when our process ends, however that
    happens, and no worker inherits it. The content of the lock file only informs those
    who find it locked.

    Args:
        folder: The state directory; created, private to us, if it does not exist.
        exactly_once: Whether each epoch is loaded exactly once, not at least once.
        whole: Whether records hold accounts and dead letters even at least once, so
            that an interrupted run can resume.
        bounds: When epochs end.

    Attributes:
        record: The last commit; to be read once the delivery is entered.
        at: For tests: called at each step of a commit: ``begin``, ``written`` after the
            sink's flush, ``committed`` after the sink's own commit, ``aside`` before
            the record counts, ``recorded``, ``performed`` after the actions that follow
            the record, and ``ended`` before the load is recorded as over.

    Raises:
        StateUnusable: On entering, if another run holds the directory, or it can't be
            made ours.

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
        """Release the state directory."""
        self._stack.close()

    @classmethod
    def joined(cls, folder: Path, fence: int) -> Self:
        """
        Return a delivery that commits for a run that another process may have begun.

        Args:
            folder: The state directory.
            fence: The run's fence.

        Raises:
            StateUnusable: If another run has taken over.

        """
        delivery = cls(folder)
        delivery.record = replace(CommitRecord.latest(folder), fence=fence)
        delivery.check()
        return delivery

    def reread(self) -> None:
        """Read the record again, after commits by others for us: see :meth:`joined`."""
        self.record = replace(CommitRecord.latest(self.folder), fence=self.record.fence)

    def check_resumable(self, *, stages: Sequence[str] | None, output: str) -> None:
        """
        Raise what :meth:`begin` would for another pipeline; nothing is changed.

        To be called before the directory is taken, if it is not held by another run.

        Args:
            stages: Names of the run's stages; None: they need not be the same.
            output: Where it loads, as in reports.

        Raises:
            StateUnusable: If another pipeline was interrupted, or the record can't be
                read.

        """
        try:
            held, _ = holder_of(self.folder)
        except OSError as error:
            raise unusable(self.folder, error) from error
        if not held:
            self._resumes(CommitRecord.latest(self.folder), stages, output)

    def begin(
        self,
        run: str,
        *,
        stages: Sequence[str],
        letters: Mapping[str, int],
        output: str = "",
        input: str = "",  # noqa: A002 - as the record has it
        from_start: bool = False,
    ) -> bool:
        """
        Begin a run, and return whether it resumes one that was interrupted.

        Args:
            run: Identifies the run, if it is a new one.
            stages: Names of its stages.
            letters: Bytes of dead letters of each stage.
            output: Where it loads, as in reports.
            input: What it reads, for a human.
            from_start: Whether the source has lost its position and reads from the start.

        Raises:
            StateUnusable: If another pipeline was interrupted, or the record can't be
                stored.

        """
        found = CommitRecord(fence=self.record.fence) if from_start else self.record
        if self._resumes(found, stages, output):
            moved = found.moved_to(output)
            self.record = replace(found, output=output, moved_from=moved, input=input)
            return True
        # A load that resumes keeps its name: by the name, its sink finds what was
        # written but not recorded, and replaces it.
        record = CommitRecord(
            fence=found.fence,
            delivery=self._promise,
            whole=self.whole,
            load=found.load if found.resumes else secrets.token_hex(4),
            run=run,
            epoch=found.epoch if found.resumes else 0,
            position=found.position,
            output=output,
            moved_from=found.moved_to(output),
            input=input,
            last=found.last_load,
            ended=False,
            # If the load resumes, the actions after its record may not be done yet.
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
        stopped_at: StoppedAt = "",
        performs: bool = False,
        intents: object = None,
    ) -> CommitRecord:
        """
        Return the record of an epoch that is durable.

        Args:
            position: Where the source resumes.
            accounts: What each stage has counted before the position; None: unchanged.
            letters: Bytes of dead letters of each stage before it; None: unchanged.
            ended: Whether the run has ended. If ``position`` is None, the load is over
                only once :meth:`settle` is called.
            stopped_at: Where a run that has ended stopped reading.
            performs: Whether the sink performs anything after the record.
            intents: What the sink needs to perform what follows the record, plain JSON.

        """
        now = self.record
        return replace(
            now,
            epoch=now.epoch + 1,
            moved_from="",
            position=position,
            accounts=now.accounts if accounts is None else accounts,
            letters=now.letters if letters is None else {**now.letters, **letters},
            ended=ended,
            stopped_at=stopped_at,
            pending=ended and position is None,
            unperformed=ended and position is not None and performs,
            intents=intents,
        )

    def commit(
        self, position: object, *, ended: bool = False, stopped_at: StoppedAt = ""
    ) -> None:
        """Record what :meth:`next` returns; raises like :meth:`keep`."""
        self.keep(self.next(position, ended=ended, stopped_at=stopped_at))

    def keep(self, record: CommitRecord) -> None:
        """
        Record that an epoch is durable.

        Args:
            record: The record made by :meth:`next`.

        Raises:
            StateUnusable: If another run has taken over, or it can't be stored.

        """
        self._store(record, self.at)
        self.at("recorded")

    def performed(self) -> None:
        """
        Record that the actions after the record are done; raises like :meth:`keep`.

        Only a run's end is recorded once more: any other record is followed by one that
        is stored when they are done, and until then the run counts as interrupted.
        """
        if self.record.unperformed:
            self._store(replace(self.record, unperformed=False))
        self.at("performed")

    def adopt(self, note: str) -> None:
        """
        Resume after an epoch that a sink has committed but that was not recorded.

        Args:
            note: The note that the sink was given with the epoch.

        Raises:
            StateUnusable: If the note can't be understood, or the record not stored, or
                all was loaded into another output.

        """
        try:
            record = CommitRecord.of_note(note, fence=self.record.fence)
        except ValueError as error:
            raise StateUnusable(
                f"can't read the sink's note of load {self.record.load}"
                f" ({error}): to start from the beginning, remove what it has written,"
                f" then use 'etlstage state reset {shlex.quote(str(self.folder))}'"
            ) from error
        # After a crash between the sink's commit and our record, the sink knows more.
        if record.epoch > self.record.epoch:
            output, input = self.record.output, self.record.input  # noqa: A001
            if record.pending:  # nothing is left to be loaded into ours
                self._check_same(record, None, output)
            moved = record.moved_to(output)
            self.keep(replace(record, output=output, moved_from=moved, input=input))

    def settle(self) -> None:
        """
        Record that a load that has ended is over; raises like :meth:`keep`.

        This is the last step of a run. If a run is killed before it, its user does not
        know that all is loaded, and starting it again must not begin another load.
        """
        if self.record.pending:
            self.at("ended")
            self._store(replace(self.record, pending=False))

    def renew(self) -> None:
        """Let the next run begin another load, from where this load has read."""
        now = self.record
        # A load's name is only changed once an epoch was loaded under it.
        if now.epoch:
            last = {"load": now.load, "epoch": now.epoch}
            last |= {"input": now.input, "output": now.output}
            self._store(replace(now, load=secrets.token_hex(4), epoch=0, last=last))

    def end(self, stopped_at: StoppedAt = "") -> None:
        """Record that the run has ended, and where; raises like :meth:`keep`."""
        self._store(replace(self.record, ended=True, stopped_at=stopped_at))

    def check(self) -> None:
        """
        Assert that no other run has taken over.

        Raises:
            StateUnusable: If one has.

        """
        if fence_of(self.folder) != self.record.fence:
            raise StateUnusable(
                f"another run has taken over the state directory {self.folder}: this run"
                f" commits nothing after epoch {self.record.epoch}"
            )

    def _store(
        self, record: CommitRecord, at: Callable[[str], None] | None = None
    ) -> None:
        """Store the record; raise if another run took over before or meanwhile."""
        self.check()
        # Another run may take over after this check. It has then read the record before
        # this one, whose lower fence makes it void. So we check again, or we would
        # report an epoch as committed that the other run loads once more.
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

    def _resumes(
        self, found: CommitRecord, stages: Sequence[str] | None, output: str
    ) -> bool:
        """Return whether a run resumes what was interrupted; raise if it can't."""
        same = self.whole and found.delivery == self._promise
        # An interrupted run without an epoch and without accounts has promised nothing,
        # so there is nothing to resume.
        resumes = (not found.ended or found.pending) and bool(
            found.epoch or same or found.delivery == "exactly-once"
        )
        # What is left to perform is performed only where the epoch was loaded.
        if resumes or found.unperformed:
            self._check_same(found, stages, output)
        return resumes

    def _check_same(
        self, found: CommitRecord, stages: Sequence[str] | None, output: str
    ) -> None:
        """Assert that we can resume where a run was interrupted."""
        # The output matters, too: only there the sink finds what it has to replace.
        if found.delivery != self._promise:
            differs = f"its delivery was {found.delivery}"
        elif self.whole and stages is not None and list(found.accounts) != [*stages]:
            differs = f"its stages were {', '.join(found.accounts)}"
        elif (
            found.epoch
            and not found.moved_from
            and not same_output(found.output, output)
        ):
            differs = loaded_elsewhere(found.output, output)
        else:
            return
        raise StateUnusable(
            f"the run {found.run} that was interrupted in {self.folder} can't be"
            f" resumed: {differs};"
            " complete it with the old settings, or delete its record with 'etlstage"
            f" state reset {shlex.quote(str(self.folder))}', which removes nothing that is"
            " loaded"
        )

    def _lock(self, stack: ExitStack) -> None:
        """Hold the lock until the stack is closed."""
        while True:
            flags = os.O_RDWR | os.O_CREAT
            file = stack.enter_context(opened(self.folder / LOCK, flags))
            self._flock(file)
            # Unlock explicitly, as a process forked meanwhile shares the lock with us.
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
            with suppress(FileNotFoundError):
                if os.path.samestat(
                    os.fstat(file.fileno()), (self.folder / LOCK).stat()
                ):
                    break
            # Another run took over meanwhile: we hold the lock of a deleted file.
        file.truncate(0)
        # Unbuffered: if the disk is full, to close the file must not fail again.
        os.pwrite(file.fileno(), json.dumps(Holder.here()._asdict()).encode(), 0)

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
        raise StateHeld(
            f"another run uses the state directory {self.folder}{about}: wait until it"
            " has ended, shut it out with 'etlstage state take-over', or set another"
            " state"
        )


def take_over(folder: Path) -> CommitRecord:
    """
    Take over a state directory, so that its holder can't commit any more.

    Returns:
        The holder's last commit. The next run resumes from there.

    Raises:
        StateUnusable: If the directory can't be read, or written.

    """
    try:
        record = CommitRecord.fenced(folder)
        # The holder keeps the lock of a file that no other run opens.
        (folder / LOCK).unlink(missing_ok=True)
    except OSError as error:
        raise unusable(folder, error) from error
    return record


def _shared(file: BinaryIO) -> bool:
    """Return whether no process holds the lock exclusively."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def _unheard(_step: str) -> None:
    pass


def unusable(folder: Path, error: OSError) -> StateUnusable:
    """Return the error for a state directory that can't be used."""
    return StateUnusable(
        f"can't use the state directory {folder}: {os_reason(error)}; set another state"
    )
