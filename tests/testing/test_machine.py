"""``WorkerMachine``: a stage and its model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar, cast

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from etlstage import worker as sdk
from etlstage.errors import StageError, StageFailed
from etlstage.messages import StageKind
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy
from etlstage.testing import (
    Fault,
    FaultKind,
    FaultPlan,
    ScriptedWorker,
    WorkerMachine,
    hostile_worker,
)
from etlstage.testing.strategies import fault_plans

Played = TypeVar("Played", bound=WorkerMachine)

FEW: Final = settings(
    deadline=None, max_examples=6, stateful_step_count=8, database=None
)
MANY: Final = settings(
    deadline=None,
    max_examples=50,
    stateful_step_count=3,
    database=None,
    derandomize=True,
    phases=[Phase.generate, Phase.shrink],
)
REFUSES: Final = FaultPlan.of(Fault(FaultKind.REFUSE, contains=b"x"))


class Upper(WorkerMachine):
    """A process that answers in capitals and refuses what has an x in it."""

    tested = hostile_worker(REFUSES, transform="upper")

    def model(self, asked: bytes | list[bytes]) -> Iterable[bytes]:
        """Return the outputs of a message, or of a batch."""
        messages = asked if isinstance(asked, list) else [asked]
        if any(b"x" in message for message in messages):
            raise sdk.Refuse("x")
        return [message.upper() for message in messages]


class Suffering(Upper):
    """The same worker, with faults that kill it or cut its output."""

    faults = fault_plans(
        {FaultKind.KILL, FaultKind.EXIT, FaultKind.PARTIAL, FaultKind.CUT}
    )


class Asking(Upper):
    """The same worker, which asks for its batches."""

    tested = hostile_worker(REFUSES, mode=Mode.BATCH_WORKER, batch=2, transform="upper")
    options = {  # noqa: RUF012
        "dialect": MarkerDialect(mode=Mode.BATCH_WORKER),
        "batch": BatchPolicy(seconds=0.01),
    }


class Batches(Upper):
    """The same worker, with batches that the supervisor closes."""

    tested = hostile_worker(REFUSES, mode=Mode.BATCH_SUPERVISOR, transform="upper")
    options = {  # noqa: RUF012
        "dialect": MarkerDialect(mode=Mode.BATCH_SUPERVISOR),
        "batch": BatchPolicy(seconds=0.01),
    }


async def remembers(worker: ScriptedWorker) -> None:
    """Answer a message that it has seen before with nothing."""
    seen = set()
    async for message in worker.messages():
        await worker.reply(*([] if message in seen else [message]))
        seen.add(message)


class Remembering(WorkerMachine):
    """A script that keeps state, with a model that does not."""

    tested = remembers
    keeps_state = True

    def model(self, asked: bytes) -> Iterable[bytes]:
        """Return what it should do."""
        return [asked]


class Knowing(WorkerMachine):
    """The same script, with a model that keeps its state, and drops it at restarts."""

    tested = remembers
    keeps_state = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[bytes] = set()
        self.asked = 0

    def model(self, asked: bytes) -> Iterable[bytes]:
        """Return what the script replies."""
        outputs = [] if asked in self.seen else [asked]
        self.seen.add(asked)
        return outputs

    def restarted(self) -> None:
        """Drop the state."""
        self.seen.clear()

    @rule()
    def ask_one_more(self) -> None:
        """Act as a rule of a user's own."""
        self.asked += 1
        (result,) = self.ask([b"%d" % self.asked])
        expected = tuple(self.model(result.message))
        assert result.outputs == expected


async def echoes(worker: ScriptedWorker) -> None:
    """Return each message, whatever its markers."""
    async for message in worker.messages():
        await worker.reply(message)


class Lines(WorkerMachine):
    """Messages and outputs with the usual markers in them, as the stage has others."""

    tested = echoes
    options = {  # noqa: RUF012
        "dialect": MarkerDialect(markers=Markers(b"EOM", b"EOP", b"EOB", b"BNC", None))
    }
    messages = st.just([b"1\n2\0"])

    def model(self, asked: bytes) -> Iterable[bytes]:
        """Return what the script replies."""
        return [asked]


class Wrong(Remembering):
    """The wrong model, with faults, which are no excuse for a wrong reply."""

    faults = st.just(FaultPlan.of(Fault(FaultKind.KILL, message=9)))


@pytest.mark.parametrize("machine", [Upper, Suffering, Asking, Batches, Knowing])
def test_stage_that_does_as_its_model(machine: type[WorkerMachine]) -> None:
    """Kills of its workers don't change that (issue 12)."""
    run_state_machine_as_test(machine, settings=FEW)


def test_model_has_the_markers_of_the_stage() -> None:
    """Its messages and outputs may contain the usual ones (issue 26)."""
    run_state_machine_as_test(Lines, settings=FEW)


async def stores(worker: ScriptedWorker) -> None:
    """Load each message."""
    async for _ in worker.messages():
        await worker.reply()


class Loading(Remembering):
    """A load stage, whose model returns the outputs of any: none."""

    tested = stores
    options = {"kind": StageKind.LOAD}  # noqa: RUF012

    def model(self, asked: bytes) -> Iterable[bytes]:
        """Return what a load worker writes."""
        return []


