"""Replacements for a file's settings in trial runs and in retries."""

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
    """Return the keys of a pipeline, changed to try its ends on this machine alone."""
    session = replace(keys.spark, master="local[2]", remote=None)
    return replace(keys, engine="local", state=None, spark=session)


class DryRun(NamedTuple):
    """
    Replacements for the file's settings in a trial run.

    A trial run neither loads nor stores anything where real runs do, and it ends:
    extraction begins where a first run would begin, and is not repeated.
    """

    engine: str
    """The engine that runs the stages."""
    state: Path
    """The folder for positions and dead letters, for this run alone."""
    sink: Sink
    """Receives what would be loaded."""
    until: str | None = None
    """The last stage to run, without an error budget; None: all stages."""

    def keys(self, keys: PipelineKeys) -> PipelineKeys:
        """
        Return the keys of a file, changed for a trial run.

        Raises:
            ConfigError: If ``until`` is not a stage that another stage follows.

        """
        changes: dict[str, Any] = {
            "engine": self.engine,
            "state": str(self.state),
            "extract": replace(keys.extract, every=None, end=keys.extract.end.tried()),
            "dead_letters": None,
            # The output of stages is not kept for other runs.
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
            # As nothing is loaded, exactly-once means nothing; it needs a whole input.
            changes["delivery"] = "at-least-once"
            changes["transform"] = tuple(lenient(s, s.on_error.then) for s in stages)
        return replace(keys, **changes)


def retried_keys(keys: PipelineKeys, epoch: str) -> PipelineKeys:
    """
    Return the keys of a file, changed for a retry of its dead letters.

    Its stages run on engine local and may reject any number of messages, and their
    output is added to what exists, if the end allows that.

    Args:
        keys: The keys of the file.
        epoch: The name of the retry.

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
    """Return a stage's keys without an error budget: it dead-letters, or fails."""
    policy = replace(keys.on_error, then=then, budget=ErrorBudget())
    stage = keys.stage and replace(keys.stage, on_error=policy)
    return replace(keys, on_error=policy, stage=stage)
