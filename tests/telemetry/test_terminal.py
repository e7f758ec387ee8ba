from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.telemetry.terminal import harmless


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
        ("a\u200bb\u2060c\xadd\ufeff", r"a\u200bb\u2060c\xadd\ufeff"),
        ("tag\U000e0041", r"tag\U000e0041"),
        ("a\u034fb", r"a\u034fb"),
        ("a\U000e0100b\U000e01ef", r"a\U000e0100b\U000e01ef"),
        ("a\u115fb\u1160c\u3164d\uffa0", r"a\u115fb\u1160c\u3164d\uffa0"),
        ("a\u17b4b\u17b5c\u180bd\u180f", r"a\u17b4b\u17b5c\u180bd\u180f"),
        ("a\ufe00b\ufe0dc\ufff0d\ufff8", r"a\ufe00b\ufe0dc\ufff0d\ufff8"),
        ("a\U0001bca0b\U0001bca3", r"a\U0001bca0b\U0001bca3"),
        ("a\U0001d173b\U0001d17a", r"a\U0001d173b\U0001d17a"),
        ("\u2764\ufe0f\u2764\ufe0e", "\u2764\ufe0f\u2764\ufe0e"),
        ("d\udc9b", r"d\udc9b"),
        ("a\u200db\u200c", r"a\u200db\u200c"),
        # Joiners between letters of Persian, or within a picture, hide nothing.
        ("\u0645\u06cc\u200c\u062e", "\u0645\u06cc\u200c\u062e"),
        ("\U0001f469\u200d\U0001f680", "\U0001f469\u200d\U0001f680"),
    ],
)
def test_harmless(text: str, expected: str) -> None:
    """Colours are removed; other control characters are shown as escapes."""
    assert harmless(text) == expected


def test_several_lines() -> None:
    """A traceback keeps its line ends, and no other control characters."""
    assert harmless("a\r\n\x1b[1mb\u202e\nc", lines=True) == "a\\r\nb\\u202e\nc"


@given(st.text(st.sampled_from("\x1b[]P\\0;mA\x07\x9b\r\n a\u202e")))
def test_nothing_steers_a_terminal(text: str) -> None:
    """Removing one sequence must not form another."""
    assert harmless(text).replace("\t", " ").isprintable()
    for line in harmless(text, lines=True).split("\n"):
        assert line.replace("\t", " ").isprintable()
