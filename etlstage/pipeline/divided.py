"""
A pipeline that is cut at durable edges: its parts run side by side, each by itself.

Each part is a pipeline with a state of its own. A part that fails stops no other: the
parts before it continue until the journals reach their limit, the parts after it load
what has come so far. A part ends when the part before it has ended, and everything is
read.

A load is over when the last part has loaded all of it. If the input is one that each
run reads from the beginning, a first part that has reached its end is not run again
until then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from etlstage.errors import ConfigError, LedgerImbalance, guess
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import (
    EDGE_BOUNDS,
    Bounds,
    Delivery,
    StateHeld,
)
from etlstage.pipeline.delivery.folder import edge_folder
from etlstage.pipeline.delivery.record import CommitRecord, StoppedAt
from etlstage.pipeline.edge import DurableEdge, Waiting, is_over
from etlstage.pipeline.interfaces import Sink, Source
from etlstage.pipeline.journal_settings import misordered
from etlstage.pipeline.journal_source import CUT
from etlstage.pipeline.ledger import JoinedLedger, Ledger
from etlstage.pipeline.pipeline import Pipeline
from etlstage.pipeline.report import EdgeReport, KeptLetters, Report, Status
from etlstage.pipeline.runner import Runner
from etlstage.pipeline.secret import Secrets
from etlstage.stage import Stage
from etlstage.telemetry.log import Log

__all__ = ("DividedPipeline",)

_log = Log()

_LOOK: Final = 0.2
"""Seconds between two checks on another process, and on the journals."""
_WORST: Final = ("done", "drained", "forced")


class DividedPipeline(Runner):
    """
    Pipelines of which each reads what the one before it appends.

    Args:
        name: Name of the pipeline, as shown in the report.
        parts: The pipelines in order. All but the last end in the sink of an edge, all
            but the first begin with the source of one.
        edges: The edges between them: one less.
        first: Number of the first part to run; parts before it may run elsewhere.
        last: Number of the last part to run; None: the last of the pipeline.
        release: Called last, with the error of the run if there is one.

    """

    def __init__(
        self,
        name: str,
        parts: Sequence[Pipeline],
        edges: Sequence[DurableEdge],
        *,
        first: int = 0,
        last: int | None = None,
        release: Callable[[Exception | None], Awaitable[None]] | None = None,
    ) -> None:
        self._edges = edges
        self._first = first
        self._last = len(parts) - 1 if last is None else last
        self._whole = parts
        self._parts = parts[first : self._last + 1]
        # The numbers of running parts, and the reports of those that have ended.
        self._running: set[int] = set()
        self._reports: dict[int, Report] = {}
        # By edge number: set once the edge is counted, and what waited there before the
        # run and after it.
        self._counted: dict[int, anyio.Event] = {}
        self._before: dict[int, Waiting] = {}
        self._after: dict[int, Waiting] = {}
        super().__init__(
            name,
            source=self._parts[0].ledger[0].stage,
            stages=[stage for part in self._parts for stage in part._stages],
            sink=self._parts[-1]._landing,
            dead_letters=None,
            dead_letter_sink=None,
            release=release,
        )
        self.ledger: Ledger = JoinedLedger([part.ledger for part in self._parts])
        if (letters := parts[-1]._dead_letters) is not None:
            letters.before = [edge.before for edge in edges]

    @classmethod
    def cut(
        cls,
        name: str,
        *,
        state: Path,
        source: Source,
        stages: Sequence[Stage],
        sink: Sink,
        durable: Mapping[str, Mapping[str, Any]],
        exactly_once: bool = True,
        bounds: Bounds | None = None,
        edge_bounds: Bounds = EDGE_BOUNDS,
        **settings: Any,  # noqa: ANN401 - those of a pipeline
    ) -> DividedPipeline:
        """
        Return a pipeline that is cut after some of its stages.

        Args:
            name: Name of the pipeline, as shown in the report.
            state: The state directory, with the journals and the dead letters.
            source: Where messages come from.
            stages: The transform stages, in order.
            sink: Where messages are loaded.
            durable: By name, the stages whose output goes to journals, with the
                settings of these, see :class:`~etlstage.pipeline.edge.DurableEdge`.
            exactly_once: Whether each epoch is loaded exactly once, not at least once.
            bounds: When epochs at the sink end.
            edge_bounds: When epochs at an edge end.
            settings: For each part, see :class:`~etlstage.pipeline.pipeline.Pipeline`.

        Raises:
            ConfigError: If ``durable`` names no stage or an unknown one, or a stage's
                order can't be kept.

        """
        edges: list[DurableEdge] = []
        pieces: list[list[Stage]] = [[]]
        sources, states = [source], [state]
        sinks: list[Sink] = []
        of_epochs = bounds or Bounds()
        most = (of_epochs.messages, of_epochs.bytes) if exactly_once else CUT
        unknown = dict(durable)
        for stage in stages:
            pieces[-1].append(stage)
            if stage.name not in unknown:
                continue
            given = unknown.pop(stage.name)
            spread = given.get("partitions", 1), given.get("key")
            if why := misordered(stage.order, *spread):
                raise ConfigError(f"stage {stage.name}: durable.partitions: {why}")
            behind = Path(edge_folder(str(state), stage.name))
            edge = DurableEdge(stage.name, states[-1], behind, **given)
            edges.append(edge)
            pieces.append([])
            sinks.append(edge.sink())
            sources.append(edge.source(most))
            states.append(behind)
        names = [stage.name for stage in stages]
        if unknown or not edges:
            wrong = next(iter(unknown), "")
            raise ConfigError(
                f"durable: there is no stage {wrong!r}{guess(wrong, names)}"
            )
        parts = [
            Pipeline(
                name=name,
                source=begin,
                stages=piece,
                sink=end,
                dead_letters=DeadLetters(folder, pipeline=name),
                delivery=Delivery(folder, exactly_once=exactly_once, bounds=limits),
                **settings,
            )
            for begin, piece, end, folder, limits in zip(
                sources,
                pieces,
                [*sinks, sink],
                states,
                [*(edge_bounds for _ in edges), of_epochs],
                strict=True,
            )
        ]
        return cls(name, parts, edges)

    def drain(self) -> None:
        """Stop extracting and reading; what is read is loaded, the rest waits."""
        for part in self._parts:
            part.drain()

    @property
    def drain_limit(self) -> float:
        """The parts' longest limit, in seconds."""
        return max(part.drain_limit for part in self._parts)

    @property
    def activity(self) -> str:
        """What the running parts wait for."""
        parts = enumerate(self._parts, self._first)
        waits = [part.activity for n, part in parts if n in self._running]
        return "; ".join(filter(None, waits))

    @property
    def secrets(self) -> Secrets:
        """The texts that must not be shown, the same for all parts."""
        return self._parts[0].secrets

    def letters(self) -> Iterator[DeadLetter]:
        """Yield the dead letters of all parts; blocks."""
        return chain.from_iterable(part.letters() for part in self._parts)

    def report(self, status: Status) -> Report:
        """Return one report of all parts."""
        kept = [part.report(status).dead_letters for part in self._parts]
        some = [one for one in kept if one.messages] or [KeptLetters()]
        return replace(
            super().report(status),
            run="+".join(part._number for part in self._parts),
            dead_letters=some[0]._replace(messages=sum(one.messages for one in some)),
            durable=[self._passed(number) for number in self._touched],
        )

    async def _run(self) -> Status:
        await anyio.to_thread.run_sync(self._prepare)
        again = await self._begins()
        if not again:
            await anyio.to_thread.run_sync(self._take_up_first)
        self._running = set(range(self._first + (not again), self._last + 1))
        inner = range(self._first, self._last)
        self._counted = {number: anyio.Event() for number in inner}
        async with anyio.create_task_group() as tasks:
            if self._first:
                tasks.start_soon(self._complete_later)
            elif not again:
                self._whole[1].complete()
            for number in sorted(self._running):
                self._whole[number].when_begun = partial(self._count_waiting, number)
                tasks.start_soon(self._run_part, number, tasks)
        self._cut = any(part._cut for part in self._parts)
        await anyio.to_thread.run_sync(self._balance)
        if self._error is not None:
            raise self._error
        statuses = [report.status for report in self._reports.values()]
        return max(statuses, key=_WORST.index, default="done")

    async def _run_part(self, number: int, tasks: TaskGroup) -> None:
        report = self._reports[number] = await self._whole[number].run()
        self._running.remove(number)
        if number - 1 in self._counted:
            self._counted[number - 1].set()
        if number < self._last:
            done = report.status == "done"
            stopped_at = self._whole[number].stopped_at if done else ""
            self._whole[number + 1].complete(stopped_at)
        if report.error is not None:
            self._fail(report.error)
            if number > self._first:
                tasks.start_soon(self._stop_at_limit, number - 1)

    async def _count_waiting(self, number: int) -> None:
        """
        Count what waits for a part, before the part in front of it appends more.

        Not sooner: a part may begin after the position of its record, where its sink's
        note has it.
        """
        if number - 1 in self._counted:
            edge = self._edges[number - 1]
            self._before[number - 1] = await anyio.to_thread.run_sync(edge.unread)
            self._counted[number - 1].set()
        if number in self._counted:
            await self._counted[number].wait()

    async def _stop_at_limit(self, number: int) -> None:
        """Drain a part whose reader has failed once the edge between them is full."""
        edge = self._edges[number]
        while number in self._running:
            if await anyio.to_thread.run_sync(edge.full):
                self._whole[number].drain()
                return
            await anyio.sleep(_LOOK)

    async def _complete_later(self) -> None:
        """Complete the first part once the part before it is committed and at rest."""
        while self._first in self._running:
            stopped_at = await anyio.to_thread.run_sync(self._look_where_input_stopped)
            if stopped_at is not None:
                self._parts[0].complete(stopped_at)
                return
            await anyio.sleep(_LOOK)

    def _look_where_input_stopped(self) -> StoppedAt | None:
        """
        Return up to where the parts that run elsewhere have read and passed on all.

        Returns:
            Empty: one of them never ran, was interrupted, or was drained. None: the
            part before the first one of this process is running.

        """
        *before, edge = self._edges[: self._first]
        if not edge.acknowledge():
            return None
        record = CommitRecord.latest(self._edges[0].before)
        if not record.ended or any(one.waits for one in before):
            return ""
        return record.stopped_at

    def _take_up_first(self) -> None:
        """Count what the first part, which has ended already, did in earlier starts."""
        record = CommitRecord.latest(self._edges[0].before)
        part = self._parts[0]
        # The counts of other stages would not balance: only this start is counted then.
        same = list(record.accounts) == [account.stage for account in part.ledger]
        if record.whole and same:
            part._carry(record)
            if part._dead_letters is not None:
                part._dead_letters.take_up(record.run)

    @property
    def _touched(self) -> range:
        """The numbers of the edges before, between and after the parts that run."""
        return range(max(0, self._first - 1), min(self._last + 1, len(self._edges)))

    def _prepare(self) -> None:
        # First of all: parts start at the same time, and what one of them stores would
        # keep the old settings from completing what another one can't resume.
        ended = CommitRecord.latest(self._edges[0].before).pending
        # What a part in front was interrupted with must stay able to complete it.
        for number in range(max(0, self._first - 1), self._last + 1):
            runs = number >= self._first and (number > 0 or not ended)
            self._whole[number].check_resumable(runs=runs)
        for number in self._touched:
            self._edges[number].prepare()

    async def _begins(self) -> bool:
        """Return whether the first part is to run, once that is known."""
        begins = await anyio.to_thread.run_sync(self._look_whether_it_begins)
        if begins is None:
            # The part after it has nothing to load and will end, as nothing comes now.
            _log.info(
                "waiting for a later part of the pipeline to end",
                stage=self.ledger[0].stage,
            )
        while begins is None and not self._parts[0]._drained:
            await anyio.sleep(_LOOK)
            begins = await anyio.to_thread.run_sync(self._look_whether_it_begins)
        return bool(begins)

    def _look_whether_it_begins(self) -> bool | None:
        """Return whether the first part is to run; None: a later part is still busy."""
        record = CommitRecord.latest(self._edges[0].before)
        # Without an epoch nothing is recorded as read: what waits comes from a drained
        # run with delivery at least once, or from an interrupted run of one part.
        if self._first or (record.resumes and not record.pending) or not record.epoch:
            return True
        # A later part may still retry dead letters of that load, too; the next load is
        # another one, and may replace the output.
        if not record.pending and any(edge.idle for edge in self._edges):
            return None
        if not is_over(self._edges):
            _log.info(
                "input is not read again: the previous load is not complete yet",
                stage=self.ledger[0].stage,
            )
            return False
        # The previous load is complete: all parts begin another one.
        try:
            for edge in self._edges:
                edge.renew()
        except StateHeld:
            return None
        return True

    def _settle(self) -> None:
        # The load is over if it has ended in the first part and is loaded by the last,
        # which completes the output unless it is drained before.
        pending = CommitRecord.latest(self._edges[0].before).pending
        last = self._reports.get(len(self._edges))
        whole = pending and last is not None and last.status == "done"
        if whole and not any(edge.waits for edge in self._edges):
            self._edges[0].settle()

    def _balance(self) -> None:
        """Count what waits, and assert that appended and read messages balance."""
        self._after = {number: self._edges[number].unread() for number in self._touched}
        if self._error is not None:
            return
        for number, before in self._before.items():
            if self._whole[number + 1]._cut:
                continue  # what the part has read and not loaded still waits
            edge, after = self._edges[number], self._after[number]
            appended, read = self._appended(number), self._read(number)
            if before.messages + appended != read + after.messages:
                raise LedgerImbalance(
                    f"edge {edge.stage}: {before.messages} waited, and {appended} were"
                    f" appended, but {read} were read and {after.messages} wait"
                )

    def _appended(self, number: int) -> int:
        """Return how many messages this run has appended to an edge."""
        part = self._whole[number]
        return part.count(part.ledger[-1], "done")

    def _read(self, number: int) -> int:
        """Return how many messages this run has read from an edge."""
        part = self._whole[number + 1]
        return part.count(part.ledger[0], "produced")

    def _passed(self, number: int) -> EdgeReport:
        edge, after = self._edges[number], self._after.get(number)
        return EdgeReport(
            stage=edge.stage,
            next=self._whole[number + 1].ledger[1].stage,
            appended=self._appended(number),
            read=self._read(number),
            **({} if after is None else after._asdict()),
        )

    def _covered(self, status: Status) -> str:
        if self._first or self._last < len(self._edges):
            return ""  # the input is not read again before all parts have loaded it
        return self._parts[0]._covered(status)
