from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.errors import ConfigError
from etlstage.testing import Fault, FaultKind, FaultPlan, Moment
from etlstage.testing.strategies import fault_plans, faults

ANY = st.binary(max_size=5)
KINDS = st.sampled_from([FaultKind.KILL, FaultKind.HUGE, FaultKind.STOP])


@pytest.mark.parametrize(
    ("fault", "at"),
    [
        (Fault(FaultKind.KILL), Moment.MESSAGE),
        (Fault(FaultKind.NEVER_READY), Moment.START),
        (Fault(FaultKind.IGNORE_SIGTERM), Moment.START),
        (Fault(FaultKind.EXTRA_EOP), Moment.IDLE),
        (Fault(FaultKind.EXTRA_EOP, Moment.MESSAGE), Moment.MESSAGE),
        (Fault(FaultKind.SPIN, Moment.END), Moment.END),
    ],
)
def test_moment_is_that_of_the_kind_unless_it_is_given(
    fault: Fault, at: Moment
) -> None:
    """A plan only has to name what differs."""
    assert fault.at is at


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (FaultKind.STDERR, 10_000_000),
        (FaultKind.HUGE, 1_000_000_000),
        (FaultKind.FLOOD, 10_000),
        (FaultKind.LEAK, 10_000_000),
        (FaultKind.KILL, None),
    ],
)
def test_size_is_that_of_the_kind_unless_it_is_given(
    kind: FaultKind, size: int | None
) -> None:
    """A kind without a default size has None."""
    assert Fault(kind).size == size
    assert Fault(kind, size=7).size == 7


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"message": 0}, "fault: message must be 1 or more, got 0"),
        ({"start": 0}, "fault: start must be 1 or more, got 0"),
        ({"size": -1}, "fault: size must be 0 or more, got -1"),
        ({"seconds": -0.5}, "fault: seconds must be 0 or more, got -0.5"),
        ({"seconds": float("nan")}, "fault: seconds must be 0 or more, got nan"),
        ({"message": 1.5}, "fault: message must be a whole number, got 1.5"),
        ({"start": True}, "fault: start must be a whole number, got True"),
        ({"size": "5"}, "fault: size must be a whole number, got '5'"),
        ({"seconds": True}, "fault: seconds must be a number, got True"),
        ({"seconds": "3"}, "fault: seconds must be a number, got '3'"),
        ({"probability": True}, "fault: probability must be a number, got True"),
        ({"worker": 5}, "fault: worker must be text, got 5"),
        ({"probability": 1.5}, "fault: probability must be 0 to 1, got 1.5"),
        ({"probability": -0.1}, "fault: probability must be 0 to 1, got -0.1"),
        ({"status": 256}, "fault: status must be 0 to 255, got 256"),
        ({"status": -9}, "fault: status must be 0 to 255, got -9"),
        (
            {"at": Moment.IDLE, "message": 3},
            "fault: at idle there is no message; omit message",
        ),
        (
            {"at": Moment.END, "equals": b""},
            "fault: at end there is no message; omit equals",
        ),
        (
            {"at": Moment.START, "contains": b"x"},
            "fault: at start there is no message; omit contains",
        ),
    ],
)
def test_values_are_checked(values: dict[str, object], text: str) -> None:
    """The text names the value and what is wrong with it (issue 26)."""
    with pytest.raises(ConfigError) as caught:
        Fault(FaultKind.KILL, **values)  # type: ignore[arg-type]
    assert str(caught.value) == text


@pytest.mark.parametrize("seed", ['"x"', "[1]", "1.5", "true", "null"])
def test_seed_is_a_whole_number(seed: str) -> None:
    """It is refused as the plan is read, not as a worker is started (issue 26)."""
    with pytest.raises(ConfigError, match="fault plan: seed must be a whole number"):
        FaultPlan.from_json(f'{{"faults":[],"seed":{seed}}}')


def test_changed_reply_needs_a_message() -> None:
    """There is none at the start."""
    with pytest.raises(ConfigError, match="twice changes a reply: it can't happen at"):
        Fault(FaultKind.TWICE, Moment.START)


def test_plan_as_text() -> None:
    """Each byte is a character that arguments and variables can hold."""
    fault = Fault(FaultKind.KILL, equals=b"\0\xff\xc3\xa9", start=2)
    assert FaultPlan.of(fault, seed=3).to_json() == (
        '{"seed":3,"faults":[{"kind":"kill","at":"message",'
        '"equals":"\\u0000\\u00ff\\u00c3\\u00a9","start":2,'
        '"status":1,"seconds":0.1,"size":null}]}'
    )


def test_plan_is_no_place_for_markers() -> None:
    """A supervisor would replace placeholders in a command line."""
    plan = FaultPlan.of(Fault(FaultKind.KILL, equals=b"{eom}{eop}{eob}{bnc}{x}"))
    text = plan.to_json()
    assert not any(f"{{{name}}}" in text for name in ("eom", "eop", "eob", "bnc"))
    assert FaultPlan.from_json(text) == plan


@settings(max_examples=200, deadline=None)
@given(fault_plans(poison=(b"{eom}", b"\0")), st.builds(Fault, KINDS, contains=ANY))
def test_plan_survives_the_way_through_text(plan: FaultPlan, fault: Fault) -> None:
    """It also survives pickle, for processes that are started in other ways."""
    plan = FaultPlan((*plan.faults, fault), plan.seed)
    assert FaultPlan.from_json(plan.to_json()) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan  # noqa: S301 - our own
    assert hash(plan) == hash(FaultPlan.from_json(plan.to_json()))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"faults":[{"kind":"sing"}]}',
        '{"faults":[{}]}',
        '{"faults":[{"kind":"kill","loud":true}]}',
        '{"faults":[{"kind":"kill","at":"noon"}]}',
        '{"faults":[{"kind":"kill","equals":1}]}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_other_text_is_refused(text: str) -> None:
    """The error names what it can't read, however deep it is (issue 26)."""
    with pytest.raises(ConfigError, match="can't read the fault plan"):
        FaultPlan.from_json(text)


# --- strategies -----------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(fault_plans({FaultKind.KILL, FaultKind.EXTRA_EOP}, max_faults=2))
def test_drawn_plans_keep_to_what_was_asked_for(plan: FaultPlan) -> None:
    """Kinds and number of faults are as requested."""
    assert len(plan.faults) <= 2
    assert {f.kind for f in plan.faults} <= {FaultKind.KILL, FaultKind.EXTRA_EOP}


def test_faults_of_no_kind() -> None:
    """There is nothing to draw from."""
    with pytest.raises(ValueError, match="kinds is empty"):
        faults(())
