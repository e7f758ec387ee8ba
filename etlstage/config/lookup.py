"""
One stage of a pipeline file, for commands about that stage alone.

Only the keys of the file are checked, unless more is asked for: not whether programs or
Spark exist.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from etlstage.config.build import hidden_texts
from etlstage.config.document import Document
from etlstage.config.loader import load
from etlstage.config.model import PipelineKeys
from etlstage.config.presence import Look
from etlstage.config.reading import UNCHANGED
from etlstage.config.stages import StageKeys, stage_of
from etlstage.errors import ConfigError, guess
from etlstage.messages import StageKind
from etlstage.pipeline.secret import Secrets
from etlstage.stage import PoolPolicy, Stage

__all__ = ("StageFile", "stage_from_yaml")


class StageFile(NamedTuple):
    """The stages of a pipeline file."""

    keys: PipelineKeys
    stages: dict[str, tuple[StageKeys, Stage | None]]
    """The keys and the worker of each stage by name, in pipeline order; a DataFrame has
    no worker. Each worker has one process."""
    secrets: Secrets
    """Texts that must not be shown."""
    document: Document

    @classmethod
    def read(cls, path: Path) -> StageFile:
        """
        Read a file.

        Raises:
            ConfigError: If anything in it is wrong.

        """
        keys, document = load(path, UNCHANGED)
        stages = {
            each.name: (each, _alone(each, document.folder))
            for _, each in keys.stages()
        }
        return cls(keys, stages, Secrets(hidden_texts(keys, document)), document)

    def worker(self, name: str) -> Stage:
        """
        Return a stage by its name.

        Raises:
            ConfigError: If there is no such stage, or it has no worker.

        """
        if name not in self.stages:
            names = list(self.stages)
            expected = guess(name, names) or f", expected {' or '.join(names)}"
            raise ConfigError(f"unknown stage {name!r}{expected}")
        _, stage = self.stages[name]
        if stage is None:
            raise ConfigError(f"stage {name} has no worker")
        return stage

    def check_presence(self, name: str) -> None:
        """
        Check that what the worker of a stage needs is on this machine.

        Raises:
            ConfigError: If anything is missing, as when the file is validated.

        """
        look = Look(self.keys, self.document)
        for loc, keys in self.keys.stages():
            if keys.name == name:
                self.document.finish(look.worker(keys.stage, loc))


def stage_from_yaml(path: str | Path, name: str) -> Stage:
    """
    Return one stage of a pipeline file, to be supervised or tested by itself.

    Args:
        path: The file.
        name: Name of the stage.

    Raises:
        ConfigError: If anything in the file is wrong, or it has no such worker.

    """
    return StageFile.read(Path(path)).worker(name)


def _alone(keys: StageKeys, folder: Path) -> Stage | None:
    if keys.stage is None:
        return None
    stage = stage_of(keys, folder)
    if stage.kind is StageKind.EXTRACT:
        return stage
    return replace(stage, workers=PoolPolicy())
