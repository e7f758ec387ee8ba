"""Bugs that workers have when they extract, each found by the check about it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import pytest

from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.testing.check import Finding, Verdict
from tests.testing.check.checked import checked, failures, said

RANGES: Final = """\
import json, os, sys
lines = open("in", "rb").read().split(b"\\n")[:-1]
asked = []
def latest():
    return len(lines)
def extract(start, end):
    return lines[start:end]
def answer(messages):
    os.write(1, b"".join(m + b"\\n" for m in messages) + b"\\0")
def read():
    return os.read(0, 65536)
def requests():
    rest = b""
    while data := read():
        *whole, rest = (rest + data).split(b"\\n")
        yield from whole
{bug}
for request in requests():
    request = json.loads(request)
    asked.append(request)
    if request.get("offsets") == "initial":
        answer([b"0"])
    elif "offsets" in request:
        answer([str(latest()).encode()])
    else:
        answer(extract(request["start"], request["end"]))
"""

OF_RANGES: Final = {
    "the end is in the range": (
        "def extract(start, end): return lines[start : end + 1]",
        "ranges meet",
        "not what it gave at once",
    ),
    "the start is not in the range": (
        "def extract(start, end): return lines[start + 1 : end]",
        "ranges meet",
        "not what it gave at once",
    ),
    "it goes on where it was": (
        (
            "at = 0\n"
            "def extract(start, end):\n"
            " global at\n"
            " at += end - start\n"
            " return lines[at - end + start : at]"
        ),
        "gives a range again",
        "gave other messages",
    ),
    "no order": (
        (
            "import random\n"
            "def extract(start, end): return random.sample(lines[start:end], end - start)"
        ),
        "gives a range again",
        "gave other messages",
    ),
    "latest falls": (
        "def latest(): return len(lines) - len(asked)",
        "knows its latest offset",
        "is its latest offset, then",
    ),
    "latest is no number": (
        "def latest(): return 'end'",
        "knows its latest offset",
        "not one whole number",
    ),
    "it gives a range once": (
        (
            "given = set()\n"
            "def extract(start, end):\n"
            " new = [l for l in lines[start:end] if l not in given]\n"
            " given.update(new)\n"
            " return new"
        ),
        "gives a range again",
        "gave other messages",
    ),
    "it marks on the disk what it has given": (
        (
            "import pathlib\n"
            "def extract(start, end):\n"
            " done = pathlib.Path(f'done-{start}-{end}')\n"
            " if end - start > 20 and done.exists(): return []\n"
            " done.touch()\n"
            " return lines[start:end]"
        ),
        "gives a range again",
        "gave other messages",
    ),
    "a page has ten messages": (
        "def extract(start, end): return lines[start : min(end, start + 10)]",
        "ranges meet",
        "not what it gave at once",
    ),
    "a read is a request": (
        "def requests():\n while data := read():\n  yield data",
        "takes requests in parts",
        "exited with status 1",
    ),
    "one request a read": (
        (
            "def requests():\n"
            " rest = b''\n"
            " while data := read():\n"
            "  *whole, rest = (rest + data).split(b'\\n')\n"
            "  yield from whole[:1]"
        ),
        "takes requests at once",
        "owes",
    ),
    "no EOP where there is nothing": (
        (
            "def answer(messages):\n"
            " if messages:\n"
            "  os.write(1, b''.join(m + b'\\n' for m in messages) + b'\\0')\n"
            "def extract(start, end):\n"
            " return lines[start:end] if end - start > 1 else []"
        ),
        "answers a request",
        "owes 1 reply",
    ),
    "one request is enough": (
        "def requests():\n yield read()",
        "takes many requests",
        "exited with status 0",
    ),
    "a progress bar": (
        "print('extracting', flush=True)",
        "says nothing unasked",
        "asked for: extracting",
    ),
}

KEPT: Final = """\
import os, pathlib
stored = pathlib.Path("offset")
lines = open("in", "rb").read().split(b"\\n")[:-1]
at = int(stored.read_text()) if stored.exists() else 0
rest = b""
while data := os.read(0, 65536):
    *whole, rest = (rest + data).split(b"\\n")
    for _ in whole:
        {step}
