"""The record of what became of dead letters, and retrying them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from etlstage.errors import Attempt, StateUnusable
from etlstage.pipeline import Pipeline
from etlstage.pipeline.dead_letter.files import LetterFile, Torn
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.retry import Retry, Settled, UnderWay, chunks, settle
from etlstage.pipeline.dead_letter.store import supersede
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.testing import MemorySink


def letter(number: int, stage: str = "clean", error: str = "died") -> DeadLetter:
    """Return a letter."""
    return DeadLetter(
        id=f"r-{number}",
        time="2026-01-02T12:00:00.500+00:00",
        pipeline="p",
        run="r",
        stage=stage,
        place=number,
        message=b"m%d" % number,
        error=error,
        kind="WorkerLost",
        attempts=(),
        config={},
    )


def append(state: Path, *letters: DeadLetter) -> None:
    """Append letters of one stage as a run does."""
    file = LetterFile(state, letters[0].stage, lambda: None)
    file.append(b"".join(letter.to_line() for letter in letters))
    file.close()


def left(state: Path, stage: str = "clean") -> list[tuple[str, str]]:
    """Return the ids and errors of the letters that are still open."""
    found = []
    for item in Settled(state / "dead_letters").letters(stage):
        assert not isinstance(item, Torn)
        found.append((item.id, item.error))
    return found


def test_letters_as_they_stand(tmp_path: Path) -> None:
    """Some passed, one was dropped, one failed again twice, one is new (issue 14)."""
    append(tmp_path, *map(letter, range(5)))
    more = letter(1, error="again"), replace(letter(9), stage="load")
    settle(tmp_path, ["r-0", "r-2"], "passed", letters=more, number=1)
    settle(tmp_path, ["r-3"], "dropped")
    later = [letter(1, error="once more")]
    settle(tmp_path, (), "passed", letters=later, number=2)
    append(tmp_path, letter(5))  # a run that does not know of the retries
    settled = Settled(tmp_path / "dead_letters")
    assert left(tmp_path) == [("r-4", "died"), ("r-5", "died"), ("r-1", "once more")]
    assert left(tmp_path, "load") == [("r-9", "died")]
    assert settled.stages == ["clean", "load"]
    assert [settled.became(f"r-{n}") for n in (0, 3, 4)] == ["passed", "dropped", None]
    assert settled.next == 3
    settle(tmp_path, ["r-1"], "dropped")
    assert left(tmp_path) == [("r-4", "died"), ("r-5", "died")]


def test_outcome_in_another_part_counts(tmp_path: Path) -> None:
    """A durable edge that is added or removed moves stages (issue 26)."""
    edge = tmp_path / "edge-a"
    (tmp_path / "lock").touch()
    append(tmp_path, letter(0), letter(1))
    append(edge, letter(2), letter(3), letter(4))
    again = [
        replace(letter(n), time=f"2026-01-03T00:00:0{second}.000+00:00", error=error)
        for n, second, error in [(1, 1, "in edge"), (4, 2, "in whole"), (1, 3, "later")]
    ]
    settle(edge, ["r-0"], "passed", letters=[again[0]], number=1)
    settle(tmp_path, ["r-2"], "passed", letters=again[1:], number=1)
    assert left(tmp_path) == [("r-4", "in whole"), ("r-1", "later"), ("r-3", "died")]
    assert left(edge) == [("r-3", "died")]
    settled = Settled(edge / "dead_letters")
    assert [settled.became(f"r-{n}") for n in (0, 2, 3)] == ["passed", "passed", None]
    settle(edge, [], "passed", number=2)
    assert Settled(tmp_path / "dead_letters").next == 2


@pytest.mark.parametrize("path", [".", "../edge-a", "dead_letters/..", "link"])
def test_outcome_in_another_part_counts_by_each_path(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part after a durable edge may be named in any way (issue 26)."""
    edge = tmp_path / "edge-a"
    (tmp_path / "lock").touch()
    append(edge, letter(0), letter(1), letter(2))
    settle(tmp_path, ["r-0"], "passed", number=1)
    settle(edge, [], "passed", letters=[letter(1, error="again")], number=1)
    monkeypatch.chdir(edge)
    Path("link").symlink_to(edge)
    assert left(Path(path)) == [("r-2", "died"), ("r-1", "again")]


