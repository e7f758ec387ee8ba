"""
Storage of dead letters on disk, until a user looks at them.

Secrets are removed before anything is written. On an executor, the letters of a task are
stored elsewhere and come back with its rows.

When a load replaces its output, letters of earlier runs refer to output that is gone:
retrying them would add messages that the load has already added itself. So the run that
last replaced the output is recorded, with the time; older letters of other loads are
superseded. So are the letters of a run that ended before it replaced the output,
because the output that exists lacks other messages. Letters that a run writes before it
replaces the output are marked as *pending*. The parts of a pipeline between durable
edges have loads of their own: the record names those whose messages are in the output.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import secrets
import shlex
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio.to_thread

from etlstage.errors import Attempt, StageError, StateUnusable, os_reason
from etlstage.messages import counted
from etlstage.pipeline.dead_letter.files import (
    FOLDER,
    LetterFile,
    cut,
    letter_file,
    letter_files,
    read_letters,
    size_of,
    stage_of_file,
)
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.delivery.delivery import unusable
from etlstage.pipeline.delivery.folder import make_inside, make_ours, opened
from etlstage.pipeline.delivery.position import load, store
from etlstage.pipeline.delivery.record import CommitRecord, fence_of
from etlstage.pipeline.secret import Secrets

__all__ = (
    "SETTLED",
    "DeadLetters",
    "Replaced",
    "make_settled",
    "replacement",
    "supersede",
)

SETTLED: Final = "settled"
"""The folder of the records about letters, in the folder of the letters."""
_REPLACED: Final = "replaced.json"


class Replaced(NamedTuple):
    """The last replacement of the output."""

    run: str
    """Identifies the run; its own letters are not superseded."""
    time: str
    """Time of the replacement: ISO 8601, UTC."""
    loads: tuple[str, ...] = ()
    """Names of the load, and of those of the parts in front of it."""


class DeadLetters:
    """
    Keeps the dead letters of one run.

    Args:
        state: The state directory; created, private to us, with the first letter.
        pipeline: Name of the pipeline.
        shown: The path to show users as the argument of ``etlstage dlq``; default:
            ``state``.
        run: Identifies this run's letters; default: a random number.
        commands: By stage name, the stage's command as the pipeline file has it.
        hidden: Texts that must not be stored, with the replacement of each.

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
        """Number of letters of this run."""
        self.pending: bool = False
        """Whether the run will replace the output but has not done so yet."""
        self.load: str = ""
        """The name of the run's load; empty: unknown."""
        self.before: Sequence[Path] = ()
        """The state directories of the parts before durable edges."""
        self.fence: int = 0
        """The run's fence, if it holds the state directory. Once another run has raised
        the fence, no letter is kept any more."""
        self._state = state
        self._shown = shown or str(state)
        self._commands = commands or {}
        self.secrets: Secrets = Secrets(hidden)
        """The texts that must not be shown, here or elsewhere."""
        self._numbered = 0
        self._taken_up = False  # whether an earlier start may have letters
        # The ids of letters that already exist, by stage, place and message.
        self._known: dict[tuple[str, int, bytes], str] = {}
        self._keep: Callable[[DeadLetter], Awaitable[None]] | None = None
        self._configs: Mapping[str, Mapping[str, Any]] = {}
        self._files: dict[str, LetterFile] = {}
        # By stage: the configuration as given, and as stored in letters.
        self._shown_configs: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
        self._last_dumped: tuple[Mapping[str, Any], str] = ({}, "{}")

    @property
    def folder(self) -> Path:
        """The folder of the letter files."""
        return self._state / FOLDER

    @property
    def look(self) -> str:
        """The command with which a user looks at the letters."""
        return f"etlstage dlq ls {shlex.quote(self._shown)}"

    def check(self) -> None:
        """
        Assert that letters may be stored in the state directory, if it exists.

        Raises:
            StateUnusable: If the folder is not ours, or there is a link in it.

        """
        try:
            with suppress(FileNotFoundError):  # a parent that is a file is not missing
                self._state.stat()
                make_ours(self._state)
            if self.folder.exists() or self.folder.is_symlink():
                make_inside(self.folder)
            for path in letter_files(self._state):
                with opened(path, os.O_RDONLY):
                    pass
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
        Return a new letter; it is stored by :meth:`keep`.

        Args:
            stage: Name of the stage that could not process the message.
            place: The message's place in the stage's input.
            message: The message.
            error: Why the stage could not process it.
            config: The stage, as plain JSON.
            time: When it was dead-lettered: ISO 8601, UTC.

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
            pending=self.pending,
            load=self.load,
        )

    async def keep(self, letters: Sequence[DeadLetter]) -> None:
        """
        Append letters of one stage; they are durable after :meth:`sync`.

        Raises:
            StageError: If the letters can't be written; then none of them is.

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
            letter: The letter; it gets a new id.
            place: Its message's place in the stage's whole input.

        Raises:
            StageError: If it can't be written.

        """
        number = self._id_of(letter.stage, place, letter.message)
        ours = replace(
            letter,
            id=number,
            run=self.run,
            place=place,
            pending=self.pending,
            load=self.load,
        )
        self._append([ours])
        self.count += 1

    def supersede(self, time: str, *, anew: bool = True) -> None:
        """
        Record that this run has replaced the output, superseding others' letters.

        Args:
            time: When, in the format of letters.
            anew: Whether to record it even if a replacement by this load is recorded.

        Raises:
            StateUnusable: If it can't be recorded, or another run has taken over.

        """
        if self._keep is None:
            self._check_held()
            known = None if anew else replacement(self.folder)
            if known is None or not (known.run == self.run or self.load in known.loads):
                ours = self._state, self.run, time, self.load, self.before
                # A later start of the load looks for it: there may be letters by then.
                supersede(*ours, always=bool(self.load))
        self.pending = False

    def recall(self) -> None:
        """Remember this run's stored letters, so that none is appended twice."""
        for path in letter_files(self._state):
            for letter in read_letters(path):
                if isinstance(letter, DeadLetter) and letter.run == self.run:
                    known = letter.stage, letter.place, letter.message
                    self._known[known] = letter.id
                    number = int(letter.id.rpartition("-")[2])
                    self._numbered = max(self._numbered, number)

    def size(self, stage: str) -> int:
        """Return the size in bytes of a stage's letters on disk, of all runs."""
        return size_of(self._state, stage)

    def sizes(self) -> dict[str, int]:
        """Return that size for each stage that has letters."""
        return {
            stage_of_file(path): path.stat().st_size
            for path in letter_files(self._state)
        }

    def resume(self, run: str, sizes: Mapping[str, int]) -> None:
        """
        Resume an interrupted run, without its letters after given sizes; blocks.

        Args:
            run: Identifies the run.
            sizes: For each stage, how many bytes of its letters to keep.

        Raises:
            StateUnusable: If its files can't be read or cut, or are shorter than
                ``sizes``, or another run has taken over.

        """
        self.run = run
        for stage, size in sizes.items():
            if (found := self.size(stage)) < size:
                raise self._lacking(stage, found, size)
        try:
            for path in letter_files(self._state):
                size = sizes.get(stage_of_file(path), 0)
                cut(path, size, self._check_held, self._is_own)
        except OSError as error:
            raise unusable(self._state, error) from error
        self.take_up(run)

    def _is_own(self, letter: DeadLetter) -> bool:
        """Return whether a letter is of this run, or of a batch of its load."""
        load, _, _ = letter.run.rpartition("-")
        return letter.run == self.run or bool(load and load == self.load)

    def take_up(self, run: str) -> None:
        """Become the store of an earlier run, and count its letters; blocks."""
        self.run = run
        self.recall()
        self.count, self._known = len(self._known), {}
        self._taken_up = True

    def of_run(self, run: str) -> DeadLetters:
        """Return a copy for another run, without letters."""
        other = copy.copy(self)
        other.run, other.count, other._numbered = run, 0, 0
        other._taken_up = False
        other._files, other._known, other._shown_configs = {}, {}, {}
        return other

    def kept_by(
        self,
        keep: Callable[[DeadLetter], Awaitable[None]],
        configs: Mapping[str, Mapping[str, Any]],
        known: Mapping[tuple[str, int, bytes], str] | None = None,
    ) -> DeadLetters:
        """
        Return a copy whose letters are passed to ``keep`` instead of written to files.

        Args:
            keep: Called with each letter.
            configs: By name, stages to show in letters instead of those that have run.
            known: Ids of messages that already have one, by stage, place and bytes.

        """
        other = copy.copy(self)
        other._known = dict(known or {})
        other._keep, other._configs, other._shown_configs = keep, configs, {}
        # In a Spark task the numbers of the open descriptors mean other files.
        other._files = {}
        return other

    async def sync(self) -> None:
        """Return when all letters are durable; raises like :meth:`keep`."""
        # A copy, as other stages may add files meanwhile, in threads.
        if any(file.dirty for file in list(self._files.values())):
            await anyio.to_thread.run_sync(self._sync)

    def letters(self) -> Iterator[DeadLetter]:
        """Yield the letters of this run, of all its starts, by stage; blocks."""
        files = {file.path: file.start for file in list(self._files.values())}
        if self._taken_up:
            files = dict.fromkeys(letter_files(self._state), 0)
        for path, start in files.items():
            for letter in read_letters(path, start=start):
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
        """Return the configuration to store of a stage, built once for its letters."""
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
                " letters of this run are no longer kept there"
            )

    def _lacking(self, stage: str, found: int, size: int) -> StateUnusable:
        state = shlex.quote(str(self._state))
        return StateUnusable(
            f"{letter_file(self.folder, stage)}: has {counted(found, 'byte')}, expected"
            f" at least {size:,}, as recorded for the dead letters of run {self.run}:"
            f" restore the file, or use 'etlstage state reset {state}' to forget the run"
            " and start from the beginning"
        )

    def _failure(self, stage: str, why: str, error: OSError) -> StageError:
        behind = f"; the message's own error: {why}" if why else ""
        why = os_reason(error)
        return StageError(
            f"stage {stage}: can't write dead letters to {self.folder}: {why}; make room,"
            f" or move the directory and set state to its new place{behind}",
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


def make_settled(state: Path) -> None:
    """Create the folder of the records about letters; raises OSError."""
    make_inside(state / FOLDER)
    make_inside(state / FOLDER / SETTLED)


def supersede(
    state: Path,
    run: str,
    time: str,
    load: str = "",
    before: Sequence[Path] = (),
    *,
    always: bool = False,
) -> None:
    """
    Record that a run has replaced the output, durably; blocks.

    Args:
        state: The state directory.
        run: Identifies the run.
        time: When, in the format of letters.
        load: Name of the load.
        before: The state directories of the parts before durable edges.
        always: Whether to record it even if no part has letters.

    Raises:
        StateUnusable: If it can't be recorded.

    """
    if not always and not any((part / FOLDER).exists() for part in (state, *before)):
        return
    path = state / FOLDER / SETTLED / _REPLACED
    loads = [load, *(CommitRecord.latest(part).load for part in before)]
    try:
        make_settled(state)
        store(path, Replaced(run, time, tuple(filter(None, loads)))._asdict())
    except OSError as error:
        raise StateUnusable(
            f"can't record in {path} that the output was replaced: {os_reason(error)};"
            " make room, or set another state"
        ) from error


def replacement(folder: Path) -> Replaced | None:
    """Return the last replacement of the output; raises StateUnusable if unreadable."""
    path = folder / SETTLED / _REPLACED
    try:
        found = load(path)
        run, time = str(found["run"]), str(found["time"])
        return Replaced(run, time, tuple(map(str, found.get("loads", ()))))
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # there can't be such a file
            return None
        raise StateUnusable(f"{path}: can't be read: {os_reason(error)}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StateUnusable(
            f"{path}: is damaged ({error}): which letters are superseded is not known"
        ) from error
