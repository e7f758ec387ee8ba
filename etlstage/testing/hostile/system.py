"""What the worker asks of the system: time, and its own end."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ("FOR_EVER", "kill", "no_core", "sleep", "wait")

FOR_EVER: Final = 3600.0
"""Seconds; nothing here outlives a test for longer."""


def sleep(seconds: float) -> None:
    """Do nothing for so long."""
    import time

    time.sleep(seconds)


def wait() -> NoReturn:
    """Do nothing until somebody ends us."""
    sleep(FOR_EVER)
    os._exit(70)


def kill(name: str) -> None:
    """Send ourselves the signal of that name."""
    import signal

    os.kill(os.getpid(), getattr(signal, name))


def no_core() -> None:
    """Leave no core file behind."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
