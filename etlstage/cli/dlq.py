"""
``etlstage dlq``: list, show, retry, drop and export dead letters.

Letters are read from their files one at a time, however many there are. Their contents
came from outside: they reach a terminal unescaped only with ``--raw``.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from etlstage.cli.letters import (
    Letters,
    as_read,
    check_ended,
    chosen,
    current,
    find,
    find_stored,
    ids_of,
    one_of,
)
from etlstage.cli.options import Json, JsonLines, Overlays, Values, changes_of, new_app
from etlstage.cli.retry import Ids, OfStage, retry
from etlstage.cli.screen import Screen, confirm
from etlstage.errors import ConfigError, StateUnusable, os_reason
from etlstage.messages import StageKind, counted
from etlstage.pipeline.dead_letter.files import FOLDER
from etlstage.pipeline.dead_letter.letter import (
    Causes,
    DeadLetter,
    LetterGroup,
    first_clause,
)
from etlstage.pipeline.dead_letter.policy import config_of
from etlstage.pipeline.dead_letter.retry import Settled, UnderWay, settle
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.delivery.folder import behind
from etlstage.protocol.registry import DEFAULT, dialect_class
from etlstage.settings.problem import Invalid
from etlstage.stage import Stage, WorkerProgram
from etlstage.telemetry.terminal import harmless

__all__ = ("app", "drop_letters", "list_letters", "show_letter")

SHOWN_BYTES: Final = 4096
"""Maximum number of bytes of a message that are shown without ``--raw``."""
ROW: Final = "{:<13}  {:<19}  {:<{wide}}  "
GROUP: Final = "{:>7}  {:<{wide}}  {:<19}  {:<19}  {}"
GROUP_HEADS: Final = ("count", "stage", "first (UTC)", "last (UTC)", "example")
LINES: Final = 3
"""Maximum number of lines for an error on a terminal."""
LEAST: Final = 20
"""Minimum number of columns for an error, however narrow a terminal is."""
WIDEST: Final = 12
"""Maximum width of the column for stages; longer names stick out."""

app: typer.Typer = new_app("dlq")

Place = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="Pipeline file, its state directory, or a file of dead letters.",
    ),
]


app.command("retry")(retry)


@app.command("ls")
def list_letters(
    place: Place,
    *,
    overlays: Overlays = None,
    values: Values = None,
    stage: OfStage = None,
    group: Annotated[
        bool,
        typer.Option(
            "--group", help="Print one row per cause, with the number of letters."
        ),
    ] = False,
    as_json: JsonLines = False,
) -> int:
    """List dead letters, one per line."""
    found = find(place, changes_of(overlays, values))
    if group:
        return _list_groups(found, stage, as_json=as_json)
    if as_json:
        for letter in chosen(found, stage):
            old = found.settled.superseded(letter)
            typer.echo(json.dumps({**letter.to_dict(), "superseded": old}))
        return 0
    superseded, some = found.settled.superseded, False

    def left() -> Iterator[DeadLetter]:
        nonlocal some
        for letter in chosen(found, stage):
            if superseded(letter):
                some = True
            else:
                yield letter

    _print(_total(_rows(found, left()), stage))
    if some:
        _print(
            f"\nsuperseded: {found.settled.superseded_by};"
            " 'etlstage dlq retry' skips them"
        )
        count = _rows(found, filter(superseded, chosen(found, stage)))
        _print(f"{counted(count, 'dead letter')} superseded")
    return 0


def _rows(found: Letters, letters: Iterable[DeadLetter]) -> int:
    """Print a line for each letter, and return how many there are."""
    count, wide, width = 0, 0, _width()
    for letter in letters:
        count += 1
        if count == 1:
            wide = _widest(found)
            _print(ROW.format("id", "time (UTC)", "stage", wide=wide) + "error")
        front = ROW.format(letter.id, _time(letter.time), letter.stage, wide=wide)
        why = first_clause(letter.error) or letter.kind
        lines = _wrapped(why, " " * len(front), width)
        _print("\n".join([front + lines[0].lstrip(), *lines[1:]]))
    return count


def _list_groups(found: Letters, stage: str | None, *, as_json: bool) -> int:
    """Print dead letters by their causes, the most frequent first."""
    causes = Causes()
    for letter in current(found, stage):
        causes.add(letter)
    groups = causes.groups()
    if as_json:
        for group in groups:
            typer.echo(json.dumps(asdict(group)))
        return 0
    for line in _table(groups, _widest(found)):
        _print(line)
    count = sum(group.count for group in groups)
    causes_of = f", {counted(len(groups), 'cause')}" if groups else ""
    _print(_total(count, stage) + causes_of)
    return 0


@app.command("show")
def show_letter(
    place: Place,
    number: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="Id of the dead letter, or the beginning of it."
        ),
    ],
    *,
    overlays: Overlays = None,
    values: Values = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Write only the message, byte for byte, as the worker reads it:"
            " followed by EOM, and by EOB if the supervisor closes batches.",
        ),
    ] = False,
    as_json: Json = False,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", "-y", help="Do not ask before --raw writes to a terminal."
        ),
    ] = False,
) -> int:
    """Show one dead letter: its message, error, attempts and stage."""
    if raw and as_json:
        raise ConfigError(
            "--raw can't be used together with --json; see 'etlstage dlq show --help'"
        )
    letter = one_of(find(place, changes_of(overlays, values)), number)
    if raw:
        if sys.stdout.isatty() and not yes:
            size = counted(len(letter.message), "byte")
            confirm(
                f"write {size} to this terminal unescaped, though they may control it?",
                otherwise="nothing was written",
            )
        sys.stdout.buffer.write(as_read(letter))
        sys.stdout.buffer.flush()
    elif as_json:
        typer.echo(json.dumps(letter.to_dict(), indent=2))
    else:
        for line in _description(letter):
            _print(line)
    return 0


@app.command("drop")
def drop_letters(
    place: Place,
    numbers: Ids = None,
    *,
    overlays: Overlays = None,
    values: Values = None,
    stage: OfStage = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask before dropping all.")
    ] = False,
) -> int:
    """Mark dead letters as dropped: they are no longer listed or retried."""
    changes = changes_of(overlays, values)
    state = find_stored(place, changes).state
    if not os.path.exists(state):
        typer.echo("no dead letters")
        return 0
    with ExitStack() as stack:
        for at in (state, *behind(state)):
            check_ended(stack.enter_context(Delivery(at)))
            _check_retried(at)
        found = find(place, changes)
        ids = ids_of(found, numbers or (), stage)
        if ids is None:
            ids = {letter.id for letter in chosen(found, stage)}
        many = counted(len(ids), "dead letter")
        if not ids:
            typer.echo("no dead letters")
            return 0
        if not numbers and not yes:
            confirm(f"drop {many} of {harmless(str(place))}?")
        settle(state, sorted(ids), "dropped")
    typer.echo(f"{many} dropped")
    return 0


def _check_retried(state: Path) -> None:
    """Raise StateUnusable if letters may be loaded that count as not loaded."""
    if Settled(state / FOLDER).interrupted:
        raise StateUnusable(
            f"a retry of the dead letters in {state} was interrupted, and may have loaded"
            " some of them: complete it first with 'etlstage dlq retry', which replaces"
            f" what it has loaded, or if it can't be completed, remove"
            f" {UnderWay.path(state)}"
        )


@app.command("export")
def _export(
    place: Place,
    numbers: Ids = None,
    *,
    to: Annotated[
        Path, typer.Option("--to", metavar="PATH", help="New file to write.")
    ],
    overlays: Overlays = None,
    values: Values = None,
    stage: OfStage = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Write only the messages, as their workers read them."
        ),
    ] = False,
) -> int:
    """Write dead letters to a file: one JSON object per line, or raw messages."""
    found = find(place, changes_of(overlays, values))
    ids = ids_of(found, numbers or (), stage)
    count = 0
    try:
        # Messages may be confidential: only the user may read the file.
        with open(to, "xb", opener=_ours) as file:
            for letter in chosen(found, stage):
                if ids is None or letter.id in ids:
                    line = f"{json.dumps(letter.to_dict())}\n"
                    file.write(as_read(letter) if raw else line.encode())
                    count += 1
    except FileExistsError:
        raise ConfigError(f"{to} exists already") from None
    except OSError as error:
        raise ConfigError(f"{to}: can't be written: {os_reason(error)}") from None
    typer.echo(f"{counted(count, 'dead letter')} written to {harmless(str(to))}")
    return 0


def _ours(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _widest(found: Letters) -> int:
    """Return how wide the column of the stages is."""
    return min(max(map(len, ["stage", *found.settled.stages])), WIDEST)


def _time(time: str) -> str:
    return time[:19].replace("T", " ")


def _total(count: int, stage: str | None) -> str:
    of = f" of stage {stage}" if stage is not None else ""
    return (counted(count, "dead letter") if count else "no dead letters") + of


def _table(groups: Iterable[LetterGroup], wide: int) -> Iterator[str]:
    """Yield a row for each group, and its cause below."""
    heads = GROUP.format(*GROUP_HEADS, wide=wide)
    for number, group in enumerate(groups):
        if not number:
            yield heads
        times = _time(group.first), _time(group.last)
        yield GROUP.format(
            f"{group.count:,}", group.stage, *times, group.example, wide=wide
        )
        yield from _wrapped(group.cause, " " * 9, _width())


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
    yield "config, where it differs from the defaults"
    for name, value in _changed(letter.config).items():
        yield f"          {name}: {json.dumps(value, ensure_ascii=False)}"


_OF_RETRIES: Final = {"count": None, "share": None}
"""The error budget that a retry sets."""


def _changed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stage's non-default settings, and those that identify it."""
    try:
        kind, name = StageKind(config["kind"]), config["dialect"]["name"]
        stage = Stage(
            name=config["name"],
            kind=kind,
            worker=WorkerProgram(command=tuple(config["worker"]["command"])),
            dialect=dialect_class(name).section(kind).read({}),
        )
    except (ConfigError, Invalid, KeyError, TypeError, ValueError):
        return dict(config)  # of a stage that this version of etlstage can't make
    usual = config_of(stage)
    if config.get("on_error", usual["on_error"]).get("budget") == _OF_RETRIES:
        usual["on_error"]["budget"] = _OF_RETRIES
    found = _difference(config, usual)
    return found if name == DEFAULT else {"dialect": {"name": name}} | found


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in one.items():
        usual = other.get(name)
        if isinstance(value, Mapping) and isinstance(usual, Mapping):
            inner = _difference(value, usual)
            if inner.keys() - {"name"}:
                found[name] = inner
        elif value != usual or name in ("name", "command"):
            found[name] = value
    return found


def _indented(text: str) -> str:
    return "\n          ".join(text.splitlines())


def _shown(message: bytes) -> Iterator[str]:
    """Yield the lines of a message if it is text, else a hex dump."""
    part = message[:SHOWN_BYTES]
    text = None
    with suppress(UnicodeDecodeError):
        # The cut may split a character.
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


def _width() -> int | None:
    """Return how wide the terminal is, if there is one."""
    out = Screen()
    return out.width if out.watched else None


def _wrapped(text: str, margin: str, width: int | None) -> list[str]:
    """Return the lines of a text with a margin, wrapped and cut if there is a width."""
    text = harmless(text)
    if width is None:
        return [margin + text]
    room = max(width - len(margin), LEAST)
    lines = textwrap.wrap(text, room, max_lines=LINES, placeholder=" ...")
    return [margin + line for line in lines]


def _print(line: str) -> None:
    typer.echo(harmless(line, lines=True))
