"""Every kind of hostile worker is found, each for its own reason."""

from __future__ import annotations

from typing import Any

import pytest

from etlstage.testing import Fault, FaultKind, FaultPlan, Moment, hostile_worker
from etlstage.testing.check import Verdict
from tests.testing.check.checked import checked, failures, said

K = FaultKind
UNASKED = "writes nothing unsolicited"
SILENT = "the worker has 1 reply outstanding: timed out after 2 seconds"
STARTED = Moment.START
ANY = ""
"""In place of a name: timing decides which check is the first to find it."""

FAILS = [
    (
        Fault(K.KILL),
        "answers",
        "the worker has 1 reply outstanding: was killed by SIGKILL",
    ),
    (
        Fault(K.SEGFAULT),
        "answers",
        "the worker has 1 reply outstanding: was killed by SIGSEGV",
    ),
    (
        Fault(K.ABORT),
        "answers",
        "the worker has 1 reply outstanding: was killed by SIGABRT",
    ),
    (
        Fault(K.EXIT),
        "answers",
        "the worker has 1 reply outstanding: exited with status 1",
    ),
    (Fault(K.EXIT, status=0), "answers", "exited with status 0"),
    (Fault(K.PARTIAL), "answers", "ended its output with incomplete data: one"),
    (Fault(K.STALL), "answers", SILENT),
    (Fault(K.SPIN), "answers", SILENT),
    (Fault(K.STOP), "answers", SILENT),
    (Fault(K.SKIP), "answers", "has 1 reply outstanding: it waits for more input"),
    (
        Fault(K.NEVER_READY),
        "answers",
        "report that it is ready: it waits for more input",
    ),
    (Fault(K.TWICE), "answers", "wrote more than its reply: one<EOM><EOP>one"),
    # The EOP is read by itself, or with the reply before or after it.
    (Fault(K.EXTRA_EOP), ANY, (" too many: <EOP>", "more than its reply: <EOP>")),
    (
        Fault(K.GARBAGE, at=STARTED),
        UNASKED,
        "unsolicited output: stray print<EOM>; diagnostics belong",
    ),
    (Fault(K.BYTE_ORDER_MARK), UNASKED, r"unsolicited output: \357\273\277"),
    (Fault(K.WRONG_MARKER), "answers", "the worker fills batches; set dialect.driver"),
    (Fault(K.HUGE), "answers", "message is more than 67108864 bytes long"),
    (Fault(K.CLOSE_STDOUT), "answers", "has 1 reply outstanding: closed its stdout"),
    (Fault(K.CLOSE_STDIN), "answers", "closed its stdin before it had read all"),
    (
        Fault(K.IGNORE_SIGTERM),
        "exits on SIGTERM",
        "the worker did not exit: timed out after 2 seconds",
    ),
    (Fault(K.GRANDCHILD, message=1), "ends", "behind, which had to be killed"),
    # The same faults later, or only at some moment.
    # Killed before the next message was sent, or right after that.
    (
        Fault(K.KILL, at=Moment.IDLE),
        ANY,
        (
            "the worker was killed by SIGKILL",
            "the worker has 1 reply outstanding: was killed by SIGKILL",
        ),
    ),
    (
        Fault(K.KILL, at=Moment.END),
        "ends",
        "was killed by SIGKILL when its stdin ended",
    ),
    (
        Fault(K.STALL, at=Moment.END),
        "ends",
        "the worker did not exit: timed out after 2 seconds",
    ),
    (
        Fault(K.CLOSE_STDOUT, at=Moment.END),
        "ends",
        "did not exit: timed out after 2 seconds",
    ),
    (
        Fault(K.KILL, message=100),
        "accepts many messages at once",
        "was killed by SIGKILL",
    ),
    (Fault(K.KILL, equals=b""), "accepts an empty message", "was killed by SIGKILL"),
    (Fault(K.KILL, contains=b"\xff"), "accepts every byte", "was killed by SIGKILL"),
    (Fault(K.SKIP, message=3), "answers", "has 1 reply outstanding: it waits for more"),
]

