"""
What became of dead letters: they passed in a retry, were dropped, or failed once more.

Runs only ever append to the files of letters, and may do so at any time. What is decided
of a letter later stands beside them, in a file for each retry or drop: the ids of those
that are gone, the letters that failed again, with all of their attempts, and letters
that are new. Such a file is written aside and renamed: that it is there is the record.

A load that replaces its output leaves letters behind whose output is gone: to retry
them would add to the output what the load has added itself. It is recorded which run
was the last to replace it, and when; letters of others, from before, are superseded.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from etlstage.errors import StateUnusable
from etlstage.pipeline.dead_letter.file import (
    FOLDER,
    SUFFIX,
    Torn,
    letter_file,
    read_letters,
    stage_of_file,
)
from etlstage.pipeline.dead_letter.record import DeadLetter
from etlstage.pipeline.delivery.folder import make_ours, opened, reason, sync
from etlstage.pipeline.delivery.position import load, store

__all__ = ("SETTLED", "Became", "Replaced", "Settled", "settle", "supersede")

SETTLED: Final = "settled"
"""The folder of the records, in that of the letters."""
_RETRY: Final = "retry-"
_DROP: Final = "drop-"

_REPLACED: Final = "replaced.json"

Became: TypeAlias = Literal["passed", "dropped"]


class Replaced(NamedTuple):
    """The last replacement of the output."""

    run: str
    """What sets the run apart; its own letters count."""
    time: str
    """When it was: ISO 8601, UTC."""


class Settled:
    """
    The letters of a state directory, as they stand now.

    It does not see what is recorded later; letters that runs append it does.

    Args:
        folder: Where the files of the letters are.

    Raises:
        StateUnusable: If a record can't be read.

    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = sorted((folder / SETTLED).glob(f"*{SUFFIX}"))
        self._gone: dict[str, Became] = {}
        self._latest: dict[str, int] = {}
        self._stages: set[str] = set()
        self.replaced: Replaced | None = _replaced(folder)
        """Which run has replaced the output; None: none has."""
        for number in range(len(self._files)):
            for item in self._read(number):
                if isinstance(item, DeadLetter):
                    self._latest[item.id] = number
                    self._stages.add(item.stage)
                else:
                    self._gone[item[0]] = item[1]

    @property
    def stages(self) -> list[str]:
        """Names of the stages of which there is any file, or was any letter."""
        names = map(stage_of_file, self._folder.glob(f"*{SUFFIX}"))
        return sorted({*names, *self._stages})

    @property
    def next(self) -> int:
        """The number of the retry that is to come: one behind the last recorded."""
        names = [path.name for path in self._files if path.name.startswith(_RETRY)]
        return 1 + max(
            (int(name[len(_RETRY) : -len(SUFFIX)]) for name in names), default=0
        )

    def became(self, number: str) -> Became | None:
        """Return what became of a letter that is no more."""
        return self._gone.get(number)

    def superseded(self, letter: DeadLetter) -> bool:
        """Return whether the output that lacks the letter is replaced by another."""
        by = self.replaced
        return by is not None and letter.run != by.run and letter.time <= by.time

    def letters(self, stage: str) -> Iterator[DeadLetter | Torn]:
        """Yield the letters of a stage that are left, oldest first; blocks."""
        path = letter_file(self._folder, stage)
        for letter in read_letters(path) if path.exists() else ():
            if isinstance(letter, Torn) or not (
                letter.id in self._latest or letter.id in self._gone
            ):
                yield letter
        for number in range(len(self._files)):
            for item in self._read(number):
                if (
                    isinstance(item, DeadLetter)
                    and item.stage == stage
                    and self._latest[item.id] == number
                    and item.id not in self._gone
                ):
                    yield item

    def _read(self, number: int) -> Iterator[DeadLetter | tuple[str, Became]]:
        path = self._files[number]
        try:
            with path.open("rb") as file:
                for line in file:
                    plain = json.loads(line)
                    if "became" in plain:
                        yield plain["id"], plain["became"]
                    else:
                        yield DeadLetter.from_line(line)
        except OSError as error:
            raise StateUnusable(f"{path}: can't be read: {reason(error)}") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise StateUnusable(
                f"{path}: is damaged ({error}): what became of dead letters is not known"
            ) from error


def settle(
    state: Path,
    gone: Iterable[str],
    became: Became,
    *,
    letters: Iterable[DeadLetter] = (),
    number: int | None = None,
) -> None:
    """
    Record what became of letters, durably, all of it or nothing; blocks.

    Args:
        state: The state directory; it is ours, and there are letters in it.
        gone: The ids of letters that are no more.
        became: Why.
        letters: Those that failed again, by their ids, and new ones.
        number: Of the retry, if it was one.

    Raises:
        StateUnusable: If it can't be recorded.

    """
    folder = state / FOLDER / SETTLED
    name = _DROP + secrets.token_hex(8) if number is None else f"{_RETRY}{number:06}"
    path = folder / f"{name}{SUFFIX}"
    part = path.with_suffix(".new")
    try:
        make_ours(folder)
        part.unlink(missing_ok=True)  # of a retry that was killed
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
            f"can't record in {folder} what became of dead letters: {reason(error)}"
        ) from error


def supersede(state: Path, run: str, time: str) -> None:
    """
    Record that a run has replaced the output, durably; blocks.

    Args:
        state: The state directory; without letters in it there is nothing to record.
        run: What sets the run apart.
        time: When, as letters have it.

    Raises:
        StateUnusable: If it can't be recorded.

    """
    if not (state / FOLDER).exists():
        return
    path = state / FOLDER / SETTLED / _REPLACED
    try:
        make_ours(path.parent)
        store(path, Replaced(run, time)._asdict())
    except OSError as error:
        raise StateUnusable(
            f"can't record in {path} that the output was replaced: {reason(error)};"
            " make room, or set another state"
        ) from error


def _replaced(folder: Path) -> Replaced | None:
    path = folder / SETTLED / _REPLACED
    try:
        found = load(path)
        return Replaced(run=str(found["run"]), time=str(found["time"]))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateUnusable(f"{path}: can't be read: {reason(error)}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StateUnusable(
            f"{path}: is damaged ({error}): which letters are superseded is not known"
        ) from error
