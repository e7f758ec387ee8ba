"""Recording the batches of a stream, without Spark."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import anyio
import pytest
from pyspark.sql import SparkSession

from etlstage.errors import SinkFailed, StateUnusable
from etlstage.pipeline import DeadLetters
from etlstage.pipeline.delivery.delivery import Delivery, take_over
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.interfaces import Epochs
from etlstage.pipeline.ledger import Ledger
from etlstage.spark.dataframe.destination import Destination
from etlstage.spark.dataframe.sink import DataFrameSink
from etlstage.spark.engine import micro_batch
from etlstage.spark.engine.micro_batch import STOPPED, Batches
from etlstage.spark.engine.stage_job import StageJob
from etlstage.spark.session.session import Session
from etlstage.spark.sink import SparkSink
from etlstage.spark.task.chain import Chain

FRAME: Any = SimpleNamespace(sparkSession=None)


class Crash(Exception):
    """Stand-in for the end of the process."""


class Scripted(Batches):
    """Loads two messages in each batch, and calls ``before`` first."""

    before: Callable[[], None] = staticmethod(lambda: None)
    loaded: int = 0

    async def _pass(
        self,
        messages: Any,  # noqa: ANN401 - a DataFrame
        ledger: Ledger,
        letters: DeadLetters,
        sink: SparkSink,
        delivery: Delivery,
    ) -> None:
        ledger[0].produced = ledger[1].received = 2
        self.before()
        ledger[1].done = 2
        self.loaded += 1


class Sink(DataFrameSink):
    """A sink that does not need Spark."""

    async def __aenter__(self) -> Self:
        return self

    def of_batch(
        self, spark: SparkSession | Session, epochs: Epochs, letters: DeadLetters
    ) -> Self:
        """Return a sink that loads nothing."""
        return type(self)(spark, self._destination, dead_letters=letters)


def batches(state: Path, fence: int) -> Scripted:
    """Return the callback of a stream without stages."""
    found = Scripted(
        state,
        Chain("extract", (), DeadLetters(state, pipeline="p")),
        sink=Sink(Session(), Destination("out", mode="append")),
    )
    found.fence = fence
    return found


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Give the state directory of a run that has begun."""
    with Delivery(tmp_path, exactly_once=True) as delivery:
        delivery.begin("r", stages=["extract", "load"], letters={})
    return tmp_path


def test_batch_is_an_epoch(state: Path) -> None:
    """A recorded batch is skipped; accounts are of all batches (issue 14)."""
    there = batches(state, 1)
    for number in (0, 0, 1, 1, 0):
        there(FRAME, number)
    assert there.loaded == 2
    record = CommitRecord.latest(state)
    assert (record.epoch, record.position, record.ended) == (2, 2, False)
    assert record.accounts["extract"][5] == 4
    assert record.accounts["load"][:2] == [4, 4]
    with pytest.raises(
        StateUnusable,
        match=r"batch 5: .* has records of only 2 .* 'etlstage state reset /",
    ):
        there(FRAME, 5)


def test_batch_of_a_run_that_was_taken_over_commits_nothing(state: Path) -> None:
    """Neither one that begins after that, nor one that ends after that (issue 14)."""
    there = batches(state, 1)
    there.before = lambda: (take_over(state), None)[1]
    with pytest.raises(StateUnusable, match="has taken over the state directory"):
        there(FRAME, 0)
    assert there.loaded == 1
    with pytest.raises(StateUnusable, match="has taken over the state directory"):
        there(FRAME, 0)
    assert there.loaded == 1
    assert CommitRecord.latest(state).epoch == 0


@pytest.mark.parametrize("step", ["aside", "recorded"])
def test_batch_that_broke_off_in_its_record(state: Path, step: str) -> None:
    """It is loaded again, unless its record is complete (issue 14)."""
    there = batches(state, 1)

    def at(now: str) -> None:
        if now == step:
            raise Crash(step)

    there.at = at
    with pytest.raises(Crash):
        there(FRAME, 0)
    again = batches(state, 1)
    again(FRAME, 0)
    assert again.loaded == (step == "aside")
    assert CommitRecord.latest(state).accounts["load"][:2] == [2, 2]


