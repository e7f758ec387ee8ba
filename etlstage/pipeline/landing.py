"""
The common base of sinks that turn messages into rows and load them in epochs.

An epoch is checked before anything of it is written: messages that do not fit are
dead-lettered; where dead letters are not kept, nothing of what is loaded at once is
loaded. Files for a path of this machine are written to a hidden folder and then moved
into place, see ``delivery/place.py``.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from shutil import rmtree

import anyio.to_thread

from etlstage.columns import Epoch
from etlstage.errors import SinkFailed, StageError
from etlstage.messages import Run, counted, size_of
from etlstage.pipeline.dead_letter.policy import DeadLetterPolicy, letter_time
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.holder import Claim
from etlstage.pipeline.delivery.place import EpochFiles, has_output
from etlstage.pipeline.interfaces import Epochs, Landing, Sink
from etlstage.stage import ErrorPolicy

__all__ = ("RowLanding", "RowSink")


class RowLanding(Landing):
    """
    Loads messages as rows, an epoch at a time.

    Args:
        name: Name of the stage in reports and errors.
        where: Where the rows go, for humans.
        path: The destination, if it is a folder of this machine.
        replaces: Whether the first epoch replaces everything that exists there.
        schema: Columns as DDL; None: each message is the string ``value``.
        on_error: What to do with messages that do not fit the schema.
        dead_letters: Where these are kept; None: the first one ends the run.
        config: The stage as stored in dead letters.

    Attributes:
        name: Name of the stage in reports and errors.
        account: The account of the load stage.
        epochs: Number of epochs written.

    """

    def __init__(
        self,
        name: str,
        *,
        where: str,
        path: Path | None,
        replaces: bool,
        schema: str | None,
        on_error: ErrorPolicy | None,
        dead_letters: DeadLetters | None,
        config: Mapping[str, object],
    ) -> None:
        super().__init__(name)
        self.epochs: int = 0
        self._where = where
        self._path = path
        self._overwrites = replaces
        self._ddl = schema
        self._letters = dead_letters
        if dead_letters is not None:
            dead_letters.pending = replaces
        self._policy = DeadLetterPolicy(
            self.account, on_error or ErrorPolicy(), dict(config), dead_letters
        )
        self._claimed: Claim | None = None
        self._filled: Counter[str] = Counter()  # by column, messages that have a value
        self._error: SinkFailed | None = None
        self._whole = False
        self._goes_on = self._resumed = False
        self._moved_from = ""
        self._known: Epochs | None = None  # only if each is loaded exactly once
        self._files: EpochFiles | None = None
        self._fitted = 0  # messages that are written but not durable yet

    def begin(self, epochs: Epochs) -> None:
        """Begin after what was loaded before, which is kept."""
        self._goes_on = self._resumed = epochs.done > 0
        self._moved_from = epochs.moved_from
        if self._letters is not None:
            self._letters.pending = self._replaces
            # At least once, a load may begin anew under its name.
            self._letters.load = epochs.load if epochs.once else ""
        if not epochs.once:
            return
        self._known, self.epochs = epochs, max(epochs.done, 0)
        self._whole = epochs.ended
        self._files = self._files_of(epochs)

    def _files_of(self, epochs: Epochs) -> EpochFiles | None:
        """Return the place for files of epochs that are loaded exactly once."""
        if self._path is None:
            raise self._failure(
                f"can't load epochs exactly once into {self._where}: it is neither a"
                " path on this machine nor a database table"
            )
        return EpochFiles(self._path, epochs.load, epochs.start)

    @property
    @abstractmethod
    def _columns(self) -> Sequence[str]:
        """The columns whose values are taken from JSON."""

    @abstractmethod
    def _why(self, error: Exception) -> str:
        """Return the text of an error, for humans."""

    def _claim(self) -> None:
        """Assert that no other run writes to the same files, now or later."""
        assert self._path is not None
        self._claimed = claim = Claim(self._path)
        try:
            holder = claim.take()
        except OSError:
            return  # locks are not available: continue without one
        if holder is not None:
            raise self._failure(
                f"another run writes to {self._path} ({holder}): wait until it has"
                " ended, or set another path"
            )

    async def aclose(self) -> None:
        """Drop what has not been loaded; safe to call twice and at any time."""
        if self._claimed is not None:
            self._claimed.release()
        if self._files is not None and self._known is not None and not self._whole:
            with suppress(OSError):
                rmtree(self._files.aside(self._known.done + 1))

    def landed(self) -> str:
        """Return, in one line for humans, what was loaded and what was not."""
        account = self.account
        waiting = account.received - account.done - account.dead
        rest = f"; {counted(waiting, 'message')} not loaded" if waiting else ""
        if not self.epochs:
            return f"nothing was written to {self._where}{rest}"
        complete = "complete" if self._whole else "incomplete"
        # The epochs of earlier runs of the load count, too.
        epochs = "" if self._resumed else f" in {counted(self.epochs, 'epoch')}"
        return (
            f"wrote {counted(account.done, 'message')}{epochs} to {self._where};"
            f" output {complete}{rest}{self._empty}"
        )

    @contextmanager
    def _failing(self, what: str, *, reads: bool = False) -> Iterator[None]:
        """Set the activity; raise other errors as SinkFailed, and keep the failure."""
        self.activity: str = f"writing {what or 'the output'}".rstrip()
        try:
            yield
        except SinkFailed as error:
            self._error = error
            raise
        except StageError:
            raise
        except Exception as error:
            way = f"read {what}from" if reads else f"write {what}to"
            self._error = self._failure(
                f"can't {way} {self._where}: {self._why(error)}"
            )
            raise self._error from error
        except BaseException:
            self._error = self._failure("the epoch under way was interrupted")
            raise
        finally:
            self.activity = ""

    def _show_tasks(self, done: int, total: int) -> None:
        """Show the progress of the writing job in the activity."""
        what = self.activity.partition(": ")[0]
        self.activity = f"{what}: {done:,} of {counted(total, 'task')}"

    @property
    def _empty(self) -> str:
        """The remark about columns that are null in all rows."""
        names = [name for name in self._columns if not self._filled[name]]
        if not names or not self.account.done or not self._whole or self._resumed:
            return ""
        columns, are = ("column", "is") if len(names) == 1 else ("columns", "are")
        count = self.account.done
        return (
            f"; {columns} {', '.join(names)} {are} null in all rows loaded ({count:,})"
        )

    def _recover(self) -> None:
        """Finish the moves of recorded epochs, and remove what was not recorded."""
        files, known = self._files, self._known
        if known is None:
            return
        if files is not None:
            sealed = files.sweep(known.done, check=known.check)
            known.check()
            self._mark(files, whole=False)
            for number in sealed:
                self._move(number)
            if self._whole:
                self._mark(files, whole=True)
        if self._resumed and self._overwrites and self._letters is not None:
            # The start before may have ended between the replacement and its record.
            self._letters.supersede(letter_time(), anew=False)

    async def _settle_epoch(self) -> int:
        """Seal the epoch and begin the next; return the number of messages in it."""
        files, known = self._files, self._known
        assert known is not None
        number = known.done + 1
        if files is not None:
            with self._failing(f"epoch {number} "):
                await anyio.to_thread.run_sync(
                    lambda: files.seal(number, always=self._replaces, check=known.check)
                )
            self._goes_on = True
        self._known = known._replace(done=number)
        self._count(self._fitted)
        flushed, self._fitted = self._fitted, 0
        return flushed

    @property
    def performs(self) -> bool:
        """Whether files are moved after the record."""
        return self._files is not None

    async def perform(self) -> None:
        """Move the files of the last epoch to where readers find them."""
        files, known = self._files, self._known
        if files is None or known is None:
            return
        with self._failing(f"epoch {known.done} "):
            await anyio.to_thread.run_sync(self._move, known.done)
            if self._whole:
                mark = partial(self._mark, files, whole=True)
                await anyio.to_thread.run_sync(mark)

    def _mark(self, files: EpochFiles, *, whole: bool) -> None:
        if not self.keeps_mark:
            files.mark(whole=whole)

    def _move(self, number: int) -> None:
        files, known = self._files, self._known
        assert files is not None
        assert known is not None
        replaces = self._overwrites and number == 1
        files.move(number, replaces=replaces, check=known.check)
        if replaces and self._letters is not None:
            self._letters.supersede(letter_time())

    async def _supersede(self) -> None:
        """Record that dead letters of replaced output are superseded."""
        if self._replaces and self._letters is not None:
            await anyio.to_thread.run_sync(self._letters.supersede, letter_time())

    def _takes(self, mode: str) -> bool:
        """Return whether a mode of writing allows output of other loads."""
        if mode == "append" or self._moved_from:
            # Where a load continues there may be what it has loaded before, moved with
            # its folder: that is not replaced, as it is not read again.
            return mode == "append"
        return mode == "overwrite" or self._goes_on

    @property
    def _finds_others(self) -> bool:
        """Whether there is output of other loads, as far as that is known."""
        if self._files is not None:
            return self._files.others(hidden=not self._moved_from)
        if self._path is None:
            return True
        if self._moved_from:
            # A start that was killed may have left an empty folder.
            return has_output(self._path, sealed=True)
        return os.path.exists(self._path)

    @property
    def _replaces(self) -> bool:
        """Whether the epoch replaces everything that exists at the destination."""
        return self._overwrites and not self._goes_on

    def _count(self, messages: int, *, epochs: int = 1) -> None:
        """Count an epoch that is durable."""
        self.account.done += messages
        self.epochs += epochs

    async def _refuse(
        self, message: bytes, why: str, place: int, counts: tuple[int, int], what: str
    ) -> None:
        """
        Dead-letter a message that does not fit; raise if there are too many.

        Args:
            message: The message.
            why: Why it does not fit.
            place: Its place among all messages of the stage.
            counts: How many messages do not fit, and of how many.
            what: Name of these messages in an error; empty if they are the whole input.

        """
        wanted = self._ddl or "value string"
        if not self._policy.keeps:
            self.account.failed += counts[0]
            raise self._failure(
                f"{counts[0]:,} of {counted(counts[1], 'message')}"
                f" {'does' if counts[0] == 1 else 'do'} not fit the schema"
                f" '{wanted}': message {place + 1} is the first, {why};"
                f" nothing{what and ' of '}{what} is loaded"
            )
        error = self._failure(
            f"message {place + 1} does not fit the schema '{wanted}': {why}"
        )
        await self._policy.settle(error, [message], place=place)

    def _failure(self, text: str) -> SinkFailed:
        return SinkFailed(f"{self.name}: {text}", stage=self.name)


class RowSink(RowLanding, Sink):
    """
    Loads rows run by run: messages are kept until an epoch is full.

    So memory stays bounded, and what was loaded is durable.
    """

    _bounds: tuple[int, int]  # maximum messages of an epoch, and bytes
    _epoch: Epoch
    _covered = 0  # messages of epochs that are loaded, with their dead letters

    @abstractmethod
    async def _prepare(self) -> None:
        """Check the settings; raises like :meth:`write`."""

    @abstractmethod
    async def _load_epoch(self, *, last: bool) -> int:
        """Write the current epoch; return how many of its messages fitted."""

    @property
    def covered(self) -> int:
        """How many messages are loaded; -1 if what they replace is still there."""
        return -1 if self._replaces else self._covered

    @property
    def _marks(self) -> bool:
        """Whether writing the last epoch marks the output as complete."""
        return False

    async def write(self, run: Run) -> None:
        """
        Take a run; load the current epoch first if the run would overfill it.

        Raises:
            SinkFailed: If it can't be written, or a message does not fit the schema.

        """
        most, size_limit = self._bounds
        await self._prepare()
        while run:
            count = min(most, len(run))
            while count > 1 and size_of(run[:count]) > size_limit:
                count //= 2
            part, run = run[:count], run[count:]
            size = size_of(part)
            epoch = self._epoch
            over = epoch.size + size > size_limit or epoch.messages + len(part) > most
            # The last epoch is written by finish(), which marks the output.
            if epoch.messages and over:
                await self._land(last=False)
            self._epoch.add(part, size)
            self.account.received += len(part)

    async def flush(self) -> None:
        """Load what has come so far, as an epoch; raises like :meth:`write`."""
        await self._prepare()
        if self._epoch.messages:
            await self._land(last=False)
        if self._known is not None:
            await self._settle_epoch()

    async def finish(self) -> None:
        """Load the rest and mark the output as complete; raises like :meth:`write`."""
        await self._prepare()
        if self._whole:
            return
        # Even without messages there is an output: its schema, and its marker.
        marks = self._marks and self._files is None
        if self._epoch.messages or not self.epochs or marks:
            await self._land(last=True)
        if self._known is not None:
            await self._settle_epoch()
        self._whole = True

    async def aclose(self) -> None:
        """Drop what has not been loaded; safe to call twice and at any time."""
        self._epoch = Epoch()
        await super().aclose()

    async def _land(self, *, last: bool) -> None:
        """Load the current epoch, and begin the next."""
        with self._failing(f"epoch {self.epochs + 1} "):
            fitted = await self._load_epoch(last=last)
        if self._known is not None:
            self._fitted += fitted
        else:
            self._count(fitted)
            self._covered = self.account.done + self.account.dead
        self._epoch = Epoch()
