from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.supervisor.stderr.level import Level, level_of

NAMED: dict[str, Level] = {
    # before a colon
    "ERROR: x": "error",
    "Error: x": "error",
    "warning: x": "warning",
    "WARNING:root:x": "warning",
    "CRITICAL:a.b:x": "critical",
    "debug: x": "debug",
    "SEVERE: x": "error",
    "fatal: not a repository": "critical",
    "panic: runtime error: index out of range": "critical",
    "INFO: no ERROR: x": "info",
    # JSON
    '{"level":"error","msg":"x"}': "error",
    '{"severity":"WARNING"}': "warning",
    '{"levelname": "CRITICAL"}': "critical",
    '{"log.level": "debug"}': "debug",
    '{"level":60}': "critical",
    '{"level":50}': "error",
    '{"level":45}': "warning",
    '{"level":30}': "info",
    '{"level":20}': "debug",
    # logfmt
    'ts=1 level=error msg="a b"': "error",
    'time="2026-01-01" level="warning" msg=x': "warning",
    # syslog
    "<3>x": "error",
    "<7>x": "debug",
    "<12>x": "warning",
    "<30>error: x": "info",
    # sentences and other lines
    "no error found": "info",
    "ERROR x": "info",
    "I said: ERROR: x": "info",
    "errors: 0": "info",
    "the level=error is odd": "info",
    "a=1 b=2": "info",
    "level=loud": "info",
    '{"a": "error"}': "info",
    '{"level": true}': "info",
    '{"level": "loud"}': "info",
    '{"level": "error"': "info",
    '{"a":' * 2000: "info",
    "<3 hearts": "info",
    "": "info",
    "   ": "info",
}


@pytest.mark.parametrize(("line", "level"), NAMED.items())
def test_level(line: str, level: Level) -> None:
    """Four formats have a place for the level; a line without one is information."""
    assert level_of(line) == level


@given(st.text())
def test_any_line_has_a_level(line: str) -> None:
    """Nothing raises, and the head decides."""
    assert level_of(line) in {"debug", "info", "warning", "error", "critical"}
    assert level_of(f"ERROR: {line}") == "error"


@given(st.dictionaries(st.text(), st.none() | st.text() | st.integers()))
def test_json_has_the_level_of_its_key(entry: dict[str, object]) -> None:
    """Whatever else is in it."""
    line = json.dumps({"level": "error"} | {k: entry[k] for k in entry if k != "level"})
    assert level_of(line) == "error"
