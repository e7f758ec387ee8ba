"""
Which dead letters a command is about, and where they are.

Letters are read from their files one at a time, however many there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from etlstage.cli.failure import complain
from etlstage.config.build import state_folder
from etlstage.config.document import Document
from etlstage.config.loader import readable_keys
from etlstage.config.reading import Changes, read
from etlstage.errors import ConfigError, StateUnusable, guess, os_reason
from etlstage.messages import counted
from etlstage.pipeline.dead_letter.files import FOLDER, SUFFIX, Torn, stage_of_file
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.retry import Settled
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.delivery.record import RECORDS
from etlstage.protocol.registry import dialect_from_plain
from etlstage.settings.definition import Unread
from etlstage.testing.dialect import kit_of

__all__ = (
    "Letters",
    "as_read",
    "check_ended",
    "chosen",
    "current",
    "find",
    "find_stored",
    "ids_of",
    "one_of",
)

NEEDED: Final = ("name", "extract", "load")
"""Keys without which a file is not a pipeline."""
VALID: Final = ("name", "state")
"""Keys that must be valid: they name the state directory."""


class Letters(NamedTuple):
    """Where letters are looked for."""

    place: Path
    """What was given to the command."""
    state: Path
    """The state directory."""
    settled: Settled
    only: str | None = None
    """The stage, if the place is its file of dead letters."""
    stages: list[str] | None = None
    """Names that a letter's stage may have; None if they are unknown."""


def find(place: Path, changes: Changes) -> Letters:
    """
    Return where the letters are that ``place`` refers to.

    Args:
        place: A pipeline file, its state directory, or a file of dead letters.
        changes: What is laid over the pipeline.

    Raises:
        ConfigError: If there is no such place, or changes are given without a pipeline
            file.
        StateUnusable: If the records of what became of letters can't be read.

    """
    letters = place.suffix == SUFFIX and os.path.isfile(place)
    if (letters or os.path.isdir(place)) and (changes.overlays or changes.values):
        raise ConfigError(f"--overlay and --set need a pipeline file, got {place}")
    if letters:
        folder = place.absolute().parent
        return Letters(place, folder.parent, Settled(folder), stage_of_file(place))
    if os.path.isdir(place):
        state = _checked_state(place)
        return Letters(place, state, Settled(state / FOLDER))
    document = _pipeline(place, changes)
    keys = readable_keys(document, VALID)
    state = state_folder(document)
    settled, stages = Settled(state / FOLDER), None
    with suppress(Unread):
        names = [stage.name for _, stage in keys.stages()]
        # A stage may have had another name when its letters were written.
        stages = list(dict.fromkeys([*names, *settled.stages]))
    return Letters(place, state, settled, stages=stages)


def find_stored(place: Path, changes: Changes) -> Letters:
    """
    Like :func:`find`, for commands that change what is stored.

    Raises:
        ConfigError: Also if ``place`` is an exported file, which has no state.

    """
    found = find(place, changes)
    if found.only is not None and place.absolute().parent.name != FOLDER:
        raise ConfigError(
            f"{place}: is an exported copy, as it is not in the folder {FOLDER} of a"
            " state directory: give the pipeline file, or its state directory"
        )
    return found


def chosen(found: Letters, stage: str | None) -> Iterator[DeadLetter]:
    """
    Yield the letters of a stage, or all; report truncated ones.

    Raises:
        ConfigError: If the pipeline has no such stage, or a file can't be read.

    """
    if stage is not None and found.stages is not None:
        _check_stage(stage, found.stages)
    wanted = [name for name in (found.only, stage) if name is not None]
    stages = found.settled.stages
    return _letters(found, [s for s in stages if all(s == name for name in wanted)])


def current(found: Letters, stage: str | None) -> Iterator[DeadLetter]:
    """Yield the letters that are not superseded; raises as :func:`chosen`."""
    return (x for x in chosen(found, stage) if not found.settled.superseded(x))


