from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from etlstage.cli.history import EVERY, MOST, History, RunSpan
from etlstage.cli.progress import Rates
from etlstage.messages import StageKind
from etlstage.pipeline.delivery.delivery import Bounds, Delivery
from etlstage.pipeline.ledger import Account, Ledger
from etlstage.pipeline.pipeline import Pipeline
from etlstage.testing import MemoryEpochs, MemoryEpochSink
from tests.pipeline.test_loading import Numbers, stop_at


@pytest.fixture
def ledger() -> Ledger:
    """Return the accounts of a run that begins."""
    return Ledger.of_pipeline("extract", [], Account("load", StageKind.LOAD))


def move(ledger: Ledger, made: int, loaded: int) -> None:
    """Set how many messages were extracted and loaded so far."""
    ledger[0].produced = ledger[1].received = made
    ledger[1].done = loaded


def test_rates_are_those_between_two_samples(ledger: Ledger) -> None:
    """Each stage has its own; times count from the first sample (issue 11)."""
    history = History(ledger)
    for now, made, loaded in ((7.0, 0, 0), (8.0, 100, 10), (10.0, 100, 100)):
        move(ledger, made, loaded)
        history.sample(now)
    assert history.spans() == [
        RunSpan(0.0, 1.0, [100.0, 10.0]),
        RunSpan(1.0, 3.0, [0.0, 45.0]),
    ]


def test_what_a_run_has_left_is_no_throughput(ledger: Ledger) -> None:
    """Unprocessed messages don't add to a stage's rate (issue 23)."""
    history = History(ledger)
    history.sample(0.0)
    move(ledger, made=45, loaded=5)
    ledger.settle()
    history.sample(1.0)
    assert ledger[1].unprocessed == 40
    assert history.spans() == [RunSpan(0.0, 1.0, [45.0, 5.0])]


async def test_resumed_run_has_no_rate_of_earlier_starts(tmp_path: Path) -> None:
    """Samples before it has found out that it resumes change nothing (issue 26)."""
    epochs, loaded = MemoryEpochs(), []
    for step in ("recorded", "none"):
        delivery = Delivery(tmp_path, exactly_once=True, bounds=Bounds(messages=10))
        delivery.at = stop_at(step, 3)
        pipeline = Pipeline(
            name="p",
            source=Numbers(50, 10),
            sink=MemoryEpochSink(epochs),
            delivery=delivery,
        )
        history, rates = History(pipeline.ledger), Rates(pipeline.ledger)
        history.sample(0.0)
        rates.sample(0.0)
        report = await pipeline.run()
        history.sample(1.0)
        loaded.append(history.spans()[0].rates[1])
        assert rates.sample(1.0)[1] == loaded[-1]
    assert report.ledger[1].done == 50
    assert loaded == [30.0, 20.0]


def test_samples_are_bounded(ledger: Ledger) -> None:
    """A day's run has as few as a minute's, and counts all messages (issue 11)."""
    history, now = History(ledger), 0.0
    while now < 86_400:
        move(ledger, made=int(now * 10), loaded=int(now * 9))
        history.sample(now)
        now += history.every
    spans = history.spans()
    assert MOST / 2 - 1 <= len(spans) <= MOST
    assert history.every == EVERY * 2**11
    assert (spans[0].start, spans[-1].end) == (0.0, now - history.every)
    moved = sum((span.end - span.start) * span.rates[0] for span in spans)
    assert moved == pytest.approx(ledger[0].produced)


def test_last_sample_makes_no_peak(ledger: Ledger) -> None:
    """A sample a moment after another replaces it (issue 11)."""
    history = History(ledger)
    for now, made in ((0.0, 0), (1.0, 100), (1.001, 101)):
        move(ledger, made, 0)
        history.sample(now)
    assert history.spans() == [RunSpan(0.0, 1.001, [101 / 1.001, 0.0])]


def test_run_without_samples(ledger: Ledger) -> None:
    """Its speed is unknown."""
    assert History(ledger).spans() == []


async def test_run_that_is_over_at_once(ledger: Ledger) -> None:
    """Messages moved before the second sample still make a rate (issue 11)."""
    history = History(ledger)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(history.keep)
        await anyio.wait_all_tasks_blocked()
        move(ledger, 5, 5)
        tasks.cancel_scope.cancel()
    (span,) = history.spans()
    assert span.rates == [5 / span.end] * 2
