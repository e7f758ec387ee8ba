"""
Where a run puts its dead letters: into the files of its state directory.

What leaves for there is rid of secrets first. On an executor the letters of a task go
elsewhere, and come home with its rows.
"""

from __future__ import annotations

import copy
import json
import secrets
import shlex
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio.to_thread

from etlstage.errors import Attempt, StageError, StateUnusable
from etlstage.messages import counted
from etlstage.pipeline.dead_letter.file import (
    FOLDER,
    LetterFile,
    cut,
    letter_file,
    letter_files,
    read_letters,
    size_of,
    stage_of_file,
)
from etlstage.pipeline.dead_letter.record import DeadLetter
from etlstage.pipeline.dead_letter.settled import supersede
from etlstage.pipeline.delivery.delivery import unusable
from etlstage.pipeline.delivery.folder import make_ours
from etlstage.pipeline.delivery.record import fence_of
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
        self.run: str = run or secrets.token_hex(4)
        self.count: int = 0
        """Letters of this run."""
        self.fence: int = 0
        """Of the run, if it holds the state directory: behind a higher one none is kept."""
        self._state = state
        self._shown = shown or str(state)
        self._commands = commands or {}
        self.secrets: Secrets = Secrets(hidden)
        """What is not to be shown, here or elsewhere."""
        self._numbered = 0
        # Of those that were there before, the ids.
        self._known: dict[tuple[str, int, bytes], str] = {}
        self._keep: Callable[[DeadLetter], Awaitable[None]] | None = None
        self._configs: Mapping[str, Mapping[str, Any]] = {}
        self._files: dict[str, LetterFile] = {}
        # By stage: the configuration as it was given, and as it is kept.
        self._shown_configs: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
        self._last_dumped: tuple[Mapping[str, Any], str] = ({}, "{}")

    @property
    def folder(self) -> Path:
        """Where the files of the letters are."""
        return self._state / FOLDER

    @property
    def look(self) -> str:
        """The command with which a user looks at the letters."""
        return f"etlstage dlq ls {shlex.quote(self._shown)}"

    def check(self) -> None:
        """
        Assert that letters may be kept where they are to be, if that is there.

        Raises:
            StateUnusable: If the folder is not ours.

        """
        try:
            if self._state.exists():
                make_ours(self._state)
        except OSError as error:
            raise unusable(self._state, error) from error

    def letter(
        self,
        stage: str,
        place: int,
        message: bytes,
        error: Exception,
        *,
        config: Mapping[str, Any],
        time: str,
    ) -> DeadLetter:
        """
        Return a letter, which is to be kept.

        Args:
            stage: Name of the stage that could not process the message.
            place: Of the message in the stage's input.
            message: The message.
            error: Why.
            config: The stage, as plain JSON.
            time: When: ISO 8601, UTC.

        """
        return DeadLetter(
            id=self._id_of(stage, place, message),
            time=time,
            pipeline=self.pipeline,
            run=self.run,
            stage=stage,
            place=place,
            message=message,
            error=self.secrets.conceal(str(error)),
            kind=type(error).__name__,
            attempts=self._concealed(getattr(error, "attempts", ())),
            config=self._config_of(stage, config),
        )

    async def keep(self, letters: Sequence[DeadLetter]) -> None:
        """
        Append letters of one stage; they are durable after :meth:`sync`.

        Raises:
            StageError: If they can't be written; then none of them is.

        """
        if self._keep is None:
            await anyio.to_thread.run_sync(self._append, letters)
        else:
            for letter in letters:
                await self._keep(letter)
        self.count += len(letters)

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
        self._append([replace(letter, id=number, run=self.run, place=place)])
        self.count += 1

    def supersede(self, time: str) -> None:
        """
        Record that this run has replaced the output: letters of others are superseded.

        Args:
            time: When, as letters have it.

        Raises:
            StateUnusable: If it can't be recorded, or another run has taken over.

        """
        if self._keep is None:
            self._check_held()
            supersede(self._state, self.run, time)

    def recall(self) -> None:
        """Take note of this run's letters: what is there is not appended again."""
        for path in letter_files(self._state):
            for letter in read_letters(path):
                if isinstance(letter, DeadLetter) and letter.run == self.run:
                    known = letter.stage, letter.place, letter.message
                    self._known[known] = letter.id
                    number = int(letter.id.rpartition("-")[2])
                    self._numbered = max(self._numbered, number)

    def size(self, stage: str) -> int:
        """Return how many bytes the letters of a stage have on disk, of all runs."""
        return size_of(self._state, stage)

    def sizes(self) -> dict[str, int]:
        """Return the same for each stage that has any."""
        return {
            stage_of_file(path): path.stat().st_size
            for path in letter_files(self._state)
        }

    def resume(self, run: str, sizes: Mapping[str, int]) -> None:
        """
        Go on with a run that broke off; its letters behind some are removed; blocks.

        Args:
            run: What sets it apart.
            sizes: For each stage, the bytes of the letters that stay.

        Raises:
            StateUnusable: If its files can't be read, or cut, or lack any of that, or
                another run has taken over.

        """
        self.run = run
        for stage, size in sizes.items():
            if (found := self.size(stage)) < size:
                raise self._lacking(stage, found, size)
        try:
            for path in letter_files(self._state):
                size = sizes.get(stage_of_file(path), 0)
                cut(path, size, self._check_held)
        except OSError as error:
            raise unusable(self._state, error) from error
        self.recall()
        self.count, self._known = len(self._known), {}

    def of_run(self, run: str) -> DeadLetters:
        """Return the same for another run, with no letters yet."""
        other = copy.copy(self)
        other.run, other.count, other._numbered = run, 0, 0
        other._files, other._known, other._shown_configs = {}, {}, {}
        return other

    def kept_by(
        self,
        keep: Callable[[DeadLetter], Awaitable[None]],
        configs: Mapping[str, Mapping[str, Any]],
        known: Mapping[tuple[str, int, bytes], str] | None = None,
    ) -> DeadLetters:
        """
        Return the same, but its letters go to ``keep`` and to no file.

        Args:
            keep: Is given each letter.
            configs: By their names, stages to show in place of those that have run.
            known: The id of a message that has one, by its stage, place and bytes.

        """
        other = copy.copy(self)
        other._known = dict(known or {})
        other._keep, other._configs, other._shown_configs = keep, configs, {}
        return other

    async def sync(self) -> None:
        """Return when all letters are durable; raises as :meth:`keep`."""
        # A copy: other stages may add files meanwhile, in threads.
        if any(file.dirty for file in list(self._files.values())):
            await anyio.to_thread.run_sync(self._sync)

    def letters(self) -> Iterator[DeadLetter]:
        """Yield the letters of this run, stage by stage; blocks."""
        for file in list(self._files.values()):
            for letter in read_letters(file.path, start=file.start):
                if isinstance(letter, DeadLetter) and letter.run == self.run:
                    yield letter

    def close(self) -> None:
        """Close the files; safe to call twice."""
        for file in list(self._files.values()):
            file.close()

    def _id_of(self, stage: str, place: int, message: bytes) -> str:
        if known := self._known.get((stage, place, message)):
            return known
        self._numbered += 1
        return f"{self.run}-{self._numbered}"

    def _append(self, letters: Sequence[DeadLetter]) -> None:
        stage, known = letters[0].stage, self._known
        new = [x for x in letters if (stage, x.place, x.message) not in known]
        lines = b"".join(letter.to_line(self._dumped(letter)) for letter in new)
        if not lines:
            return
        try:
            if stage not in self._files:
                self._files[stage] = LetterFile(self._state, stage, self._check_held)
            self._files[stage].append(lines)
        except StateUnusable as error:
            raise StageError(f"stage {stage}: {error}", stage=stage) from error
        except OSError as error:
            raise self._failure(stage, letters[0].error, error) from error

    def _config_of(self, stage: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what is kept of a stage, once for all of its letters."""
        known = self._shown_configs.get(stage)
        if known is None or known[0] is not config:
            written = dict(self._configs.get(stage, config))
            if stage in self._commands:
                command = list(self._commands[stage])
                written["worker"] = {**written.get("worker", {}), "command": command}
            known = config, self.secrets.concealed(written)
            self._shown_configs[stage] = known
        return known[1]

    def _dumped(self, letter: DeadLetter) -> str:
        if self._last_dumped[0] is not letter.config:
            self._last_dumped = letter.config, json.dumps(letter.config)
        return self._last_dumped[1]

    def _sync(self) -> None:
        for stage, file in list(self._files.items()):
            try:
                file.sync()
            except OSError as error:
                raise self._failure(stage, "", error) from error

    def _check_held(self) -> None:
        if self.fence and fence_of(self._state) != self.fence:
            raise StateUnusable(
                f"another run has taken over the state directory {self._state}: dead"
                " letters of this one are not kept there any more"
            )

    def _lacking(self, stage: str, found: int, size: int) -> StateUnusable:
        state = shlex.quote(str(self._state))
        return StateUnusable(
            f"{letter_file(self.folder, stage)}: has {counted(found, 'byte')}, expected"
            f" at least {size:,}, the dead letters that are on record of the run"
            f" {self.run}: restore the file, or let 'etlstage state reset {state}' forget"
            " the run, and begin from the beginning"
        )

    def _failure(self, stage: str, why: str, error: OSError) -> StageError:
        behind = f"; the message's own error: {why}" if why else ""
        said = (error.strerror or str(error)).lower()
        return StageError(
            f"stage {stage}: can't write dead letters to {self.folder}: {said}; make room,"
            f" or set another state{behind}",
            stage=stage,
        )

    def _concealed(self, attempts: tuple[Attempt, ...]) -> tuple[Attempt, ...]:
        if not self.secrets:
            return attempts
        conceal = self.secrets.conceal
        return tuple(
            attempt._replace(
                error=conceal(attempt.error),
                story=tuple(map(conceal, attempt.story)),
                stderr=tuple(map(conceal, attempt.stderr)),
            )
            for attempt in attempts
        )
