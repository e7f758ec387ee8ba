"""Both ends of a connection, and the bytes that one sends to the other."""

from __future__ import annotations

from typing import Any

from etlstage.protocol.base import Side
from etlstage.protocol.cocaine import CocaineSession, CocaineVersion
from etlstage.protocol.events import Event, Ready


def supervisor(
    version: CocaineVersion = CocaineVersion.ONE,
    **settings: Any,  # noqa: ANN401 - passed on
) -> CocaineSession:
    """Return our side, with a worker that was ready at 0 s."""
    session = CocaineSession(Side.SUPERVISOR, version, **settings)
    session.receive_data(sent(CocaineSession(Side.WORKER, version), Ready("u")), 0.0)
    assert session.events_received() == [Ready("u")]
    session.data_to_send()
    return session


def worker(
    version: CocaineVersion = CocaineVersion.ONE,
    **settings: Any,  # noqa: ANN401 - passed on
) -> CocaineSession:
    """Return the other side, ready."""
    session = CocaineSession(Side.WORKER, version, **settings)
    sent(session, Ready("u"))
    return session


def received(session: CocaineSession, data: bytes, now: float = 0.0) -> list[Event]:
    """Feed bytes to a session; return its events."""
    session.receive_data(data, now)
    return session.events_received()


def sent(session: CocaineSession, *events: Event) -> bytes:
    """Send events; return their bytes."""
    for event in events:
        session.send(event)
    return b"".join(session.data_to_send())
