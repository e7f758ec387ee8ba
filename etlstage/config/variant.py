"""What a run has in place of what its file says, when it is no ordinary run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from etlstage.config.model import PipelineKeys
from etlstage.config.stages import StageKeys
from etlstage.pipeline.interfaces import Sink
from etlstage.stage import ErrorBudget

__all__ = ("Trial", "retried_keys")

K = TypeVar("K", bound=StageKeys)


class Trial(NamedTuple):
    """
    What a run on trial has in place of what the file says.

    It neither loads nor stores anything where real runs do, and it ends: extraction
    begins where it would for the first time, and is not repeated.
    """

    engine: str
    """What runs the stages."""
    state: Path
    """Where positions and dead letters go: a folder that only this run has."""
    sink: Sink
    """Takes what would be loaded."""

    def keys(self, keys: PipelineKeys) -> PipelineKeys:
        """Return the keys of a file as they are on trial."""
        changes: dict[str, Any] = {
            "engine": self.engine,
            "state": str(self.state),
            "extract": replace(keys.extract, every=None, end=keys.extract.end.tried()),
            "dead_letters": None,
        }
        return replace(keys, **changes)


def retried_keys(keys: PipelineKeys, epoch: str) -> PipelineKeys:
    """
    Return the keys of a file as they are for a retry of its dead letters.

    Its stages run here, refuse what they want without an end, and what they make is
    added to what is there, as the end says.

    Args:
        keys: Those of the file.
        epoch: What the retry is called.

    """
    end, delivery = keys.load.end.retried(keys, epoch)
    load = replace(_lenient(keys.load), end=end)
    changes: dict[str, Any] = {"delivery": delivery}
    stages = tuple(_lenient(stage) for stage in keys.transform)
    return replace(
        keys,
        engine="local",
        **changes,
        transform=stages,
        load=load,
        dead_letters=None,
    )


def _lenient(keys: K) -> K:
    policy = replace(keys.on_error, then="dead_letter", budget=ErrorBudget())
    changed: Any = {"written": {**keys.written, "on_error": policy}}
    return replace(keys, **changed)
