"""What a run has in place of its file's settings, when it is no ordinary run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from etlstage.config.model import PipelineKeys
from etlstage.config.parts import uncut
from etlstage.config.stages import StageKeys
from etlstage.errors import ConfigError, guess
from etlstage.pipeline.interfaces import Sink
from etlstage.stage import ErrorBudget

__all__ = ("DryRun", "here", "lenient", "retried_keys")

K = TypeVar("K", bound=StageKeys)


def here(keys: PipelineKeys) -> PipelineKeys:
    """Return the keys of a pipeline whose ends are tried on this machine alone."""
    session = replace(keys.spark, master="local[2]", remote=None)
    return replace(keys, engine="local", state=None, spark=session)


class DryRun(NamedTuple):
    """
    What a run on trial has in place of the file's settings.

    It neither loads nor stores anything where real runs do, and it ends: extraction
    begins where it would for the first time, and is not repeated.
    """

    engine: str
    """What runs the stages."""
    state: Path
    """Where positions and dead letters go: a folder that only this run has."""
    sink: Sink
    """Takes what would be loaded."""
    until: str | None = None
    """The last stage that is run, whatever its errors; None: all of the file's."""

    def keys(self, keys: PipelineKeys) -> PipelineKeys:
        """
        Return the keys of a file as they are on trial.

        Raises:
            ConfigError: If it is to end behind a stage behind which nothing comes.

        """
        changes: dict[str, Any] = {
            "engine": self.engine,
            "state": str(self.state),
            "extract": replace(keys.extract, every=None, end=keys.extract.end.tried()),
            "dead_letters": None,
            # What it makes is made once.
            "transform": uncut(keys).transform,
        }
        if self.until is not None:
            *names, _ = [stage.name for _, stage in keys.stages()]
            if self.until not in names:
                known = ", ".join(names)
                raise ConfigError(
                    f"--until: no messages leave a stage {self.until!r}"
                    f"{guess(self.until, names) or f', expected one of {known}'}"
                )
            stages = changes["transform"][: names.index(self.until)]
            # Where nothing is loaded, once is no matter: and it needs a whole input.
            changes["delivery"] = "at-least-once"
            changes["transform"] = tuple(lenient(s, s.on_error.then) for s in stages)
        return replace(keys, **changes)


def retried_keys(keys: PipelineKeys, epoch: str) -> PipelineKeys:
    """
    Return the keys of a file as they are for a retry of its dead letters.

    Its stages run here, refuse what they want without an end, and what they make is
    added to what is there, if the end allows it.

    Args:
        keys: Those of the file.
        epoch: What the retry is called.

    """
    end, delivery = keys.load.end.retried(keys, epoch)
    load = replace(lenient(keys.load), end=end)
    changes: dict[str, Any] = {"delivery": delivery}
    stages = tuple(lenient(stage) for stage in keys.transform)
    return replace(
        keys,
        engine="local",
        **changes,
        transform=stages,
        load=load,
        dead_letters=None,
    )


def lenient(keys: K, then: Literal["dead_letter", "fail"] = "dead_letter") -> K:
    """Return the keys of a stage that refuses what it wants without an end, or fails."""
    policy = replace(keys.on_error, then=then, budget=ErrorBudget())
    stage = keys.stage and replace(keys.stage, on_error=policy)
    return replace(keys, on_error=policy, stage=stage)
