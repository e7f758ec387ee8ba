"""
The outcomes of dead letters: they pass in a retry, fail once more, or are dropped.

Runs only ever append to the letter files, and may do so at any time. What happens to a
letter later is recorded beside these, in one file for each retry or drop: the ids of
letters that are gone, the letters that failed again, with all of their attempts, and
new letters. Such a file is written under another name and renamed, so that its
existence is the record.

A retry runs letters once more, through their stage and on into the load. A chunk of the
letters of one stage is the source of a pipeline that begins with that stage. When all
its results are durable, one record stores the outcome of each letter. A retry that was
interrupted has no record, and leaves its letters as they were.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias, get_args

from etlstage.disk import sync
from etlstage.errors import StateUnusable, os_reason
from etlstage.messages import AnnotatedRun, Position, Run
from etlstage.pipeline.dead_letter.files import (
    FOLDER,
    SUFFIX,
    Torn,
    files_in,
    letter_file,
    read_letters,
    stage_of_file,
)
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.store import (
    SETTLED,
    Replaced,
    make_settled,
    replacement,
)
from etlstage.pipeline.delivery.folder import behind, opened
from etlstage.pipeline.delivery.holder import LOCK
from etlstage.pipeline.delivery.position import load, store
from etlstage.pipeline.interfaces import Source

__all__ = (
    "Became",
    "LetterSource",
    "Retry",
    "Settled",
    "UnderWay",
    "chunks",
    "record_noted",
    "settle",
)

_AT_ONCE: Final = 10_000  # maximum number of letters that one record covers
_BYTES: Final = 64 << 20  # maximum size of their messages, unless one is larger
_RUN: Final = 256  # messages
_RETRY: Final = "retry-"
_DROP: Final = "drop-"
_NUMBERED: Final = re.compile(f"{_RETRY}([0-9]+){re.escape(SUFFIX)}")


Became: TypeAlias = Literal["passed", "dropped"]


class UnderWay(NamedTuple):
    """A retry that has begun, and replaces what it loaded before it was killed."""

    number: int
    """Its number: while the next retry has the same, it is not recorded."""
    output: str
    """Where it loads, as in records."""
    time: str
    """When it last began: ISO 8601, UTC; empty in older records."""

    @staticmethod
    def path(state: Path) -> Path:
        """Return where a state directory has it."""
        return state / FOLDER / SETTLED / "retry.json"

    @classmethod
    def of(cls, state: Path) -> Self | None:
        """Return the last one of a state directory; raises StateUnusable."""
        path = cls.path(state)
        try:
            found = load(path)
            return cls(found["number"], str(found["output"]), found.get("time", ""))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise StateUnusable(f"can't use {path}: {error}") from error

    def store(self, state: Path) -> None:
        """Store it, durably; raises StateUnusable."""
        path = self.path(state)
        try:
            store(path, self._asdict())
        except OSError as error:
            raise StateUnusable(f"can't use {path}: {error}") from error


class Settled:
    """
    The current letters of a state directory, and of the parts after durable edges.

    Outcomes that are recorded later are not seen; letters that runs append are.

    Args:
        folder: The folder of the letter files.

    Raises:
        StateUnusable: If a record can't be read.

    """

    def __init__(self, folder: Path) -> None:
        self.state: Path = folder.parent
        """The state directory, without those of the parts after durable edges."""
        self._folders = [
            _real(self.state) / folder.name,
            *_letters_behind(self.state),
        ]
        # When a durable edge is added or removed, stages move to other parts: so the
        # outcome of a letter may be recorded in any part.
        every = _letters_of_whole(self.state) or self._folders
        self._files = [path for one in every for path in files_in(one / SETTLED)]
        self._gone: dict[str, Became] = {}
        # Retries are numbered in each part: between parts, attempts and time decide.
        self._latest: dict[str, tuple[int, str, int]] = {}
        self._stages: set[str] = set()
        self.replaced: Replaced | None = max(
            filter(None, map(replacement, every)),
            key=lambda one: one.time,
            default=None,
        )
        """The run that last replaced the output; None: no run has."""
        for number, path in enumerate(self._files):
            for item in _read(path):
                if not isinstance(item, DeadLetter):
                    self._gone[item[0]] = item[1]
                    continue
                rank = _rank(item, number)
                last = self._latest.get(item.id, rank)
                same = self._files[last[-1]].parent == path.parent
                self._latest[item.id] = rank if same else max(last, rank)
                if path.parent.parent in self._folders:
                    self._stages.add(item.stage)

    @property
    def stages(self) -> list[str]:
        """Names of the stages that have a letter file, or ever had a letter."""
        files = (path for one in self._folders for path in files_in(one))
        return sorted({*map(stage_of_file, files), *self._stages})

    @property
    def next(self) -> int:
        """The number of the next retry in this part: one more than the last recorded."""
        names = (path.name for path in files_in(self._folders[0] / SETTLED))
        retries = filter(None, map(_NUMBERED.fullmatch, names))
        return 1 + max((int(found[1]) for found in retries), default=0)

    @property
    def interrupted(self) -> bool:
        """Whether a retry in this part may have loaded letters, but is not recorded."""
        begun, by = UnderWay.of(self._folders[0].parent), self.replaced
        if begun is None or begun.number != self.next:
            return False
        return by is None or not begun.time or by.time < begun.time

    def became(self, number: str) -> Became | None:
        """Return the outcome of a letter that is gone; None: it is not."""
        return self._gone.get(number)

    def superseded(self, letter: DeadLetter) -> bool:
        """Return whether the letter's output was replaced since, or never written."""
        by = self.replaced
        if by is None:
            return letter.pending
        ours = letter.run == by.run or letter.load in by.loads
        return not ours and (letter.pending or letter.time <= by.time)

    @property
    def superseded_by(self) -> str:
        """Why letters are superseded, for humans."""
        by = f" by run {self.replaced.run}" if self.replaced is not None else ""
        return f"their output was overwritten{by}, or never written"

    def letters(self, stage: str) -> Iterator[DeadLetter | Torn]:
        """Yield a stage's remaining letters, oldest first; blocks."""
        for folder in self._folders:
            yield from self._letters_in(folder, stage)

    def _letters_in(self, folder: Path, stage: str) -> Iterator[DeadLetter | Torn]:
        path = letter_file(folder, stage)
        for letter in read_letters(path) if path.exists() else ():
            if isinstance(letter, Torn) or not (
                letter.id in self._latest or letter.id in self._gone
            ):
                yield letter
        for number, path in enumerate(self._files):
            for item in _read(path) if path.parent.parent == folder else ():
                if (
                    isinstance(item, DeadLetter)
                    and item.stage == stage
                    and self._latest[item.id] == _rank(item, number)
                    and item.id not in self._gone
                ):
                    yield item


