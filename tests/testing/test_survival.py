"""A stage of workers that fail at random: every message has one outcome, in order."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from etlstage.errors import WorkerLost
from etlstage.pipeline import Pipeline
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.protocol.marker import Markers
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, Order, RestartPolicy, Stage
from etlstage.testing import (
    Fault,
    FaultKind,
    FaultPlan,
    MemorySink,
    MemorySource,
    hostile_worker,
)
from etlstage.testing.strategies import (
    DEADLY,
    HARMLESS,
    fault_plans,
    messages,
    stages,
)
from tests.testing.supervised import (
    PATIENT,
    RUN,
    WORDS,
    delivered,
    hostile,
    left,
    supervise,
)

POISON = b"poison"
MARKERS = (Markers(), WORDS, Markers(b"aab", b"cc", b"xyx", b"ded"))


def loses(fault: Fault) -> bool:
    """Return whether a fault kills each process that has the poison message."""
    return fault.kind in DEADLY and fault.equals == POISON


def may_lose(fault: Fault) -> bool:
    """Return whether a fault may hit a message as often as it is tried."""
    if fault.kind not in DEADLY or fault.start is not None:
        return False
    # Tried alone a message is the first of its process.
    return fault.message == 1 or fault.probability is not None


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[Stage, FaultPlan, list[bytes]]:
    """Draw a stage, what goes wrong in it, and its messages."""
    plan = draw(fault_plans(DEADLY | HARMLESS, poison=(POISON,)))
    stage = draw(
        stages(
            lambda mode: hostile_worker(plan, mode=mode, batch=4),
            speaking=st.sampled_from(MARKERS),
            timeout=PATIENT,
            order=Order.TOTAL,
            batch=BatchPolicy(size=4, seconds=0.05),
            # Workers may fail any number of times here, without a pause.
            restart=RestartPolicy(max=1000, delay=0.001, max_delay=0.001),
        )
    )
    assert isinstance(stage.dialect, MarkerDialect)
    run = draw(st.lists(messages(stage.dialect.markers), max_size=25))
    for place in draw(st.lists(st.integers(0, 25), max_size=2)):
        run.insert(place, POISON)
    return stage, plan, run


@settings(max_examples=30, deadline=None, derandomize=True)
@given(scenario=scenarios())
async def test_random_faults(scenario: tuple[Stage, FaultPlan, list[bytes]]) -> None:
    """Only messages at fault fail; all others are delivered once and in order."""
    stage, plan, run = scenario

    outcome = await supervise(stage, run)

    failed = [r.message for r in outcome.results if r.error is not None]
    assert delivered(outcome.results) == [
        r.message for r in outcome.results if r.error is None
    ]
    for result in outcome.results:
        if result.error is not None:
            assert isinstance(result.error, WorkerLost)
            assert len(result.error.attempts) >= 3
    if any(map(loses, plan.faults)):
        assert failed.count(POISON) == run.count(POISON)
    if not any(map(may_lose, plan.faults)):
        assert set(failed) <= {POISON}
        if not any(map(loses, plan.faults)):
            assert failed == []


# --- many -----------------------------------------------------------------------------

COUNT = 200_000
CULPRITS = 5


def numbered(at: int) -> bytes:
    """Return message number ``at``; some are poison, spread over all."""
    poison = at % (COUNT // CULPRITS) == 17_713
    return b"%s %d" % (POISON if poison else b"message", at)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_many_messages_through_workers_that_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They die about every 2,000 messages; each culprit is found, the rest arrives."""
    token = uuid.uuid4().hex
    stage = hostile(
        Fault(FaultKind.KILL, probability=1 / 2000),
        Fault(FaultKind.KILL, contains=POISON),
        seed=20,
        workers=3,
        markers=Markers(),
        env={RUN: token},
    )
    sink, letters = MemorySink(), DeadLetters(tmp_path, pipeline="p")
    pipeline = Pipeline(
        name="p",
        source=MemorySource(
            [numbered(n) for n in range(at, min(at + 8192, COUNT))]
            for at in range(0, COUNT, 8192)
        ),
        stages=[stage],
        sink=sink,
        dead_letters=letters,
    )

    with capture_logs() as logs:
        report = await pipeline.run()

    everything = [numbered(at) for at in range(COUNT)]
    poison = [m for m in everything if m.startswith(POISON)]
    assert len(poison) == CULPRITS
    assert sink.messages == [m for m in everything if not m.startswith(POISON)]
    found = list(letters.letters())
    assert [letter.message for letter in found] == poison
    assert [letter.place for letter in found] == [everything.index(m) for m in poison]
    # There are more attempts if it was not the first message of its worker.
    assert all(3 <= len(letter.attempts) <= 9 for letter in found)
    report.ledger.check()
    (_, account, _) = report.ledger
    assert (account.done, account.dead) == (COUNT - CULPRITS, CULPRITS)
    assert (account.failed, account.unprocessed) == (0, 0)
    restarts = sum(log["event"] == "worker is restarted" for log in logs)
    # Messages that were answered in a culprit's block are sent again, to new processes.
    assert 60 < restarts < 300
    assert left(token) == {}
    with capsys.disabled():
        print(f" {report.seconds:.1f} s, {restarts} restarts", end=" ")  # noqa: T201
