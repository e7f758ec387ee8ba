from __future__ import annotations

from etlstage.protocol.base import SEND_EOF, Limits, Session, Side
from etlstage.protocol.marker import MarkerProtocol, Mode


def test_limits_are_in_mebibytes() -> None:
    """The YAML says ``64MiB`` and ``256MiB``; these are the numbers behind it."""
    assert Limits() == (67_108_864, 268_435_456)


def test_end_is_the_write_of_nothing() -> None:
    """No message is empty on the wire: it has its EOM."""
    assert SEND_EOF == b""


def test_marker_has_a_session_on_both_sides() -> None:
    """The type checker compares every method; here it gets something to compare."""
    for side in Side:
        session: Session = MarkerProtocol(side, Mode.SINGLE)
        assert session.events_received() == []
        assert session.data_to_send() == []


def test_marker_needs_no_timer() -> None:
    """The page knows no time: deadlines are the supervisor's."""
    for side in Side:
        protocol = MarkerProtocol(side, Mode.SINGLE)
        assert protocol.get_timer() is None
        protocol.handle_timer(12.5)
        assert protocol.events_received() == []
        assert protocol.data_to_send() == []