ADVISES = [
    (Fault(K.REFUSE), "continues after a refusal", "it refuses all test words"),
    (
        Fault(K.STDERR, size=5000),
        "writes little to stderr",
        "bytes to stderr for each message",
    ),
    (Fault(K.EXIT, at=Moment.END), "ends", "exited with status 1 when its stdin ended"),
    (Fault(K.GARBAGE, message=6), "keeps no state", "depends on earlier messages"),
    (
        Fault(K.FLOOD, message=6, size=2),
        "keeps no state",
        "depends on earlier messages",
    ),
]

# A worker may be slow, and may reply with anything: these can't be distinguished from
# a sound worker.
PASSES = [
    (Fault(K.PAUSE, seconds=0.01), Fault(K.CUT), Fault(K.LEAK, size=1000)),
    (Fault(K.GARBAGE), Fault(K.FLOOD, size=3)),
]

BEFORE = ("accepts an empty message", "accepts many messages at once")
"""Checks whose observations are used by the checks at the end."""


def command(*faults: Fault) -> tuple[str, ...]:
    """Return the command of a worker with these faults."""
    return hostile_worker(FaultPlan.of(*faults))


def name_of(value: object) -> str:
    """Return the id of a row."""
    if not isinstance(value, Fault):
        return ""
    at = value.at.value if value.at else ""
    return f"{value.kind.value}-{at}"


def row(*values: object) -> object:
    """Return a row; one with a worker that hangs is slow."""
    hangs = any("2 seconds" in str(value) for value in values)
    return pytest.param(*values, marks=[pytest.mark.slow] if hangs else [])


@pytest.mark.parametrize(
    ("fault", "name", "reason"), [row(*each) for each in FAILS], ids=name_of
)
def test_hostile_worker_fails(
    fault: Fault, name: str, reason: str | tuple[str, ...]
) -> None:
    """The check about its fault fails, and names what it did (issue 12)."""
    reasons = (reason,) if isinstance(reason, str) else reason
    hangs = "2 seconds" in reasons[0]
    stage: dict[str, Any] = {"ready": fault.kind is K.NEVER_READY}

    findings = checked(
        command(fault),
        timeout=2 if hangs else 10,
        only=[name] if name else (),
        stage=stage,
    )

    failed = failures(findings)
    shown = failed[name] if name else " ".join(failed.values())
    assert any(each in shown for each in reasons), shown


@pytest.mark.parametrize(("fault", "name", "reason"), ADVISES, ids=name_of)
def test_hostile_worker_is_advised(fault: Fault, name: str, reason: str) -> None:
    """What does not break the protocol is advice (issue 12)."""
    findings = checked(command(fault), only=[name, *BEFORE])

    assert failures(findings) == {}
    assert reason in said(findings, Verdict.ADVICE)[name]


@pytest.mark.parametrize("faults", PASSES, ids=["slow", "talkative"])
def test_what_is_no_fault_passes(faults: tuple[Fault, ...]) -> None:
    """However odd it is (issue 12)."""
    assert failures(checked(command(*faults))) == {}


def test_every_kind_of_fault_is_in_a_table() -> None:
    """A new kind needs a row (issue 12)."""
    rows = [row[0] for row in [*FAILS, *ADVISES]]
    rows += [fault for faults in PASSES for fault in faults]
    # Faults of connections are not done by the worker itself.
    assert {fault.kind for fault in rows} == {k for k in FaultKind if not k.outside}


def test_nothing_else_is_asked_of_a_worker_that_does_not_answer() -> None:
    """One check fails, not twenty (issue 12)."""
    findings = checked(command(Fault(K.KILL)))

    assert list(failures(findings)) == ["answers"]
    others = said(findings, Verdict.NOT_APPLICABLE)
    assert len(others) == len(findings) - 1
    assert "'answers' has failed" in others.values()
