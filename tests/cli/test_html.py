from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

import pytest

from etlstage.cli.history import RunSpan
from etlstage.cli.html import page
from etlstage.errors import StageError, WorkerFailure
from etlstage.messages import StageKind
from etlstage.pipeline.dead_letter.letter import LetterGroup
from etlstage.pipeline.interfaces import Output
from etlstage.pipeline.ledger import Account, Ledger
from etlstage.pipeline.report import KeptLetters, Report
from etlstage.pipeline.secret import Secrets
from tests.cli.browser import browser
from tests.cli.conftest import Etlstage

NASTY: Final = "</title></style><script>alert(1)</script><img src=x onerror=a()>&\"'"
HIDING: Final = "\x1b[31m\N{RIGHT-TO-LEFT OVERRIDE}gpj.exe\0"
NOON: Final = datetime(2026, 1, 2, 12, tzinfo=UTC)
TIME: Final = NOON.isoformat(timespec="milliseconds")
SPANS: Final = (RunSpan(0.0, 1.0, [10.0, 5.0, 0.0]), RunSpan(1.0, 3.0, [0.0, 2.0, 1.0]))
TAGS: Final = frozenset(
    [
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "header",
        "section",
        "ul",
        "li",
        "b",
        "h1",
        "h2",
        "h3",
        "p",
        "pre",
        "code",
        "span",
        "div",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "figure",
        "figcaption",
        "svg",
        "g",
        "rect",
        "text",
        "polyline",
        "path",
        "defs",
        "marker",
    ]
)
SLOW: Final = """\
import sys
for line in sys.stdin.buffer:
    if line == b"13\\n":
        sys.exit("<script>alert(1)</script>")
    if line == b"14\\n":
        sys.stdout.buffer.write(b"<img src=http://example.org/x.png>\\x15")
    else:
        sys.stdout.buffer.write(line + b"\\0")
    sys.stdout.flush()
"""
PIPELINE: Final = """\
name: letters
extract: {worker: {command: [seq, "1000"]}}
transform:
  - name: clean
    worker: {command: [python, slow.py]}
    on_error: {retries: 0}
load: {worker: {command: [python, keep.py]}}
"""


class Reader(HTMLParser):
    """Collects the tags, attributes and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag and its attributes."""
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        """Note a text."""
        self.texts.append(data)


@pytest.fixture
def report() -> Report:
    """Return the report of a run in which everything went wrong, in hostile texts."""
    load = Account("load", StageKind.LOAD, received=3, done=1, failed=1, unprocessed=1)
    ledger = Ledger.of_pipeline("extract", [NASTY], load)
    ledger[0].produced, ledger[1].received = 10, 9
    ledger[1].done, ledger[1].dead, ledger[1].produced = 5, 4, 3
    ledger[1].doubtful = ledger[1].skipped = 1
    ledger[1].restarts, ledger[1].failures = 2, 3
    ledger[1].faults = (WorkerFailure(TIME, NASTY, f"died of hunter2 {HIDING}{NASTY}"),)
    return Report(
        name=NASTY,
        run=NASTY,
        status="failed",
        error=StageError(f"hunter2 {HIDING}{NASTY}", stage="s"),
        started=NOON,
        ended=NOON,
        seconds=3.0,
        ledger=ledger,
        landed=f"wrote hunter2 {NASTY}",
        output=Output("memory", NASTY),
        dead_letters=KeptLetters(4, NASTY, f"etlstage dlq ls hunter2 {NASTY}"),
        secrets=Secrets({"hunter2": "${TOKEN}"}),
    )


def test_average_of_a_resumed_run_is_below_its_maximum(report: Report) -> None:
    """Counts of the first start are not moved by this one (issue 26)."""
    report.ledger[0].produced += 9000
    text = page(report, SPANS, [])
    assert "up to 10, on average 3<" in text
    assert "up to 5, on average 3<" in text


def test_restarts_are_in_the_ledger(report: Report) -> None:
    """The column is there only if there were any (issue 22)."""
    heads = "<th>doubtful</th><th>restarts</th><th>seconds</th>"
    cells = "<td>2</td><td>"
    text = re.sub(r' class="[^"]*"', "", page(report, SPANS, []))
    assert heads in text
    assert cells in text
    report.ledger[1].restarts = 0
    assert heads not in re.sub(r' class="[^"]*"', "", page(report, SPANS, []))


def test_share_of_time_in_which_workers_are_busy(report: Report) -> None:
    """It shows which stage is the slow one (issue 26)."""
    assert "<th>busy</th>" not in re.sub(r' class="[^"]*"', "", page(report, SPANS, []))
    report.ledger[1].busy = 2.7
    text = re.sub(r' class="[^"]*"', "", page(report, SPANS, []))
    assert "<th>seconds</th><th>busy</th>" in text
    assert text.count("<td>90%</td>") == 1
    assert text.count("<td>-</td></tr>") == 2


def test_stages_have_the_times_at_which_they_moved(report: Report) -> None:
    """In seconds of the run; a stage that nothing reached has no start (issue 26)."""
    report.ledger[1].began, report.ledger[1].seconds = 0.4, 2.25
    text = re.sub(r' class="[^"]*"', "", page(report, SPANS, []))
    assert "<th>started</th><th>ended</th></tr>" in text
    assert "<td>0.4 s</td><td>2.2 s</td></tr>" in text
    assert "<td>-</td><td>0.0 s</td></tr>" in text


