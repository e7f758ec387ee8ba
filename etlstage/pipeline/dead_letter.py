"""
Messages that a stage could not process, kept on disk until somebody looks at them.

Each stage has one append-only file in the state directory, shared by all runs; a
line is one letter, as JSON. A crash in the middle of an append leaves a torn line:
later letters go on behind it, and who reads is told of it.

A letter holds what it takes to run its message again, and no secrets: of a worker's
environment it has the names, and what a pipeline file interpolated stands there as
it was written.
"""

from __future__ import annotations

import base64
import copy
import fcntl
import json
import os
import re
import secrets
import shlex
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import anyio.to_thread

from etlstage.errors import Attempt, StageError

__all__ = (
    "FOLDER",
    "SUFFIX",
    "DeadLetter",
    "DeadLetters",
    "Torn",
    "first_clause",
    "letter_files",
    "read_letters",
)

FOLDER: Final = "dead_letters"
"""Where the files are, in the state directory."""
SUFFIX: Final = ".jsonl"

SECRET: Final = 4
"""Shorter texts are no secrets, and stand in too many others."""

WHO: Final = re.compile(r"stage [^:;]+: worker [^:;]+ \(pid \d+\) ")
"""How errors begin that say what became of a worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter:
    """One message that could not be processed, and why."""

    id: str
    """Unique over all runs; the number of the run, and of the letter in it."""
    time: str
    """When it was put aside: ISO 8601, UTC."""
    pipeline: str
    run: str
    stage: str
    place: int
    """Of the message in the stage's input, counted from 0."""
    message: bytes
    error: str
    kind: str
    """Class of the error."""
    attempts: tuple[Attempt, ...]
    """The workers that were lost with the message, oldest first."""
    config: Mapping[str, Any]
    """The stage, as plain JSON; of its environment the names."""

    def to_dict(self) -> dict[str, Any]:
        """Return the letter as plain JSON, its message in base64."""
        plain = asdict(self)
        plain["message"] = base64.b64encode(self.message).decode()
        plain["attempts"] = [attempt._asdict() for attempt in self.attempts]
        return plain

    @classmethod
    def from_line(cls, line: bytes) -> DeadLetter:
        """Return the letter of a line; raises ValueError if it is none."""
        try:
            plain = json.loads(line)
            plain["message"] = base64.b64decode(plain["message"], validate=True)
            plain["attempts"] = tuple(map(_attempt, plain["attempts"]))
            return cls(**{field.name: plain[field.name] for field in fields(cls)})
        except (TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"not a dead letter: {error}") from error


def _attempt(plain: Mapping[str, Any]) -> Attempt:
    sides = {name: tuple(plain[name]) for name in ("story", "stderr")}
    return Attempt(**{**plain, **sides})


class Torn(NamedTuple):
    """A line that is no letter: a run was stopped, or ran out of space, in it."""

    path: Path
    line: int
    """Counted from 1."""
    size: int
    """Bytes."""


