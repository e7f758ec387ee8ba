"""What Hypothesis draws for a worker with sessions."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from etlstage import worker as sdk
from etlstage.messages import StageKind
from etlstage.protocol.base import Limits, Side
from etlstage.protocol.cocaine import CocaineVersion
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.protocol.events import (
    Added,
    Cancelled,
    Event,
    Opened,
    Ready,
)
from etlstage.stage import Stage
from etlstage.testing import ScriptedWorker, SessionMachine
from etlstage.testing.conversation import WorkerMisbehaved
from etlstage.testing.fuzzing.fuzz import session_cases
from etlstage.testing.fuzzing.steps import Calls
from etlstage.testing.transcript import cut
from tests.protocol.cocaine.drawn import frames
from tests.testing.check.sessions import PLANTED, Worker

FEW: Final = settings(
    deadline=None, max_examples=20, stateful_step_count=15, database=None
)
MANY: Final = settings(
    deadline=None,
    max_examples=100,
    stateful_step_count=8,
    database=None,
    derandomize=True,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
)
LOADS: Final = """
from etlstage.worker import cocaine

def load(request, response):
    for _ in request:
        pass

cocaine.run({"load": load})
"""
VERSIONS: Final = [version for version in CocaineVersion if version.words is not None]


@given(st.data(), st.sampled_from(VERSIONS))
@settings(deadline=None, max_examples=50)
def test_sessions_arrive_as_they_are_sent(
    data: st.DataObject, version: CocaineVersion
) -> None:
    """They do so in any version, and however the bytes are cut (issue 15)."""
    dialect = CocaineDialect(protocol=version)
    ours, theirs = (dialect.open(side, Limits()) for side in Side)
    theirs.send(Ready("u"))
    ours.receive_data(b"".join(theirs.data_to_send()), 0.0)
    step = next(iter(data.draw(session_cases(dialect)).steps), Calls(()))
    assert isinstance(step, Calls)
    said = step.events(1)
    for event in said:
        ours.send(event)
    for piece in cut(b"".join(ours.data_to_send()), step.cuts):
        theirs.receive_data(piece, 0.0)
    heard: dict[int, list[bytes]] = {}
    ended, cancelled = [], []
    for event in theirs.events_received():
        match event:
            case Opened(id_):
                heard[id_] = []
            case Added(id_, messages, last):
                heard[id_] += messages
                ended += [id_] * last
            case Cancelled(id_):
                cancelled.append(id_)
            case _:
                pass
    assert heard == _chunks(said)
    assert ended == [e.id for e in said if isinstance(e, Added) and e.ended]
    assert cancelled == [e.id for e in said if isinstance(e, Cancelled)]


def _chunks(said: Sequence[Event]) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    for event in said:
        if isinstance(event, Opened):
            found[event.first] = []
        elif isinstance(event, Added):
            found[event.id] += event.messages
    return found


@given(st.data(), st.sampled_from(VERSIONS), st.sampled_from(list(Side)))
@settings(deadline=None, max_examples=100)
def test_no_frame_is_more_than_a_fault_of_the_peer(
    data: st.DataObject, version: CocaineVersion, side: Side
) -> None:
    """Whatever it sends, and when: nothing is raised (issue 15)."""
    session = CocaineDialect(protocol=version).open(side, Limits())
    if side is Side.WORKER:
        session.send(Ready("u"))
    for frame in data.draw(st.lists(frames(version), max_size=6)):
        session.receive_data(frame, 0.0)
        session.events_received()
        session.data_to_send()


async def shouts(worker: ScriptedWorker) -> int:
    """Run a worker without a bug."""
    return await Worker.script(worker)


class Shouting(SessionMachine):
    """The machine of that worker."""

    tested = shouts

    def model(self, chunks: Sequence[bytes]) -> Iterable[bytes]:
        """Return what the worker replies."""
        return [chunk.upper() for chunk in chunks]


class Refusing(Shouting):
    """A machine whose model refuses what the worker answers."""

    def model(self, chunks: Sequence[bytes]) -> Iterable[bytes]:
        """Refuse any session."""
        raise sdk.Refuse("no")


def machine(bug: str) -> type[SessionMachine]:
    """Return the machine of a worker with a bug."""
    (worker,) = [worker for worker in PLANTED if worker.__name__ == f"_{bug}"]
    return type(bug, (Shouting,), {"tested": worker.script})


def test_worker_that_does_as_its_model() -> None:
    """Its sessions may overlap, and be cancelled (issue 15)."""
    run_state_machine_as_test(Shouting, settings=FEW)


class _NamedWorker(Worker):
    """A worker whose only event is ``shout``."""

    async def begin(self, number: int, event: bytes) -> None:
        assert event == b"shout"
        self.open[number] = []


async def named(worker: ScriptedWorker) -> int:
    """Run that worker."""
    return await _NamedWorker.script(worker)


class _NamedEvent(Shouting):
    """The machine of that worker."""

    tested = named
    dialect = CocaineDialect(event="shout")


class _LoadStage(SessionMachine):
    """The machine of a load worker, whose event is that kind."""

    tested = Stage(
        name="w",
        kind=StageKind.LOAD,
        worker=(sys.executable, "-c", LOADS),
        dialect=CocaineDialect(),
    )

    def model(self, chunks: Sequence[bytes]) -> Iterable[bytes]:
        """Return what the worker replies."""
        return []


@pytest.mark.parametrize("machine", [_NamedEvent, _LoadStage])
def test_event_is_the_stages(machine: type[SessionMachine]) -> None:
    """It is the one of the dialect, else the stage's kind (issue 26)."""
    run_state_machine_as_test(machine, settings=settings(FEW, max_examples=4))


