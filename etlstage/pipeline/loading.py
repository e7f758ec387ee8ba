"""
Loading of what leaves the last stage, and recording of the run's progress.

At least once: whenever what the sink has made durable covers a position, the position
is recorded. Exactly once: the messages between two positions that are far enough apart
are an epoch. It is flushed at its end and at no other time, and then recorded; the sink
replaces everything that an interrupted run has loaded after that.

A position is recorded when something has come after it, after a while, or at the end:
by then it is known whether the workers had written unsolicited output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Final

import anyio
import anyio.lowlevel

from etlstage.errors import EtlstageError, SourceFailed
from etlstage.messages import Position, Run, size_of
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import Bounds, Delivery
from etlstage.pipeline.delivery.record import StoppedAt
from etlstage.pipeline.interfaces import Sink, Source
from etlstage.pipeline.ledger import COUNTS, Ledger

__all__ = ("Loading",)

_PRODUCED: Final = COUNTS.index("produced")


class Loading:
    """
    Loads the results of one run, and commits.

    Args:
        sink: The sink; entered.
        source: The source of the positions.
        ledger: The ledger of the run.
        letters: The dead letters; made durable before a position is recorded.
        delivery: Records positions; None: they are not recorded.
        every: Seconds after which written messages are made durable.
        doubtful: Returns how many replies may be those of other messages.
        note: Returns the note that the sink stores at the end, unless epochs are loaded
            exactly once.

    """

    def __init__(
        self,
        sink: Sink,
        source: Source,
        *,
        ledger: Ledger,
        letters: DeadLetters | None,
        delivery: Delivery | None,
        every: float,
        doubtful: Callable[[], int],
        note: Callable[[], str] = str,
    ) -> None:
        self._sink = sink
        self._source = source
        self._ledger = ledger
        self._letters = letters
        self._delivery = delivery
        exact = delivery is not None and delivery.exactly_once
        self._epochs = delivery if exact else None
        self._bounds = delivery.bounds if delivery is not None else Bounds()
        self._every = self._bounds.seconds if exact else every
        self._doubtful = doubtful
        self._note = note
        self._writing = anyio.Lock(fast_acquire=True)
        self._flushing = anyio.CancelScope()
        # Each position with the number of messages that the sink had taken before it.
        self._positions: deque[tuple[int, Position]] = deque()
        # Messages and bytes of the current epoch, and those after the last position.
        self._held = [0, 0]
        self._behind = [0, 0]
        # The most messages and bytes between two positions, as far as is known.
        self._coming = source.cut
        # Messages yielded by the source before the last position, or at the start.
        self._covered = 0
        if self._epochs is not None:
            counts = self._epochs.record.accounts.get(source.name)
            self._covered = counts[_PRODUCED] if counts else 0
        self._reached: Position | None = None
        self._due = False
        # Whether a call of the sink was begun and has not returned. After an error a
        # part of it may be done. A task that waited meanwhile must not call the sink: a
        # second flush would have nothing left to do and so hide the failed first one.
        self._unfinished = False

    async def take(self, item: Run | Position) -> None:
        """Write a run, or register a position before which everything was written."""
        async with self._writing:
            if self._unfinished:
                return
            self._unfinished = True
            if self._epochs is not None:
                await self._take_exactly(item)
            elif isinstance(item, Position):
                self._positions.append((self._sink.account.received, item))
            else:
                try:
                    await self._sink.write(item)
                finally:
                    await self._acknowledge()
            self._unfinished = False

    async def flush_now_and_then(
        self, guarded: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Make written messages durable at intervals, until :meth:`end`."""
        with suppress(Exception), guarded(), self._flushing:
            while True:
                await anyio.sleep(self._every)
                async with self._writing:
                    if self._unfinished:
                        return
                    self._unfinished = True
                    if self._epochs is None:
                        await self._sink.flush()
                        await self._acknowledge()
                    elif self._reached is not None and not self._behind[0]:
                        await self._commit_at(self._reached)
                    else:
                        self._due = True
                    self._unfinished = False

    async def end(self, stopped_at: StoppedAt, *, cut: bool = False) -> None:
        """
        Make everything durable, and record that the run has ended.

        Args:
            stopped_at: Where reading has stopped.
            cut: Whether something that was read was not processed.

        """
        async with self._writing:
            self._flushing.cancel()
        if self._letters is not None:
            await self._letters.sync()
        if self._unfinished:
            return
        if self._epochs is not None:
            await self._end_exactly(stopped_at, cut=cut)
            return
        try:
            whole = stopped_at == "end"
            await (self._sink.finish() if whole else self._sink.flush())
            await self._sink.stop()
        except EtlstageError:
            await self._acknowledge()  # what is durable, whatever becomes of the rest
            raise
        stopped_at = "" if self._sink.withheld else stopped_at
        await self._sink.commit(self._note())
        await self._sink.perform()
        await self._acknowledge()
        delivery = self._delivery
        if delivery is not None and not self._doubtful():
            if stopped_at == "end" and not self._source.goes_on:
                delivery.commit(None, ended=True, stopped_at=stopped_at)
                await self._source.finished()
            else:
                delivery.end(stopped_at)

    # --- at least once ------------------------------------------------------------

    async def _acknowledge(self) -> None:
        """Record the last position before which everything is durable."""
        covered = None
        while self._positions and self._positions[0][0] <= self._sink.covered:
            covered = self._positions.popleft()[1]
        # If replies are doubtful, rather load messages twice than lose any of them.
        if covered is None or self._doubtful():
            return
        await self._source.secure(covered)
        if self._letters is not None:
            await self._letters.sync()
        if self._delivery is not None:
            # Blocks: the file is small, and must be there before the loop continues.
            self._delivery.commit(covered.value)
        await self._source.acknowledge(covered)

    # --- exactly once -------------------------------------------------------------

    async def _take_exactly(self, item: Run | Position) -> None:
        if isinstance(item, Position):
            if self._sink.withheld:
                return  # workers may not have been given everything before it
            self._coming = (
                max(self._coming[0], self._behind[0]),
                max(self._coming[1], self._behind[1]),
            )
            self._reached, self._behind = item, [0, 0]
            if item.passed:
                self._covered = item.passed[0].counts[_PRODUCED]
            return
        size = size_of(item)
        if (
            self._reached is not None
            and not self._behind[0]
            and (self._due or self._over(len(item), size))
        ):
            await self._commit_at(self._reached)
        await self._sink.write(item)
        for counts in (self._behind, self._held):
            counts[0] += len(item)
            counts[1] += size

    def _over(self, messages: int, size: int) -> bool:
        """Return whether that much more would make the epoch exceed its bounds."""
        bounds, (held, held_size) = self._bounds, self._held
        # Everything up to the next position comes, too, perhaps in several runs.
        messages, size = max(messages, self._coming[0]), max(size, self._coming[1])
        over = held + messages > bounds.messages or held_size + size > bounds.bytes
        return bool(held) and over

    async def _commit_at(
        self, reached: Position, *, ended: bool = False, stopped_at: StoppedAt = ""
    ) -> None:
        """End the epoch at a position right after everything that was written."""
        self._due = False
        if self._doubtful():
            return  # the run fails at its end; the next resumes after the last epoch
        account, letters = self._sink.account, {}
        passed = {at.stage: at for at in reached.passed}
        await self._seal(self._sink.flush)
        await self._source.secure(reached)
        if self._letters is not None:
            passed_sizes = {name: at.letters for name, at in passed.items()}
            letters = passed_sizes | {account.stage: self._letters.size(account.stage)}
        accounts = {name: list(at.counts) for name, at in passed.items()}
        accounts[account.stage] = account.counts
        await self._commit(
            reached.value, accounts, letters, ended=ended, stopped_at=stopped_at
        )
        self._held, self._reached = [0, 0], None
        await self._source.acknowledge(reached)

    async def _end_exactly(self, stopped_at: StoppedAt, *, cut: bool) -> None:
        assert self._epochs is not None
        if self._doubtful():
            return  # the run fails for it; the next resumes after the last epoch
        if stopped_at == "end":
            await self._seal(self._sink.finish)
            value = self._epochs.record.position
            if not self._source.goes_on:
                value = None
            elif self._reached is not None:
                await self._source.secure(self._reached)
                value = self._reached.value
            letters = self._letters.sizes() if self._letters is not None else {}
            counts = {account.stage: account.counts for account in self._ledger}
            await self._commit(
                value, counts, letters, ended=True, stopped_at=stopped_at
            )
            if value is None:
                await self._source.finished()
            elif self._reached is not None:
                await self._source.acknowledge(self._reached)
        elif cut:
            # Not ended: what came after the last position is read again, and its dead
            # letters are written again.
            if self._reached is not None and not self._behind[0]:
                await self._commit_at(self._reached)
        elif self._behind[0] or self._ledger[0].produced > self._covered:
            # Messages of which nothing reached the sink count, too: they may have dead
            # letters, which will come again.
            raise SourceFailed(
                f"stage {self._source.name}: stopped where it can't resume: messages after"
                " its last position are not loaded, and will be read again",
                stage=self._source.name,
            )
        elif self._reached is not None:
            await self._commit_at(self._reached, ended=True, stopped_at=stopped_at)
        else:
            self._epochs.end(stopped_at)

    async def _seal(self, durable: Callable[[], Awaitable[None]]) -> None:
        """Make an epoch durable, and the dead letters of its messages."""
        assert self._epochs is not None
        self._epochs.check()
        self._epochs.at("begin")
        await durable()
        self._epochs.at("written")
        if self._letters is not None:
            await self._letters.sync()

    async def _commit(
        self,
        position: object,
        accounts: Mapping[str, Sequence[int]],
        letters: Mapping[str, int],
        *,
        ended: bool,
        stopped_at: StoppedAt,
    ) -> None:
        assert self._epochs is not None
        record = self._epochs.next(
            position,
            accounts=accounts,
            letters=letters,
            ended=ended,
            stopped_at=stopped_at,
            performs=self._sink.performs,
            intents=self._sink.intents,
        )
        await self._sink.commit(record.note)
        self._epochs.at("committed")
        self._epochs.keep(record)
        if self._sink.performs:
            await self._sink.perform()
            self._epochs.performed()
