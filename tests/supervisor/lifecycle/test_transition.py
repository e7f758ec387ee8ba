"""The table of a worker's states."""

from __future__ import annotations

from collections import deque

import pytest

from etlstage.supervisor.lifecycle.events import StopRequested
from etlstage.supervisor.lifecycle.transition import TRANSITIONS, State


def reached(start: State) -> set[State]:
    """Return the states to which events lead from ``start``, in any number."""
    found, new = {start}, deque([start])
    while new:
        state = new.popleft()
        ways = (to for (at, _), to in TRANSITIONS.items() if at is state)
        for to in frozenset().union(*ways) - found:
            found.add(to)
            new.append(to)
    return found


def test_every_state_is_left_by_something_and_entered_by_something() -> None:
    """None is forgotten."""
    assert {state for state, _ in TRANSITIONS} == set(State)
    assert frozenset().union(*TRANSITIONS.values()) == set(State)


def test_first_start_may_lead_anywhere() -> None:
    """To the end, to another start, and to being given up."""
    assert reached(State.STARTING) == set(State)


@pytest.mark.parametrize("end", [State.EXITED, State.FATAL])
def test_who_has_ended_stays_there(end: State) -> None:
    """Only the supervisor starts a worker that was never started."""
    assert reached(end) == {end}


@pytest.mark.parametrize("state", State)
def test_stop_may_be_requested_at_any_time(state: State) -> None:
    """And nobody is started after it."""
    assert (state, StopRequested) in TRANSITIONS
    after = TRANSITIONS[state, StopRequested]
    assert after <= {State.STOPPING, State.EXITED, State.FATAL}
