"""Make text of other origin safe to show on a terminal."""

from __future__ import annotations

import re
from typing import Final

__all__ = ("harmless",)

_SEQUENCES: Final = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\))"
)
_CONTROLS: Final = re.compile(
    # Changes of the writing direction and ends of lines hide text as well.
    r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    # Characters without width or ink can't be seen. U+FE0E and U+FE0F choose between
    # text and picture.
    r"\xad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u2060-\u2065\u206a-\u206f"
    r"\u3164\ufe00-\ufe0d\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3"
    r"\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
    # Lone surrogates can't be encoded, or become bytes that steer a terminal.
    r"\ud800-\udfff]"
    # Joiners are needed in some scripts and in emoji, but never beside ASCII.
    r"|(?:(?<![^\x00-\x7f])[\u200c\u200d])|(?:[\u200c\u200d](?![^\x00-\x7f]))"
)


def harmless(text: str, *, lines: bool = False) -> str:
    """
    Return ``text`` without what would steer a terminal or hide text.

    Args:
        text: Text of any origin.
        lines: Whether it may have several lines; otherwise line breaks are escaped.

    """
    # Nearly all text has nothing to remove; outside of ASCII, not all of that is seen.
    if text.isascii() and text.isprintable():
        return text
    if lines:
        return "\n".join(map(harmless, text.split("\n")))
    return _CONTROLS.sub(_escaped, _SEQUENCES.sub("", text))


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
