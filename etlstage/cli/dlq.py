"""
``etlstage dlq``: a look at the messages that were dead-lettered.

Letters are read from their files one at a time, however many there are. What is in
them came from outside: nothing of it reaches a terminal as it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import typer

from etlstage.cli.screen import Screen
from etlstage.config.build import state_folder
from etlstage.config.document import Document
from etlstage.config.reading import read
from etlstage.config.rules import stage_names
from etlstage.errors import ConfigError, guess
from etlstage.messages import counted
from etlstage.pipeline.dead_letter.file import (
    FOLDER,
    SUFFIX,
    Torn,
    letter_files,
    read_letters,
)
from etlstage.pipeline.dead_letter.record import DeadLetter, first_clause
from etlstage.pipeline.delivery.position import POSITIONS
from etlstage.protocol.registry import dialect_from_plain
from etlstage.telemetry.terminal import harmless

__all__ = ("list_letters", "show_letter")

SHOWN_BYTES: Final = 4096
"""Of a message, unless it is wanted raw."""
ROW: Final = "{:<14}  {:<19}  {:<12}  {:>9}  {:>5}  {}"
HEADS: Final = ("id", "time (UTC)", "stage", "bytes", "tries", "error")
NEEDED: Final = ("name", "extract", "load")
"""Keys without which a file is no pipeline."""


class Letters(NamedTuple):
    """Where letters are looked for."""

    files: list[Path]
    stages: list[str] | None = None
    """Names that a letter's stage may have; None if nobody knows them."""


def list_letters(place: Path, *, stage: str | None, as_json: bool) -> int:
    """
    Print a line for each dead letter; return the exit code.

    Args:
        place: A pipeline file, its state directory, or a file of dead letters.
        stage: The only stage to look at, or None.
        as_json: Whether to print each as a JSON object.

    Raises:
        ConfigError: If there is no such place, or the pipeline has no such stage.

    """
    out = Screen()
    count, width = 0, out.width if out.watched else None
    found = _found(place)
    if stage is not None and found.stages is not None:
        _check_stage(stage, found.stages)
    for letter in _letters(found):
        if stage is None or letter.stage == stage:
            if as_json:
                typer.echo(json.dumps(letter.to_dict()))
            else:
                if not count:
                    _print(ROW.format(*HEADS), width)
                _print(_row(letter), width)
            count += 1
    if not as_json:
        of = f" of stage {stage}" if stage is not None else ""
        _print((counted(count, "dead letter") if count else "no dead letters") + of)
    return 0


def show_letter(place: Path, number: str, *, raw: bool, as_json: bool) -> int:
    """
    Print all there is of one letter; return the exit code.

    Args:
        place: As for :func:`list_letters`.
        number: Its id, or a beginning that no other has.
        raw: Whether to write the message alone, as a worker reads it.
        as_json: Whether to print it as a JSON object.

    Raises:
        ConfigError: If there is no such letter, or more than one; if it is to be both
            raw and JSON.

    """
    if raw and as_json:
        raise ConfigError(
            "--raw can't be used together with --json; see 'etlstage dlq show --help'"
        )
    letter = _letter(place, number)
    if raw:
        sys.stdout.buffer.write(_as_read(letter))
        sys.stdout.buffer.flush()
    elif as_json:
        typer.echo(json.dumps(letter.to_dict(), indent=2))
    else:
        for line in _description(letter):
            _print(line)
    return 0


def _found(place: Path) -> Letters:
    """Return where the letters are that ``place`` stands for."""
    if place.suffix == SUFFIX and place.is_file():
        return Letters([place])
    if place.is_dir():
        return Letters(letter_files(_checked_state(place)))
    document = _pipeline(place)
    files = letter_files(state_folder(document))
    # A stage may have had another name when its letters were written.
    older = [unquote(path.name.removesuffix(SUFFIX)) for path in files]
    names = [name for _, name in stage_names(document.data)]
    return Letters(files, list(dict.fromkeys([*names, *older])))


def _pipeline(path: Path) -> Document:
    """Return a pipeline file of which little need be right."""
    document = read(path)
    # The rest may be wrong, or want variables that are not set here.
    ours = [p for p in document.problems if p.loc[:1] in ((), ("name",), ("state",))]
    document.problems[:] = ours
    document.check()
    missing = [key for key in NEEDED if key not in document.data]
    if missing:
        raise ConfigError(
            f"{path}: is not a pipeline: it has no key {' and no key '.join(missing)}"
        )
    return document


