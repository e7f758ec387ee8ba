"""What is due, and when."""

from __future__ import annotations

import math

from etlstage.protocol.cocaine import Deadlines
from etlstage.protocol.cocaine.alarm import Alarm, Alarms


def test_alarm_rings_once_and_is_named() -> None:
    """The words are those of the error."""
    alarms = Alarms(Deadlines(handshake=2.0, terminate=5.0))
    assert alarms.tick(10.0)
    alarms.set(Alarm.HANDSHAKE)
    alarms.set(Alarm.TERMINATE)

    assert alarms.next() == 12.0
    assert not alarms.tick(12.0)
    assert alarms.rung() == [Alarm.HANDSHAKE]
    assert alarms.next() == 15.0
    assert alarms.missed(Alarm.HANDSHAKE) == "it did not say who it is within 2 s"


def test_alarm_without_a_limit_never_rings() -> None:
    """Nor one that is not waited for any more."""
    alarms = Alarms(Deadlines(handshake=None))
    alarms.tick(0.0)
    alarms.set(Alarm.HANDSHAKE)
    alarms.set(Alarm.SEAL)

    assert not alarms.waits(Alarm.HANDSHAKE)
    assert alarms.cancel(Alarm.SEAL)
    assert not alarms.cancel(Alarm.SEAL)
    assert alarms.next() is None
    alarms.set(Alarm.SEAL)
    alarms.clear()
    assert alarms.next() is None


def test_clock_that_has_not_begun_is_asked_for_at_once() -> None:
    """Nobody has told the time."""
    alarms = Alarms(Deadlines())
    assert alarms.next() == -math.inf
    alarms.begin()
    alarms.tick(7.0)
    assert alarms.rung() == [Alarm.BEGIN]
