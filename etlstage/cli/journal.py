"""``etlstage journal``: list, read, append to, verify and trim a set of journals."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from etlstage.cli.failure import complain, naming
from etlstage.cli.options import JsonLines, new_app
from etlstage.cli.signals import interruptible
from etlstage.cli.streams import check_stdin
from etlstage.errors import ConfigError
from etlstage.messages import counted
from etlstage.telemetry.terminal import harmless

if TYPE_CHECKING:
    from etlstage.journal import OffsetGone
    from etlstage.journal.journals import Journals
    from etlstage.journal.log import JournalLog
    from etlstage.journal.reader import Start
    from etlstage.sequencing import Checkpoint, Envelope, Publisher

__all__ = ("app",)

_POLL: Final = 0.05
"""Seconds between two checks for room."""

app: typer.Typer = new_app("journal")

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of a set of journals.")
]
Name = Annotated[
    str | None,
    typer.Option("--journal", metavar="NAME", help="Only this journal of the set."),
]


@app.command("ls")
def _ls(path: Folder, *, as_json: JsonLines = False) -> int:
    """List the journals of a set with their offsets and sizes."""
    with _opened(path) as journals:
        for spec in journals.select():
            log = journals.log(spec.name)
            row = {
                "journal": spec.name,
                "first": log.first(),
                "end": log.end(),
                "bytes": log.size(),
                "segments": len(log.segments()),
            }
            _show(row, as_json=as_json)
    return 0


@app.command("cat")
def _cat(
    path: Folder,
    *,
    journal: Name = None,
    uncommitted: Annotated[
        bool,
        typer.Option(
            "--uncommitted",
            help="Also print uncommitted messages, duplicates and acknowledgements.",
        ),
    ] = False,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="OFFSET|TIME",
            help="Begin at this offset, or with messages appended at or after a time,"
            " such as 2026-11-23T18:00:00Z.",
        ),
    ] = None,
    end: Annotated[
        int | None, typer.Option("--to", metavar="OFFSET", help="End at this offset.")
    ] = None,
    producer: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Only messages of this producer, in hex."),
    ] = None,
) -> int:
    """Print committed messages as JSON lines."""
    from etlstage.sequencing import producer_of

    if producer is not None and not re.fullmatch("[0-9a-f]{12}", producer):
        raise ConfigError(
            f"--producer is {producer!r}, expected 12 lower-case hexadecimal digits"
        )
    with _opened(path) as journals:
        names = _names(journals, journal)
        offsets = {name: _offset(journals.log(name), begin) for name in names}
        for envelope in (
            _all(journals, offsets) if uncommitted else _committed(journals, offsets)
        ):
            if envelope.journal not in names:
                continue
            if end is not None and envelope.end > end:
                continue
            if producer and producer_of(envelope.message.uuid).hex() != producer:
                continue
            typer.echo(json.dumps(_row(envelope)))
    return 0


@app.command("tail")
def _tail(path: Folder, *, journal: Name = None) -> int:
    """
    Print messages as they become committed, from now on.

    Of a transaction that is open now, only the messages appended from now on.
    """
    with _opened(path) as journals:
        names = _names(journals, journal)
        for envelope in _committed(journals, "end", follow=True):
            if envelope.journal in names:
                typer.echo(json.dumps(_row(envelope)))
    return 0


@app.command("append")
def _append(path: Folder, *, journal: Name = None) -> int:
    """
    Append lines of stdin as committed messages; a set of JSON needs JSON objects.

    At the set's limit it waits until readers have read more.
    """
    from etlstage.journal import Publisher, RunMessage
    from etlstage.pipeline.invalid import loaded
    from etlstage.sequencing import JsonMessage, random

    with _opened(path) as journals:
        kind = journals.new_message(journals.select()[0])
        runs = isinstance(kind, RunMessage)
        if not runs and not isinstance(kind, JsonMessage):
            raise ConfigError(
                f"{path}: can't append lines to a set of {journals.content_type},"
                " expected application/x-ndjson (JSON lines) or"
                " application/x-etlstage-run (runs); append to this set in Python, with"
                " etlstage.journal.Publisher"
            )
        check_stdin()
        mapping = random(journals.partitions)
        if journal is not None:
            _names(journals, journal)
            target = journal, journals.content_type
            mapping = lambda _: target  # noqa: E731 - as short as it can be
        publisher = Publisher(journals, mapping=mapping)
        with _publishing(publisher, path) as publish:
            for number, line in enumerate(sys.stdin.buffer, 1):
                if runs:
                    publish(RunMessage([line.removesuffix(b"\n")]))
                    continue
                try:
                    flaw = _flaw(value := loaded(line))
                except ValueError as error:
                    flaw = f"not JSON: {error}"
                except RecursionError:
                    flaw = "nested too deeply"
                if flaw is not None:
                    complain(f"line {number} is {flaw}")
                    return 1
                publish(value)
    return 0


@app.command("verify")
def _verify(path: Folder, *, as_json: JsonLines = False) -> int:
    """Read everything; count committed, pending, rolled back, duplicate, damaged."""
    from etlstage.journal.account import verify

    damaged = 0
    with _opened(path) as journals:
        for spec in journals.select():
            account = verify(journals, spec.name, _report)
            damaged += account.damaged
            _show(account.as_json(), as_json=as_json)
    return 1 if damaged else 0


@app.command("stat")
def _stat(path: Folder, *, as_json: JsonLines = False) -> int:
    """Show how far each reader lags behind, in bytes, messages and seconds."""
    from etlstage.journal.account import lags

    with _opened(path) as journals:
        for lag in lags(journals):
            row = lag._asdict() | {"seconds": round(lag.seconds, 3)}
            _show(row, as_json=as_json)
    return 0


@app.command("readers")
def _readers(
    path: Folder,
    *,
    forget: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Delete the position of this reader."),
    ] = None,
    as_json: JsonLines = False,
) -> int:
    """List named readers, and the offsets from which they need the journals."""
    with _opened(path) as journals:
        if forget is not None:
            with _named_by_user():
                journals.forget(forget)
            return 0
        for reader in journals.readers():
            row = {
                "reader": reader.name,
                "updated": _time_of(reader.updated),
                "needs": reader.needs,
            }
            _show(row, as_json=as_json)
    return 0


@app.command("trim")
def _trim(path: Folder) -> int:
    """Delete segments that no longer have to be kept."""
    with _opened(path) as journals:
        for name, count in journals.trim().items():
            typer.echo(f"{name}: dropped {counted(count, 'segment')}")
    return 0


def _opened(path: Path) -> Journals:
    from etlstage.journal import Journals

    with _named_by_user(), naming(path):
        return Journals.open(path, create=False)


@contextmanager
def _named_by_user() -> Iterator[None]:
    """Report journal errors as wrong usage: names come from the command line."""
    from etlstage.journal import JournalError

    try:
        yield
    except JournalError as error:
        raise ConfigError(str(error)) from None


@contextmanager
def _publishing(publisher: Publisher, path: Path) -> Iterator[Callable[[object], None]]:
    """
    Yield a function that publishes a line, once its readers are within the limit.

    If the block is interrupted or fails, report how many lines were appended.
    """
    from etlstage.journal import LimitReached
    from etlstage.sequencing import AppendUncertain

    # They differ while a line is appended.
    begun = appended = 0
    awaited = set()

    def publish(message: object) -> None:
        nonlocal begun, appended
        while True:
            begun = appended + 1
            try:
                publisher.publish_committed(message)
            except LimitReached as error:
                begun = appended
                if error.reader not in awaited:
                    awaited.add(error.reader)
                    text = f"waiting for reader {error.reader!r} of {path} (limit)"
                    complain(text, as_="warning")
                time.sleep(_POLL)
            else:
                appended = begun
                return

    try:
        with interruptible():
            yield publish
    except BaseException as error:
        text = f"{counted(appended, 'line')} appended"
        # After any other error of an append, nothing of it can be read.
        uncertain = isinstance(error, AppendUncertain | KeyboardInterrupt)
        if uncertain and begun > appended:
            text += f", and perhaps line {begun}"
        complain(text, as_="warning")
        raise


def _flaw(value: object) -> str | None:
    """Return why a JSON value can't be a message; None if it can."""
    from etlstage.pipeline.invalid import kind_of
    from etlstage.sequencing import encode_json

    if not isinstance(value, dict):
        return "not a JSON object"
    if not isinstance(meta := value.get("_meta", {}), dict):
        return (
            f"not a message: found {kind_of(meta)} at /_meta, expected an object, to"
            " which the UUID is added"
        )
    try:
        encode_json(value)
    except ValueError:  # a number such as 1e999, which was read as infinity
        most = f"{sys.float_info.max:.1e}"
        return (
            "not a message: found a number that is no 64-bit float, expected"
            f" -{most} to {most}"
        )
    return None


