"""What the batches of a stream leave in the state directory, without Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from etlstage.pipeline import DeadLetters
from etlstage.pipeline.ledger import COUNTS
from etlstage.spark.dataframe.destination import Destination
from etlstage.spark.engine import micro_batch as batch_module
from etlstage.spark.engine.micro_batch import Batches, FrameOutlet, Record


def batches(run: str, state: Path) -> Batches:
    """Return what Spark would call, without stages."""
    return Batches(
        run,
        state,
        source="extract",
        stages=(),
        outlet=FrameOutlet(destination=Destination("out", mode="append")),
        letters=DeadLetters(state, pipeline="p"),
    )


def record(number: int, run: str = "a", error: str | None = None) -> Record:
    """Return what became of a batch of no messages."""
    return Record(number, run, [[0] * len(COUNTS)] * 2, error is None, error)


def test_records_are_yielded_once(tmp_path: Path) -> None:
    """A stream without end would read more of them each time."""
    here, there = batches("a", tmp_path), batches("a", tmp_path)
    there._note(record(0))
    there._note(record(1, run="b"))
    assert [one.number for one in here.records()] == [0]
    there._note(record(2))
    assert [one.number for one in here.records()] == [2]
    assert not list(here.records())


def test_old_records_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder does not grow with the stream; the last batch is always known."""
    monkeypatch.setattr(batch_module, "_KEPT", 3)
    there = batches("a", tmp_path)
    for number in range(10):
        there._note(record(number))
    kept = sorted(path.name for path in (tmp_path / "batches").iterdir())
    assert kept == ["7.json", "8.json", "9.json"]


def test_failure_of_an_earlier_run_is_forgotten(tmp_path: Path) -> None:
    """A batch may fail again, for another reason, and that is to be told."""
    batches("a", tmp_path)._note(record(4, error="old"))
    again = batches("b", tmp_path)
    again.stop()
    again.begin(anew=False)
    assert not list(again.records())
    again._note(record(4, run="b", error="new"))
    assert [one.error for one in again.records()] == ["new"]
    assert not (tmp_path / "stop").exists()


def test_stream_that_begins_anew_has_another_name(tmp_path: Path) -> None:
    """Its first batch is not the one that an earlier stream has loaded."""
    there = batches("a", tmp_path)
    there._note(record(0))
    name = there.stream()
    there.begin(anew=False)
    assert (there.stream(), there._record(0).exists()) == (name, True)
    there.begin(anew=True)
    assert there.stream() != name
    assert not there._record(0).exists()
