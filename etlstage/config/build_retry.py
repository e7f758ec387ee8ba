"""Builds what retries the dead letters of a pipeline file."""

from __future__ import annotations

from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Self

import anyio

from etlstage.config.build import Builder, state_folder
from etlstage.config.document import Document
from etlstage.config.ends.journal import EdgeSinkKeys
from etlstage.config.loader import examine
from etlstage.config.model import PipelineKeys
from etlstage.config.parts import parts_of
from etlstage.config.reading import UNCHANGED, Changes
from etlstage.config.variant import retried_keys
from etlstage.errors import StateUnusable
from etlstage.pipeline.dead_letter.files import FOLDER
from etlstage.pipeline.dead_letter.policy import letter_time
from etlstage.pipeline.dead_letter.retry import Retry, UnderWay, record_noted
from etlstage.pipeline.dead_letter.store import SETTLED
from etlstage.pipeline.delivery import position
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.delivery.place import loaded_elsewhere, same_output
from etlstage.pipeline.interfaces import Epochs
from etlstage.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    from etlstage.spark import Session

__all__ = ("Retries",)


class Retries:
    """
    Builds what retries the dead letters of a pipeline, or of a part of one.

    Args:
        keys: The pipeline.
        document: Its file.

    """

    def __init__(self, keys: PipelineKeys, document: Document) -> None:
        self._keys, self._document = keys, document
        self.state: Path = state_folder(document)
        """The state directory, which has the letters."""
        if keys.state is not None:
            self.state = document.folder / keys.state
        names = [stage.name for _, stage in self._keys.stages()]
        self.stages: list[str] = names[1:]
        """Names of the stages that may have letters, in order."""
        self._shared: Session | None = None
        self._repeats = False  # whether the retry was interrupted before
        end = keys.load.end
        self.waits: str | None = None
        """The stage in whose journals passed messages wait; None: they are loaded."""
        if isinstance(end, EdgeSinkKeys):
            self.waits = keys.load.name.partition("/")[0]

    @classmethod
    def of_file(cls, path: str | Path, changes: Changes = UNCHANGED) -> list[Self]:
        """
        Return an object for each part of a pipeline, in order.

        Args:
            path: The file.
            changes: What is laid over it.

        Raises:
            ConfigError: If anything is wrong or missing; one line for each.

        """
        keys, document = examine(path, changes, loads=False)
        return [cls(part, document) for part in parts_of(keys)]

    def pipeline(self, retry: Retry, delivery: Delivery) -> Pipeline:
        """
        Return the pipeline that retries some letters, which begins with their stage.

        Args:
            retry: The letters.
            delivery: The state directory, which we hold.

        Raises:
            StateUnusable: If nothing can be stored there, or the retry was interrupted
                and loaded into another output.

        """
        builder = self._builder(retry.number)
        epochs = self._epochs(retry.number, delivery)
        made = builder.retrying(retry, self.stages.index(retry.stage), epochs)
        if self._keys.load.end.redoes(self._keys):
            self._begin(retry.number, made.output)
        return made

    def _begin(self, number: int, output: str) -> None:
        """Record where a retry loads: only there its sink finds what it has to replace."""
        found = UnderWay.of(self.state)
        self._repeats = found is not None and found.number == number
        if (
            found is not None
            and self._repeats
            and not same_output(found.output, output)
        ):
            raise StateUnusable(
                f"retry {number} that was interrupted can't be repeated:"
                f" {loaded_elsewhere(found.output, output)}; complete it with the old"
                f" settings, or remove {UnderWay.path(self.state)}"
            )
        UnderWay(number, output, letter_time()).store(self.state)

    def give_up(self) -> None:
        """Forget a retry that has loaded nothing: the next may load elsewhere."""
        # What an interrupted one has loaded may still be there.
        if not self._repeats:
            UnderWay.path(self.state).unlink(missing_ok=True)

    def recover(self, number: int, delivery: Delivery) -> bool:
        """
        Record a retry that was killed after a database committed it.

        Args:
            number: Number of the next retry.
            delivery: The state directory, which we hold.

        Returns:
            Whether there was such a retry.

        Raises:
            SinkFailed: If the database can't be asked.
            StateUnusable: If the retry can't be recorded.

        """
        if not self._keys.load.end.notes(self._keys) or not self._name.exists():
            return False
        sink = self._builder(number).retry_sink(self._epochs(number, delivery))
        note = anyio.run(sink.noted)
        return bool(note) and record_noted(self.state, number, str(note))

    def _builder(self, number: int) -> Builder:
        keys = retried_keys(self._keys, f"{self._load()}-{number}")
        builder = Builder(keys, self._document, shared=self._shared)
        # All pipelines share one session.
        if self._keys.load.end.needs_spark:
            self._shared = builder.site.session()
        return builder

    @property
    def _name(self) -> Path:
        return self.state / FOLDER / SETTLED / "load.json"

    def _load(self) -> str:
        """Return the name of all retries of this state: others load there, too."""
        try:
            if not self._name.exists():
                position.store(self._name, f"retry-{token_hex(8)}")
            return str(position.load(self._name))
        except (OSError, ValueError) as error:
            raise StateUnusable(f"can't use {self._name}: {error}") from error

    def _epochs(self, number: int, delivery: Delivery) -> Epochs:
        """Return the epochs of a sink, which stay the same until one is recorded."""
        return Epochs(
            self._load(),
            number - 1,
            once=True,
            check=delivery.check,
            start=delivery.record.fence,
        )

    async def release(self, error: Exception | None) -> None:
        """Release the session that all pipelines share."""
        if self._shared is not None:
            await self._shared.release(error)