class _HastyWorker(Worker):
    """A worker that answers the first chunk of a session, and ignores the others."""

    def __init__(self, worker: ScriptedWorker) -> None:
        super().__init__(worker)
        self.answered: set[int] = set()

    async def take(
        self, first: int, second: int, arguments: tuple[Any, ...], *others: object
    ) -> None:
        if first in self.answered:
            return
        await super().take(first, second, arguments, *others)
        if self.open.get(first):
            self.answered.add(first)
            await self.answer(first, self.open.pop(first))


async def hasty(worker: ScriptedWorker) -> int:
    """Run that worker."""
    return await _HastyWorker.script(worker)


class Hasty(Shouting):
    """The machine of that worker, which can wait for a reply."""

    tested = hasty

    def model(self, chunks: Sequence[bytes]) -> Iterable[bytes]:
        """Return what the worker replies."""
        return [chunk.upper() for chunk in chunks[:1]]

    def wait_for(self, session: int) -> None:
        """Wait for the reply to a session."""
        assert self._held is not None
        self._held.run(self._held.entered.reply_to(session))


class _Drawn:
    """Takes the place of Hypothesis' data: it holds what rules draw, in order."""

    def __init__(self, *values: object) -> None:
        self.values = [*values]

    def draw(self, _strategy: object, label: str) -> object:
        """Return the next value."""
        return self.values.pop(0)


def test_worker_that_ends_its_reply_early() -> None:
    """It is sent no more in that session, and its reply is compared (issue 26)."""
    data = cast("st.DataObject", _Drawn([b"a"], 1, b"b", 1))
    machine = Hasty()
    machine.start()
    machine.begin(data, 1)
    machine.wait_for(1)
    machine.pass_on(data)
    machine.end(data)
    machine.teardown()
    run_state_machine_as_test(Hasty, settings=FEW)


def test_early_reply_that_is_wrong() -> None:
    """It is compared with the model of the whole session (issue 26)."""
    machine = type("Wrong", (Hasty,), {"model": Shouting.model})()
    machine.start()
    machine.begin(cast("st.DataObject", _Drawn([b"a", b"b"])), 1)
    with pytest.raises(AssertionError, match=r"b'A', b'B'\] to .* worker \[b'A'\]"):
        machine.teardown()


@pytest.mark.parametrize(
    ("machine", "error", "text"),
    [
        (machine("KnowsOneSession"), AssertionError, "the model returned"),
        (machine("DiesOfErrors"), WorkerMisbehaved, "status 1"),
        (machine("WaitsForAChunk"), WorkerMisbehaved, "did not end session"),
        (Refusing, AssertionError, "the model returned None"),
    ],
)
def test_worker_that_does_not(
    machine: type[SessionMachine], error: type[Exception], text: str
) -> None:
    """The error has what the worker sent, or did (issue 15)."""
    with pytest.raises(error, match=text):
        run_state_machine_as_test(machine, settings=MANY)
