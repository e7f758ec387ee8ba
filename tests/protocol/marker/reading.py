"""Sides at the beginning of a stream, and how a faulty stream ends."""

from __future__ import annotations

from collections.abc import Callable

from etlstage.errors import RemoteProtocolError
from etlstage.protocol.base import SEND_EOF
from etlstage.protocol.events import Failed
from etlstage.protocol.marker import MarkerProtocol, Markers, MarkerState, Mode
from tests.protocol.pair import S, W, receive, typed, without_dump
from tests.protocol.words import Messages, Word, tell

Chop = Callable[[bytes], list[bytes]]
ONE_TO_ONE = Markers(eop=b"\n")
DIAGNOSTICS = ": no reply is due; diagnostics belong on stderr"


def supervisor(
    mode: Mode, *sent: Word, markers: Markers | None = None, echo: bool = False
) -> MarkerProtocol:
    """Return a supervisor that has sent these events."""
    protocol = MarkerProtocol(S, mode, markers, eob_then_eom=echo)
    for event in sent:
        tell(protocol, event)
    return protocol


def asked(
    count: int, mode: Mode = Mode.SINGLE, markers: Markers | None = None
) -> MarkerProtocol:
    """Return a supervisor that waits for the replies to ``count`` messages."""
    return supervisor(mode, Messages([b"m"] * count), markers=markers)


def worker(mode: Mode, markers: Markers | None = None) -> MarkerProtocol:
    """Return a worker that has just been started."""
    return MarkerProtocol(W, mode, markers)


def failure(protocol: MarkerProtocol, chunks: list[bytes], *before: Word) -> str:
    """Return why the peer is at fault; check the events ``before``, and the state."""
    *events, last = receive(protocol, *chunks)
    assert events == typed(before)
    name, kind, text = last
    assert (name, kind) == (Failed.__name__, RemoteProtocolError.__name__)
    assert protocol.state is MarkerState.ERROR
    assert receive(protocol, b"a\n\0", SEND_EOF) == []
    return without_dump(str(text))