def _checked_state(folder: Path) -> Path:
    """Return the state directory that is ``folder``, or that holds it."""
    if folder.name == FOLDER:
        return folder.parent
    if (folder / FOLDER).is_dir() or any(folder.glob(POSITIONS)):
        return folder
    inside = folder / "pipeline.yaml"
    hint = f" (did you mean {inside}?)" if inside.is_file() else ""
    raise ConfigError(f"{folder}: is not the state directory of a pipeline{hint}")


def _check_stage(stage: str, known: list[str]) -> None:
    if stage not in known:
        raise ConfigError(
            f"there is no stage {stage!r}{guess(stage, known)},"
            f" the stages are {', '.join(known)}"
        )


def _letters(found: Letters) -> Iterator[DeadLetter]:
    for path in found.files:
        try:
            for letter in read_letters(path):
                if isinstance(letter, Torn):
                    typer.echo(
                        f"etlstage: warning: {harmless(str(path))}:{letter.line}:"
                        f" skipped a truncated record of {letter.size} bytes",
                        err=True,
                    )
                else:
                    yield letter
        except OSError as error:
            said = (error.strerror or str(error)).lower()
            raise ConfigError(f"{path}: can't be read: {said}") from None


def _letter(place: Path, number: str) -> DeadLetter:
    found: DeadLetter | None = None
    ids: list[str] = []
    for letter in _letters(_found(place)):
        if letter.id == number:
            return letter
        if number and letter.id.startswith(number):
            found = letter
            if len(ids) < 4:
                ids.append(letter.id)
    if found is None:
        raise ConfigError(
            f"there is no dead letter {number!r}; see 'etlstage dlq ls {place}'"
        )
    if len(ids) > 1:
        several = ", ".join(ids[:3]) + ("..." if len(ids) > 3 else "")
        raise ConfigError(f"several dead letters begin with {number!r}: {several}")
    return found


def _as_read(letter: DeadLetter) -> bytes:
    """Return what the stage's worker must read to answer the message."""
    dialect = letter.config.get("dialect")
    if dialect is None:
        return letter.message  # a load stage without workers
    return dialect_from_plain(dialect).raw([letter.message])


def _row(letter: DeadLetter) -> str:
    return ROW.format(
        letter.id,
        letter.time[:19].replace("T", " "),
        letter.stage,
        f"{len(letter.message):,}",
        len(letter.attempts),
        first_clause(letter.error) or letter.kind,
    )


def _description(letter: DeadLetter) -> Iterator[str]:
    yield f"id        {letter.id}"
    yield f"time      {letter.time}"
    yield f"pipeline  {letter.pipeline}, run {letter.run}"
    yield f"stage     {letter.stage}, message {letter.place + 1:,} of its input"
    yield f"error     {letter.kind}: {_indented(letter.error)}"
    size = len(letter.message)
    yield f"message   {counted(size, 'byte')}"
    yield from (f"  {line}" for line in _shown(letter.message))
    for number, attempt in enumerate(letter.attempts, 1):
        error = _indented(attempt.error)
        yield f"attempt   {number}: {attempt.worker} (pid {attempt.pid}): {error}"
        yield from (f"          stderr  {line}" for line in attempt.stderr)
        if number == len(letter.attempts):
            yield from (f"          story   {line}" for line in attempt.story)
    yield "config"
    for name, value in letter.config.items():
        yield f"          {name}: {json.dumps(value, ensure_ascii=False)}"


def _indented(text: str) -> str:
    return "\n          ".join(text.splitlines())


def _shown(message: bytes) -> Iterator[str]:
    """Yield the lines of a message if it is text, else a hex dump."""
    part = message[:SHOWN_BYTES]
    text = None
    with suppress(UnicodeDecodeError):
        # The cut may go through a character.
        text = message.decode() if len(message) <= SHOWN_BYTES else _cut(part)
    if text is not None and all(c.isprintable() or c in "\n\t" for c in text):
        yield from text.split("\n")
    else:
        for at in range(0, len(part), 16):
            row = part[at : at + 16]
            seen = "".join(chr(b) if 32 <= b < 127 else "." for b in row)
            yield f"{at:08x}  {row.hex(' '):<47}  {seen}"
    if len(message) > SHOWN_BYTES:
        rest = len(message) - SHOWN_BYTES
        yield f"... {rest:,} more bytes: --raw writes the whole message to stdout"


def _cut(part: bytes) -> str:
    for short in range(4):
        with suppress(UnicodeDecodeError):
            return part[: len(part) - short].decode()
    return part.decode()


def _print(line: Any, width: int | None = None) -> None:  # noqa: ANN401
    text = harmless(line, lines=True)
    typer.echo(text if width is None else text[:width])
