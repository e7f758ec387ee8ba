from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etlstage.supervisor.stderr.level import Level, LevelReader, harmless, level_of

NAMED = {
    # a prefix
    "ERROR: x": "error",
    "Error: x": "error",
    "ERROR x": "error",
    "warning: x": "warning",
    " WARN crate: x": "warning",
    "WARNING:root:x": "warning",
    "CRITICAL:a.b:x": "critical",
    "DEBUG - x": "debug",
    "SEVERE: x": "error",
    "fatal: not a repository": "critical",
    "panic: runtime error: index out of range": "critical",
    "INFO no ERROR": "info",
    "Note: ERROR": "info",
    # brackets
    "[warning] x": "warning",
    "[ERROR] x": "error",
    "[ERROR]: x": "error",
    "(WARN) x": "warning",
    "<error> x": "error",
    "[WARN ] x": "warning",
    "[note] ERROR": "info",
    # behind a time
    "2026-01-01 12:00:00,123 - root - WARNING - x": "warning",
    "2026-01-01 12:00:00,123 ERROR x": "error",
    "2026-01-01 12:00:00.123 | ERROR    | a:f:1 - x": "error",
    "2026-01-01 12:00:00 [warning  ] x": "warning",
    "2026-01-01 12:00:00 [info     ] x": "info",
    "2026-01-01T00:00:00.000000Z  WARN a::b: x": "warning",
    "2026-01-01T00:00:00.000+01:00\terror\ta.go:1\tx": "error",
    "2026-01-01T00:00:00Z DEBUG x": "debug",
    "[2026-01-01T00:00:00Z ERROR a::b] x": "error",
    "2026/01/01 12:00:00 ERROR x": "error",
    "2026/01/01 12:00:00 [error] 1#1: x": "error",
    "2026-01-01 12:00:00 UTC [123] FATAL:  x": "critical",
    "12:00:00.123 [main] ERROR a.B - x": "error",
    "2026-01-01 12:00:00,123 [http nio-1] WARN  a.B - x": "warning",
    "26/01/01 12:00:00 WARN Utils: x": "warning",
    "[01/Jan/2026:12:00:00 +0000] ERROR x": "error",
    "[Thu Jan 01 12:00:00.123 2026] [core:error] [pid 1] x": "error",
    "2026-01-01 12:00:00 4711 ERROR x": "error",
    "1767268800.123 ERROR x": "error",
    "3:04PM ERR x": "error",
    "2026-11-20 10:05:56 (WARN) (InputStream) x": "warning",
    "(ERROR) 21-11-2026 10:00:00 (script) x": "error",
    # a name before it
    "root - WARNING - x": "warning",
    "web_1  | ERROR: x": "error",
    "a.c:3:5: error: x": "error",
    "a.c:1:10: fatal error: b.h: No such file or directory": "error",
    "ls: warning: x": "warning",
    "error[E0308]: mismatched types": "error",
    # letters
    "E0102 15:04:05.678901 1 a.go:1] x": "error",
    "E, [2026-01-01T12:00:00 #123] ERROR -- : x": "error",
    "[W 260101 12:00:00 web:1] x": "warning",
    # keys
    'ts=1 level=error msg="a b"': "error",
    'time="2026-01-01" level="warning" msg=x': "warning",
    '{"level":"error","msg":"x"}': "error",
    '{"severity":"WARNING"}': "warning",
    '{"levelname": "CRITICAL"}': "critical",
    '{"log.level": "debug"}': "debug",
    '{"level":50}': "error",
    '{"level":20}': "debug",
    # syslog
    "<3>x": "error",
    "<7>x": "debug",
    "<12>x": "warning",
    "<30>error x": "info",
    # what a crash leaves
    "Traceback (most recent call last):": "error",
    "  + Exception Group Traceback (most recent call last):": "error",
    "ValueError: x": "error",
    "a.b.NotThere: x": None,
    "java.lang.NullPointerException": "error",
    'Exception in thread "main" java.lang.RuntimeException: x': "error",
    "Caused by: java.io.IOException: x": "error",
    "thread 'main' panicked at src/main.rs:2:5:": "error",
    "thread 'main' (4711) panicked at src/main.rs:2:5:": "error",
    "/a/b.py:3: DeprecationWarning: x": "warning",
    # sentences and other lines
    "no error found": None,
    "No ERROR found": None,
    "error found nowhere": None,
    "errors: 0": None,
    "3 ERROR lines": None,
    "3.5 ERROR lines": None,
    "2026-01-01 12:00:00 no ERROR found": None,
    "2026-01-01 12:00:00 the error is gone": None,
    "the level=error is odd": None,
    "I said: ERROR": None,
    "a=1 b=2": None,
    "level=loud": None,
    '{"a": "error"}': None,
    '{"level": true}': None,
    '{"level": "loud"}': None,
    '{"level": "error"': None,
    '{"a":' * 2000: None,
    "<3 hearts": None,
    "<error": None,
    "ERRORS": None,
    "x " * 20 + "ERROR": None,
    "- " * 20 + "ERROR": None,
    "": None,
    "   ": None,
}


