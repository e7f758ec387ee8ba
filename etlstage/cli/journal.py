"""``etlstage journal``: what is in the journals of a folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from etlstage.cli.failure import complain
from etlstage.telemetry.terminal import harmless

if TYPE_CHECKING:
    from pathlib import Path

    from etlstage.journal.journals import Journals
    from etlstage.sequencing import Envelope

__all__ = (
    "append_lines",
    "list_journals",
    "print_messages",
    "print_readers",
    "print_stat",
    "trim_set",
    "verify_set",
)


def list_journals(path: Path, *, as_json: bool) -> int:
    """Print each journal: its offsets and how many bytes and segments it has."""
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


def print_messages(
    path: Path,
    *,
    journal: str | None,
    uncommitted: bool,
    begin: int | None,
    end: int | None,
    producer: str | None,
    follow: bool,
) -> int:
    """Print messages as lines of JSON, with where they stand and their UUIDs."""
    from etlstage.sequencing import producer_of

    with _opened(path) as journals:
        names = [spec.name for spec in journals.select()]
        if journal is not None:
            journals.log(journal)
            names = [journal]
        for envelope in _messages(
            journals, names, uncommitted=uncommitted, begin=begin, follow=follow
        ):
            if envelope.journal not in names:
                continue
            if end is not None and envelope.end > end:
                continue
            if producer and producer_of(envelope.message.uuid).hex() != producer:
                continue
            typer.echo(json.dumps(_row(envelope)))
    return 0


def append_lines(path: Path, *, journal: str | None) -> int:
    """Append each line of stdin, to JSON lines an object, as a committed message."""
    from etlstage.journal import Publisher, RunMessage
    from etlstage.sequencing import random

    with _opened(path) as journals:
        mapping = random(journals.partitions)
        if journal is not None:
            journals.log(journal)
            target = journal, journals.content_type
            mapping = lambda _: target  # noqa: E731 - as short as it can be
        publisher = Publisher(journals, mapping=mapping)
        runs = isinstance(journals.new_message(journals.select()[0]), RunMessage)
        for number, line in enumerate(sys.stdin.buffer, 1):
            if runs:
                publisher.publish_committed(RunMessage([line.removesuffix(b"\n")]))
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                complain(f"line {number} is no JSON: {error}")
                return 1
            if not isinstance(value, dict):
                complain(f"line {number} is no JSON object")
                return 1
            publisher.publish_committed(value)
    return 0


def verify_set(path: Path, *, as_json: bool) -> int:
    """Read all, print what is there, return 1 if something is damaged."""
    from etlstage.journal.account import verify

    damaged = 0
    with _opened(path) as journals:
        for spec in journals.select():
            account = verify(journals, spec.name, lambda error: complain(str(error)))
            damaged += account.damaged
            _show(account.as_json(), as_json=as_json)
    return 1 if damaged else 0


def print_stat(path: Path, *, as_json: bool) -> int:
    """Print how far each reader is behind."""
    from etlstage.journal.account import lags

    with _opened(path) as journals:
        for lag in lags(journals):
            row = lag._asdict() | {"seconds": round(lag.seconds, 3)}
            _show(row, as_json=as_json)
    return 0


def print_readers(path: Path, *, forget: str | None, as_json: bool) -> int:
    """Print each reader and what it needs, or drop the position of one."""
    with _opened(path) as journals:
        if forget is not None:
            journals.forget(forget)
            return 0
        for reader in journals.readers():
            row = {
                "reader": reader.name,
                "updated": datetime.fromtimestamp(reader.updated, UTC).isoformat(),
                "needs": reader.needs,
            }
            _show(row, as_json=as_json)
    return 0


def trim_set(path: Path) -> int:
    """Drop the segments that are not to be kept."""
    with _opened(path) as journals:
        for name, count in journals.trim().items():
            typer.echo(f"{name}: dropped {count} segments")
    return 0


def _opened(path: Path) -> Journals:
    from etlstage.journal import Journals

    return Journals.open(path, create=False)


def _messages(
    journals: Journals,
    names: list[str],
    *,
    uncommitted: bool,
    begin: int | None,
    follow: bool,
) -> Iterator[Envelope]:
    if uncommitted:
        for name in names:
            yield from journals.read_uncommitted(
                name, begin, on_error=_told, passes=True
            )
        return
    start: Any = "end" if follow else "beginning"
    if begin is not None:
        start = dict.fromkeys(names, begin)
    yield from journals.read_committed(follow=follow, start=start, on_error=_told)


def _told(error: Exception) -> None:
    complain(str(error))


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
