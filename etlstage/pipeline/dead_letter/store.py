"""
Where a run puts its dead letters: into the files of its state directory.

What leaves for there is rid of secrets first. On an executor the letters of a task go
elsewhere, and come home with its rows.
"""

from __future__ import annotations

import copy
import secrets
import shlex
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import anyio.to_thread

from etlstage.errors import Attempt, StageError
from etlstage.pipeline.dead_letter.file import (
    FOLDER,
    LetterFile,
    letter_files,
    read_letters,
)
from etlstage.pipeline.dead_letter.record import DeadLetter
from etlstage.pipeline.secret import Secrets

__all__ = ("DeadLetters",)


class DeadLetters:
    """
    Keeps the dead letters of one run.

    Args:
        state: The state directory; made, for us alone, with the first letter.
        pipeline: Name of the pipeline.
        shown: What users are told to give to ``etlstage dlq``; default: ``state``.
        run: What sets this run's letters apart; default: a random number.
        commands: The command of a stage as it was written, by the stage's name.
        hidden: Texts that are not to be stored, and what stands in for each.

    """

    def __init__(
        self,
        state: Path,
        *,
        pipeline: str,
        shown: str | None = None,
        run: str | None = None,
        commands: Mapping[str, Sequence[str]] | None = None,
        hidden: Mapping[str, str] | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.run = run or secrets.token_hex(4)
        self.count = 0
        """Letters of this run."""
        self._state = state
        self._shown = shown or str(state)
        self._commands = commands or {}
        self.secrets = Secrets(hidden)
        """What is not to be shown, here or elsewhere."""
        self._numbered = 0
        # Of those that were there before, the ids.
        self._known: dict[tuple[str, int, bytes], str] = {}
        self._keep: Callable[[DeadLetter], Awaitable[None]] | None = None
        self._configs: Mapping[str, Mapping[str, Any]] = {}
        self._files: dict[str, LetterFile] = {}

    @property
    def look(self) -> str:
        """The command with which a user looks at the letters."""
        return f"etlstage dlq ls {shlex.quote(self._shown)}"

    async def put(
        self,
        stage: str,
        place: int,
        message: bytes,
        error: Exception,
        *,
        config: Mapping[str, Any],
        time: datetime,
    ) -> DeadLetter:
        """
        Append a letter; it is durable after :meth:`sync`.

        Args:
            stage: Name of the stage that could not process the message.
            place: Of the message in the stage's input.
            message: The message.
            error: Why.
            config: The stage, as plain JSON.
            time: Now, in UTC.

        Raises:
            StageError: If it can't be written.

        """
        written = {}
        if stage in self._commands:
            written["command"] = list(self._commands[stage])
        letter = DeadLetter(
            id=self._id_of(stage, place, message),
            time=time.isoformat(timespec="milliseconds"),
            pipeline=self.pipeline,
            run=self.run,
            stage=stage,
            place=place,
            message=message,
            error=self.secrets.conceal(str(error)),
            kind=type(error).__name__,
            attempts=tuple(map(self._attempt, getattr(error, "attempts", ()))),
            config=self.secrets.concealed(
                {**self._configs.get(stage, config), **written}
            ),
        )
        await (self._keep or self._to_file)(letter)
        self.count += 1
        return letter

    def adopt(self, letter: DeadLetter, *, place: int) -> None:
        """
        Append a letter that was written elsewhere in this run; blocks.

        Args:
            letter: The letter; it gets another id.
            place: Of its message in the stage's whole input.

        Raises:
            StageError: If it can't be written.

        """
        number = self._id_of(letter.stage, place, letter.message)
        self._append(replace(letter, id=number, run=self.run, place=place))
        self.count += 1

    def recall(self) -> None:
        """Take note of this run's letters: what is there is not appended again."""
        for path in letter_files(self._state):
            for letter in read_letters(path):
                if isinstance(letter, DeadLetter) and letter.run == self.run:
                    known = letter.stage, letter.place, letter.message
                    self._known[known] = letter.id
                    number = int(letter.id.rpartition("-")[2])
                    self._numbered = max(self._numbered, number)

    def of_run(self, run: str) -> DeadLetters:
        """Return the same for another run, with no letters yet."""
        other = copy.copy(self)
        other.run, other.count, other._numbered = run, 0, 0
        other._files, other._known = {}, {}
        return other

    def kept_by(
        self,
        keep: Callable[[DeadLetter], Awaitable[None]],
        configs: Mapping[str, Mapping[str, Any]],
    ) -> DeadLetters:
        """
        Return the same, but its letters go to ``keep`` and to no file.

        Args:
            keep: Is given each letter.
            configs: By their names, stages to show in place of those that have run.

        """
        other = copy.copy(self)
        other._keep, other._configs = keep, configs
        return other

    async def sync(self) -> None:
        """Return when all letters are durable; raises as :meth:`put`."""
        if any(file.dirty for file in self._files.values()):
            await anyio.to_thread.run_sync(self._sync)

    def letters(self) -> Iterator[DeadLetter]:
        """Yield the letters of this run, stage by stage; blocks."""
        for file in list(self._files.values()):
            for letter in read_letters(file.path, start=file.start):
                if isinstance(letter, DeadLetter) and letter.run == self.run:
                    yield letter

    def close(self) -> None:
        """Close the files; safe to call twice."""
        for file in self._files.values():
            file.close()

    def _id_of(self, stage: str, place: int, message: bytes) -> str:
        if known := self._known.get((stage, place, message)):
            return known
        self._numbered += 1
        return f"{self.run}-{self._numbered}"

    async def _to_file(self, letter: DeadLetter) -> None:
        await anyio.to_thread.run_sync(self._append, letter)

    def _append(self, letter: DeadLetter) -> None:
        stage = letter.stage
        if (stage, letter.place, letter.message) in self._known:
            return
        try:
            if stage not in self._files:
                self._files[stage] = LetterFile(self._state, stage)
            self._files[stage].append(letter.to_line())
        except OSError as error:
            raise self._failure(stage, letter.error, error) from error

    def _sync(self) -> None:
        for stage, file in list(self._files.items()):
            try:
                file.sync()
            except OSError as error:
                raise self._failure(stage, "", error) from error

    def _failure(self, stage: str, why: str, error: OSError) -> StageError:
        behind = f"; the message's own error: {why}" if why else ""
        said = (error.strerror or str(error)).lower()
        return StageError(
            f"stage {stage}: can't write dead letters to {self._state / FOLDER}:"
            f" {said}{behind}",
            stage=stage,
        )

    def _attempt(self, attempt: Attempt) -> Attempt:
        conceal = self.secrets.conceal
        return attempt._replace(
            error=conceal(attempt.error),
            story=tuple(map(conceal, attempt.story)),
            stderr=tuple(map(conceal, attempt.stderr)),
        )
