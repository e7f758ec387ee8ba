"""Journals in a pipeline file."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from etlstage.config.build import pipeline_from_yaml
from etlstage.config.build_retry import Retries
from etlstage.config.loader import examine, load
from etlstage.config.plan import Plan, plan_of
from etlstage.config.variant import DryRun
from etlstage.errors import ConfigError
from etlstage.journal import Journals, Publisher
from etlstage.testing import MemorySink

FILE = """\
name: p
extract: {journal: {path: in, reader: r}}
load: {journal: {path: out, partitions: 2, key: /id, keep: 7d, limit: 1GiB}}
"""
ONCE = FILE + "delivery: exactly-once\nstate: s\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a set of journals."""
    Journals.open(tmp_path / "in").close()
    return tmp_path


def plan(folder: Path, text: str) -> Plan:
    """Return the plan of a file."""
    (folder / "p.yaml").write_text(text)
    return plan_of(*examine(folder / "p.yaml"))


def errors(folder: Path, text: str) -> list[str]:
    """Return what is wrong with a file."""
    (folder / "p.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        examine(folder / "p.yaml")
    return [p.replace(f"{folder}/", "") for p in caught.value.problems]


def test_plan_shows_where_messages_come_from_and_go(folder: Path) -> None:
    """The plan shows paths, start and end, retention, and how a journal is chosen."""
    found = plan(folder, FILE)
    extract, load_ = found.parts
    assert (extract.what, load_.what) == ("journals in in", "journals in out")
    assert extract.about == [
        ("path", f"{folder}/in"),
        ("reader", "r"),
        ("from", "beginning, if no position is stored"),
        ("end", "ends once all was read"),
    ]
    assert load_.about == [
        ("path", f"{folder}/out"),
        ("partitions", "2"),
        ("journal", "by /id, modulo"),
        ("keep", "7d; up to 1GiB unread by a reader"),
    ]
    assert found.edges[0].how == f"journals on disk in {folder}/in, one run in memory"
    assert "at least once" in dict(found.about)["delivery"]
    assert "exactly once: readers see" in dict(plan(folder, ONCE).about)["delivery"]
    text = FILE.replace("r}", "r, follow: true}").partition("load")[0]
    extract, load_ = plan(folder, f"{text}load: {{journal: {{path: out}}}}").parts
    assert dict(extract.about)["end"] == "waits for more"
    assert load_.about == [("path", f"{folder}/out"), ("journal", "in turn")]


@pytest.mark.parametrize("start", ["beginning", "end", "2026-11-23T18:00:00Z"])
def test_it_is_built(folder: Path, start: str) -> None:
    """Each start is accepted; retried dead letters have the pipeline's delivery."""
    text = ONCE.replace("r}", f'r, from: "{start}", on_damage: skip}}')
    (folder / "p.yaml").write_text(text)
    made = pipeline_from_yaml(folder / "p.yaml")
    assert "journals in" in str(made.report("failed").landed)
    assert Retries.of_file(folder / "p.yaml")[0].stages == ["load"]
    keys, _ = load(folder / "p.yaml")
    assert keys.load.end.retried(keys, "e") == (keys.load.end, "exactly-once")
    assert keys.load.end.notes(keys)


@pytest.mark.parametrize(
    ("right", "wrong", "text"),
    [
        ("path: in", "path: im", "journals im; the first pipeline that appends to it"),
        ("path: in", "path: im", ":2:27: extract.journal.path: there is no set of"),
        (
            "reader: r",
            "follow: true",
            "extract.journal.reader: required key is missing",
        ),
        ("reader: r", "reader: r, from: soon", "expected beginning, end, or a time"),
        ("keep: 7d", "keep: 7 moons", "load.journal.keep: is '7 moons', expected"),
        *(
            (
                "reader: r",
                f"reader: {name!r}",
                f":2:39: extract.journal.reader: is {name!r}, expected letters, digits,",
            )
            for name in (" ", "0%", "/nonexistent", "-", ".r")
        ),
        ("limit: 1GiB", "limit: much", "load.journal.limit: is 'much', expected"),
        ("limit: 1GiB", "sync: now", "load.journal.sync: is 'now', expected"),
        ("keep: 7d, limit: 1GiB", 'keep: ""', "load.journal.keep: is '', expected"),
        ("keep: 7d, limit: 1GiB", 'limit: ""', "load.journal.limit: is '', expected"),
        ("keep: 7d, limit: 1GiB", 'sync: ""', "load.journal.sync: is '', expected"),
        ("partitions: 2", "partitions: 0", "load.journal.partitions: "),
        (
            "path: out",
            "path: http://h/a/",
            "load.journal.path: is 'http://h/a/', expected",
        ),
        ("path: in", "path: https://h/a/", "extract.journal.path: is 'https://h/a/'"),
        ("key: /id", "key: id", "load.journal.key: "),
        ("r}}", "r}, every: 1s}", "is not for journals: use journal.follow"),
        (
            "name: p",
            "name: p\nengine: spark",
            "works only with engine: local; for engine: spark use",
        ),
        ("name: p", "name: p\ndelivery: exactly-once", "exactly-once needs state"),
    ],
)
def test_what_is_wrong(folder: Path, right: str, wrong: str, text: str) -> None:
    """The error names the key, and what was expected (issue 24)."""
    assert any(text in one for one in errors(folder, FILE.replace(right, wrong, 1)))


def test_time_after_the_last_one(folder: Path) -> None:
    """It is refused where it is written (issue 26)."""
    begin = "9999-12-31T23:00:00-12:00"
    file = FILE.replace("reader: r", f"reader: r, from: '{begin}'")
    (problem,) = errors(folder, file)
    assert problem == (
        f"p.yaml:2:48: extract.journal.from: is '{begin}', expected beginning, end, or"
        " a time such as 2026-11-23T18:00:00Z"
    )


def test_name_that_is_too_long_for_the_system(folder: Path) -> None:
    """There is no such set, as with any other name (issue 24)."""
    (error,) = errors(folder, FILE.replace("path: in", f"path: {'x' * 256}"))
    assert ":2:27: extract.journal.path: there is no set of journals xxx" in error


def test_run_on_trial_leaves_the_position_of_the_reader(folder: Path) -> None:
    """A trial run uses no reader's name, and ends even if the file follows."""
    (folder / "p.yaml").write_text(FILE.replace("r}", "r, follow: true}"))
    with Journals.open(folder / "in") as journals:
        target = journals.select()[0].name, journals.content_type
        Publisher(journals, mapping=lambda _: target).publish_committed({"n": 1})
        for state in ("one", "two"):
            sink = MemorySink()
            trial = DryRun(engine="local", state=folder / state, sink=sink)
            made = pipeline_from_yaml(folder / "p.yaml", trial=trial)
            assert anyio.run(made.run).error is None
            assert len(sink.messages) == 1
        assert journals.readers() == []