def _names(journals: Journals, journal: str | None) -> list[str]:
    """Return the name of the given journal, or those of all journals of the set."""
    if journal is None:
        return [spec.name for spec in journals.select()]
    with _named_by_user():
        journals.log(journal)
    return [journal]


def _committed(
    journals: Journals, start: Start, *, follow: bool = False
) -> Iterator[Envelope]:
    """Yield committed messages; report those dropped before they could be read."""
    from etlstage.journal import OffsetGone

    read = partial(journals.read_committed, follow=follow, on_error=_report)
    reader = read(start=start)
    while True:
        try:
            yield from reader
        except OffsetGone as error:
            _report(error)
            reader = read(position=_behind(reader.position(secured=False), error))
        else:
            return


def _behind(position: Checkpoint, gone: OffsetGone) -> Checkpoint:
    """Return the position to resume from, without transactions that began before it."""
    offset = max(position.offsets[gone.journal], gone.first)
    states = [
        state._replace(begin=-1)
        if state.journal == gone.journal and state.begin < gone.first
        else state
        for state in position.states
    ]
    offsets = {**position.offsets, gone.journal: offset}
    return position._replace(offsets=offsets, states=states)


def _all(journals: Journals, offsets: dict[str, int]) -> Iterator[Envelope]:
    from etlstage.journal import OffsetGone

    for name, begin in offsets.items():
        at = begin
        while True:
            try:
                for envelope in journals.read_uncommitted(name, at, on_error=_report):
                    yield envelope
                    at = envelope.end
                break
            except OffsetGone as error:
                _report(error)
                at = error.first


