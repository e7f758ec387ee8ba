"""
Hypothesis rules for a stage: messages, batches, restarts and kills, in any order.

This module needs the extra ``testing``.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import wraps
from signal import SIGKILL
from typing import Any, ClassVar, Final, Generic, TypeAlias, TypeVar

import anyio
import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from etlstage.errors import EtlstageError, WorkerRefusal
from etlstage.messages import Result
from etlstage.protocol.base import Shape
from etlstage.stage import ErrorBudget, ErrorPolicy, RestartPolicy
from etlstage.supervisor import AsyncSupervisor
from etlstage.testing.clock import VirtualLoop
from etlstage.testing.conversation import WorkerUnderTest
from etlstage.testing.factories import Tested, stage_of
from etlstage.testing.fault import FaultPlan
from etlstage.testing.faulty.wire import FaultyLaunch
from etlstage.testing.fuzzing.oracle import Oracles, compare, end, modelled
from etlstage.testing.fuzzing.steps import Step
from etlstage.testing.replies import Reply
from etlstage.testing.strategies import batches
from etlstage.testing.transcript import WorkerMisbehaved
from etlstage.transport import Child, Launch, LaunchRequest, Wire

__all__ = ("Held", "WorkerMachine", "given_worker")

Test: TypeAlias = Callable[..., None]
_Returned: TypeAlias = Coroutine[Any, Any, None] | None


def given_worker(
    tested: Tested,
    *,
    messages: st.SearchStrategy[list[bytes]] | None = None,
    settings: hypothesis.settings | None = None,
    timeout: float = 10.0,
    **options: Any,  # noqa: ANN401 - settings of a stage
) -> Callable[[Test], Test]:
    """
    Decorate a test of a worker's replies to messages that Hypothesis draws.

    ::

        @given_worker(["./clean.sh"])
        def test_blanks_are_dropped(messages, replies):
            for message, reply in zip(messages, replies):
                assert reply.outputs == (message.strip(),)

    Each example has a process of its own. If the stage works in batches, an example is
    a batch, which has one reply. If its ``expect`` has ``stateless`` or ``order_free``,
    further processes are started, whose replies are compared.

    Args:
        tested: A command, a script or a stage.
        messages: Draws the messages to send at once; by default up to five, which
            resemble markers as much as is allowed.
        settings: Hypothesis settings; by default 50 examples, without a deadline.
        timeout: How long each wait for the worker may take, in seconds.
        options: Settings of :class:`~etlstage.Stage`.

    Raises:
        TypeError: If the test does not take both ``messages`` and ``replies``, or is a
            coroutine function.
        WorkerMisbehaved: By the test, if the worker breaks the protocol, a reply breaks
            the stage's ``expect``, or the worker does not exit cleanly.
        WorkerStartFailed: By the test, if the program can't be run.

    """
    stage, launch = stage_of(tested, **options)
    if messages is None:
        messages = batches(getattr(stage.dialect, "markers", None))
    if settings is None:
        settings = hypothesis.settings(deadline=None, max_examples=50)

    def start() -> WorkerUnderTest:
        return WorkerUnderTest(stage, launch=launch, timeout=timeout)

    async def ask(asked: Sequence[bytes]) -> list[Reply]:
        async with start() as worker:
            replies = await worker.exchange(asked)
            worker.examine_contract(replies)
            await compare(start, worker, [(Step(asked), replies)], Oracles())
            await end(worker)
        return replies

    def decorate(test: Callable[..., _Returned]) -> Test:
        if inspect.iscoroutinefunction(test):
            raise TypeError(f"{test.__name__} is a coroutine function; use def")

        whole = inspect.signature(test)
        if missing := {"messages", "replies"} - whole.parameters.keys():
            raise TypeError(
                f"{test.__name__}{whole} has no parameter {min(missing)}, expected"
                " messages and replies"
            )
        kept = [p for name, p in whole.parameters.items() if name != "replies"]
        signature = whole.replace(parameters=kept)

        @wraps(test)
        def example(*args: object, **others: object) -> _Returned:
            __tracebackhide__ = True
            given = signature.bind(*args, **others).arguments
            try:
                replies = anyio.run(ask, given["messages"])
            except (EtlstageError, WorkerMisbehaved) as error:
                # Its text explains it; the frames of our event loop do not.
                raise error.with_traceback(None) from None
            # Hypothesis fails a test that returns anything: a generator has not run.
            return test(**given, replies=replies)

        example.__signature__ = signature  # type: ignore[attr-defined]
        return settings(hypothesis.given(messages=messages)(example))

    return decorate


T = TypeVar("T")
Entered = TypeVar("Entered", bound=AbstractAsyncContextManager[Any])

_TIMEOUT: Final = 60.0  # seconds for one step
_KILLS: Final = 20  # at most, with no result in between
_PATIENT: Final[Mapping[str, Any]] = {
    "restart": RestartPolicy(
        max=_KILLS + RestartPolicy().max, delay=0.001, max_delay=0.001
    ),
    "on_error": ErrorPolicy(budget=ErrorBudget(share=1.0)),
}
"""Workers that we kill are restarted, but not without limit those that only exit."""
_STEPS: Final = 30  # turns of the event loop, at most, before a kill


class WorkerMachine(RuleBasedStateMachine):
    """
    Compares a stage, whose workers are killed at any time, with a model.

    ::

        class Clean(WorkerMachine):
            tested = ["./clean.sh"]

            def model(self, message):
                return [message.strip()]

        TestClean = Clean.TestCase

    Its rules submit messages, or a batch, kill the worker while it is idle, and kill it
    while it holds messages: these are retried, so the outcome must be the same. Add
    rules, and invariants, as to any machine of Hypothesis; they may use :meth:`ask`.

    Attributes:
        tested: A command, a script or a stage. A script runs in virtual time.
        options: Settings of :class:`~etlstage.Stage`; ``restart`` and ``on_error`` are
            set by this machine.
        messages: Draws the messages submitted at once; by default up to five.
        faults: Draws further faults of the workers; then messages may fail, but all
            outputs must be right; see :func:`~etlstage.testing.strategies.fault_plans`.
        keeps_state: Whether a reply depends on earlier messages. Then a worker is not
            killed while it holds messages, as the right outcome would be unknown.

    """

    tested: ClassVar[Tested]
    options: ClassVar[Mapping[str, Any]] = {}
    messages: ClassVar[st.SearchStrategy[list[bytes]] | None] = None
    faults: ClassVar[st.SearchStrategy[FaultPlan] | None] = None
    keeps_state: ClassVar[bool] = False

    def model(self, asked: Any) -> Iterable[bytes]:  # noqa: ANN401 - by the stage
        """
        Return the outputs for a message; in a stage with batches, for a list of them.

        Raise ``worker.Refuse`` if the worker must refuse; the reason is not compared.
        """
        raise NotImplementedError

    def restarted(self) -> None:
        """Reset the state of the model, if it has any: the worker is a new one."""

    def __init__(self) -> None:
        super().__init__()
        tested = type(self).tested  # via self, a script would become a method
        self._stage, launch = stage_of(tested, **{**self.options, **_PATIENT})
        self._launch = _Watched(launch)
        markers = getattr(self._stage.dialect, "markers", None)
        usual = batches(markers, max_size=min(5, self._stage.batch.size))
        self._drawn = usual if self.messages is None else self.messages
        self._kills = 0  # since the last result
        self._supervisor: Held[AsyncSupervisor]

    # --- rules --------------------------------------------------------------

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Start the workers."""
        launch: Launch = self._launch
        if self.faults is not None:
            plan = data.draw(self.faults, label="faults")
            launch = FaultyLaunch(launch, {self._stage.name: plan})
        supervisor = AsyncSupervisor(self._stage, launch=launch)
        self._supervisor = Held(supervisor, virtual=callable(type(self).tested))
        self._supervisor.open()

    @rule(data=st.data())
    def ask_some(self, data: st.DataObject) -> None:
        """Submit messages, or a batch."""
        messages = data.draw(self._drawn, label="messages")
        self._compare(messages, self.ask(messages), whole=self.faults is None)

    @precondition(lambda self: self._kills < _KILLS)
    @rule()
    def restart(self) -> None:
        """Kill the workers while they are idle."""
        self._kills += 1
        self._supervisor.run(self._launch.kill())
        self.restarted()

    @precondition(lambda self: not self.keeps_state and self._kills < _KILLS)
    @rule(data=st.data(), steps=st.integers(0, _STEPS))
    def ask_and_kill(self, data: st.DataObject, steps: int) -> None:
        """Submit messages, and kill the workers after turns of the event loop."""
        messages = data.draw(self._drawn, label="messages")
        self._kills += 1
        results = self._supervisor.run(self._killed(messages, steps))
        self.restarted()
        self._compare(messages, results, whole=False)

    def ask(self, messages: Sequence[bytes]) -> list[Result]:
        """
        Submit messages, and return their results.

        Raises:
            StageFailed: If the workers keep exiting, though they are not killed.

        """
        return self._supervisor.run(self._submitted(messages))

    def teardown(self) -> None:
        """Stop the workers; raise if some of their replies have become doubtful."""
        if hasattr(self, "_supervisor"):
            self._supervisor.close()
            doubt = self._supervisor.entered.doubt
            if doubt is not None and self.faults is None:
                raise doubt

    # --- how ----------------------------------------------------------------

    async def _submitted(self, messages: Sequence[bytes]) -> list[Result]:
        async with asyncio.timeout(_TIMEOUT):
            results = await self._supervisor.entered.submit(messages)
        if (failure := self._supervisor.entered.failure) is not None:
            raise failure  # also of workers with faults
        if results:
            self._kills = 0
        return results

    async def _killed(self, messages: Sequence[bytes], steps: int) -> list[Result]:
        async def kill() -> None:
            for _ in range(steps):
                await asyncio.sleep(0)
            await self._launch.kill()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kill())
            return await self._submitted(messages)

    def _compare(
        self, messages: list[bytes], results: list[Result], *, whole: bool
    ) -> None:
        """
        Compare results with the model.

        Args:
            messages: The messages that were submitted.
            results: Their results.
            whole: Whether they are known to have been one batch, unless that was
                refused.

        """
        if self._stage.dialect.shape is Shape.MESSAGE:
            for result in results:
                expected = self._expected(result.message)
                assert self._agree(expected, [result]), _difference(expected, [result])
            return
        expected = self._expected(messages)
        if (
            whole
            and self._stage.dialect.shape is Shape.BATCH
            and expected.refused is None
        ):
            assert self._agree(expected, results), _difference(expected, results)
        else:
            # Batches may have been halved, or filled by the worker: some division
            # into batches must agree with the model.
            assert self._fits(results), _difference(expected, results)

    def _fits(self, results: list[Result]) -> bool:
        return not results or any(
            self._agree(self._expected([r.message for r in results[:n]]), results[:n])
            and self._fits(results[n:])
            for n in range(1, len(results) + 1)
        )

    def _agree(self, expected: Reply, results: Sequence[Result]) -> bool:
        """Return whether results of an exchange agree; its last one has the outputs."""
        errors = [result.error for result in results if result.error is not None]
        if errors and len(results) == 1 and self.faults is not None:
            return True
        if expected.refused is not None:
            # A batch is halved until the offending message is refused alone.
            return len(results) == 1 and isinstance(results[0].error, WorkerRefusal)
        outputs = [result.outputs for result in results]
        wanted = [()] * (len(results) - 1) + [expected.outputs] * bool(results)
        return outputs == wanted and not errors

    def _expected(self, asked: bytes | list[bytes]) -> Reply:
        return modelled(self._stage.dialect, self.model, asked)