"""

ANSWER: Final = "os.write(1, b''.join(m + b'\\n' for m in lines[at:]) + b'\\0')"
STORE: Final = "at = len(lines); stored.write_text(str(at))"

OF_KEEPERS: Final = {
    "stored before it is received": (
        f"{ANSWER}; {STORE}",
        "gives again what was not received",
        "did not give the same again",
    ),
    "no EOP where there is nothing new": (
        f"at < len(lines) and {ANSWER}; at = len(lines)",
        "takes many requests",
        "owes 1 reply",
    ),
}

PLAIN: Final = {
    "an EOP at the end": (
        "print('a\\nb\\n', end='\\0')",
        "the worker works in cycles; set mode: cyclic",
    ),
    "half a source": ("print('a', flush=True); exit(1)", "exited with status 1"),
    "the last message has no end": ("print('a\\nb', end='')", "not complete: b"),
}


@pytest.fixture(autouse=True)
def _source(tmp_path: Path) -> None:
    lines = (b"line %d\n" % number for number in range(45))
    (tmp_path / "in").write_bytes(b"".join(lines))


def cyclic(program: str, folder: Path, *, ranges: bool = False) -> list[Finding]:
    """Return what is found in a worker that extracts what is in the folder."""
    return checked(
        (sys.executable, "-c", program),
        kind=StageKind.EXTRACT,
        mode=Mode.CYCLIC,
        ranges=ranges,
        stage={"cwd": folder},
        timeout=3,
    )


@pytest.mark.parametrize(
    ("bug", "name", "reason"), OF_RANGES.values(), ids=OF_RANGES.keys()
)
@pytest.mark.timeout(60)
def test_bug_of_ranges_is_found(
    bug: str, name: str, reason: str, tmp_path: Path
) -> None:
    """What Spark's reads, and a restart, rely on (issue 12)."""
    findings = cyclic(RANGES.replace("{bug}", bug), tmp_path, ranges=True)
    assert reason in failures(findings)[name]


@pytest.mark.parametrize(
    ("step", "name", "reason"), OF_KEEPERS.values(), ids=OF_KEEPERS.keys()
)
@pytest.mark.timeout(60)
def test_bug_of_a_worker_that_keeps_the_offset_is_found(
    step: str, name: str, reason: str, tmp_path: Path
) -> None:
    """Nothing may be lost when it is killed (issue 12)."""
    findings = cyclic(KEPT.replace("{step}", step), tmp_path)
    assert reason in failures(findings)[name]


@pytest.mark.parametrize(("program", "reason"), PLAIN.values(), ids=PLAIN.keys())
def test_bug_of_a_plain_extraction_is_found(program: str, reason: str) -> None:
    """Its end is its exit (issue 12)."""
    command = (sys.executable, "-c", program)
    findings = checked(command, kind=StageKind.EXTRACT, mode=Mode.PLAIN)
    assert reason in failures(findings)["writes all and exits"]


@pytest.mark.timeout(60)
def test_worker_without_a_bug_passes(tmp_path: Path) -> None:
    """All of these, without what was planted (issue 12)."""
    command = (sys.executable, "-c", RANGES.replace("{bug}", ""))
    findings = checked(
        command,
        kind=StageKind.EXTRACT,
        mode=Mode.CYCLIC,
        ranges=True,
        stage={"cwd": tmp_path},
    )
    assert failures(findings) == said(findings, Verdict.ADVICE) == {}


def test_worker_that_extracts_nothing_is_told() -> None:
    """Perhaps it waits to be asked (issue 12)."""
    findings = checked(["true"], kind=StageKind.EXTRACT, mode=Mode.PLAIN)
    assert "is cyclic" in said(findings, Verdict.ADVICE)["writes all and exits"]


@pytest.mark.timeout(60)
def test_worker_that_does_not_know_latest_is_told(tmp_path: Path) -> None:
    """Its stage needs an end (issue 12)."""
    bug = (
        "reply = answer\n"
        "def latest(): return 'unknown'\n"
        "def answer(messages):\n"
        " if messages == [b'unknown']: os.write(1, b'unknown\\x15')\n"
        " else: reply(messages)"
    )
    command = (sys.executable, "-c", RANGES.replace("{bug}", bug))
    findings = checked(
        command,
        kind=StageKind.EXTRACT,
        mode=Mode.CYCLIC,
        ranges=True,
        stage={"cwd": tmp_path},
    )
    assert "needs end" in said(findings, Verdict.ADVICE)["knows its latest offset"]