def _offset(log: JournalLog, begin: str | None) -> int:
    """Return the offset for a text, which is an offset or a time."""
    if begin is None:
        return log.first()
    try:
        if begin.isdecimal():
            return int(begin)
        moment = datetime.fromisoformat(begin).astimezone()
    except (ValueError, OverflowError):
        raise ConfigError(
            f"--from is {begin!r}, expected an offset, or a time such as"
            " 2026-11-23T18:00:00Z"
        ) from None
    return log.at_time(int(moment.timestamp() * 1e9))


def _report(error: Exception) -> None:
    from etlstage.journal.errors import located

    complain(located(error))


def _row(envelope: Envelope) -> dict[str, object]:
    from etlstage.sequencing import clock_of, flags_of, seconds_of

    message: Any = envelope.message
    uuid = message.uuid
    row: dict[str, object] = {
        "journal": envelope.journal,
        "begin": envelope.begin,
        "end": envelope.end,
        "uuid": str(uuid),
        "time": _time_of(seconds_of(clock_of(uuid))),
        "flags": str(flags_of(uuid)),
    }
    readings: dict[str, Callable[[Any], object]] = {
        "value": lambda value: value,
        "fields": lambda fields: fields[1:],
        "data": lambda data: data.decode(errors="backslashreplace"),
        "run": lambda run: [one.decode(errors="backslashreplace") for one in run],
    }
    for name, reading in readings.items():
        if hasattr(message, name):
            row["message"] = reading(getattr(message, name))
    return row


def _time_of(seconds: float) -> str | None:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat()
    except (ValueError, OverflowError):
        return None


def _show(row: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(row))
        return
    first, *rest = row.items()
    cells = [f"{name} {value}" for name, value in rest]
    typer.echo(harmless(f"{first[1]}: {', '.join(cells)}"))
