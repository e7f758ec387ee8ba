from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from etlstage.errors import StageError
from etlstage.messages import StageKind
from etlstage.pipeline import Pipeline, Report
from etlstage.pipeline.interfaces import Output
from etlstage.pipeline.ledger import Account, Ledger
from etlstage.pipeline.report import KeptLetters
from etlstage.pipeline.secret import Secrets
from etlstage.testing import MemorySink, MemorySource
from tests.pipeline.ends import GatedSink, ScriptedSource

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
TABLE = """\
stage    in  out  dead  failed  unprocessed  seconds
extract   -   10     0       0            0      1.5
clean    10    5     4       0            1     12.0
load      5    5     0       0            0     12.5
"""


@pytest.fixture
def report() -> Report:
    """Return the report of a run that failed."""
    load = Account("load", StageKind.LOAD, received=5, done=5, seconds=12.5)
    ledger = Ledger.of_pipeline("extract", ["clean"], load)
    ledger[0].produced = ledger[1].received = 10
    ledger[1].done = ledger[1].produced = 5
    ledger[1].dead, ledger[1].unprocessed = 4, 1
    ledger[0].seconds, ledger[1].seconds = 1.5, 12.0
    return Report(
        name="letters",
        run="af32b1c9",
        status="failed",
        error=StageError("stage clean: <b>hunter2</b>", stage="clean"),
        started=NOON,
        ended=NOON,
        seconds=12.6,
        ledger=ledger,
        landed="5 messages loaded; output incomplete",
        output=Output("workers", "load"),
        dead_letters=KeptLetters(4, "/x", "etlstage dlq ls letters.yaml"),
        secrets=Secrets({"hunter2": "${TOKEN}"}),
    )


def test_text_is_the_closing_table(report: Report) -> None:
    """It is what the command line prints, and the error, without secrets (issue 22)."""
    assert str(report) == (
        f"{TABLE}"
        "accounted for: 5 loaded, 4 dead-lettered, 1 unprocessed\n"
        "5 messages loaded; output incomplete\n"
        "to see the dead letters: etlstage dlq ls letters.yaml\n"
        "letters: failed in 12.6 s\n"
        "error: stage clean: <b>${TOKEN}</b>"
    )
    assert repr(report) == "<Report 'letters' run=af32b1c9 failed loaded=5>"


def test_many_dead_letters_are_grouped(report: Report) -> None:
    """A list of thousands would be useless (issue 26)."""
    many = replace(report, dead_letters=KeptLetters(21, "/x", "etlstage dlq ls x"))
    assert "dead letters: etlstage dlq ls x --group\n" in str(many)
    few = replace(report, dead_letters=KeptLetters(20, "/x", "etlstage dlq ls x"))
    assert "dead letters: etlstage dlq ls x\n" in str(few)


def test_notebook_shows_a_table(report: Report) -> None:
    """With failures in red; messages and errors are escaped (issue 22)."""
    html = report._repr_html_()
    assert html.count("<tr>") == 4
    red = '<td style="text-align:right;color:#c00;font-weight:bold">'
    assert [part.partition("<")[0] for part in html.split(red)[1:]] == ["4", "1"]
    assert "<div>error: stage clean: &lt;b&gt;${TOKEN}&lt;/b&gt;</div>" in html
    assert "hunter2" not in html


def test_texts_are_harmless(report: Report) -> None:
    """No name, path or error steers a terminal or hides text (issue 22)."""
    ledger = Ledger.of_pipeline("a\n\x1b[31m\u202eb", ["clean"], report.ledger[2])
    steered = replace(report, ledger=ledger, landed="a \x9b31m", error=ValueError("\r"))
    for text in (str(steered), steered._repr_html_()):
        assert r"a\n\u202eb" in text
        assert r"a \x9b31m" in text
        assert r"error: \r" in text
        assert {c for c in text if not c.isprintable()} <= {"\n"}


def test_no_column_for_what_did_not_happen(report: Report) -> None:
    """The skipped column is only there if messages were skipped."""
    assert "skipped" not in str(report)
    report.ledger[1].skipped = 2
    first, _, clean, *_ = str(report).splitlines()
    assert first.split()[-2:] == ["skipped", "seconds"]
    assert clean.split()[-2:] == ["2", "12.0"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_pipeline_shows_how_far_it_is() -> None:
    """Before and after a run: a notebook cell may end with its name (issue 22)."""
    source, sink = ScriptedSource([[b"a", b"b"]]), GatedSink()
    pipeline = Pipeline(name="p", source=source, sink=sink)
    line = f"{source.name} -> {sink.account.stage}"
    assert repr(pipeline) == f"<Pipeline 'p' {line}: has not run>"
    assert str(pipeline).endswith("\np: has not run")
    await pipeline.run()
    head, first, last, state = str(pipeline).splitlines()
    assert head.split()[:3] == ["stage", "in", "out"]
    assert (first.split()[2], last.split()[1:3]) == ("2", ["2", "2"])
    assert state.startswith("p: ended in ")
    assert "<table>" in pipeline._repr_html_()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_report_has_when_each_stage_moved() -> None:
    """The times of its first and last message; null if it had none (issue 26)."""
    source, sink = MemorySource([[b"a", b"b"]]), MemorySink()
    report = await Pipeline(name="p", source=source, sink=sink).run()
    for stage in report.to_dict()["stages"]:
        times = [report.started.isoformat(timespec="milliseconds")]
        times += [stage["started"], stage["ended"]]
        assert times == sorted(times)
    source = MemorySource([])
    report = await Pipeline(name="p", source=source, sink=MemorySink()).run()
    first, last = report.to_dict()["stages"]
    assert first["started"] is not None
    assert (last["started"], last["ended"]) == (None, None)
