"""``given_worker``: properties of a worker's replies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import anyio
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import FailedHealthCheck

from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import ReplyContract
from etlstage.testing import (
    FaultPlan,
    Reply,
    ScriptedWorker,
    WorkerMisbehaved,
    given_worker,
    hostile_worker,
)

FEW: Final = settings(deadline=None, max_examples=8, database=None)
MANY: Final = settings(
    deadline=None,
    max_examples=200,
    database=None,
    derandomize=True,
    phases=[Phase.generate, Phase.shrink],
)
WORDS: Final = MarkerDialect(markers=Markers(b"EOM", b"EOP", b"EOB", b"BNC", b"ERR"))
UPPER: Final = hostile_worker(FaultPlan(), transform="upper")
JOINED: Final = hostile_worker(FaultPlan(), mode=Mode.BATCH_SUPERVISOR)


async def clumsy(worker: ScriptedWorker) -> None:
    """Echo a message, with a byte 0xff replaced; refuse it if it has ``no`` in it."""
    async for message in worker.messages():
        if b"no" in message:
            await worker.refuse("it says no")
        else:
            await worker.reply(message.replace(b"\xff", b"?"))


@given_worker(UPPER, settings=FEW, dialect=WORDS)
def test_process_for_each_example(messages: list[bytes], replies: list[Reply]) -> None:
    """It has the markers of the stage (issue 12)."""
    assert [reply.outputs for reply in replies] == [(m.upper(),) for m in messages]


@given_worker(JOINED, settings=FEW, dialect=MarkerDialect(mode=Mode.BATCH_SUPERVISOR))
def test_example_of_a_batch(messages: list[bytes], replies: list[Reply]) -> None:
    """All of its messages have one reply (issue 12)."""
    assert replies == [Reply(tuple(messages))]


@pytest.mark.parametrize("word", [b"no", b"yes"])
@given_worker(clumsy, settings=FEW, messages=st.just([b"no", b"yes"]))
def test_with_fixtures(
    word: bytes, messages: list[bytes], replies: list[Reply]
) -> None:
    """They work beside the messages, which may be given (issue 12)."""
    said = dict(zip(messages, replies, strict=True))
    refused = Reply((), "it says no")
    assert said[word] == (refused if word == b"no" else Reply((b"yes",)))


def test_example_that_fails_is_shrunk() -> None:
    """One message of one byte is left (issue 12)."""
    last: list[bytes] = []

    @given_worker(clumsy, settings=MANY)
    def test_echo(messages: list[bytes], replies: list[Reply]) -> None:
        last[:] = messages
        assert [reply.outputs for reply in replies] == [(m,) for m in messages]

    with pytest.raises(AssertionError):
        test_echo()
    assert last == [b"\xff"]


def test_worker_that_does_not_keep_to_the_protocol() -> None:
    """It fails before the test's body runs (issue 12)."""

    async def silent(worker: ScriptedWorker) -> None:
        async for _ in worker.messages():
            return

    @given_worker(silent, settings=FEW, messages=st.just([b"x"]))
    def test_nothing(messages: list[bytes], replies: list[Reply]) -> None:
        raise AssertionError("unreachable: there is no reply")

    with pytest.raises(
        WorkerMisbehaved, match="has 1 reply outstanding: exited with status 0"
    ):
        test_nothing()
    assert list(inspect.signature(test_nothing).parameters) == []


def test_worker_that_writes_more_at_its_end() -> None:
    """Each example includes the worker's end (issue 12)."""

    async def bye(worker: ScriptedWorker) -> None:
        await clumsy(worker)
        await worker.write(b"bye\n")

    @given_worker(bye, settings=FEW, messages=st.just([b"x"]))
    def test_nothing(messages: list[bytes], replies: list[Reply]) -> None:
        raise AssertionError("unreachable: it has failed by now")

    with pytest.raises(WorkerMisbehaved, match="wrote unsolicited output: bye"):
        test_nothing()


def test_worker_that_exits_with_a_failure_status() -> None:
    """Each example requires a clean exit, even if all was answered (issue 26)."""

    async def fails(worker: ScriptedWorker) -> int:
        await clumsy(worker)
        return 3

    @given_worker(fails, settings=FEW, messages=st.just([b"x"]))
    def test_nothing(messages: list[bytes], replies: list[Reply]) -> None:
        raise AssertionError("unreachable: it has failed by now")

    with pytest.raises(WorkerMisbehaved, match="status 3 at the end of its input"):
        test_nothing()


