"""What is set of journals, wherever it is: in a pipeline file, in options of Spark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from etlstage.errors import ConfigError
from etlstage.settings.definition import Definition
from etlstage.settings.problem import Problem
from etlstage.settings.units import Pointer
from etlstage.stage import Order

__all__ = (
    "Appending",
    "misordered",
    "remote_problems",
    "start_of",
    "start_problems",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Appending(Definition):
    """How messages are appended to a set of journals."""

    key: Pointer | None = None
    """A JSON pointer such as /customer: messages with one key are in one journal, in
    order; those without it, too. Without it runs of messages go to the journals in
    turn."""
    mapping: Literal["modulo", "rendezvous"] = "modulo"
    """How the journal of a key is found; with rendezvous few keys move when journals
    are added."""
    limit: str | None = None
    """Of a new set, what a reader may have unread of a journal, such as 20GiB; an epoch
    is begun when it has read on."""
    sync: str = "commit"
    """When bytes are forced to the disk besides at the end of an epoch: append, or a
    time such as 1s."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return what is no folder, and what is no amount."""
        yield from remote_problems(given)
        amounts = {key: given.get(key) for key in ("keep", "limit", "sync")}
        if not any(amounts.values()):
            return
        from etlstage.journal import journals  # takes a moment

        checks = journals.amount_of, journals.bytes_of, journals.sync_of
        for (key, value), check in zip(amounts.items(), checks, strict=True):
            try:
                if isinstance(value, str):
                    check(value)
            except ConfigError as error:
                yield Problem((key,), str(error).removeprefix(f"{key} "), value)


def misordered(order: Order, partitions: int, key: str | None) -> str:
    """Return why so many journals can't keep the order of a stage; nothing, if they can."""
    if partitions == 1 or key is not None or order is Order.NONE:
        return ""
    return (
        f"several journals can't keep order {order.value}: set partitions: 1, a key,"
        " a JSON pointer such as /id, or order: none"
    )


def start_of(text: str) -> Literal["beginning", "end"] | float:
    """Return where reading begins: also a time, in seconds since 1970."""
    if text == "beginning" or text == "end":
        return "beginning" if text == "beginning" else "end"
    return datetime.fromisoformat(text).astimezone().timestamp()


def start_problems(given: Mapping[str, Any]) -> Iterable[Problem]:
    """Yield why ``from`` is no such text."""
    start = given.get("from")
    if isinstance(start, str):
        try:
            start_of(start)
        except ValueError:
            text = "is {got}, expected beginning, end, or a time such as 2026-11-23T18:00:00Z"
            yield Problem(("from",), text, start)


def remote_problems(given: Mapping[str, Any]) -> Iterable[Problem]:
    """Yield why ``path`` is no folder."""
    path = given.get("path")
    if isinstance(path, str) and path.startswith(("http://", "https://")):
        text = (
            "is {got}, expected a folder: a broker is read and appended to from Python"
        )
        yield Problem(("path",), text, path)
