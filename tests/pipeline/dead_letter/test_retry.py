from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from etlstage.errors import Attempt
from etlstage.pipeline import Pipeline
from etlstage.pipeline.dead_letter.record import DeadLetter
from etlstage.pipeline.dead_letter.retry import Retry, chunks
from etlstage.pipeline.dead_letter.settled import Settled
from etlstage.testing import MemorySink
from tests.pipeline.dead_letter.test_settled import append, left, letter


async def test_what_failed_again_keeps_its_id(tmp_path: Path) -> None:
    """With the place that it had, and one more attempt; the others passed (issue 14)."""
    tried = Attempt("clean-1", 7, "died")
    letters = [replace(letter(n), attempts=(tried,)) for n in (3, 5, 8)]
    append(tmp_path, *letters)
    retry = Retry(letters, 1)
    assert retry.known["clean", 1, b"m5"] == "r-5"
    retry.source.given = 3
    made = replace(letter(1), id="x-1", run="x", error="worse")
    await retry.keep(replace(made, attempts=(tried, tried)))
    await retry.keep(replace(made, id="x-2", stage="load"))
    assert retry.passed == ["r-3", "r-8"]
    retry.record(tmp_path)
    assert left(tmp_path) == [("r-5", "worse")]
    assert left(tmp_path, "load") == [("x-2", "worse")]
    (again,) = Settled(tmp_path / "dead_letters").letters("clean")
    assert isinstance(again, DeadLetter)
    assert (again.place, again.run, len(again.attempts)) == (5, "r", 3)


async def test_letters_as_a_source() -> None:
    """What was not passed on when a signal came has not passed."""
    letters = [letter(n) for n in range(600)]
    retry, sink = Retry(letters, 1), MemorySink()
    pipeline = Pipeline(name="p", source=retry.source, sink=sink)
    assert (await pipeline.run()).status == "done"
    assert sink.messages == [letter.message for letter in letters]
    assert len(retry.passed) == 600
    drained = Retry(letters, 1)
    pipeline = Pipeline(name="p", source=drained.source, sink=(sink := MemorySink()))
    pipeline.drain()
    assert (await pipeline.run()).status == "drained"
    assert len(drained.passed) == len(sink.messages) < 600


def test_letters_are_taken_some_at_a_time() -> None:
    """However many there are, and however large (issue 14)."""
    many = list(chunks(map(letter, range(25_000))))
    assert [len(chunk) for chunk in many] == [10_000, 10_000, 5_000]
    large = [replace(letter(n), message=b"x" * (40 << 20)) for n in range(3)]
    assert [len(chunk) for chunk in chunks(large)] == [1, 1, 1]
    assert list(chunks([])) == []
