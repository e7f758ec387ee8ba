"""
What leaves the last stage, into the sink; and how far that has come, on record.

At least once: what the sink has made durable is recorded whenever it covers a position.
Exactly once: what comes between two positions that are far enough apart is an epoch. It
is flushed at its end and at no other time, and then recorded; an interrupted run has
loaded nothing behind that which its sink does not replace.

A position is recorded when something has come behind it, after a while, or at the end:
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
from etlstage.pipeline.interfaces import Sink, Source
from etlstage.pipeline.ledger import COUNTS, Ledger

__all__ = ("Loading",)

_PRODUCED: Final = COUNTS.index("produced")


class Loading:
    """
    Loads what one run makes, and commits.

    Args:
        sink: Where it goes; entered.
        source: Whose positions they are.
        ledger: Of the run.
        letters: Durable before a position is.
        delivery: Where they are recorded, if they are.
        every: Seconds after which what was written is made durable.
        doubtful: Returns how many replies may be those of other messages.
        note: Returns what the sink is to note at the end, where nothing is recorded.

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
        # Each with how many messages the sink had taken before it.
        self._positions: deque[tuple[int, Position]] = deque()
        # Of the epoch under way: its messages and bytes, and those behind the position.
        self._held = [0, 0]
        self._behind = [0, 0]
        # What may come between two positions, as far as that is known.
        self._coming = source.cut
        # What the source had given before the last position, or had when we began.
        self._covered = 0
        if self._epochs is not None:
            counts = self._epochs.record.accounts.get(source.name)
            self._covered = counts[_PRODUCED] if counts else 0
        self._reached: Position | None = None
        self._due = False
        # Whether something was begun at the sink and has not returned. Behind an error
        # a part of it may be done: who waited meanwhile is to add nothing to that, as
        # a second flush, which has nothing left to do, would pass for the first.
        self._unfinished = False

    async def take(self, item: Run | Position) -> None:
        """Write a run, or record that all before a position was written."""
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
        """Make durable what waits for more, until :meth:`end`."""
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

    async def end(self, *, exhausted: bool, cut: bool = False) -> None:
        """
        Make all durable, and record that the run has ended.

        Args:
            exhausted: Whether the source has no more, and was not drained.
            cut: Whether something that came before the end was not processed.

        """
        async with self._writing:
            self._flushing.cancel()
        if self._letters is not None:
            await self._letters.sync()
        if self._unfinished:
            return
        if self._epochs is not None:
            await self._end_exactly(exhausted=exhausted, cut=cut)
            return
        try:
            await (self._sink.finish() if exhausted else self._sink.flush())
            await self._sink.stop()
        except EtlstageError:
            await self._acknowledge()  # whatever becomes of the rest
            raise
        exhausted &= not self._sink.withheld
        await self._sink.commit(self._note())
        await self._sink.perform()
        await self._acknowledge()
        delivery = self._delivery
        if delivery is not None and not self._doubtful():
            if exhausted and not self._source.goes_on:
                delivery.commit(None, ended=True)
                await self._source.finished()
            else:
                delivery.end()

    # --- at least once ------------------------------------------------------------

    async def _acknowledge(self) -> None:
        """Record the last position before which all is durable."""
        account, covered = self._sink.account, None
        while self._positions and self._positions[0][0] <= account.done + account.dead:
            covered = self._positions.popleft()[1]
        # Rather load twice what comes before it than leave out what was not its reply.
        if covered is None or self._doubtful():
            return
        await self._source.secure(covered)
        if self._letters is not None:
            await self._letters.sync()
        if self._delivery is not None:
            # A small file, and the loop must not run on before it is there.
            self._delivery.commit(covered.value)
        await self._source.acknowledge(covered)

    # --- exactly once -------------------------------------------------------------

    async def _take_exactly(self, item: Run | Position) -> None:
        if isinstance(item, Position):
            if self._sink.withheld:
                return  # of what is before it the workers may not have been given all
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
        """Return whether the epoch would be larger than it may be with so much more."""
        bounds, (held, held_size) = self._bounds, self._held
        # The rest up to the next position comes, too, perhaps in several runs.
        messages, size = max(messages, self._coming[0]), max(size, self._coming[1])
        over = held + messages > bounds.messages or held_size + size > bounds.bytes
        return bool(held) and over

    async def _commit_at(self, reached: Position, *, ended: bool = False) -> None:
        """End the epoch at a position that is right behind all that was written."""
        self._due = False
        if self._doubtful():
            return  # the run fails at its end, and goes on from the epoch before
        account, letters = self._sink.account, {}
        passed = {at.stage: at for at in reached.passed}
        await self._seal(self._sink.flush)
        await self._source.secure(reached)
        if self._letters is not None:
            passed_sizes = {name: at.letters for name, at in passed.items()}
            letters = passed_sizes | {account.stage: self._letters.size(account.stage)}
        accounts = {name: list(at.counts) for name, at in passed.items()}
        accounts[account.stage] = account.counts
        await self._commit(reached.value, accounts, letters, ended=ended)
        self._held, self._reached = [0, 0], None
        await self._source.acknowledge(reached)

    async def _end_exactly(self, *, exhausted: bool, cut: bool) -> None:
        assert self._epochs is not None
        if self._doubtful():
            return  # the run fails for it, and goes on from the epoch before
        if exhausted:
            await self._seal(self._sink.finish)
            value = self._epochs.record.position
            if not self._source.goes_on:
                value = None
            elif self._reached is not None:
                await self._source.secure(self._reached)
                value = self._reached.value
            letters = self._letters.sizes() if self._letters is not None else {}
            counts = {account.stage: account.counts for account in self._ledger}
            await self._commit(value, counts, letters, ended=True)
            if value is None:
                await self._source.finished()
            elif self._reached is not None:
                await self._source.acknowledge(self._reached)
        elif cut:
            # It has not ended: what is behind its last position comes again, and its
            # dead letters with it.
            if self._reached is not None and not self._behind[0]:
                await self._commit_at(self._reached)
        elif self._behind[0] or self._ledger[0].produced > self._covered:
            # Of some nothing came: they have dead letters that will come again, too.
            raise SourceFailed(
                f"stage {self._source.name}: stopped where it can't read on: what came"
                " behind its last position is not loaded, and read again",
                stage=self._source.name,
            )
        elif self._reached is not None:
            await self._commit_at(self._reached, ended=True)
        else:
            self._epochs.end()

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
    ) -> None:
        assert self._epochs is not None
        record = self._epochs.next(
            position,
            accounts=accounts,
            letters=letters,
            ended=ended,
            intents=self._sink.intents,
        )
        await self._sink.commit(record.note)
        self._epochs.at("committed")
        self._epochs.keep(record)
        if self._sink.performs:
            await self._sink.perform()
            self._epochs.at("performed")
