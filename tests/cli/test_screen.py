from __future__ import annotations

import io

import pytest

from etlstage.cli.screen import Screen


class Terminal(io.StringIO):
    """A file that claims to be a terminal."""

    def isatty(self) -> bool:
        """Claim to be a terminal."""
        return True


@pytest.mark.parametrize(
    ("file", "term", "watched", "renews"),
    [
        (Terminal(), "xterm", True, True),
        (Terminal(), "dumb", True, False),
        (io.StringIO(), "xterm", False, False),
    ],
)
def test_what_a_screen_can_do(
    monkeypatch: pytest.MonkeyPatch,
    file: io.StringIO,
    term: str,
    watched: bool,
    renews: bool,
) -> None:
    """Colours may be forced into a pipe, a table that renews itself may not."""
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")
    screen = Screen(file=file)
    assert (screen.watched, screen.renews) == (watched, renews)
