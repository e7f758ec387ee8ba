"""Stages for tests, of which a helper passes on whatever it was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etlstage.settings.definition import settings_of
from etlstage.stage import Stage, WorkerProgram

__all__ = ("staged",)


def staged(command: Sequence[str], /, **settings: Any) -> Stage:  # noqa: ANN401
    """Return a stage, called ``t`` by default, with a program's settings."""
    known = settings_of(WorkerProgram)
    own = {name: settings.pop(name) for name in known if name in settings}
    worker = WorkerProgram(command=own.pop("command", command), **own)
    return Stage(**{"name": "t", "worker": worker, **settings})
