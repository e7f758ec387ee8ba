"""What runs the dead letters of a pipeline file again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from etlstage.config.build import Builder, state_folder
from etlstage.config.loader import examine
from etlstage.config.reading import UNCHANGED, Changes
from etlstage.config.rules import stage_names
from etlstage.config.variant import retried_keys
from etlstage.pipeline.dead_letter.retry import Retry
from etlstage.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    from etlstage.spark import Session

__all__ = ("Retries",)


class Retries:
    """
    Builds what runs dead letters again.

    Args:
        path: The file.
        changes: What is laid over it.

    Raises:
        ConfigError: If anything is wrong, or is not there; one line for each.

    """

    def __init__(self, path: str | Path, changes: Changes = UNCHANGED) -> None:
        self._keys, self._document = examine(path, changes, loads=False)
        self.state: Path = state_folder(self._document)
        """Where the letters are."""
        names = [name for _, name in stage_names(self._document.data)]
        self.stages: list[str] = names[1:]
        """Names of the stages that may have any, in order."""
        self._shared: Session | None = None

    def pipeline(self, retry: Retry, check: Callable[[], None]) -> Pipeline:
        """
        Return what runs some letters; it begins with their stage.

        Args:
            retry: The letters.
            check: Raises if somebody has taken over the state directory.

        """
        keys = retried_keys(self._keys, retry.number)
        builder = Builder(keys, self._document, None, None)
        builder.shared = self._shared
        pipeline = builder.retrying(retry, self.stages.index(retry.stage), check)
        # All that are built have one session.
        self._shared = builder.shared
        return pipeline

    async def release(self, error: Exception | None) -> None:
        """Let go of what all that was built has in common."""
        if self._shared is not None:
            await self._shared.release(error)
