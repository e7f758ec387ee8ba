"""
Checks of arguments.

They raise TypeError for a value of another type, and ValueError for one out of range.
"""

from __future__ import annotations

import math

from etlstage.stage.stage import Stage

__all__ = (
    "check_callable",
    "check_limit",
    "check_meter",
    "check_seconds",
    "check_stage",
    "check_whole",
)


def check_stage(stage: object) -> None:
    """Check what a supervisor is to run."""
    if not isinstance(stage, Stage):
        raise TypeError(
            f"expected a Stage, got {type(stage).__name__}; make one with"
            ' Stage(name="clean", worker=["python", "clean.py"])'
        )


def check_seconds(name: str, value: object) -> None:
    """Check a time, in seconds; a negative one has passed."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number of seconds, got {value!r}")
    if math.isnan(value):
        raise ValueError(f"{name} is {value}, expected a number of seconds")


def check_limit(name: str, value: int, least: int) -> None:
    """Check a whole number that is to be ``least`` or more."""
    check_whole(name, value)
    if value < least:
        raise ValueError(f"{name} is {value}, expected {least} or more")


def check_whole(name: str, value: object) -> None:
    """Check a whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")


def check_callable(name: str, value: object, expected: str) -> None:
    """Check what is to be called; ``expected`` names it in the error."""
    if not callable(value):
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")


def check_meter(meter: object) -> None:
    """Check that a meter has all methods of one."""
    for method in ("counter", "gauge", "histogram"):
        if not callable(getattr(meter, method, None)):
            raise TypeError(
                f"meter: expected a Meter, got {type(meter).__name__} without"
                f" {method}(); see etlstage.telemetry"
            )