def test_load_stage_that_does_as_its_model() -> None:
    """The model returns no outputs, rather than nothing (issue 26)."""
    run_state_machine_as_test(Loading, settings=FEW)


class Forbidding(Remembering):
    """The script, with a model that refuses everything."""

    def model(self, asked: bytes) -> Iterable[bytes]:
        """Refuse any message."""
        raise sdk.Refuse("no")


def test_model_that_refuses_what_the_worker_answers() -> None:
    """The failure has the model's reason, and the worker's reply (issue 26)."""
    with pytest.raises(AssertionError, match=r"the model returned a refusal \(no\), "):
        run_state_machine_as_test(Forbidding, settings=MANY)


@pytest.mark.parametrize("machine", [Remembering, Wrong])
def test_stage_that_does_not(machine: type[WorkerMachine]) -> None:
    """The failure is shrunk to the shortest messages (issue 12)."""
    with pytest.raises(
        AssertionError, match=r"the model returned \[b''\], the workers"
    ):
        run_state_machine_as_test(machine, settings=MANY)


async def parting(worker: ScriptedWorker) -> None:
    """Answer, and write once more at the end of the input."""
    async for message in worker.messages():
        await worker.reply(message)
    await worker.write(b"bye\n")


class Parting(Remembering):
    """A script that returns each message, and whose last words are no reply."""

    tested = parting


def test_stage_that_writes_more_than_replies() -> None:
    """Its replies may be those of other messages (issue 26)."""
    with pytest.raises(StageError, match="an unsolicited reply after"):
        run_state_machine_as_test(Parting, settings=MANY)


class Dying(WorkerMachine):
    """A program that exits at its start."""

    tested = ("sh", "-c", "exit 2")

    def model(self, asked: bytes) -> Iterable[bytes]:
        """Return what it should do."""
        return [asked]


class DyingWithFaults(Dying):
    """The same with faults, which are no excuse for it."""

    faults = st.just(FaultPlan())


@pytest.mark.parametrize("machine", [Dying, DyingWithFaults])
def test_worker_that_keeps_exiting(machine: type[WorkerMachine]) -> None:
    """It is not restarted for ever, and its last exit is reported (issue 26)."""
    with started(machine()) as dying, pytest.raises(StageFailed, match="with status 2"):
        dying.ask([b"a"])


def test_worker_may_be_killed_again_and_again() -> None:
    """A kill needs a result only after many others (issue 26)."""
    data = cast("st.DataObject", Given(b"a"))
    with started(Knowing()) as machine:
        for _ in range(20):
            machine.restart()
        machine.ask_some(data)
        machine.restart()
        machine.ask_some(data)


# --- rules, one by one ----------------------------------------------------------------


class Given:
    """Takes the place of Hypothesis' data: it holds what a rule draws."""

    def __init__(self, *messages: bytes) -> None:
        self.messages = messages

    def draw(self, _strategy: object, label: str) -> object:
        """Return the messages, or faults."""
        return [*self.messages] if label == "messages" else FaultPlan()


@contextmanager
def started(machine: Played) -> Iterator[Played]:
    """Run the machine's workers during the block."""
    machine.start(cast("st.DataObject", Given()))
    try:
        yield machine
    finally:
        machine.teardown()


def test_worker_that_is_killed_is_a_new_one() -> None:
    """The model is notified (issue 12)."""
    data = cast("st.DataObject", Given(b"a"))
    with started(Knowing()) as machine:
        machine.ask_some(data)
        machine.restart()
        machine.ask_some(data)


def test_model_is_notified_of_a_worker_that_is_killed_at_work() -> None:
    """The model drops its state then (issue 12)."""
    with started(Knowing()) as machine:
        machine.seen.add(b"z")
        machine.ask_and_kill(cast("st.DataObject", Given(b"a")), 0)
        assert machine.seen == {b"a"}


async def halves(worker: ScriptedWorker) -> None:
    """Answer a batch of one, and refuse those that are larger."""
    rest = b""
    while data := await worker.read():
        rest += data
        while b"\x17" in rest:
            batch, _, rest = rest.partition(b"\x17")
            if batch.count(b"\n") > 1:
                await worker.refuse("too many")
            else:
                await worker.reply(batch.strip().upper())


class Halving(WorkerMachine):
    """A batch that is submitted as a whole, and answered in parts."""

    tested = halves
    options = Batches.options

    def model(self, asked: list[bytes]) -> Iterable[bytes]:
        """Return the outputs of a batch."""
        return [message.upper() for message in asked]


class Excused(Halving):
    """The same with faults, which may be the reason for the parts."""

    faults = st.just(FaultPlan())


def test_batch_is_answered_whole() -> None:
    """Parts are allowed only to a machine with faults (issue 12)."""
    data = cast("st.DataObject", Given(b"a", b"b"))
    with started(Excused()) as machine:
        machine.ask_some(data)
    with (
        started(Halving()) as machine,
        pytest.raises(AssertionError, match=r"the model returned \[b'A', b'B'\]"),
    ):
        machine.ask_some(data)
