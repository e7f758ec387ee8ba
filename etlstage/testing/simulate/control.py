"""What else a run depends on, and is taken from it while a seed runs."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import structlog

from etlstage.protocol.marker import proof
from etlstage.telemetry.log import NAME

__all__ = ("chance", "logged", "no_garbage")


@contextmanager
def chance(seed: int) -> Iterator[None]:
    """Have what etlstage draws, and the functions that it is given, follow the seed."""
    state = random.getstate()
    random.seed(f"{seed} chance")
    try:
        # Scripts answer in a turn or two of the loop: spinning would only cost time.
        with patch.object(proof, "_LOOKS", 0):
            yield
    finally:
        random.setstate(state)


@contextmanager
def no_garbage() -> Iterator[Callable[[], object]]:
    """Collect none by itself: when that happens is no choice of the seed."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def logged(tell: Callable[[str], None] | None) -> Iterator[None]:
    """Have log lines told, or dropped; also where structlog is set up."""
    settings = structlog.get_config() if structlog.is_configured() else None
    structlog.reset_defaults()
    logger = logging.getLogger(NAME)
    before = logger.disabled, logger.propagate, logger.level
    handler = _Teller(tell) if tell is not None else None
    logger.disabled, logger.propagate = handler is None, False
    if handler is not None:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.disabled, logger.propagate, logger.level = before
        if handler is not None:
            logger.removeHandler(handler)
        if settings is not None:
            structlog.configure(**settings)


class _Teller(logging.Handler):
    """Adds log lines to a story."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Tell a line."""
        self._tell(f"log: {record.getMessage()}")
