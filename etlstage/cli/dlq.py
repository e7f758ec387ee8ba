"""
``etlstage dlq``: a look at the messages that were put aside.

Letters are read from their files one at a time, however many there are. What is in
them came from outside: nothing of it reaches a terminal as it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import typer

from etlstage.cli.logs import harmless
from etlstage.cli.screen import Screen
from etlstage.config.build import state_folder
from etlstage.config.document import read
from etlstage.errors import ConfigError
from etlstage.pipeline.dead_letter import (
    FOLDER,
    SUFFIX,
    DeadLetter,
    Torn,
    letter_files,
    read_letters,
)

__all__ = ("list_letters", "show_letter")

SHOWN_BYTES: Final = 4096
"""Of a message, unless it is wanted raw."""
ROW: Final = "{:<14}  {:<19}  {:<12}  {:>9}  {:>5}  {}"


def list_letters(place: Path, *, stage: str | None, as_json: bool) -> int:
    """
    Print a line for each dead letter; return the exit code.

    Args:
        place: A pipeline file, its state directory, or a file of dead letters.
        stage: The only stage to look at, or None.
        as_json: Whether to print each as a JSON object.

    """
    out = Screen()
    count, width = 0, out.width if out.watched else None
    if not as_json:
        heads = ("id", "time (UTC)", "stage", "bytes", "tries", "error")
        _print(ROW.format(*heads), width)
    for letter in _letters(place):
        if stage is None or letter.stage == stage:
            count += 1
            if as_json:
                typer.echo(json.dumps(letter.to_dict()))
            else:
                _print(_row(letter), width)
    if not as_json:
        of = f" of stage {stage}" if stage is not None else ""
        _print(f"{count:,} dead letter{'s' * (count != 1)}{of}")
    return 0


def show_letter(place: Path, number: str, *, raw: bool, as_json: bool) -> int:
    """
    Print all there is of one letter; return the exit code.

    Args:
        place: As for :func:`list_letters`.
        number: Its id, or a beginning that no other has.
        raw: Whether to write the message alone, byte for byte.
        as_json: Whether to print it as a JSON object.

    Raises:
        ConfigError: If there is no such letter, or more than one.

    """
    letter = _found(place, number)
    if raw:
        sys.stdout.buffer.write(letter.message)
        sys.stdout.buffer.flush()
    elif as_json:
        typer.echo(json.dumps(letter.to_dict(), indent=2))
    else:
        for line in _description(letter):
            _print(line)
    return 0


def _files(place: Path) -> list[Path]:
    """Return the files with the letters that ``place`` stands for."""
    if place.suffix == SUFFIX and place.is_file():
        return [place]
    if place.is_dir():
        state = place.parent if place.name == FOLDER else place
    else:
        document = read(place)
        # The rest of the file may be wrong, or want variables that are not set here.
        ours = [
            p for p in document.problems if p.loc[:1] in ((), ("name",), ("state",))
        ]
        document.problems[:] = ours
        document.check()
        state = state_folder(document)
    files = letter_files(state)
    if not files:
        raise ConfigError(f"{place}: no dead letters in {state / FOLDER}")
    return files


def _letters(place: Path) -> Iterator[DeadLetter]:
    for path in _files(place):
        try:
            for letter in read_letters(path):
                if isinstance(letter, Torn):
                    typer.echo(
                        f"etlstage: warning: {harmless(str(path))}:{letter.line}:"
                        f" {letter.size} bytes are no dead letter, skipped: a run was"
                        " stopped while it wrote them",
                        err=True,
                    )
                else:
                    yield letter
        except OSError as error:
            said = (error.strerror or str(error)).lower()
            raise ConfigError(f"{path}: can't be read: {said}") from None


def _found(place: Path, number: str) -> DeadLetter:
    found: DeadLetter | None = None
    ids: list[str] = []
    for letter in _letters(place):
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


def _row(letter: DeadLetter) -> str:
    lines = letter.error.splitlines()
    return ROW.format(
        letter.id,
        letter.time[:19].replace("T", " "),
        letter.stage,
        f"{len(letter.message):,}",
        len(letter.attempts),
        lines[0] if lines else letter.kind,
    )


def _description(letter: DeadLetter) -> Iterator[str]:
    yield f"id        {letter.id}"
    yield f"time      {letter.time}"
    yield f"pipeline  {letter.pipeline}, run {letter.run}"
    yield f"stage     {letter.stage}, message {letter.place + 1:,} of its input"
    yield f"error     {letter.kind}: {_indented(letter.error)}"
    for number, attempt in enumerate(letter.attempts, 1):
        error = _indented(attempt.error)
        yield f"attempt   {number}: {attempt.worker} (pid {attempt.pid}): {error}"
        yield from (f"          story   {line}" for line in attempt.story)
        yield from (f"          stderr  {line}" for line in attempt.stderr)
    yield "config"
    for name, value in letter.config.items():
        yield f"          {name}: {json.dumps(value, ensure_ascii=False)}"
    size = len(letter.message)
    yield f"message   {size:,} byte{'s' * (size != 1)}"
    yield from (f"  {line}" for line in _shown(letter.message))


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
    text = harmless(line)
    typer.echo(text if width is None else text[:width])
