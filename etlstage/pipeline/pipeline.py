"""
A run: from the source through the stages into the sink.

Each stage is a task, each pair of neighbours shares an edge. The first error wins:
it ends the run, the workers are stopped, and the report says what was loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Sequence,
)
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from etlstage.messages import Position, Run, joined
from etlstage.pipeline.dead_letter.policy import DeadLetterPolicy, config_of
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.edge import Edge, Item
from etlstage.pipeline.interfaces import DeadLetterSink, Sink, Source
from etlstage.pipeline.ledger import Account
from etlstage.pipeline.report import Status
from etlstage.pipeline.runner import Runner
from etlstage.pipeline.watermark import Watermark
from etlstage.stage import Stage
from etlstage.supervisor import AsyncSupervisor

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ("Pipeline",)


class Pipeline(Runner):
    """
    One extract stage, any number of transform stages, one load stage.

    Args:
        name: As the report calls it.
        source: Where messages come from.
        stages: What they pass through.
        sink: Where they end.
        flush_every: Seconds after which written messages are made durable, although
            the sink would wait for more; for extractions that never end.
        dead_letters: Where messages are kept that a stage can't process; None: the
            first one ends the run. The sink has its own.
        dead_letter_sink: What is given the dead letters at the end of the run.
        release: Called behind all else, with the error of the run if there is one:
            lets go of what its parts have in common, as a Spark session.
        judged_of: Messages of which the share of an error budget is taken, at least:
            a part of an input may be worse than the whole.

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
        release: Callable[[Exception | None], Awaitable[None]] | None = None,
        judged_of: int = 0,
    ) -> None:
        super().__init__(
            name,
            source=source.name,
            stages=stages,
            sink=sink,
            dead_letters=dead_letters,
            dead_letter_sink=dead_letter_sink,
            release=release,
        )
        self._source = source
        self._sink = sink
        self._flush_every = flush_every
        self._judged_of = judged_of
        self._extracting: anyio.CancelScope | None = None
        self._drained = False
        self._exhausted = False

    @classmethod
    def from_yaml(
        cls, path: str | Path, *, spark: SparkSession | None = None
    ) -> Runner:
        """
        Build what runs the pipeline of a YAML file; nothing is started.

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
        """Stop extracting; :meth:`run` returns when all that is under way is loaded."""
        self._drained = True
        if self._extracting is not None and not self._source.drain():
            self._extracting.cancel()

    async def _run(self) -> Status:
        self._extracting = anyio.CancelScope()
        if self._drained:
            self.drain()
        with anyio.CancelScope() as scope:
            await self._run_stages(scope)
        return "done" if self._exhausted else "drained"

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
                    self._fail(error)
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
        policy = DeadLetterPolicy(
            account,
            stage.on_error,
            config_of(stage),
            self._dead_letters,
            judged_of=self._judged_of,
        )

        async def runs() -> AsyncIterator[Run]:
            async for item in edge:
                if not isinstance(item, Position):
                    account.received += len(item)
                    yield item
                elif passed.low == account.received and not positions:
                    await out.put(item)
                else:
                    positions.append((account.received, item))

        async with (
            AsyncSupervisor(stage) as supervisor,
            aclosing(supervisor.answers(runs())) as answers,
        ):
            async for answer in answers:
                if answer.error is None:
                    outputs = joined(answer.groups)
                    if len(outputs):
                        await out.put(outputs)
                    account.produced += len(outputs)
                    account.done += len(answer.messages)
                else:
                    await policy.settle(
                        answer.error, answer.messages, place=answer.start
                    )
                self._tick(account)
                passed.rise(answer.start, len(answer.messages))
                while positions and positions[0][0] <= passed.low:
                    # It stays the first until it is through: none may overtake it.
                    await out.put(positions[0][1])
                    positions.popleft()
        out.close()

    async def _load(self, edge: Edge) -> None:
        sink, account = self._sink, self._sink.account
        positions: deque[tuple[int, Position]] = deque()
        async with sink, aclosing(self._items_to_load(edge)) as items:
            async for item in items:
                if isinstance(item, Position):
                    positions.append((account.received, item))
                else:
                    await sink.write(item)
                self._tick(account)
                await self._acknowledge(positions)
            if self._dead_letters is not None:
                await self._dead_letters.sync()
            await (sink.finish() if self._exhausted else sink.flush())
            self._tick(account)
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
        account, covered = self._sink.account, None
        while positions and positions[0][0] <= account.done + account.dead:
            covered = positions.popleft()[1]
        if covered is None:
            return
        if self._dead_letters is not None:
            await self._dead_letters.sync()
        await self._source.acknowledge(covered)
