"""The error that a worker died of, found at the end of what it wrote."""

from __future__ import annotations

import subprocess
import sys

import pytest

from etlstage.supervisor.stderr.cause import cause_of

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "clean.py", line 9, in <module>',
    "    main()",
    "    ~~~~^^",
    '  File "clean.py", line 5, in main',
    "    json.loads(line)",
]
ERROR = "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([*TRACEBACK, ERROR], ERROR),
        ([*TRACEBACK[-2:], ERROR], ERROR),
        ([*TRACEBACK, "KeyboardInterrupt"], "KeyboardInterrupt"),
        (["loading", *TRACEBACK, ERROR, "and more of its text"], ERROR),
        ([*TRACEBACK, "KeyError: 'a'", "", *TRACEBACK, ERROR], ERROR),
        ([], ""),
        (["done"], ""),
        (["usage: clean FILE", "  FILE is missing", "Error: usage"], ""),
        (["one", "two: three"], ""),
        ([*TRACEBACK, "(no class has such a name)"], ""),
    ],
)
def test_cause(lines: list[str], cause: str) -> None:
    """The last exception that ended with nothing behind it, if any (issue 11)."""
    assert cause_of(lines) == cause


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("{}['date']", "KeyError: 'date'"),
        ("raise SystemError", "SystemError"),
        ("import json; json.loads('x')", ERROR),
        ("def f(n): return f(n + 1)\nf(0)", "RecursionError: maximum recursion depth"),
        ("raise SystemExit('bad usage')", ""),
    ],
)
def test_cause_of_this_python(code: str, cause: str) -> None:
    """Whatever the version adds to its tracebacks."""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    found = cause_of(ended.stderr.splitlines()[-10:])
    assert found.startswith(cause)
    assert bool(found) == bool(cause)
