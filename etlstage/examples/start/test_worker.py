"""Test the worker's function by itself: ``python -m pytest``."""

from __future__ import annotations

from worker import clean

from etlstage import worker


def test_blanks_around_a_name_are_dropped() -> None:
    """A message has a list of outputs."""
    assert worker.run(clean, [b"  Ada Lovelace ", b"Grace Hopper"]) == [
        [b"Ada Lovelace"],
        [b"Grace Hopper"],
    ]


def test_line_without_a_name_is_refused() -> None:
    """The worker continues with the next message."""
    assert worker.run(clean, [b" ", b"Alan Turing"]) == [
        worker.Refuse("no name"),
        [b"Alan Turing"],
    ]