def test_mismatched_replies_are_in_the_ledger(report: Report) -> None:
    """They have a column, and a line by the promises they broke (issue 26)."""
    assert "mismatched" not in page(report, SPANS, [])
    report.ledger[1].add_mismatches(["json", "json", "outputs"])
    text = re.sub(r' class="[^"]*"', "", page(report, SPANS, []))
    assert "<th>mismatched</th>" in text
    assert "<td><span>3</span></td>" in text
    assert "not as expected: 1 by outputs, 2 by json</p>" in text


def test_what_came_from_outside_is_escaped(report: Report) -> None:
    """The page has none of its tags, attributes, hidden text or secrets (issue 11)."""
    group = LetterGroup(NASTY, NASTY, f"{HIDING}{NASTY}", 4, NASTY, NASTY, NASTY)
    text = page(report, SPANS, [group])
    read = Reader(text)
    assert read.tags <= TAGS
    assert not {name for name in read.attributes if name.startswith("on")}
    assert not read.attributes & {"src", "href", "style", "action", "xlink:href"}
    assert sum(NASTY in part for part in read.texts) >= 10
    assert not {"\x1b", "\0", "\N{RIGHT-TO-LEFT OVERRIDE}"} & set(text)
    assert "hunter2" not in text
    assert r"${TOKEN} \u202egpj.exe\x00" in text


def test_policy_lets_a_page_fetch_nothing(report: Report) -> None:
    """Only the page's own style sheet is let through, by its digest (issue 11)."""
    text = page(report, SPANS, [])
    found = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert found
    assert re.fullmatch(
        r"default-src 'none'; style-src 'sha256-[\w+/=]{44}'; base-uri 'none';"
        r" form-action 'none'",
        found[1],
    )
    assert "http:" not in text
    assert "https:" not in text


def test_what_is_many_is_cut(report: Report) -> None:
    """The page stays small however much went wrong (issue 11)."""
    groups = [LetterGroup("s", "k", f"why {n}", 1, TIME, TIME, "i") for n in range(999)]
    report.ledger[1].faults *= 500
    text = page(report, SPANS, groups)
    assert "why 49" in text
    assert "why 50" not in text
    assert "949 more causes" in text
    assert text.count("died of") == 20


def test_page_of_a_run_without_faults(report: Report) -> None:
    """Sentences take the place of faults and of the plot."""
    ledger = Ledger.of_pipeline("extract", [], Account("load", StageKind.LOAD))
    quiet = replace(
        report, status="done", error=None, ledger=ledger, dead_letters=KeptLetters()
    )
    text = page(quiet, [], [])
    for line in (
        "No worker failed or was restarted.",
        "No message was dead-lettered.",
        "The run was too short.",
    ):
        assert line in text
    assert "<h2>Error</h2>" not in text


def test_page_in_a_browser(etlstage: Etlstage, pipeline: Path, tmp_path: Path) -> None:
    """It renders in light, dark, print and on a phone, fetching nothing (issue 11)."""
    (tmp_path / "slow.py").write_text(SLOW)
    pipeline.write_text(PIPELINE)
    etlstage("run", pipeline, "--report-html", "r.html", "--quiet", code=0)
    path = tmp_path / "r.html"
    assert path.stat().st_mode & 0o777 == 0o600
    with browser(tmp_path / "profile") as chromium:
        chromium.open(path)
        graph = "document.querySelector('#graph')"
        boxes = f"[...{graph}.querySelectorAll('rect')].map(r => r.getBBox().width)"
        assert chromium.value(boxes) == [184, 184, 184]
        texts = chromium.value(
            f"[...{graph}.querySelectorAll('text')].map(t => t.textContent)"
        )
        for text in ("clean", "1,000", "998", "2 dead letters", "998 loaded"):
            assert text in texts
        drawn = "[...document.querySelectorAll('.plot path')].map(p => p.getBBox())"
        sizes = f"{drawn}.map(box => [box.width, box.height])"
        assert chromium.value(sizes) == [[1000, 100]] * 3
        shown = chromium.value("document.body.innerText")
        assert "WorkerRefusal: refused the message: <img src=http://" in shown
        assert "exited with status 1" in shown
        back = "getComputedStyle(document.body).backgroundColor"
        wide = "document.documentElement.scrollWidth <= innerWidth"
        for red, look in (
            (246, {}),
            (18, {"dark": True}),
            (255, {"dark": True, "media": "print"}),
            (246, {"width": 360}),
        ):
            chromium.look(**look)
            assert chromium.value(wide), look
            assert chromium.value(back).startswith(f"rgb({red},"), look
        assert chromium.picture().startswith(b"\x89PNG")
        assert chromium.problems == []
        assert chromium.requests == [path.as_uri()]


def test_page_that_can_not_be_written(
    etlstage: Etlstage, pipeline: Path, tmp_path: Path
) -> None:
    """It is an error before the run, a warning after it; JSON is written (issue 11)."""
    result = etlstage("run", pipeline, "--report-html", "no/r.html")
    assert (result.returncode, result.stdout) == (2, "")
    assert "no/r.html can't be written: no such file or directory" in result.stderr
    (tmp_path / "reports").mkdir()
    upper = tmp_path / "upper.py"
    upper.write_text(
        f"import shutil; shutil.rmtree('reports', True)\n{upper.read_text()}"
    )
    options = ("--report-html", "reports/r.html", "--report", "r.json")
    result = etlstage("run", pipeline, *options, "--quiet", code=0)
    assert result.stderr.count("\n") == 1
    assert "reports/r.html can't be written" in result.stderr
    assert json.loads((tmp_path / "r.json").read_text())["status"] == "done"
