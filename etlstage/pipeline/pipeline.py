"""
A run: from the source through the stages into the sink.

Each stage is a task, each pair of neighbours shares an edge. The first error wins:
it ends the run, the workers are stopped, and the report says what is in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from etlstage.errors import ConfigError
from etlstage.messages import Position, Run, StageKind, listed
from etlstage.pipeline.dead_letter import DeadLetters
from etlstage.pipeline.edge import Edge, Item
from etlstage.pipeline.interfaces import DeadLetterSink, Sink, Source
from etlstage.pipeline.ledger import Account, Ledger
from etlstage.pipeline.refusal import Refusals, config_of
from etlstage.pipeline.report import Report, Status
from etlstage.pipeline.watermark import Watermark
from etlstage.protocol.marker.framing import LISTS, Framing
from etlstage.supervisor import AsyncSupervisor, Stage
from etlstage.supervisor.submission import Answer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ("Pipeline",)


class Pipeline:
    """
    One extract stage, any number of transform stages, one load stage.

    Args:
        name: As the report calls it.
        source: Where messages come from.
        stages: What they pass through.
        sink: Where they end.
        flush_every: Seconds after which written messages are made durable, although
            the sink would wait for more; for extractions that never end.
        dead_letters: Where messages are put aside that a stage can't process; None:
            the first one ends the run. The sink has its own.
        dead_letter_sink: What is given the dead letters at the end of the run.
        framing: How messages are held between the stages.

    Raises:
        ConfigError: If two stages have one name, or a stage in the middle is not of
            kind transform.

    """

    def __init__(
        self,
        *,
        name: str,
        source: Source,
        stages: Sequence[Stage] = (),
        sink: Sink,
        flush_every: float = 60.0,
        dead_letters: DeadLetters | None = None,
        dead_letter_sink: DeadLetterSink | None = None,
        framing: Framing = LISTS,
    ) -> None:
        self.name = name
        self._source = source
        self._stages = tuple(stages)
        self._sink = sink
        self._flush_every = flush_every
        self._dead_letters = dead_letters
        self._dead_letter_sink = dead_letter_sink
        self._framing = framing
        self._check()
        self._extracting: anyio.CancelScope | None = None
        self._drained = False
        self._exhausted = False
        self._started = self._ended = 0.0
        self._error: Exception | None = None
        self.ledger = Ledger(
            [
                (source.name, StageKind.EXTRACT),
                *((stage.name, stage.kind) for stage in self._stages),
                (sink.name, StageKind.LOAD),
            ]
        )
        """The accounts of the stages, live."""

    @classmethod
    def from_yaml(
        cls, path: str | Path, *, spark: SparkSession | None = None
    ) -> Pipeline:
        """
        Build the pipeline of a YAML file; nothing is started.

        Args:
            path: The file.
            spark: A session to use in place of the file's own; it is not stopped.

        Raises:
            ConfigError: If anything in the file is wrong; one line for each problem.

        """
        # The one way up: whoever has a Pipeline need not know where files are read.
        from etlstage.config.build import pipeline_from_yaml

        return pipeline_from_yaml(path, spark=spark)

    def drain(self) -> None:
        """Stop extracting; :meth:`run` returns when all that is under way has landed."""
        self._drained = True
        if self._extracting is not None and not self._source.drain():
            self._extracting.cancel()

    async def run(self) -> Report:
        """
        Run to the end and return the report; a failure is in there.

        Cancelling stops the workers at once; :meth:`report` then says what landed.
        A pipeline runs only once.
        """
        self._started = anyio.current_time()
        self._extracting = anyio.CancelScope()
        if self._drained:
            self.drain()
        whole = False
        try:
            with anyio.CancelScope() as scope:
                await self._run_stages(scope)
            await self._hand_over_letters()
            whole = self._error is None
        finally:
            await self._close_letters()
            self._ended = anyio.current_time()
            self._take_stock()
            # What a whole run can't account for is a fault, and no loss.
            if not whole:
                self.ledger.settle()
        if self._error is not None:
            return self.report("failed")
        status: Status = "done" if self._exhausted else "drained"
        self.ledger.check(whole=True)
        return self.report(status)

    def report(self, status: Status) -> Report:
        """Return the report of a run that ended as ``status`` says."""
        letters = self._dead_letters
        return Report(
            name=self.name,
            status=status,
            error=self._error,
            seconds=self._ended - self._started,
            ledger=self.ledger,
            landed=self._sink.landed(),
            dead_letters=letters.look if letters and letters.count else None,
        )

    # --- the tasks ----------------------------------------------------------

    async def _run_stages(self, scope: anyio.CancelScope) -> None:
        edges = [Edge() for _ in self.ledger][:-1]
        async with anyio.create_task_group() as tasks:

            async def guard(
                task: Callable[..., Coroutine[Any, Any, None]], *args: object
            ) -> None:
                try:
                    await task(*args)
                except Exception as error:
                    self._error = self._error or _innermost(error)
                    scope.cancel()

            tasks.start_soon(guard, self._extract, edges[0])
            for number, stage in enumerate(self._stages):
                tasks.start_soon(
                    guard,
                    self._transform,
                    stage,
                    self.ledger[number + 1],
                    edges[number],
                    edges[number + 1],
                )
            tasks.start_soon(guard, self._load, edges[-1])

    async def _extract(self, edge: Edge) -> None:
        account = self.ledger[0]
        assert self._extracting is not None
        with self._extracting:
            try:
                async with aclosing(self._source.runs()) as items:
                    async for item in items:
                        await edge.put(item)
                        if not isinstance(item, Position):
                            account.produced += len(item)
                        self._tick(account)
                self._exhausted = not self._drained
            finally:
                with anyio.CancelScope(shield=True):
                    await self._source.aclose()
        edge.close()

    async def _transform(
        self, stage: Stage, account: Account, edge: Edge, out: Edge
    ) -> None:
        # Positions pass a stage behind the outcome of all messages before them.
        positions: deque[tuple[int, Position]] = deque()
        passed = Watermark()
        refusals = Refusals(
            stage.name, stage.on_error, config_of(stage), self._dead_letters
        )
        # A batch is put together of messages from several runs.
        framing = LISTS if stage.mode.batches else self._framing

        async def runs() -> AsyncIterator[Run]:
            async for item in edge:
                if not isinstance(item, Position):
                    account.received += len(item)
                    yield listed(item) if framing is LISTS else item
                elif passed.low == account.received and not positions:
                    await out.put(item)
                else:
                    positions.append((account.received, item))

        async with (
            AsyncSupervisor(stage, framing=framing) as supervisor,
            aclosing(supervisor.answers(runs())) as answers,
        ):
            async for answer in answers:
                if answer.error is None:
                    outputs = framing.joined(answer.groups)
                    if len(outputs):
                        await out.put(outputs)
                    account.produced += len(outputs)
                    account.done += len(answer.messages)
                else:
                    await self._settle(answer, answer.error, account, refusals)
                self._tick(account)
                passed.rise(answer.start, len(answer.messages))
                while positions and positions[0][0] <= passed.low:
                    # It stays the first until it is through: none may overtake it.
                    await out.put(positions[0][1])
                    positions.popleft()
        out.close()

    async def _load(self, edge: Edge) -> None:
        sink = self._sink
        positions: deque[tuple[int, Position]] = deque()
        async with sink, aclosing(self._items_to_load(edge)) as items:
            async for item in items:
                if isinstance(item, Position):
                    positions.append((sink.received, item))
                else:
                    await sink.write(item)
                self._take_stock()
                await self._acknowledge(positions)
            if self._dead_letters is not None:
                await self._dead_letters.sync()
            await (sink.finish() if self._exhausted else sink.flush())
            self._take_stock()
            await self._acknowledge(positions)

    async def _items_to_load(self, edge: Edge) -> AsyncGenerator[Item, None]:
        flush_at = anyio.current_time() + self._flush_every
        while True:
            late = anyio.CancelScope(deadline=flush_at)
            item = None
            with late:
                item = await edge.get()
            if late.cancelled_caught:
                await self._sink.flush()
                yield []
            elif item is None:
                return
            else:
                yield item
            if anyio.current_time() >= flush_at:
                flush_at = anyio.current_time() + self._flush_every

    # --- the accounts -------------------------------------------------------

    async def _acknowledge(self, positions: deque[tuple[int, Position]]) -> None:
        covered = None
        while positions and positions[0][0] <= self._sink.loaded + self._sink.dead:
            covered = positions.popleft()[1]
        if covered is None:
            return
        if self._dead_letters is not None:
            await self._dead_letters.sync()
        await self._source.acknowledge(covered)

    async def _settle(
        self, answer: Answer, error: Exception, account: Account, refusals: Refusals
    ) -> None:
        try:
            await refusals.settle(
                error, answer.messages, place=answer.start, received=account.received
            )
        finally:
            account.dead, account.failed = refusals.dead, refusals.failed

    async def _hand_over_letters(self) -> None:
        """Make the dead letters durable, and give them to whom they are for."""
        letters = self._dead_letters
        if letters is None:
            return
        try:
            await letters.sync()
            if self._dead_letter_sink is not None and letters.count:
                await self._dead_letter_sink.write(letters.letters())
        except Exception as error:
            self._error = self._error or error

    async def _close_letters(self) -> None:
        with anyio.CancelScope(shield=True):
            if self._dead_letter_sink is not None:
                await self._dead_letter_sink.aclose()
        if self._dead_letters is not None:
            self._dead_letters.close()

    def _take_stock(self) -> None:
        account, sink = self.ledger[len(self.ledger) - 1], self._sink
        account.received, account.done = sink.received, sink.loaded
        account.dead, account.failed = sink.dead, sink.failed
        self._tick(account)

    def _tick(self, account: Account) -> None:
        account.seconds = anyio.current_time() - self._started

    def _check(self) -> None:
        names = [
            self._source.name,
            *(stage.name for stage in self._stages),
            self._sink.name,
        ]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two stages are called {name}; names must differ")
        for stage in self._stages:
            if stage.kind is not StageKind.TRANSFORM:
                raise ConfigError(
                    f"stage {stage.name} is of kind {stage.kind.value}: between the"
                    " source and the sink only transform stages may stand"
                )


def _innermost(error: Exception) -> Exception:
    """Return the cause that a group holds, when it holds only one."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