class DeadLetters:
    """
    Puts the messages of one run aside.

    Args:
        state: The state directory; made, for us alone, when something is put aside.
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
        texts = {t: to for t, to in (hidden or {}).items() if len(t) >= SECRET}
        # As errors show commands: quoted for a shell.
        texts |= {shlex.quote(t).strip("'"): to for t, to in texts.items()}
        # The longest first: one may hold another.
        self._hidden = sorted(texts.items(), key=lambda pair: -len(pair[0]))
        self._numbered = 0
        # Of those that were there before, the ids.
        self._known: dict[tuple[str, int, bytes], str] = {}
        self._keep: Callable[[DeadLetter], Awaitable[None]] | None = None
        self._configs: Mapping[str, Mapping[str, Any]] = {}
        self._files: dict[str, _File] = {}

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
            error=self.conceal(str(error)),
            kind=type(error).__name__,
            attempts=tuple(map(self._attempt, getattr(error, "attempts", ()))),
            config=self._concealed({**self._configs.get(stage, config), **written}),
        )
        await (self._keep or self._to_file)(letter)
        self.count += 1
        return letter

    async def adopt(self, letter: DeadLetter, *, place: int) -> None:
        """
        Append a letter that was written elsewhere in this run; raises as :meth:`put`.

        Args:
            letter: The letter; it gets another id.
            place: Of its message in the stage's whole input.

        """
        number = self._id_of(letter.stage, place, letter.message)
        letter = replace(letter, id=number, run=self.run, place=place)
        await (self._keep or self._to_file)(letter)
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
        """Return the same for another run, with none put aside yet."""
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

    def conceal(self, text: str) -> str:
        """Return ``text`` with references in place of what is to be hidden."""
        for value, reference in self._hidden:
            text = text.replace(value, reference)
        return text

    def _id_of(self, stage: str, place: int, message: bytes) -> str:
        if known := self._known.get((stage, place, message)):
            return known
        self._numbered += 1
        return f"{self.run}-{self._numbered}"

    async def _to_file(self, letter: DeadLetter) -> None:
        if (letter.stage, letter.place, letter.message) in self._known:
            return
        await anyio.to_thread.run_sync(self._append, letter)

    def _append(self, letter: DeadLetter) -> None:
        stage = letter.stage
        try:
            if stage not in self._files:
                self._files[stage] = _File(_folder(self._state), stage)
            self._files[stage].append(json.dumps(letter.to_dict()).encode() + b"\n")
        except OSError as error:
            raise self._failure(stage, letter.error, error) from error

    def _sync(self) -> None:
        for stage, file in list(self._files.items()):
            try:
                file.sync()
            except OSError as error:
                raise self._failure(stage, "", error) from error

    def _failure(self, stage: str, why: str, error: OSError) -> StageError:
        behind = f"; what was to be put aside: {why}" if why else ""
        said = (error.strerror or str(error)).lower()
        return StageError(
            f"stage {stage}: can't write dead letters to {self._state / FOLDER}:"
            f" {said}{behind}",
            stage=stage,
        )

    def _attempt(self, attempt: Attempt) -> Attempt:
        return attempt._replace(
            error=self.conceal(attempt.error),
            story=tuple(map(self.conceal, attempt.story)),
            stderr=tuple(map(self.conceal, attempt.stderr)),
        )

    def _concealed(self, plain: Any) -> Any:  # noqa: ANN401 - any JSON
        if isinstance(plain, str):
            return self.conceal(plain)
        if isinstance(plain, Mapping):
            return {name: self._concealed(value) for name, value in plain.items()}
        if isinstance(plain, list | tuple):
            return [self._concealed(value) for value in plain]
        return plain


class _File:
    """The letters of one stage, open for appending."""

    def __init__(self, folder: Path, stage: str) -> None:
        self.path = folder / f"{quote(stage, safe=' ')}{SUFFIX}"
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o600)
        self.start = os.fstat(self._fd).st_size
        """Where the letters of this run begin, at the earliest."""
        self.dirty = False
        """Whether there is anything that may not be durable."""
        _sync_folders(folder)

    def append(self, line: bytes) -> None:
        # Other runs may append to the same file, now.
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            size = os.fstat(self._fd).st_size
            torn = size and os.pread(self._fd, 1, size - 1) != b"\n"
            rest = memoryview(b"\n" + line if torn else line)
            self.dirty = True
            try:
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._fd, size)
                raise
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def sync(self) -> None:
        if self.dirty:
            self.dirty = False
            try:
                os.fsync(self._fd)
            except OSError:
                self.dirty = True
                raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def first_clause(error: str) -> str:
    """Return what an error says up to the first ``; ``, without which worker it was."""
    who = WHO.match(error)
    lines = error[who.end() if who else 0 :].splitlines()
    return lines[0].split("; ", 1)[0] if lines else ""


def letter_files(state: Path) -> list[Path]:
    """Return the files in a state directory, in the order of the stages' names."""
    return sorted((state / FOLDER).glob(f"*{SUFFIX}"))


def read_letters(path: Path, *, start: int = 0) -> Iterator[DeadLetter | Torn]:
    """
    Yield the letters of a file, oldest first, one in memory at a time; blocks.

    Args:
        path: The file.
        start: Where to begin, in bytes.

    """
    with path.open("rb") as file:
        file.seek(start)
        for number, line in enumerate(file, 1):
            if line == b"\n":
                continue
            try:
                yield DeadLetter.from_line(line)
            except ValueError:
                yield Torn(path, number, len(line))


def _folder(state: Path) -> Path:
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = state / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _sync_folders(folder: Path) -> None:
    """Make a new file's name durable, and those of the folders that were made."""
    for path in (folder, folder.parent, folder.parent.parent):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