def test_worker_that_takes_too_long() -> None:
    """The test sets the time limit (issue 12)."""

    async def stuck(_worker: ScriptedWorker) -> None:
        await anyio.sleep_forever()

    @given_worker(stuck, settings=FEW, messages=st.just([b"x"]), timeout=0.01)
    def test_nothing(messages: list[bytes], replies: list[Reply]) -> None:
        raise AssertionError("unreachable: there is no reply")

    with pytest.raises(
        WorkerMisbehaved, match=r"after 0\.01 seconds; it wrote nothing"
    ):
        test_nothing()


def test_messages_look_like_markers() -> None:
    """They resemble the stage's markers, but don't contain them (issue 12)."""
    seen: set[bytes] = set()

    @given_worker(clumsy, settings=settings(MANY, max_examples=50), dialect=WORDS)
    def test_nothing(messages: list[bytes], replies: list[Reply]) -> None:
        assert len(messages) == len(replies)
        seen.update(messages)

    test_nothing()
    assert any(b"EO" in message for message in seen)
    assert not any(marker in m for m in seen for marker in (b"EOM", b"EOB"))


@pytest.mark.parametrize(
    ("test", "missing"),
    [(lambda messages: None, "replies"), (lambda message, replies: None, "messages")],
)
def test_test_without_a_parameter_is_refused(
    test: Callable[..., None], missing: str
) -> None:
    """When it is decorated, not by Hypothesis in the middle of it (issue 26)."""
    with pytest.raises(TypeError, match=f"has no parameter {missing}, expected"):
        given_worker(clumsy, settings=FEW)(test)


def test_failure_is_shown_without_our_frames() -> None:
    """Only the transcript explains what the worker did (issue 26)."""

    @given_worker(clumsy, settings=FEW, messages=st.just([b"x"]), expect={"outputs": 2})
    def test_nothing(messages: list[bytes], replies: list[Reply]) -> None:
        raise AssertionError("unreachable: it has failed by now")

    with pytest.raises(WorkerMisbehaved) as failed:
        test_nothing()
    frames = [Path(entry.path).name for entry in failed.traceback]
    assert frames[-1] == "machine.py"
    assert "conversation.py" not in frames


def test_coroutine_is_no_such_test() -> None:
    """The worker has answered before it would begin (issue 12)."""

    async def test_nothing(messages: list[bytes], replies: list[Reply]) -> None:
        raise AssertionError("unreachable: it is not taken")

    with pytest.raises(TypeError, match="test_nothing is a coroutine function; use"):
        given_worker(clumsy)(test_nothing)  # type: ignore[arg-type]


def test_what_a_test_returns_is_not_dropped() -> None:
    """The body of a generator, or of a returned coroutine, has not run (issue 26)."""

    def later(messages: list[bytes], replies: list[Reply]) -> Iterator[None]:
        raise AssertionError("unreachable: it never runs")
        yield

    once = given_worker(clumsy, settings=FEW, messages=st.just([b"x"]))
    with pytest.raises(FailedHealthCheck, match="should return None"):
        once(later)()  # type: ignore[arg-type]


def test_reply_that_is_not_as_the_stage_expects() -> None:
    """``expect`` is that of a pipeline file (issue 26)."""
    contract = ReplyContract(where="this > 0")

    @given_worker(clumsy, settings=FEW, messages=st.just([b"1"]), expect=contract)
    def good(messages: list[bytes], replies: list[Reply]) -> None:
        assert replies == [Reply((b"1",))]

    @given_worker(clumsy, settings=FEW, messages=st.just([b"1", b"0"]), expect=contract)
    def bad(messages: list[bytes], replies: list[Reply]) -> None:
        raise AssertionError

    good()
    with pytest.raises(WorkerMisbehaved, match="number 2, which breaks expect"):
        bad()


@pytest.mark.parametrize(
    ("contract", "how"),
    [
        (ReplyContract(stateless=True), "alone"),
        (ReplyContract(order_free=True), "in the opposite order"),
    ],
)
def test_reply_that_depends_on_others(contract: ReplyContract, how: str) -> None:
    """Such promises are compared with replies of fresh processes (issue 26)."""

    async def counts(worker: ScriptedWorker) -> None:
        number = 0
        async for _ in worker.messages():
            number += 1
            await worker.reply(b"%d" % number)

    drawn = st.just([b"a", b"b"])

    @given_worker(counts, settings=FEW, messages=drawn, expect=contract)
    def bad(messages: list[bytes], replies: list[Reply]) -> None:
        raise AssertionError("unreachable: it has failed by now")

    @given_worker(clumsy, settings=FEW, messages=drawn, expect=contract)
    def good(messages: list[bytes], replies: list[Reply]) -> None:
        assert len(replies) == 2

    good()
    with pytest.raises(WorkerMisbehaved, match=rf"gave .* for b'.', but .* {how}"):
        bad()
