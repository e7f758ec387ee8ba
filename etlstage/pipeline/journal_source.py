"""
A source that reads journals, to which others append.

A **position** of the source is how far each journal was read, and what is known of its
producers. It may lie within a transaction, so a transaction need not fit in memory.
Where a limit divides a run of messages, it is before the run, and has how many of these
were read.

The journals keep what was not loaded for the reader's name. Where to resume is stored
in the record of the state directory; without a state directory, under that name.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread

from etlstage.errors import (
    EtlstageError,
    InputDamaged,
    SourceFailed,
)
from etlstage.journal import CommittedReader, Journals, RunMessage
from etlstage.journal.errors import SKIPPING, JournalDamaged, JournalError, located
from etlstage.journal.reader import Start, begun_in, checkpoint_of, plain_checkpoint
from etlstage.messages import Position, Run, size_of
from etlstage.pipeline.interfaces import Epochs, Source, unfenced
from etlstage.pipeline.journal_sink import RUN_BYTES, RUN_MESSAGES, pieces
from etlstage.sequencing import (
    Checkpoint,
    CsvRecord,
    Envelope,
    FrameError,
    JsonMessage,
    Opaque,
    encode_csv,
)
from etlstage.telemetry.meter import GaugeLevel, Meter

__all__ = ("CUT", "JournalSource", "messages_of")

CUT: Final = 1 << 16, 8 << 20
"""Messages and bytes between two positions; a frame is not split."""
_POLL: Final = 0.01
"""Seconds between two checks for more input."""
_PASSED: Final = 1.0
"""Seconds between two positions while there are no messages to pass on."""
_UNREAD: Final = (
    (
        "etlstage_journal_unread_bytes",
        "Bytes of the journals that the reader has not read.",
    ),
    (
        "etlstage_journal_unread_seconds",
        "Seconds since the oldest of the unread bytes were appended.",
    ),
)
_KEPT: Final = 1 << 20
"""Maximum number of damaged bytes in a dead letter."""

T = TypeVar("T")


class JournalSource(Source):
    """
    Reads the committed messages of a set of journals, each once.

    Args:
        path: The folder of the set.
        name: Name of the stage in reports and errors.
        reader: Name of the reader in the set, which keeps what the reader has not
            loaded. None: it has no name there, and begins from ``start`` each time.
        start: Where to begin without a position, see
            :data:`~etlstage.journal.reader.Start`.
        follow: Whether to wait for more at the end.
        skips: Whether damage is skipped, and yielded in its place.
        cut: Maximum messages and bytes between two positions.
        meter: Shows how much is unread, and for how long.

    """

    goes_on = True

    def __init__(
        self,
        path: Path,
        *,
        name: str = "extract",
        reader: str | None,
        start: Start = "beginning",
        follow: bool = False,
        skips: bool = False,
        cut: tuple[int, int] = CUT,
        meter: Meter | None = None,
    ) -> None:
        super().__init__(name)
        self._path = path
        self._called = reader
        self.rereads: bool = reader is not None
        self._start = start
        self._follow = follow
        self._skips = skips
        self._most = min(cut[0], CUT[0]), min(cut[1], CUT[1])
        self._meter = meter
        self._unread: list[GaugeLevel] = []
        self._load = ""
        self._check: Callable[[], None] = unfenced
        self._position: Checkpoint | None = None
        self._set = ""  # the id of the journals in which the position is
        self._draining = anyio.Event()
        self._journals: Journals | None = None
        self._reader: CommittedReader | None = None
        # Runs that are read but not passed on, and the messages and bytes read since
        # the last position.
        self._ready: deque[Run | InputDamaged] = deque()
        self._since = [0, 0]
        # Messages up to the limit. By journal and offset, how many messages of a frame
        # were read whose rest was not; the position before the frame that is divided by
        # the limit.
        self._left = math.inf
        self._begun: dict[tuple[str, int], int] = {}
        self._before: Checkpoint | None = None

    @property
    def input(self) -> str:
        """The set of journals."""
        return f"journals {self._path}"

    @property
    def activity(self) -> str:
        """What the source does."""
        return f"reading the journals in {self._path}"

    def begin(self, epochs: Epochs) -> None:
        """Resume from the record, whatever another load has stored under the name."""
        self.rereads = True
        self._load, self._check = epochs.load, epochs.check

    def resume(self, position: object) -> None:
        """Begin after a recorded position."""
        self._position = self._checkpoint(position)
        self._begun = self._parsed(begun_in, position)
        assert isinstance(position, Mapping)
        self._set = position.get("set", "")

    async def runs(self) -> AsyncGenerator[Run | Position | InputDamaged, None]:
        """
        Yield the messages, and positions now and then.

        Raises:
            SourceFailed: If a journal can't be read, is damaged, or was cut.

        """
        reader = await self._in_thread(self._open)
        # The starting point is a position, too, even if nothing comes now.
        yield self._reached(reader)
        read = False  # anything since the last position, or the last end
        at = reader.frames, anyio.current_time()  # at the last position
        while True:
            follow = self._follow  # before reading, to get what came before a change
            ended = await self._in_thread(self._read)
            read = read or bool(self._ready)
            while self._ready:
                yield self._ready.popleft()
            draining = self._draining.is_set()
            over = draining or (ended and not follow) or not self._left
            # A position also passes frames that were rolled back. Otherwise they would
            # be kept, and writers would wait for us.
            late = over or anyio.current_time() >= at[1] + _PASSED
            passed = late and reader.frames > at[0]
            # At the end, the position is after the transaction, not only its messages.
            if ((read or passed) and (ended or draining)) or self._over:
                self._since, read = [0, 0], not ended
                at = reader.frames, anyio.current_time()
                yield self._reached(reader)
            if over:
                return
            if ended:
                with anyio.move_on_after(_POLL):
                    await self._draining.wait()

    async def observe(self) -> None:
        """Measure what is unread by this reader."""
        if self._meter is not None and self._reader is not None:
            self._show(await self._in_thread(self._reader.unread))

    def _show(self, unread: tuple[float, float]) -> None:
        # A failure of the host's meter is no reason to stop reading.
        with suppress(Exception):
            if not self._unread:
                assert self._meter is not None
                labels = {"stage": self.name, "reader": self._called or ""}
                self._unread = [
                    GaugeLevel(self._meter.gauge(*named, labels)) for named in _UNREAD
                ]
            for gauge, value in zip(self._unread, unread, strict=True):
                gauge.set(value)

    def complete(self) -> None:
        """End where there is no more input."""
        self._follow = False

    def drain(self) -> bool:
        """End after what is read, with a position."""
        self._draining.set()
        return True

    def limit(self, most: int) -> bool:
        """End after a number of messages, perhaps within a run of them."""
        self._left = most
        return True

    async def secure(self, position: Position) -> None:
        """Force the input before a position to the disk; raises SourceFailed."""
        assert self._reader is not None
        await self._in_thread(self._reader.secure, self._checkpoint(position.value))

    async def acknowledge(self, position: Position) -> None:
        """
        Allow the journals to drop what is before a position.

        Raises:
            SourceFailed: If the position can't be stored.
            StateUnusable: If another run has taken over, which has its own position.

        """
        if self._reader is not None and self._called is not None:
            self._check()
            checkpoint = self._checkpoint(position.value)
            begun = begun_in(position.value)
            await self._in_thread(self._reader.commit, checkpoint, begun)

    async def aclose(self) -> None:
        """Release the reader's name, and close the files."""
        if self._unread:
            self._show((0, 0))
        if self._reader is not None:
            await anyio.to_thread.run_sync(self._reader.close)
        if self._journals is not None:
            await anyio.to_thread.run_sync(self._journals.close)

    def _open(self) -> CommittedReader:
        self._journals = journals = Journals.open(self._path, create=False)
        if self._set and journals.id and self._set != journals.id:
            raise JournalError(
                f"{journals.name}: the position is in the set with id {self._set}, but"
                f" this set has id {journals.id}: it is not the journal that was read;"
                " set the path of that one, or use 'etlstage state reset' to start from"
                " the beginning"
            )
        self._reader = self._journals.read_committed(
            self._called,
            follow=self._follow,
            start=self._start,
            position=self._position,
            commit_every=None,
            on_error=_raise if self._skips else None,
            load=self._load,
        )
        if self._position is None:
            self._begun = dict(self._reader.begun)
        return self._reader

    def _read(self) -> bool:
        """Read some runs; return whether there is no more at the moment."""
        assert self._reader is not None
        count = size = 0
        held: list[bytes] = []
        while count < RUN_MESSAGES and size < RUN_BYTES and not self._over:
            try:
                envelope = self._reader.poll()
            except (FrameError, JournalDamaged) as error:
                if not self._skips:
                    raise
                self._ready += [held] if held else []
                held = []
                damage = self._damage(error)
                self._ready.append(damage)
                more = 1, len(damage.data)
            else:
                if envelope is None:
                    self._ready += [held] if held else []
                    return True
                run = self._unread_of(envelope)
                self._left -= len(run)
                if len(run) == 1:
                    held += run
                else:
                    self._ready += [held] if held else []
                    held = []
                    self._ready += pieces(run)
                more = len(run), size_of(run)
            count, size = count + more[0], size + more[1]
            self._since = [self._since[0] + more[0], self._since[1] + more[1]]
        self._ready += [held] if held else []
        return False

    def _unread_of(self, envelope: Envelope) -> Run:
        """Return the messages of a frame that are not read yet, up to the limit."""
        assert self._reader is not None
        place = envelope.journal, envelope.begin
        done = self._begun.pop(place, 0)
        run = messages_of(envelope.message)[done:]
        if len(run) > self._left:
            run = run[: int(self._left)]
            self._begun[place] = done + len(run)
            self._before = self._reader.position(secured=False, finished=False)
            # It is behind the position, but a crash must not lose it either.
            self._reader.secure(Checkpoint({envelope.journal: envelope.end}, []))
        return run

    def _reached(self, reader: CommittedReader) -> Position:
        """Return the position behind what was read."""
        assert self._journals is not None
        checkpoint = self._before or reader.position(secured=False)
        value = plain_checkpoint(checkpoint, self._begun)
        # Journals have the same names in every set with the same folder name.
        value["set"] = self._journals.id
        return Position(value)

    @property
    def _over(self) -> bool:
        bounds = zip(self._since, self._most, strict=True)
        return not self._left or any(n >= most for n, most in bounds)

    def _checkpoint(self, value: Any) -> Checkpoint:  # noqa: ANN401 - any JSON
        return self._parsed(checkpoint_of, value)

    def _parsed(self, parse: Callable[[Any], T], value: object) -> T:
        try:
            return parse(value)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise SourceFailed(
                f"stage {self.name}: the recorded position is not a journal position"
                f" ({error!r}); 'etlstage state reset' starts from the beginning",
                stage=self.name,
            ) from error

    async def _in_thread(self, call: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - as it returns
        try:
            return await anyio.to_thread.run_sync(call, *arguments)
        except (OSError, EtlstageError) as error:
            remedies = f"; {SKIPPING}" if isinstance(error, FrameError) else ""
            raise SourceFailed(
                f"stage {self.name}: can't read the journals in {self._path}:"
                f" {located(error)}{remedies}",
                stage=self.name,
            ) from error

    def _damage(self, error: FrameError | JournalDamaged) -> InputDamaged:
        assert self._journals is not None
        assert error.journal is not None
        assert error.offset is not None
        size = _KEPT if error.end is None else min(_KEPT, error.end - error.offset)
        data = self._journals.log(error.journal).peek(error.offset, size)
        return InputDamaged(located(error), stage=self.name, data=data)


def _raise(error: FrameError | JournalDamaged) -> None:
    """Make the reader raise an error where it skips damage."""
    raise error


def messages_of(message: object) -> Run:
    """Return the pipeline's messages for a message of a journal."""
    if isinstance(message, RunMessage):
        return message.run
    if isinstance(message, JsonMessage):
        return [message.line]
    if isinstance(message, Opaque):
        return [message.data]
    assert isinstance(message, CsvRecord)
    return [encode_csv(message.fields[1:])[:-1]]