def _letters_behind(state: Path) -> list[Path]:
    return [_real(at) / FOLDER for at in behind(state)]


def _letters_of_whole(state: Path) -> list[Path]:
    """Return all folders of letters of a pipeline, if ``state`` is after an edge."""
    # The path may be a link to an edge, and an edge a link to another place.
    for whole in (_real(state).parent, _real(state.parent)):
        parts = _letters_behind(whole)
        if _real(state) / FOLDER in parts and os.path.exists(whole / LOCK):
            return [whole / FOLDER, *parts]
    return []


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _rank(letter: DeadLetter, number: int) -> tuple[int, str, int]:
    return len(letter.attempts), letter.time, number


def _read(path: Path) -> Iterator[DeadLetter | tuple[str, Became]]:
    """Yield what a record has: letters, and the ids of those that are gone."""
    try:
        with path.open("rb") as file:
            for line in file:
                plain = json.loads(line)
                if "became" in plain:
                    yield _outcome(plain)
                else:
                    yield DeadLetter.from_line(line)
    except OSError as error:
        raise StateUnusable(f"{path}: can't be read: {os_reason(error)}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StateUnusable(
            f"{path}: is damaged ({error}): the outcomes of dead letters are not known"
        ) from error


def _outcome(plain: Mapping[str, Any]) -> tuple[str, Became]:
    id_, became = plain["id"], plain["became"]
    if not isinstance(id_, str) or became not in get_args(Became):
        raise ValueError(f"the letter {id_!r} became {became!r}")
    return id_, became


