"""Settings of journals, common to pipeline files and the options of Spark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from etlstage.errors import ConfigError
from etlstage.settings.definition import Definition
from etlstage.settings.problem import Problem
from etlstage.settings.units import READER_NAME, Pointer, is_reader_name
from etlstage.stage import Order

__all__ = (
    "Appending",
    "misordered",
    "reader_problems",
    "remote_problems",
    "start_of",
    "start_problems",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Appending(Definition):
    """How messages are appended to a set of journals."""

    key: Pointer | None = None
    """JSON pointer such as /customer: messages with the same key go to the same
    journal, in order, and so do those without the key. By default runs of messages go
    to the journals in turn."""
    mapping: Literal["modulo", "rendezvous"] = "modulo"
    """How the journal of a key is chosen; with rendezvous few keys move when journals
    are added."""
    limit: str | None = None
    """How much of a journal in a new set a reader may have unread, such as 20GiB; no
    epoch begins while a reader has more."""
    sync: str = "commit"
    """When bytes are forced to the disk besides at the end of an epoch: never (commit),
    after each append (append), or at intervals such as 1s."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Yield the problems of a path that is not a folder, and of invalid amounts."""
        yield from remote_problems(given)
        amounts = {key: given.get(key) for key in ("keep", "limit", "sync")}
        if all(amount is None for amount in amounts.values()):
            return
        from etlstage.journal.retention import (  # takes a moment
            Retention,
            limit_of,
            sync_of,
        )

        checks = Retention.of, limit_of, sync_of
        for (key, value), check in zip(amounts.items(), checks, strict=True):
            try:
                if isinstance(value, str):
                    check(value)
            except ConfigError as error:
                yield Problem((key,), str(error).removeprefix(f"{key} "), value)


def misordered(order: Order, partitions: int, key: str | None) -> str:
    """Return why that many journals can't keep a stage's order; empty if they can."""
    if partitions == 1 or key is not None or order is Order.NONE:
        return ""
    return (
        f"several journals can't keep order {order.value}: set partitions: 1, a key"
        " (a JSON pointer such as /id), or order: none"
    )


def start_of(text: str) -> Literal["beginning", "end"] | float:
    """Return where reading begins; for a time, its seconds since 1970."""
    if text == "beginning" or text == "end":
        return "beginning" if text == "beginning" else "end"
    return datetime.fromisoformat(text).astimezone().timestamp()


def start_problems(given: Mapping[str, Any]) -> Iterable[Problem]:
    """Yield the problem of ``from`` if it is not valid for :func:`start_of`."""
    start = given.get("from")
    if isinstance(start, str):
        try:
            start_of(start)
        except (ValueError, OverflowError):
            text = "is {got}, expected beginning, end, or a time such as 2026-11-23T18:00:00Z"
            yield Problem(("from",), text, start)


def reader_problems(given: Mapping[str, Any]) -> Iterable[Problem]:
    """Yield the problem of ``reader`` if no reader can have this name."""
    name = given.get("reader")
    # A run on trial has no name, and stores no position.
    if isinstance(name, str) and name and not is_reader_name(name):
        yield Problem(("reader",), f"is {{got}}, expected {READER_NAME}", name)


def remote_problems(given: Mapping[str, Any]) -> Iterable[Problem]:
    """Yield the problem of ``path`` if it is a URL, not a folder."""
    path = given.get("path")
    if isinstance(path, str) and path.startswith(("http://", "https://")):
        text = "is {got}, expected a folder: a broker can be used only from Python"
        yield Problem(("path",), text, path)
