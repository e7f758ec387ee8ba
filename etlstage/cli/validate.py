"""``etlstage validate``: whether a pipeline could be run here, and what it would be."""

from __future__ import annotations

from pathlib import Path

from etlstage.cli.screen import Screen
from etlstage.config.loader import cases_of, examine
from etlstage.config.reading import Changes

__all__ = ("validate",)


def validate(file: Path, changes: Changes) -> int:
    """
    Check a pipeline file and say that it is valid; return the exit code.

    Args:
        file: The pipeline.
        changes: What is laid over it.

    Raises:
        ConfigError: If anything in the file is wrong, or missing on this machine.

    """
    keys, document = examine(file, changes)
    cases_of(keys, document)
    stages = " -> ".join(stage.name for _, stage in keys.stages())
    line = f"{file}: valid: {keys.name} on engine {keys.engine}: {stages}"
    Screen().tell(line)
    return 0
