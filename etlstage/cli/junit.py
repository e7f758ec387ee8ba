"""Results of tests in the XML format of JUnit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

from etlstage.cli.failure import naming
from etlstage.telemetry.terminal import harmless

__all__ = ("XmlCase", "junit", "write")

_NO_CHARACTERS: Final = re.compile("[\ud800-\udfff\ufffe\uffff]")
"""What XML can't have besides the control characters, which are escaped as well."""


class XmlCase(NamedTuple):
    """The result of one test."""

    name: str
    seconds: float
    failures: Sequence[tuple[str, str]] = ()
    """For each failure, a line about what was wrong, and the whole text."""
    skipped: str = ""
    """Why it was not run."""
    printed: str = ""
    """What was reported although it passed."""


def junit(name: str, cases: Sequence[XmlCase]) -> str:
    """Return the document of a suite of that name."""
    failed = sum(1 for case in cases if case.failures)
    skipped = sum(1 for case in cases if case.skipped)
    seconds = sum(case.seconds for case in cases)
    counts = f'tests="{len(cases)}" failures="{failed}"'
    counts += f' skipped="{skipped}"' if skipped else ""
    lines = [
        '<?xml version="1.0" encoding="utf-8"?>',
        f'<testsuite name={_quoted(name)} {counts} time="{seconds:.3f}">',
    ]
    for case in cases:
        head = f"<testcase classname={_quoted(name)} name={_quoted(case.name)}"
        lines.append(f'  {head} time="{case.seconds:.3f}">')
        for what, text in case.failures:
            lines.append(
                f"    <failure message={_quoted(what)}>{_text(text)}</failure>"
            )
        if case.skipped:
            lines.append(f"    <skipped message={_quoted(case.skipped)}/>")
        if case.printed:
            lines.append(f"    <system-out>{_text(case.printed)}</system-out>")
        lines.append("  </testcase>")
    return "\n".join([*lines, "</testsuite>", ""])


def write(path: Path, text: str) -> None:
    """
    Write a file.

    Raises:
        ConfigError: If it can't be written.

    """
    with naming(f"{path} can't be written"):
        path.write_text(text, encoding="utf-8")


def _text(text: str) -> str:
    return escape(_plain(harmless(text, lines=True)), quote=False)


def _quoted(text: str) -> str:
    return f'"{escape(_plain(harmless(text)))}"'


def _plain(text: str) -> str:
    return _NO_CHARACTERS.sub(
        lambda found: found[0].encode("unicode_escape").decode(), text
    )
