"""``etlstage validate``: check whether a pipeline could be run here; start nothing."""

from __future__ import annotations

from etlstage.cli.options import File, Overlays, Values, changes_of
from etlstage.cli.screen import Screen
from etlstage.config.loader import cases_of, examine

__all__ = ("main",)


def main(file: File, *, overlays: Overlays = None, values: Values = None) -> int:
    """Check a pipeline file and what it refers to on this machine; start nothing."""
    keys, document = examine(file, changes_of(overlays, values))
    cases_of(keys, document)
    stages = " -> ".join(stage.name for _, stage in keys.stages())
    line = f"{file}: valid: {keys.name} on engine {keys.engine}: {stages}"
    Screen().tell(line)
    return 0