@pytest.mark.parametrize(("line", "level"), NAMED.items())
def test_level(line: str, level: Level | None) -> None:
    """Each format in use has its place for the level."""
    assert level_of(line) == level


@given(st.text())
@example("- " * 5000)
@example("[" * 9000)
@example("1 - " * 3000)
@example("\x1b]" * 4000)
def test_any_line_has_a_level(line: str) -> None:
    """Nothing raises, nothing takes for ever, and the head decides."""
    assert LevelReader().read(line) in {"debug", "info", "warning", "error", "critical"}
    assert level_of(f"ERROR: {line}") == "error"


@given(st.text("aeinrst", min_size=1), st.sampled_from(["error", "ERROR", "warning"]))
def test_word_in_a_sentence_does_not_count(word: str, level: str) -> None:
    """Only the place makes a level of it."""
    for line in (
        f"{word} {level}",
        f"{word} {level} {word}",
        f"{word} {word} {level}:",
    ):
        assert level_of(line) is None


@given(st.dictionaries(st.text(), st.none() | st.text() | st.integers()))
def test_json_has_the_level_of_its_key(entry: dict[str, object]) -> None:
    """Whatever else is in it."""
    line = json.dumps({"level": "error"} | {k: entry[k] for k in entry if k != "level"})
    assert level_of(line) == "error"


def read(*lines: str) -> list[Level]:
    """Return the levels of lines that follow each other."""
    reader = LevelReader()
    return [reader.read(line) for line in lines]


def test_traceback_is_an_error_to_its_end() -> None:
    """Frames are indented; below them stands what was raised, whatever it is called."""
    assert read(
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in <module>',
        "    error()",
        "a.NotThere: no such thing",
        "During handling of the above exception, another exception occurred:",
        "next",
    ) == ["error"] * 5 + ["info"]


def test_frames_go_with_the_line_above() -> None:
    """Of a Java program; and details of a warning."""
    assert read(
        "12:00:00 WARN a.B - x", "\tat a.B.c(B.java:1)", "(==) more", "done", "  rest"
    ) == ["warning", "warning", "warning", "info", "info"]


def test_indented_line_may_have_its_own_level() -> None:
    """Some formats begin with blanks."""
    assert read("ERROR: x", "  WARN a: y", "  z") == ["error", "warning", "warning"]


def test_lines_that_are_not_read() -> None:
    """What follows a gap does not go with what was before it."""
    reader = LevelReader()
    reader.read("Traceback (most recent call last):")
    reader.skip()
    assert reader.read("  x") == "info"
    assert reader.read("y") == "info"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\tb é", "a\tb é"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]8;;http://a\x1b\\x", "x"),
        ("\x1bPq#0\x1b\\x", "x"),
        ("\x1b]0;title", r"\x1b]0;title"),
        ("\x1bc", r"\x1bc"),
        ("a\rb\nc", r"a\rb\nc"),
        ("\x9b31m", r"\x9b31m"),
        ("\0\x7f", r"\x00\x7f"),
        ("a\u202eb\u2028c", r"a\u202eb\u2028c"),
    ],
)
def test_harmless(text: str, expected: str) -> None:
    """Colours go quietly; what is left of the rest can be read."""
    assert harmless(text) == expected


@given(st.text(st.sampled_from("\x1b[]P\\0;mA\x07\x9b\r\n a\u202e")))
def test_nothing_steers_a_terminal(text: str) -> None:
    """Not even what appears when something else is taken away."""
    assert harmless(text).replace("\t", " ").isprintable()
