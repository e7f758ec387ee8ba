"""
Planted bugs of workers with sessions, each found and shown by the shortest case.

The workers are scripts: a try takes milliseconds, and no process.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.stage import Stage
from etlstage.testing import (
    Call,
    Calls,
    Case,
    ScriptedLaunch,
    SessionCase,
    WorkerUnderTest,
)
from etlstage.testing.fuzzing.fuzz import Found, Fuzzer, session_cases
from etlstage.testing.fuzzing.oracle import CaseFailed, FailureKind, Oracles, converse
from etlstage.testing.fuzzing.steps import has_sessions
from tests.testing.check.sessions import Worker
from tests.testing.fuzzed import searched

pytestmark = pytest.mark.core

ONE: Final = Call((b"",))


class _Mixes(Worker):
    """Adds each chunk to the session that was begun last."""

    def add(self, number: int, chunk: bytes) -> None:
        super().add(max(self.open), chunk)


class _DiesWhenEmpty(Worker):
    """Reads the first byte of a chunk that may be empty."""

    def add(self, number: int, chunk: bytes) -> None:
        _ = chunk[0]
        super().add(number, chunk)


class _ForgetsTheThird(Worker):
    """Does not answer a session that ends while two others are open."""

    async def answer(self, number: int, chunks: list[bytes]) -> None:
        if len(self.open) < 2:
            await super().answer(number, chunks)


class _KeepsCount(Worker):
    """Replies with the number of sessions so far."""

    count = 0

    async def answer(self, number: int, chunks: list[bytes]) -> None:
        self.count += 1
        await super().answer(number, [b"%d" % self.count for _ in chunks])


class _TakesReadsForFrames(Worker):
    """Loses the incomplete frame at the end of a read."""

    def cut(self, data: bytes) -> Any:  # noqa: ANN401 - frames
        frames = [*super().cut(data)]
        self.frames = type(self.frames)(raw=True, use_list=False)
        return frames


class _BreaksWhenCancelled(Worker):
    """Ends a session that was never begun when another one is cancelled."""

    async def take(self, first: int, second: int, *rest: Any) -> None:  # noqa: ANN401
        if second == self.words.error and first in self.open:
            await self.say(99, self.words.choke)
        await super().take(first, second, *rest)


PLANTED: Final[
    list[tuple[type[Worker], dict[str, Any], FailureKind, *tuple[Calls, ...]]]
] = [
    (
        _Mixes,
        {"one_output": True},
        FailureKind.OUTPUTS,
        Calls((ONE, ONE), turns=(0, 1)),
    ),
    (_DiesWhenEmpty, {}, FailureKind.CRASHES, Calls((ONE,))),
    (_ForgetsTheThird, {}, FailureKind.HANGS, Calls((ONE,) * 3, turns=(1, 2))),
    (
        _TakesReadsForFrames,
        {},
        FailureKind.CRASHES,
        Calls((ONE,), cuts=(1,)),
    ),
    (
        _KeepsCount,
        {"stateless": True},
        FailureKind.STATELESS,
        Calls((ONE,)),
        Calls((ONE,)),
    ),
    (_BreaksWhenCancelled, {}, FailureKind.BREAKS, Calls((Call((), cancelled=True),))),
]


def search(worker: type[Worker], examples: int = 100, **oracles: Any) -> list[Found]:  # noqa: ANN401
    """Return the failures that are found in a script."""
    dialect = CocaineDialect()
    fuzzer = Fuzzer(
        Stage(name="worker", worker=("no-such-program",), dialect=dialect),
        session_cases(dialect),
        Oracles(**oracles),
        launch=ScriptedLaunch(worker.script),
    )
    return searched(fuzzer, examples)


@pytest.mark.parametrize(
    ("worker", "oracles", "kind", "shortest"),
    [(worker, oracles, kind, steps) for worker, oracles, kind, *steps in PLANTED],
    ids=[bug[0].__name__[1:] for bug in PLANTED],
)
def test_bug_is_found(
    worker: type[Worker],
    oracles: dict[str, Any],
    kind: FailureKind,
    shortest: list[Calls],
) -> None:
    """It is shrunk to its known minimum, which fails from a fresh start (issue 15)."""
    found = search(worker, **oracles)[0]
    assert (found.failure.kind, found.steady) == (kind, True)
    # Calls in turn are as short as calls at once: Hypothesis may find either.
    at_once = Calls(tuple(call for step in shortest for call in step.calls))
    assert found.case in (SessionCase((*shortest,)), SessionCase((at_once,)))


class _Leaves(Worker):
    """Exits after its first answer."""

    async def leave(self) -> int | None:
        return 3 if self.answered else await super().leave()

    answered = False

    async def answer(self, number: int, chunks: list[bytes]) -> None:
        await super().answer(number, chunks)
        self.answered = True


async def test_worker_that_has_left_is_at_fault() -> None:
    """The next call can't be sent, which is not the sender's mistake."""
    stage = Stage(name="worker", worker=("none",), dialect=CocaineDialect())
    launch = ScriptedLaunch(_Leaves.script)
    async with WorkerUnderTest(stage, launch=launch, timeout=5.0) as worker:
        await Calls((ONE,)).exchange(worker)
        await worker.exited()
        with pytest.raises(CaseFailed, match="exited with status 3") as caught:
            await converse(worker, [Calls((ONE,))])
    assert caught.value.kind is FailureKind.CRASHES


def upper(message: bytes) -> list[bytes]:
    """Do what the worker should do."""
    return [message.upper()]


def test_sound_worker_passes() -> None:
    """It does so with every oracle (issue 15)."""
    model = f"{__name__}:upper"
    assert search(Worker, 25, one_output=True, order_free=True, model=model) == []
    assert search(Worker, 10, stateless=True, idempotent=True) == []


def test_case_reads_as_a_program() -> None:
    """The printed text, and what is saved, are the same case (issue 15)."""
    step = Calls((Call((b"x",)), Call((), cancelled=True)), turns=(0, 1), cuts=(3,))
    case = SessionCase((step, Calls((ONE,))))
    assert SessionCase is Case
    assert eval(repr(case)).to_plain() == case.to_plain()  # noqa: S307
    assert repr(case) == (
        "Case([Calls([Call([b'x']), Call([], cancelled=True)], turns=[0, 1],"
        " cuts=[3]), Calls([Call([b''])])])"
    )
    assert SessionCase.from_plain(case.to_plain()) == case
    assert case.count == 2
    wont = "error 3 [42, 7] 'not wanted any more'"
    assert [*case.written(CocaineDialect())] == [
        "... | invoke 2 'transform'; invoke 3 'transform'; chunk 2 'x'; choke 2; "
        + wont,
        "invoke 4 'transform'; chunk 4 ''; choke 4",
        "a terminate",
    ]


def test_batch_is_a_session() -> None:
    """It is sent again as one session, single messages as several (issue 15)."""
    dialect = CocaineDialect(batches=True)
    assert has_sessions(dialect)
    said = Calls((Call((b"a", b"b")),)).of([b"A", b"B"], batches=True)
    assert said == Calls((Call((b"A", b"B")),))
    said = Calls((Call((b"a", b"b")),)).of([b"A", b"B"], batches=False)
    assert said == Calls((Call((b"A",)), Call((b"B",))))
