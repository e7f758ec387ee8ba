from __future__ import annotations

from collections.abc import Mapping

import pytest

from etlstage.messages import StageKind
from etlstage.protocol.base import (
    SEND_EOF,
    Dialect,
    DialectSession,
    Limits,
    Shape,
    Side,
)
from etlstage.protocol.marker import MarkerProtocol, Mode
from etlstage.settings.definition import Section


def test_limits_are_in_mebibytes() -> None:
    """YAML shows ``64MiB`` and ``256MiB``; these are the numbers for them."""
    assert Limits() == (67_108_864, 268_435_456)


def test_end_is_the_write_of_nothing() -> None:
    """No message is empty on the wire: it has its EOM."""
    assert SEND_EOF == b""


def test_marker_has_a_session_on_both_sides() -> None:
    """The type checker compares every method; this gives it a value to check."""
    for side in Side:
        session: DialectSession = MarkerProtocol(side, Mode.SINGLE)
        assert session.events_received() == []
        assert session.data_to_send() == []
        assert session.in_order


class Silent(Dialect):
    """A dialect that defines no more than required."""

    name = "silent"

    @property
    def shape(self) -> Shape:
        """One message, one exchange."""
        return Shape.MESSAGE

    def open(self, side: Side, limits: Limits, **_opened_for: object) -> DialectSession:
        """Return a session of the marker dialect."""
        return MarkerProtocol(side, Mode.SINGLE, limits=limits)

    def silence(self, received: int, *, ready: bool = True) -> str:
        """Give no reason."""
        return "did not answer"

    def plain(self) -> dict[str, object]:
        """Return no settings: there are none."""
        return {}

    @classmethod
    def section(cls, kind: StageKind) -> Section:
        """Return a section without settings."""
        return Section({}, lambda given: cls())

    @classmethod
    def from_plain(cls, settings: Mapping[str, object]) -> Silent:
        """Return the dialect."""
        return cls()


def test_dialect_may_leave_the_rest_unsaid() -> None:
    """A worker gets no variables, any stage fits, and there is no connection."""
    dialect = Silent()
    assert dialect.variables() == {}
    assert dialect.problem(StageKind.EXTRACT) is None
    assert dialect.connection is None
    assert dialect.fitted(batches=True, heartbeat=1.0) is dialect


@pytest.mark.parametrize(
    ("status", "stopped", "held", "unproven", "failed"),
    [
        (0, False, 0, 0, False),
        (1, False, 0, 0, True),
        (0, False, 3, 0, True),
        (-15, True, 3, 0, False),
        (0, True, 0, 3, False),
        (1, True, 0, 3, True),
    ],
)
def test_exit_is_a_failure_unless_it_was_asked_for(
    status: int, stopped: bool, held: int, unproven: int, failed: bool
) -> None:
    """After a stop a failing status counts only if there are unproven loads."""
    dialect = Silent()
    assert not dialect.announces
    assert (
        dialect.failed(status, stopped=stopped, held=held, unproven=unproven) is failed
    )


def test_dialect_has_few_members() -> None:
    """Each member has several implementations, or several callers.

    What only sockets need is in its ``connection``, and what only tests need in its kit
    (issue 22).
    """
    members = {**vars(Dialect), **Dialect.__annotations__}
    public = {name for name in members if not name.startswith("_")}
    assert len(public) <= 14, sorted(public)


def test_marker_needs_no_timer() -> None:
    """The protocol page has no notion of time: deadlines are the supervisor's."""
    for side in Side:
        protocol = MarkerProtocol(side, Mode.SINGLE)
        assert protocol.get_timer() is None
        protocol.handle_timer(12.5)
        assert protocol.events_received() == []
        assert protocol.data_to_send() == []
