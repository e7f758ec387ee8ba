"""
Infers an ``expect`` for a stage from what the replies in recordings have in common.

A recording has only bytes. Both sides of the dialect interpret them: the worker's side
receives what was written to the worker, our side what came back, and each also sends
what the other received.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from etlstage.errors import ConfigError, LocalProtocolError
from etlstage.protocol.base import Limits, Shape, Side
from etlstage.protocol.events import (
    Added,
    Alive,
    Cancelled,
    Ended,
    Event,
    Farewell,
    Opened,
    Ready,
    Wanted,
)
from etlstage.stage.contract import Checker, ReplyContract
from etlstage.testing.recording.recording import Recording
from etlstage.testing.replies import Reply, ReplyReader
from etlstage.testing.transcript import Channel

__all__ = ("Exchanged", "Inferred", "exchanged", "inferred", "schema_of")

_LIMITS: Final = Limits(2**31, 2**31)
_FULL: Final = 2**31  # messages of a batch
_MARGIN: Final = 10  # max_seconds, as a multiple of the slowest reply
_LEAST: Final = 1.0  # seconds; the least max_seconds
_OURS: Final = (Opened, Added, Cancelled)
_THEIRS: Final = (Ready, Alive, Added, Ended, Farewell)
_TYPES: Final[Mapping[type, str]] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


class Exchanged(NamedTuple):
    """The messages that a worker was given, and its reply."""

    messages: Sequence[bytes]
    reply: Reply
    seconds: float
    """Seconds until the reply, from when its turn came."""


class Inferred(NamedTuple):
    """The contract that all replies have kept."""

    contract: ReplyContract
    replies: int
    refused: int
    """Number of replies that were refusals, which the contract does not cover."""


def exchanged(recording: Recording) -> Iterator[Exchanged]:
    """
    Yield the exchanges of a recording, up to where the protocol was broken.

    Raises:
        ConfigError: If workers of the dialect do not reply.

    """
    if recording.dialect.shape in (Shape.STREAM, Shape.COMMITTED):
        raise ConfigError(f"stage {recording.stage}: its worker has no replies")
    # Reading ends where the protocol is broken, by either side.
    with suppress(LocalProtocolError):
        yield from _exchanged(recording)


def _exchanged(recording: Recording) -> Iterator[Exchanged]:
    dialect, kind = recording.dialect, recording.kind
    theirs = dialect.open(Side.WORKER, _LIMITS, batch=_FULL, kind=kind)
    ours = ReplyReader(dialect, _LIMITS, kind, _FULL)
    given: dict[int, tuple[float, list[bytes]]] = {}  # by exchange, in order
    last = 0.0  # time of the previous reply
    for entry in recording.entries:
        if entry.channel is Channel.STDIN and entry.data:
            theirs.receive_data(entry.data, entry.at)
            for event in theirs.events_received():
                if isinstance(event, _OURS):
                    ours.session.send(event, entry.at)
                    ours.session.data_to_send()
                    ours.note(event)
                    _note(event, entry.at, given)
        elif entry.channel is Channel.STDOUT and entry.data:
            seen = len(ours.events)
            ours.receive(entry.data, entry.at)
            for event in ours.events[seen:]:
                if isinstance(event, _THEIRS):
                    theirs.send(event, entry.at)
            if ours.filling and ours.session.room > 0:
                theirs.send(Wanted(1), entry.at)  # not an event on our side
            theirs.data_to_send()
            for reply in ours.complete:
                since, messages = given.pop(next(iter(given)))
                if ours.session.in_order:
                    since = max(since, last)
                yield Exchanged(messages, reply, entry.at - since)
            last = entry.at if ours.complete else last
            ours.complete.clear()
            if ours.fault is not None:
                return


def _note(
    event: Event, now: float, given: dict[int, tuple[float, list[bytes]]]
) -> None:
    match event:
        case Opened(first, messages, each=True):
            given.update((first + n, (now, [m])) for n, m in enumerate(messages))
        case Opened(first, messages):
            given[first] = now, [*messages]
        case Added(id_, messages) if id_ in given:
            given[id_] = now, [*given[id_][1], *messages]
        case Cancelled(id_):
            given.pop(id_, None)
        case _:
            pass


def inferred(recordings: Iterable[Recording]) -> Inferred:
    """
    Return the contract that all replies in recordings of one stage have kept.

    Raises:
        ConfigError: If workers of the dialect do not reply, or answer a batch as a
            whole, or there are no replies but refusals.

    """
    answered: list[Exchanged] = []
    refused = 0
    for recording in recordings:
        if recording.dialect.shape.batches:
            raise ConfigError(
                f"stage {recording.stage}: its workers answer a batch as a whole, and"
                " expect is for replies to single messages"
            )
        for one in exchanged(recording):
            if one.reply.refused is None:
                answered.append(one)
            else:
                refused += 1
    if not answered:
        raise ConfigError("the recordings have no reply that is not a refusal")
    counts = {len(one.reply.outputs) for one in answered}
    slowest = max(one.seconds for one in answered)
    contract = ReplyContract(
        outputs=counts.pop() if len(counts) == 1 else None,
        json=_all_json(answered),
        max_seconds=_rounded(max(_LEAST, _MARGIN * slowest)),
        stateless=_repeats(answered),
    )
    return Inferred(contract, len(answered) + refused, refused)


def schema_of(recordings: Iterable[Recording]) -> dict[str, Any]:
    """
    Return a JSON Schema for all outputs in recordings: types and required members.

    Raises:
        ConfigError: If an output is not a JSON document.

    """
    outputs = [
        output
        for recording in recordings
        for one in exchanged(recording)
        for output in one.reply.outputs
    ]
    try:
        documents = [json.loads(output) for output in outputs]
    except ValueError:
        raise ConfigError("not all outputs are JSON documents") from None
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_schema(documents),
    }


def _schema(values: Sequence[object]) -> dict[str, Any]:
    types = {_TYPES[type(value)] for value in values}
    if "number" in types:
        types.discard("integer")  # covered by number
    schema: dict[str, Any] = {}
    if types:
        schema["type"] = min(types) if len(types) == 1 else sorted(types)
    objects = [value for value in values if isinstance(value, dict)]
    if objects:
        names = dict.fromkeys(name for value in objects for name in value)
        schema["properties"] = {
            name: _schema([value[name] for value in objects if name in value])
            for name in names
        }
        if always := [n for n in names if all(n in value for value in objects)]:
            schema["required"] = always
    items = [item for value in values if isinstance(value, list) for item in value]
    if items:
        schema["items"] = _schema(items)
    return schema


def _all_json(answered: Sequence[Exchanged]) -> bool:
    checker = Checker(ReplyContract(json=True))
    some = any(one.reply.outputs for one in answered)
    return some and all(checker(one.reply.outputs) is None for one in answered)


def _repeats(answered: Sequence[Exchanged]) -> bool:
    """Return whether messages recurred, after others, always with the same outputs."""
    seen: dict[tuple[bytes, ...], tuple[bytes, ...]] = {}
    again = False
    for one in answered:
        key = tuple(one.messages)
        again = again or (key in seen and len(seen) > 1)
        if seen.setdefault(key, one.reply.outputs) != one.reply.outputs:
            return False
    return again


def _rounded(seconds: float) -> float:
    """Round up to one significant digit."""
    unit = 10.0 ** math.floor(math.log10(seconds))
    return math.ceil(seconds / unit) * unit