def test_outcome_counts_in_an_edge_that_is_a_link(tmp_path: Path) -> None:
    """A part may be kept elsewhere, with a link in the state directory (issue 26)."""
    state, edge = tmp_path / "state", tmp_path / "elsewhere"
    append(edge, letter(0), letter(1))
    settle(state, ["r-0"], "passed", number=1)
    (state / "lock").touch()
    (state / "edge-a").symlink_to(edge)
    assert left(state / "edge-a") == [("r-1", "died")]


def test_clock_may_go_back_between_retries(tmp_path: Path) -> None:
    """In one part the number of a retry decides which outcome is shown (issue 26)."""
    append(tmp_path, letter(0))
    for number, hour in enumerate((12, 11), start=1):
        at = f"2026-01-03T{hour}:00:00.000+00:00"
        again = replace(letter(0, error=f"error {number}"), time=at)
        settle(tmp_path, [], "passed", letters=[again], number=number)
    assert left(tmp_path) == [("r-0", "error 2")]


def test_folder_named_like_an_edge_is_not_one(tmp_path: Path) -> None:
    """Without a state directory around it, what is beside it is not read (issue 26)."""
    append(tmp_path / "edge-a", letter(0))
    append(tmp_path / "edge-b", letter(0))
    settle(tmp_path / "edge-b", ["r-0"], "passed", number=1)
    assert left(tmp_path / "edge-a") == [("r-0", "died")]


def test_what_was_not_renamed_is_no_record(tmp_path: Path) -> None:
    """After a crash the letters are as before, and the next retry reuses the number."""
    append(tmp_path, letter(0))
    settle(tmp_path, ["r-0"], "passed", number=1)
    folder = tmp_path / "dead_letters" / "settled"
    (folder / "retry-000001.jsonl").rename(folder / "retry-000001.new")
    assert left(tmp_path) == [("r-0", "died")]
    assert Settled(tmp_path / "dead_letters").next == 1
    settle(tmp_path, ["r-0"], "passed", number=1)
    assert [path.name for path in folder.iterdir()] == ["retry-000001.jsonl"]


def test_record_that_is_damaged(tmp_path: Path) -> None:
    """An unreadable file must not cause a message to be loaded twice (issue 14)."""
    append(tmp_path, letter(0))
    settle(tmp_path, ["r-0"], "passed", number=1)
    (path,) = (tmp_path / "dead_letters" / "settled").iterdir()
    path.write_text('{"id": "r-0"\n')
    with pytest.raises(StateUnusable, match=r"retry-000001\.jsonl: is damaged"):
        Settled(tmp_path / "dead_letters")


@pytest.mark.parametrize(
    "line",
    [
        '{"id": [], "became": "passed"}',
        '{"id": 5, "became": "passed"}',
        '{"id": "r-0", "became": "lost"}',
        '{"id": "r-0", "became": []}',
        '{"became": "passed"}',
        '["became"]',
    ],
)
def test_outcome_that_is_damaged(tmp_path: Path, line: str) -> None:
    """An outcome has the id of a letter, and what became of it (issue 23)."""
    append(tmp_path, letter(0))
    settle(tmp_path, ["r-0"], "passed", number=1)
    (path,) = (tmp_path / "dead_letters" / "settled").iterdir()
    path.write_text(f"{line}\n")
    with pytest.raises(StateUnusable, match=r"retry-000001\.jsonl: is damaged"):
        Settled(tmp_path / "dead_letters")


def test_record_with_another_name_is_not_counted(tmp_path: Path) -> None:
    """A copy of a record does not change the number of the next retry (issue 23)."""
    append(tmp_path, letter(0))
    settle(tmp_path, ["r-0"], "passed", number=1)
    folder = tmp_path / "dead_letters" / "settled"
    record = (folder / "retry-000001.jsonl").read_bytes()
    for name in ("retry-old.jsonl", "retry-000007.old.jsonl"):
        (folder / name).write_bytes(record)
    assert Settled(tmp_path / "dead_letters").next == 2


def test_record_that_can_not_be_written(tmp_path: Path) -> None:
    """The error names the folder."""
    append(tmp_path, letter(0))
    (tmp_path / "dead_letters" / "settled").write_text("")
    with pytest.raises(StateUnusable, match=r"can't record the .* in .*/settled: "):
        settle(tmp_path, ["r-0"], "passed", number=1)


