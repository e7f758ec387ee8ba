"""What all tests share: the option that runs those of Spark over Spark Connect."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--connect``; ``tests/spark/conftest.py`` is where it counts."""
    parser.addoption(
        "--connect",
        action="store_true",
        help="run the tests that use a Spark session, and these alone, with one over"
        " Spark Connect; a process can't have both",
    )
