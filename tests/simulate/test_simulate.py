"""Simulations of pipelines drawn from seeds find bugs, and find them again."""

from __future__ import annotations

import gc
import random
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import structlog

from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.pipeline import DeadLetter
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.epoch_sink import EpochSink
from etlstage.pipeline.loading import Loading
from etlstage.protocol.marker.blocks import BlockSizing
from etlstage.protocol.marker.proof import Proof
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import ErrorBudget, ErrorPolicy, Stage
from etlstage.supervisor.exchange import dispatch, retry, submission
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.testing import (
    Fault,
    FaultKind,
    FaultPlan,
    MemoryDeadLetters,
)
from tests.simulate import (
    Bounds,
    Scenario,
    SimulationFailed,
    simulate,
    three_stages,
)
from tests.simulate.__main__ import main
from tests.simulate.pipelines import any_pipeline, miscounting

SOME = range(60)
MANY = range(400)
ALL = ErrorPolicy(budget=ErrorBudget(share=1.0))


def test_three_stages_keep_what_is_promised() -> None:
    """A sample of seeds; ``python -m tests.simulate`` runs more."""
    simulate(three_stages, SOME)


@pytest.mark.parametrize("seed", [4443, 28333])
def test_reply_too_many_that_is_made_up_for_is_no_finding(seed: int) -> None:
    """If the worker ends its batches itself, this can't be detected (issue 12)."""
    simulate(three_stages, [seed])


# --- what is planted is found ---------------------------------------------------------

judge = retry.judge
acknowledge = Loading._acknowledge
begin = submission.Submission.__init__
open_session = MarkerDialect.open


