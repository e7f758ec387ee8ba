"""Stages for tests, for helpers that pass on any settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etlstage.settings.definition import settings_of
from etlstage.stage import Stage, WorkerProgram

__all__ = ("staged",)


def staged(command: Sequence[str], /, **settings: Any) -> Stage:  # noqa: ANN401
    """Return a stage, named ``t`` by default; settings may be its program's, too."""
    known = settings_of(WorkerProgram)
    own = {name: settings.pop(name) for name in known if name in settings}
    worker = WorkerProgram(command=own.pop("command", command), **own)
    return Stage(**{"name": "t", "worker": worker, **settings})