def ids_of(
    found: Letters, numbers: Sequence[str], stage: str | None
) -> set[str] | None:
    """
    Return the ids of the chosen letters; None for all.

    Args:
        found: Where to look.
        numbers: Their ids, or unambiguous beginnings of ids; empty: all.
        stage: The only stage to look at, or None.

    Raises:
        ConfigError: If an id stands for no letter or for several.

    """
    if not numbers:
        return None
    return {one_of(found, number, stage).id for number in numbers}


def one_of(found: Letters, number: str, stage: str | None = None) -> DeadLetter:
    """Return a letter by its id, or the beginning of it; raises as :func:`ids_of`."""
    letter: DeadLetter | None = None
    ids: list[str] = []
    for other in chosen(found, stage):
        if other.id == number:
            return other
        if number and other.id.startswith(number):
            letter = other
            if len(ids) < 4:
                ids.append(other.id)
    if letter is None:
        became = found.settled.became(number)
        if became is not None:
            gone = {"passed": "has passed in a retry", "dropped": "was dropped"}
            raise ConfigError(f"dead letter {number!r} {gone[became]}")
        of = f" of stage {stage}" if stage is not None else ""
        raise ConfigError(
            f"there is no dead letter {number!r}{of}; see 'etlstage dlq ls"
            f" {found.place}'"
        )
    if len(ids) > 1:
        several = ", ".join(ids[:3]) + ("..." if len(ids) > 3 else "")
        raise ConfigError(
            f"the ids of several dead letters begin with {number!r}: {several}"
        )
    return letter


def check_ended(delivery: Delivery) -> None:
    """
    Check that no interrupted run will resume and write its last letters again.

    Raises:
        StateUnusable: If a run was interrupted.

    """
    record = delivery.record
    if record.whole and not record.ended:
        raise StateUnusable(
            f"the run {record.run} that uses {delivery.folder} was interrupted: complete"
            " it first, as it writes its last dead letters again"
        )


def as_read(letter: DeadLetter) -> bytes:
    """Return the bytes that the stage's worker reads for the message."""
    dialect = letter.config.get("dialect")
    if dialect is None:
        return letter.message  # a load stage without workers
    return kit_of(dialect_from_plain(dialect)).raw([letter.message])


def _check_stage(stage: str, known: Sequence[str]) -> None:
    if stage not in known:
        raise ConfigError(
            f"there is no stage {stage!r}{guess(stage, known)},"
            f" the stages are {', '.join(known)}"
        )


def _pipeline(path: Path, changes: Changes) -> Document:
    """Return a pipeline file, of which only a few keys need be valid."""
    document = read(path, changes)
    # The rest may be wrong, or need variables that are not set here.
    ours = [p for p in document.problems if not p.loc or p.loc[0] in VALID]
    document.problems[:] = ours
    document.check()
    missing = [key for key in NEEDED if key not in document.data]
    if missing:
        raise ConfigError(
            f"{path}: is not a pipeline: it has no key {' and no key '.join(missing)}"
        )
    return document


def _checked_state(folder: Path) -> Path:
    """Return the state directory: ``folder``, or the one that contains it."""
    if folder.name == FOLDER:
        return folder.absolute().parent
    if (folder / FOLDER).is_dir() or any(folder.glob(RECORDS)):
        return folder
    inside = folder / "pipeline.yaml"
    hint = f" (did you mean {inside}?)" if inside.is_file() else ""
    raise ConfigError(f"{folder}: is not the state directory of a pipeline{hint}")


def _letters(found: Letters, stages: Sequence[str]) -> Iterator[DeadLetter]:
    for stage in stages:
        try:
            for letter in found.settled.letters(stage):
                if isinstance(letter, Torn):
                    size = counted(letter.size, "byte")
                    text = f"{letter.path}:{letter.line}: skipped a truncated record of"
                    complain(f"{text} {size}", as_="warning")
                else:
                    yield letter
        except OSError as error:
            path = error.filename or found.state
            raise ConfigError(f"{path}: can't be read: {os_reason(error)}") from None