def settle(
    state: Path,
    gone: Iterable[str],
    became: Became,
    *,
    letters: Iterable[DeadLetter] = (),
    number: int | None = None,
) -> None:
    """
    Record the outcomes of letters, durably, all of them or none; blocks.

    Args:
        state: The state directory; it is ours, and has letters.
        gone: The ids of letters that are gone.
        became: Why they are gone.
        letters: Letters that failed again, with their old ids, and new ones.
        number: Number of the retry; None: the letters were dropped.

    Raises:
        StateUnusable: If the outcomes can't be recorded.

    """
    folder = state / FOLDER / SETTLED
    name = _DROP + secrets.token_hex(8) if number is None else f"{_RETRY}{number:06}"
    path = folder / f"{name}{SUFFIX}"
    part = path.with_suffix(".new")
    try:
        make_settled(state)
        part.unlink(missing_ok=True)  # left by a retry that was killed
        with opened(part, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
            for id_ in gone:
                file.write(json.dumps({"id": id_, "became": became}).encode() + b"\n")
            file.writelines(letter.to_line() for letter in letters)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync(folder)
    except OSError as error:
        raise StateUnusable(
            f"can't record the outcomes of dead letters in {folder}: {os_reason(error)}"
        ) from error


class LetterSource(Source):
    """
    Yields the messages of letters.

    Args:
        letters: The letters.
        name: Name of the stage in reports and errors.

    """

    def __init__(self, letters: Sequence[DeadLetter], *, name: str) -> None:
        super().__init__(name)
        self.given: int = 0
        """Number of messages passed on."""
        self._letters = letters
        self.size: int | None = len(self._letters)

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield runs of messages; there are no positions."""
        for at in range(0, len(self._letters), _RUN):
            run = [letter.message for letter in self._letters[at : at + _RUN]]
            self.given += len(run)
            # The keys went with the rows of the source: a common key keeps the order.
            yield AnnotatedRun(run, key=[0] * len(run))

    def drain(self) -> bool:
        """Allow immediate cancellation: letters not passed on stay as they are."""
        return False


class Retry:
    """
    One attempt at some letters of a stage.

    Args:
        letters: The letters.
        number: Number of the retry, see :class:`Settled`.

    """

    def __init__(self, letters: Sequence[DeadLetter], number: int) -> None:
        self.stage: str = letters[0].stage
        self.number: int = number
        self.source: LetterSource = LetterSource(
            letters, name=f"dead letters of {self.stage}"
        )
        self.again: list[DeadLetter] = []
        """Letters that failed again, with one more attempt."""
        self.new: list[DeadLetter] = []
        """Letters of results that a later stage could not process."""
        self._letters = letters

    @property
    def known(self) -> dict[tuple[str, int, bytes], str]:
        """The id of each letter, by its stage, place and message in this attempt."""
        places = enumerate(self._letters)
        return {(self.stage, at, x.message): x.id for at, x in places}

    async def keep(self, letter: DeadLetter) -> None:
        """Record a message that could not be processed."""
        if letter.stage != self.stage:
            self.new.append(letter)
            return
        old = self._letters[letter.place]
        self.again.append(
            replace(
                letter,
                id=old.id,
                run=old.run,
                load=old.load,
                place=old.place,
                attempts=old.attempts + letter.attempts,
            )
        )

    @property
    def passed(self) -> list[str]:
        """The ids of the letters that passed, once the pipeline has run to its end."""
        failed = {letter.id for letter in self.again}
        given = self._letters[: self.source.given]
        return [letter.id for letter in given if letter.id not in failed]

    def record(self, state: Path) -> None:
        """Record the outcomes of the letters; raises like :func:`settle`."""
        letters = [*self.again, *self.new]
        settle(state, self.passed, "passed", letters=letters, number=self.number)

    @property
    def note(self) -> str:
        """The outcomes of the letters, as a note for the sink to store."""
        letters = [letter.to_line().decode() for letter in (*self.again, *self.new)]
        return json.dumps([self.number, self.passed, letters])


def record_noted(state: Path, number: int, note: str) -> bool:
    """
    Record a retry that was killed before its record, from the note in its sink.

    Args:
        state: The state directory.
        number: Number of the next retry.
        note: The last note in the sink.

    Returns:
        Whether the note was of that retry, which is then recorded.

    Raises:
        StateUnusable: If the note can't be understood, or the outcomes not recorded.

    """
    try:
        noted, passed, lines = json.loads(note)
        letters = [DeadLetter.from_line(line.encode()) for line in lines]
    except (ValueError, TypeError, AttributeError) as error:
        raise StateUnusable(
            f"can't read the sink's note of the retry of dead letters ({error})"
        ) from error
    if noted != number:
        return False
    settle(state, passed, "passed", letters=letters, number=number)
    return True


def chunks(letters: Iterable[DeadLetter]) -> Iterator[list[DeadLetter]]:
    """Yield letters of one stage in lists of a bounded size."""
    chunk: list[DeadLetter] = []
    size = 0
    for letter in letters:
        size += len(letter.message)
        if chunk and (len(chunk) >= _AT_ONCE or size > _BYTES):
            yield chunk
            chunk, size = [], len(letter.message)
        chunk.append(letter)
    if chunk:
        yield chunk