def forget(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
    """Judge, and forget one of the messages that must be tried again."""
    found = judge(*arguments, **options)
    if found.innocent:
        found.innocent.pop()
    return found


def blame(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
    """Judge without any retries."""
    return judge(*arguments, **options | {"retries": 0})


def hurry(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
    """Judge as if the process had got no messages before."""
    return judge(*arguments, **options | {"first": True})


def disorder(*arguments: Any, **options: Any) -> None:  # noqa: ANN401
    """Begin a submission whose outcomes come in any order."""
    begin(*arguments, **options | {"order": submission.AnyOrder()})


def drift(backlog: Any, lane: Any, lanes: Any, owned: int = 0) -> bool:  # noqa: ANN401
    """Let a lane move to another worker while messages of it are in flight."""
    owner = backlog._owners.get(id(lane))
    return owner not in backlog._workers or lanes[owner] > owned


def release_at_once(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
    """Open a session that releases replies by count, without proof."""
    return open_session(*arguments, **options | {"life": None})


async def hasten(loading: Any) -> None:  # noqa: ANN401
    """Acknowledge everything that was read, before the sink has it."""
    positions = loading._positions
    if positions:
        await loading._source.acknowledge(positions.pop()[1])
        positions.clear()


async def skip(_: MemoryDeadLetters) -> None:
    """Make nothing durable."""


PLANTED = {
    "a message is forgotten when its worker dies": (
        (dispatch, "judge", forget),
        "the run did not end within 100 s",
    ),
    "a message is not tried again": (
        (dispatch, "judge", blame),
        "is dead-lettered, and is not at fault",
    ),
    "order is not kept": (
        (submission.Submission, "__init__", disorder),
        "is loaded before|is dead-lettered as number",
    ),
    "messages with one key are with two workers": (
        (Backlog, "_is_free", drift),
        "is processed before another one with its key",
    ),
    "replies are not verified": (
        (MarkerDialect, "open", release_at_once),
        "is not dead-lettered|is not durable|is lost",
    ),
    "positions do not wait for the sink": (
        (Loading, "_acknowledge", hasten),
        "is stored, but .* is not durable",
    ),
    "positions do not wait for dead letters": (
        (MemoryDeadLetters, "sync", skip),
        "is stored, but .* is not durable",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_found(name: str) -> None:
    """Few seeds find it, and the seed that does passes without the bug."""
    bug, why = PLANTED[name]
    with patch.object(*bug), pytest.raises(SimulationFailed, match=why) as found:
        simulate(three_stages, SOME)
    simulate(three_stages, [found.value.seed])


# --- pairing --------------------------------------------------------------------------

conclude, look, exited = Proof._conclude, Proof.input_unread, Proof.peer_exited


def trust(
    proof: Proof,
    answer: Any,  # noqa: ANN401
    many: int,
    *_: Any,  # noqa: ANN401
    owed: int,
    **_more: Any,  # noqa: ANN401
) -> None:
    """Release a block as soon as it is complete, without proof."""
    proof.held += many
    proof._answers.append(answer)
    if not owed:
        proof._release(proven=True)
        proof.blocks.end()


def count(proof: Proof, now: float, **_: Any) -> None:  # noqa: ANN401
    """Treat an exited process as one that replied to everything and ended well."""
    proof._whole, proof._left = True, 0
    exited(proof, now, clean=True, owed=0)


MISCOUNTED: dict[str, Any] = {
    "nothing is proven": (Proof, "hold", trust),
    "any exit proves": (
        Proof,
        "_conclude",
        lambda proof, *, clean: conclude(proof, clean=clean or True),
    ),
    "what is owed at the end is not looked at": (Proof, "peer_exited", count),
    "there are no quiet times": (
        BlockSizing,
        "quiet",
        lambda *_, several: 0.0 * several,
    ),
    "the byte ahead need not be read": (
        Proof,
        "input_unread",
        lambda proof, _left, now, *, owed: look(proof, 0, now, owed=owed),
    ),
}


def test_workers_that_miscount_change_no_reply() -> None:
    """Surplus or missing replies, or deaths after them, change no reply (issue 22)."""
    simulate(miscounting, MANY)


@pytest.mark.parametrize("name", MISCOUNTED)
def test_planted_bug_in_pairing_is_found(name: str) -> None:
    """Each rule of the pairing is needed (issue 22)."""
    with patch.object(*MISCOUNTED[name]), pytest.raises(SimulationFailed) as found:
        simulate(miscounting, MANY)
    simulate(miscounting, [found.value.seed])


# --- epochs ---------------------------------------------------------------------------

follow = Delivery.next
commit = Loading._commit
commit_at = Loading._commit_at


def epochs(draw: random.Random) -> Scenario:
    """Draw three stages until each message must be loaded exactly once."""
    while (made := three_stages(draw)).epoch is None:
        pass
    return made


def epochs_of_workers(draw: random.Random) -> Scenario:
    """Draw three stages until a user's programs commit what load workers staged."""
    while (made := epochs(draw)).sink is None:
        pass
    return made


def ahead(delivery: Delivery, position: object, **options: Any) -> Any:  # noqa: ANN401
    """Return a record whose position is one too far."""
    at = position + 1 if isinstance(position, int) else position
    return follow(delivery, at, **options)


def uncounted(delivery: Delivery, position: object, **options: Any) -> Any:  # noqa: ANN401
    """Return a record without the stages' accounts."""
    return follow(delivery, position, **options | {"accounts": None})


async def seal(loading: Any, durable: Any) -> None:  # noqa: ANN401
    """Make the epoch durable without the dead letters."""
    await durable()


async def put_off(loading: Any, _durable: Any) -> None:  # noqa: ANN401
    """Make the dead letters durable without the epoch."""
    await loading._letters.sync()


async def record_first(loading: Any, *record: Any, **ended: Any) -> None:  # noqa: ANN401
    """Record an epoch before it is loaded."""
    await commit(loading, *record, **ended)
    await loading._sink.flush()


LOADED_TWICE = {
    "a position is one ahead": (
        ((Delivery, "next", ahead),),
        "is lost: neither|the last position stored is|is acknowledged, and not",
    ),
    "dead letters are made durable behind the record": (
        ((Loading, "_seal", seal),),
        "a dead letter of stage . is not durable",
    ),
    "an epoch is recorded before it is loaded": (
        ((Loading, "_seal", put_off), (Loading, "_commit", record_first)),
        "is lost: neither|LedgerImbalance",
    ),
    "accounts are forgotten": (
        ((Delivery, "next", uncounted),),
        r"messages were extracted|where the stage was given \[\]",
    ),
    "what a table has noted is not looked at": (
        ((Delivery, "adopt", lambda *_: None),),
        "the run failed: ",
    ),
}


def test_runs_that_break_off_load_each_message_once() -> None:
    """A sample of seeds; ``python -m tests.simulate`` runs more (issue 14)."""
    simulate(epochs, range(30))


def test_programs_commit_each_message_once() -> None:
    """Workers, the commit programs, and the run may die anywhere (issue 24)."""
    simulate(epochs_of_workers, range(30))


def test_message_that_is_blamed_for_the_process_of_another_is_found() -> None:
    """The process had other messages, one of which may have killed it (issue 26)."""
    why = r"dead-lettered because of a process that had \d messages"
    with (
        patch.object(dispatch, "judge", hurry),
        pytest.raises(SimulationFailed, match=why),
    ):
        simulate(any_pipeline, [533])
    simulate(any_pipeline, [533])


def test_attempt_that_is_committed_though_a_worker_was_lost_is_found() -> None:
    """Its messages are loaded again by another worker in the attempt (issue 24)."""
    with (
        patch.object(EpochSink, "_in_vain", False),
        pytest.raises(SimulationFailed, match="is loaded too often") as found,
    ):
        simulate(epochs_of_workers, MANY)
    simulate(epochs_of_workers, [found.value.seed])


@pytest.mark.parametrize("seed", [919, 2837])
def test_run_that_was_drained_is_read_on_behind(seed: int) -> None:
    """Another run continues there, and accounts for the rest (issue 14)."""
    simulate(three_stages, [seed])


@pytest.mark.parametrize("name", LOADED_TWICE)
def test_planted_bug_in_a_commit_is_found(name: str) -> None:
    """Few seeds find it, and the seed that does passes without the bug (issue 14)."""
    bugs, why = LOADED_TWICE[name]
    with ExitStack() as stack:
        for bug in bugs:
            stack.enter_context(patch.object(*bug))
        with pytest.raises(SimulationFailed, match=why) as found:
            simulate(epochs, SOME)
    simulate(epochs, [found.value.seed])


def test_position_that_is_acknowledged_is_recorded() -> None:
    """It must be recorded first, as the source forgets what is before it (issue 14)."""

    async def hasty(loading: Any, reached: Any, *, ended: bool = False) -> None:  # noqa: ANN401
        await loading._source.acknowledge(reached)
        await commit_at(loading, reached, ended=ended)

    with (
        patch.object(Loading, "_commit_at", hasty),
        pytest.raises(SimulationFailed, match="is acknowledged, and not recorded"),
    ):
        simulate(epochs, SOME)


# --- one's own stages -----------------------------------------------------------------


def number(message: bytes) -> list[bytes]:
    """Return a number as it is; anything else is refused."""
    return [b"%d" % int(message)]


def clean(**settings: Any) -> Stage:  # noqa: ANN401
    """Return a transform stage that dead-letters messages."""
    return Stage(name="clean", worker=("no-such-program",), on_error=ALL, **settings)


def scenario(**changes: Any) -> Callable[[random.Random], Scenario]:  # noqa: ANN401
    """Return a function that always draws the same scenario."""
    made = Scenario(
        messages=[b"%d" % n for n in range(8)],
        stages=[clean()],
        work={"clean": number},
        fatal={},
    )
    return lambda _: replace(made, **changes)


def test_embedder_simulates_own_stages() -> None:
    """An embedder gives the stages' work and faults."""
    killed = Fault(FaultKind.KILL, equals=b"3")
    simulate(
        scenario(
            messages=[b"1", b"x", b"3", b"4"],
            faults={"clean": FaultPlan.of(killed)},
            fatal={"clean": {b"x", b"3"}},
        ),
        range(5),
    )


def test_both_ends_may_be_workers() -> None:
    """One extracts the scenario's messages, another loads them."""
    simulate(
        scenario(
            stages=[
                Stage(
                    name="extract",
                    worker=("no-such-program",),
                    kind=StageKind.EXTRACT,
                    dialect=MarkerDialect(mode=MarkerDialect().mode.CYCLIC),
                ),
                clean(),
                Stage(name="load", worker=("no-such-program",), kind=StageKind.LOAD),
            ]
        ),
        range(5),
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"fatal": {"clean": {b"3"}}},
            "stage clean: b'3' is not dead-lettered",
        ),
        (
            {"messages": [b"1", b"x"]},
            "stage clean: b'x' is dead-lettered, and is not at fault",
        ),
        (
            {
                "messages": [b"1", b"x"],
                "stages": [replace(clean(), on_error=ErrorPolicy(then="fail"))],
            },
            "the run failed: ",
        ),
        (
            {"faults": {"clean": FaultPlan.of(Fault(FaultKind.STALL))}},
            "the run did not end within 3600 s",
        ),
        (
            {"faults": {"clean": FaultPlan.of(Fault(FaultKind.GRANDCHILD))}},
            "fault: grandchild can't be simulated",
        ),
        (
            {
                "faults": {
                    "clean": FaultPlan.of(
                        Fault(FaultKind.WRONG_MARKER, equals=b"3", data=b"?\n\0")
                    )
                }
            },
            "b'\\?' is loaded too often, or by mistake",
        ),
    ],
)
def test_what_is_not_as_expected_is_a_finding(
    changes: dict[str, Any], why: str
) -> None:
    """The error shows what is wrong, and for which message."""
    with pytest.raises(SimulationFailed, match=why):
        simulate(scenario(**changes), [0])


def test_own_stages_load_once() -> None:
    """A run may be interrupted at any step, and several times (issue 14)."""
    killed = {"clean": FaultPlan.of(Fault(FaultKind.KILL, message=2, start=1))}
    breaks = [(step, n) for n in (1, 2) for step in ("written", "aside", "recorded")]
    for notes in (False, True):
        simulate(
            scenario(
                epoch=Bounds(messages=2),
                notes=notes,
                breaks=[0.0, 0.001, *breaks],
                position_every=1,
                faults=killed,
            ),
            range(3),
        )


@pytest.mark.parametrize("ended", ["drained", "cancelled"])
@pytest.mark.parametrize("at", [0.0, 0.01, 10.0])
def test_run_that_is_ended_early(ended: str, at: float) -> None:
    """A drained or cancelled run keeps its promises, too."""
    slow = Fault(FaultKind.PAUSE, seconds=0.5, probability=0.5)
    simulate(
        scenario(ended=ended, ended_at=at, faults={"clean": FaultPlan.of(slow)}),
        range(5),
    )


@pytest.mark.parametrize("broken", ["source", "sink", "flush", "commit", "letters"])
def test_end_that_fails_makes_the_run_fail(broken: str) -> None:
    """With ``may_fail`` the run must fail; without it the failure is a finding."""
    fails: dict[str, Any] = {"messages": [b"1", b"x", b"3"], "fatal": {"clean": {b"x"}}}
    fails |= {"broken": broken, "flushes": True}
    simulate(scenario(**fails, may_fail=True), range(5))
    with pytest.raises(SimulationFailed, match=r"the run failed: .* is broken"):
        simulate(scenario(**fails), [0])


def test_letter_of_a_load_worker_can_not_be_kept() -> None:
    """The run fails, and leaves nothing open (issue 12)."""
    load = Stage(
        name="load", worker=("no-such-program",), kind=StageKind.LOAD, on_error=ALL
    )
    killed = Fault(FaultKind.KILL, equals=b"3")
    simulate(
        scenario(
            stages=[clean(), load],
            faults={"load": FaultPlan.of(killed)},
            broken="letters",
            may_fail=True,
        ),
        range(5),
    )


def test_end_whose_failure_no_one_sees_is_a_finding() -> None:
    """It is one if the run ends as though the end had not failed."""

    async def swallow(loading: Any) -> None:  # noqa: ANN401
        with suppress(OSError):
            await acknowledge(loading)

    with (
        patch.object(Loading, "_acknowledge", swallow),
        pytest.raises(SimulationFailed, match="done, although the commit failed"),
    ):
        simulate(scenario(broken="commit", may_fail=True), range(5))


def test_start_that_fails() -> None:
    """A later start is tried again; a failed first start ends the run."""
    killed = {"clean": FaultPlan.of(Fault(FaultKind.KILL, message=2, start=1))}
    simulate(scenario(faults=killed, starts_that_fail={"clean": {2}}), range(5))
    with pytest.raises(SimulationFailed, match=r"the run failed: .*can't start worker"):
        simulate(scenario(starts_that_fail={"clean": {1}}), [0])


def test_pipes_may_be_small() -> None:
    """They may be even smaller than a message."""
    simulate(scenario(messages=[b"123456789"] * 5, pipe_size=4), range(5))


def test_stage_needs_work() -> None:
    """Without ``work`` the outputs of a message are unknown."""
    with pytest.raises(ConfigError, match="stage clean has no work"):
        Scenario(messages=[], stages=[clean()], work={})


def test_generator_that_is_left_behind_is_a_finding() -> None:
    """The time at which it is closed would be left to chance."""
    keep = MemoryDeadLetters.keep

    async def numbers() -> AsyncIterator[int]:
        yield 1
        yield 2

    async def leave(letters: MemoryDeadLetters, kept: Sequence[DeadLetter]) -> None:
        async for _ in numbers():
            break
        gc.collect()
        await keep(letters, kept)

    with (
        patch.object(MemoryDeadLetters, "keep", leave),
        pytest.raises(
            SimulationFailed, match=r"numbers .* was abandoned in the middle"
        ),
    ):
        simulate(scenario(messages=[b"x"], fatal=None, may_fail=True), [0])


# --- stories --------------------------------------------------------------------------


def story() -> str:
    """Return the story of a seed that fails because of a planted bug."""
    with (
        patch.object(dispatch, "judge", forget),
        pytest.raises(SimulationFailed) as found,
    ):
        simulate(three_stages, SOME)
    return str(found.value)


def test_failing_seed_has_its_story() -> None:
    """The story has the events in order, with virtual times, and is reproducible."""
    told = story()
    first, *lines = told.splitlines()
    assert re.fullmatch(r"seed \d+: the run did not end within 100 s", first)
    assert lines[0].split()[:2] == ["0.000", "s"]
    assert any(": start 1" in line for line in lines)
    assert any(": fault " in line for line in lines)
    assert any("log: worker is restarted" in line for line in lines)
    assert lines[-1].endswith("VIOLATION: the run did not end within 100 s")
    assert story() == told


def test_story_is_whole_where_structlog_is_set_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The service's own configuration of structlog stays as it is (issue 12)."""
    told = story()
    structlog.configure()
    try:
        assert story() == told
        assert structlog.is_configured()
    finally:
        structlog.reset_defaults()
    assert capsys.readouterr().out == ""


PROGRAM = """
from tests.simulate.test_simulate import story
print(story())
"""


def test_other_process_has_the_same_story() -> None:
    """The story doesn't depend on the hash seed."""
    again = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert again.stdout.strip() == story()


# --- the command ----------------------------------------------------------------------


def test_command_runs_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints only a summary if all seeds pass."""
    assert main(["--seeds", "3"]) == 0
    assert main(["--seeds", "0:4"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("1 seed")
    assert second.startswith("4 seeds in ")
    assert second.endswith(" s of processor time: none failed")


def test_command_reports_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    """It goes on after a failed seed."""
    with patch.object(Loading, "_acknowledge", hasten):
        assert main(["--seeds", "0:10"]) == 1
    told = capsys.readouterr().out
    stories = re.findall(r"^seed \d: ", told, flags=re.MULTILINE)
    assert len(stories) > 1
    assert told.endswith(f": {len(stories)} failed\n")


@pytest.mark.process
def test_command_runs_seeds_in_several_processes() -> None:
    """``--jobs`` sets their number."""
    told = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.simulate",
            "--seeds",
            "0:4",
            "--jobs",
            "2",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.startswith("4 seeds in ")


def test_command_wants_a_process() -> None:
    """Zero jobs are refused."""
    with pytest.raises(SystemExit, match="2"):
        main(["--jobs", "0"])


@pytest.mark.parametrize("text", ["x", "5:5", "9:5", ":", "1:x"])
def test_command_refuses_what_is_no_range(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error shows the expected form."""
    with pytest.raises(SystemExit, match="2"):
        main(["--seeds", text])
    assert f"expected FIRST:END, as 0:10000, got {text!r}" in capsys.readouterr().err