def _difference(expected: Reply, results: Sequence[Result]) -> str:
    shown = [(r.message, str(r.error) if r.error else r.outputs) for r in results]
    why = expected.refused
    returned = f"{[*expected.outputs]!r}" if why is None else f"a refusal ({why})"
    return f"the model returned {returned}, the workers {shown!r}"


class _Watched:
    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._children: list[Child] = []

    def __call__(self, request: LaunchRequest, /) -> tuple[Wire, Child]:
        wire, child = self._launch(request)
        self._children = [c for c in self._children if c.returncode is None]
        self._children.append(child)
        return wire, child

    async def kill(self) -> None:
        """Kill all running workers, and wait for their exit."""
        for child in (living := [c for c in self._children if c.returncode is None]):
            child.signal(SIGKILL)
        # Only the supervisor may call wait() on them.
        while any(child.returncode is None for child in living):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Held(Generic[Entered]):
    """
    Keeps an async context manager entered between calls from synchronous code.

    Its event loop runs only during a call. Between calls nothing happens, and virtual
    time does not pass.
    """

    def __init__(self, entered: Entered, *, virtual: bool) -> None:
        self.entered = entered
        factory = VirtualLoop if virtual else asyncio.new_event_loop
        self._runner = asyncio.Runner(loop_factory=factory)
        self._task: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
        self._over = asyncio.Event()

    def open(self) -> None:
        """Enter it, in a task of its own; errors are raised here."""
        self._task = self._runner.get_loop().create_task(self._hold())
        self.run(self._opened.wait())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine; raise the error of the held object if it fails meanwhile."""
        return self._runner.run(self._watched(work))

    def close(self) -> None:
        """Exit the context manager, and close the event loop."""
        try:
            if self._task is not None:
                self._over.set()
                self._runner.run(_ended(self._task))
        finally:
            self._runner.close()

    async def _hold(self) -> None:
        async with self.entered:
            self._opened.set()
            await self._over.wait()

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._task is not None
        task = asyncio.ensure_future(work)
        await asyncio.wait({task, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await self._task
        return await task


async def _ended(task: asyncio.Task[None]) -> None:
    await task
