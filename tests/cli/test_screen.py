from __future__ import annotations

import io
import os

import pytest

from etlstage.cli.screen import Screen


class Terminal(io.StringIO):
    """A file that claims to be a terminal."""

    def isatty(self) -> bool:
        """Claim it."""
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


def test_reader_that_is_gone_is_no_error() -> None:
    """A long run must not end because of its progress lines."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file:
        screen = Screen(file=file)
        screen.print("nobody reads this")
        screen.print("nor this")
        assert screen.quiet


def test_full_disk_is_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    """On stderr; the run goes on, and so does what is printed into the void."""
    with open("/dev/full", "w") as file:
        screen = Screen(file=file)
        screen.print("a line")
        screen.print("another")
        assert screen.quiet
    assert capfd.readouterr() == (
        "",
        "etlstage: error: stdout can't be written: no space left on device\n",
    )