def test_failure_of_an_earlier_run_is_forgotten(state: Path) -> None:
    """A batch may fail again for another reason, which must be reported, too."""

    def fails() -> None:
        raise SinkFailed("disk full", stage="load")

    there = batches(state, 1)
    there.before = fails
    with pytest.raises(SinkFailed, match="disk full"):
        there(FRAME, 0)
    failure = there.failure()
    assert failure is not None
    assert failure.error == "disk full"
    assert failure.accounts[1][:5] == [2, 0, 0, 0, 2]
    assert batches(state, 2).failure() is None
    there.stop()
    left = {path.name for path in state.iterdir()} - {"stop-1", "failed.json"}
    (state / "failed.new").touch()  # as if killed while writing it
    there.begin()
    assert there.failure() is None
    assert {path.name for path in state.iterdir()} == left


def test_batch_is_not_begun_when_the_stream_was_stopped(state: Path) -> None:
    """It is left to the next run."""
    there = batches(state, 1)
    there.stop()
    with pytest.raises(RuntimeError, match=STOPPED):
        there(FRAME, 0)
    assert not there.loaded


def test_request_to_stop_concerns_one_run(state: Path) -> None:
    """Not the run that has taken over from it (issue 23)."""
    old, new = batches(state, 1), batches(state, 2)
    take_over(state)
    old.stop(at_once=True)
    new(FRAME, 0)
    assert new.loaded


def test_batch_that_is_taken_over_in_its_stages(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of its letters are kept (issue 14)."""

    class Passing(StageJob):
        async def fill(self, *_: object) -> None:
            take_over(state)

        async def settle(self, *_: object) -> dict[int, int]:
            raise AssertionError("unreachable: its letters are settled")

    monkeypatch.setattr(micro_batch, "StageJob", Passing)
    monkeypatch.setattr(micro_batch, "staging_for", lambda *_: nullcontext())
    monkeypatch.setattr(Scripted, "_pass", Batches._pass)
    with pytest.raises(StateUnusable, match="has taken over the state directory"):
        batches(state, 1)(FRAME, 0)
    assert CommitRecord.latest(state).epoch == 0


def test_batch_that_is_called_off_has_no_record(state: Path) -> None:
    """It is run again when the stream is."""
    there = batches(state, 1)

    async def waits(*_: object) -> None:
        await anyio.sleep_forever()

    there._pass = waits  # type: ignore[method-assign, assignment]
    (state / "stop-now-1").touch()
    with pytest.raises(RuntimeError, match=STOPPED):
        there(FRAME, 0)
    assert CommitRecord.latest(state).epoch == 0


@pytest.mark.parametrize("connect", [True, False])
def test_garbage_of_a_batch_is_collected_at_its_end(
    state: Path, *, connect: bool
) -> None:
    """
    Over Connect; what is collected within a call may call the server (issue 23).

    gRPC holds a lock while it starts a thread, and a collection in that thread waits
    for the lock for ever.
    """

    class Handle:
        """Refers to itself, as a data frame that a traceback refers to does."""

        def __init__(self) -> None:
            self.it = self

    def before() -> None:
        enabled.append(gc.isenabled())
        handles.append(weakref.ref(Handle()))

    module = "pyspark.sql.connect.session" if connect else "pyspark.sql.session"
    session = type("AnySession", (), {"__module__": module})()
    enabled, handles = list[bool](), list[weakref.ref[Handle]]()
    there = batches(state, 1)
    there.before = before
    frame: Any = SimpleNamespace(sparkSession=session)
    there(frame, 0)
    assert enabled == [not connect]
    assert gc.isenabled()
    if connect:
        assert handles[0]() is None
