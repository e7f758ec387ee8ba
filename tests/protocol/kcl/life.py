"""Sessions of record processors for tests, and the lines that either side sends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from etlstage.errors import ProtocolError
from etlstage.messages import AnnotatedRun
from etlstage.protocol.events import Assignment, Ended, Event, Failed, Opened
from etlstage.protocol.kcl.lines import Version
from etlstage.protocol.kcl.session import KclSession

__all__ = ("Said", "begun", "checkpoint", "failure", "given", "said", "status", "typed")

Said: TypeAlias = tuple[object, ...]


def status(action: str) -> bytes:
    """Return the line by which a processor reports that an action is done."""
    return b'{"action":"status","responseFor":"%b"}\n' % action.encode()


def checkpoint(number: str | None = None) -> bytes:
    """Return the line by which a processor asks for a checkpoint."""
    text = "null" if number is None else f'"{number}"'
    return b'{"action":"checkpoint","sequenceNumber":%b}\n' % text.encode()


def begun(
    version: Version = Version.V2,
    position: object = None,
    **settings: Any,  # noqa: ANN401
) -> KclSession:
    """Return a session whose processor has initialized, at time 0."""
    session = KclSession(Assignment("s-1", position), version, **settings)
    session.data_to_send()
    session.receive_data(status("initialize"), 0.0)
    session.events_received()
    return session


def given(session: KclSession, *numbers: int, first: int = 1) -> None:
    """Give records with these numbers; discard what is written."""
    run = AnnotatedRun([b"x"] * len(numbers), sequence=[*map(str, numbers)])
    session.send(Opened(first, run), 0.0)
    session.data_to_send()


def said(session: KclSession) -> bytes:
    """Return everything that is to be written, joined."""
    return b"".join(session.data_to_send())


def typed(events: Iterable[Event]) -> list[Said]:
    """Return events as tuples with their names; groups of replies as their number."""
    return [
        (type(event).__name__, event.first, len(event.groups))
        if isinstance(event, Ended)
        else (type(event).__name__, *event)
        for event in events
    ]


def failure(session: KclSession) -> ProtocolError:
    """Return the error with which a session has failed: its last event."""
    last = session.events_received()[-1]
    assert isinstance(last, Failed)
    return last.error