def test_letters_of_replaced_output_are_superseded(tmp_path: Path) -> None:
    """Earlier letters of other runs are; the run's own still count (issue 23)."""
    noon, later = "2026-01-02T12:00:00.500+00:00", "2026-01-02T12:00:01.000+00:00"
    supersede(tmp_path, "new", noon)
    assert not list(tmp_path.iterdir())  # without letters there is nothing to record
    append(tmp_path, letter(1))
    assert not Settled(tmp_path / "dead_letters").superseded(letter(1))
    supersede(tmp_path, "older", "2026-01-01T00:00:00.000+00:00")
    supersede(tmp_path, "new", noon)
    settled = Settled(tmp_path / "dead_letters")
    assert settled.replaced == ("new", noon, ())
    assert settled.superseded(letter(1))
    assert not settled.superseded(replace(letter(1), run="new"))
    assert not settled.superseded(replace(letter(1), time=later))
    assert left(tmp_path) == [("r-1", "died")]


def test_letters_of_the_load_that_replaced_the_output_are_current(
    tmp_path: Path,
) -> None:
    """Whichever of its runs has written them, and replaced it (issue 23)."""
    mine = replace(letter(1), run="earlier", load="ab")
    append(tmp_path, mine)
    supersede(tmp_path, "new", "2026-01-02T12:00:01.000+00:00", "ab")
    settled = Settled(tmp_path / "dead_letters")
    assert not settled.superseded(mine)
    assert not settled.superseded(replace(mine, pending=True))
    assert settled.superseded(replace(mine, load="of before"))
    assert settled.superseded(replace(mine, load=""))


def test_letters_before_a_durable_edge_are_superseded(tmp_path: Path) -> None:
    """The part after the edge replaces the output for all parts (issue 23)."""
    edge = tmp_path / "edge-clean"
    edge.mkdir(mode=0o700)
    supersede(edge, "b", "2026-01-02T12:00:01.000+00:00", "cd", [tmp_path])
    assert not list(edge.iterdir())  # without letters there is nothing to record
    CommitRecord(fence=1, load="ab").store(tmp_path)
    append(tmp_path, letter(1), replace(letter(2), load="ab"))
    supersede(edge, "b", "2026-01-02T12:00:01.000+00:00", "cd", [tmp_path])
    settled = Settled(tmp_path / "dead_letters")
    assert [settled.superseded(letter(1)), settled.superseded_by] == [
        True,
        "their output was overwritten by run b, or never written",
    ]
    assert not settled.superseded(replace(letter(2), load="ab"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '"x"', "[" * 9999])
def test_record_of_a_replacement_that_is_damaged(tmp_path: Path, text: str) -> None:
    """An error is better than loading a row twice (issue 23)."""
    append(tmp_path, letter(1))
    supersede(tmp_path, "new", "t")
    path = tmp_path / "dead_letters" / "settled" / "replaced.json"
    path.write_text(text)
    with pytest.raises(StateUnusable, match=r"replaced\.json: is damaged \("):
        Settled(tmp_path / "dead_letters")
    path.unlink()
    path.mkdir()
    with pytest.raises(StateUnusable, match=r"replaced\.json: can't be read: "):
        Settled(tmp_path / "dead_letters")
    with pytest.raises(StateUnusable, match=r"can't record in .* that the output was"):
        supersede(tmp_path, "new", "t")


def test_retry_that_can_not_be_stored_as_under_way(tmp_path: Path) -> None:
    """Nothing is loaded that no one would replace later (issue 23)."""
    path = UnderWay.path(tmp_path)
    path.mkdir(parents=True)
    with pytest.raises(StateUnusable, match=r"can't use .*/retry\.json: "):
        UnderWay(1, "text out", "t").store(tmp_path)


def test_retry_under_way_of_before_has_no_time(tmp_path: Path) -> None:
    """It counts as interrupted, whenever the output was replaced (issue 23)."""
    path = UnderWay.path(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text('{"number": 3, "output": "text out"}')
    assert UnderWay.of(tmp_path) == UnderWay(3, "text out", "")
    path.write_text('{"number": 1, "output": "text out"}')
    supersede(tmp_path, "new", "2026-11-30T00:00:00Z")
    assert Settled(tmp_path / "dead_letters").interrupted


async def test_what_failed_again_keeps_its_id(tmp_path: Path) -> None:
    """It keeps its place, too, and gains an attempt; the others passed (issue 14)."""
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
    """Letters not yet passed on when a drain begins do not count as passed."""
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
    """Both the number of letters and their bytes are bounded (issue 14)."""
    many = list(chunks(map(letter, range(25_000))))
    assert [len(chunk) for chunk in many] == [10_000, 10_000, 5_000]
    large = [replace(letter(n), message=b"x" * (40 << 20)) for n in range(3)]
    assert [len(chunk) for chunk in chunks(large)] == [1, 1, 1]
    assert list(chunks([])) == []
