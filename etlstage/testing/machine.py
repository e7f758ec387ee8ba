"""
A stage under Hypothesis's rules: messages, batches, restarts and deaths, in any order.

It needs the extra ``testing``.
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

from etlstage import worker
from etlstage.errors import WorkerRefusal
from etlstage.messages import Result
from etlstage.protocol.base import Shape
from etlstage.stage import ErrorBudget, ErrorPolicy, RestartPolicy
from etlstage.supervisor import AsyncSupervisor
from etlstage.testing.clock import VirtualLoop
from etlstage.testing.conversation import WorkerUnderTest
from etlstage.testing.factories import Tested, stage_of
from etlstage.testing.fault import FaultPlan
from etlstage.testing.faulty.wire import FaultyLaunch
from etlstage.testing.replies import Reply
from etlstage.testing.strategies import batches
from etlstage.transport import Child, Launch, LaunchRequest, Wire

__all__ = ("Held", "WorkerMachine", "given_worker")

Test: TypeAlias = Callable[..., None]


def given_worker(
    tested: Tested,
    *,
    messages: st.SearchStrategy[list[bytes]] | None = None,
    settings: hypothesis.settings | None = None,
    timeout: float = 10.0,
    **options: Any,  # noqa: ANN401 - a stage's
) -> Callable[[Test], Test]:
    """
    Have a test run for what a worker replies to messages that Hypothesis draws.

    ::

        @given_worker(["./clean.sh"])
        def test_blanks_are_dropped(messages, replies):
            for message, reply in zip(messages, replies):
                assert reply.outputs == (message.strip(),)

    Each example has a process of its own. Where the stage works in batches, an example
    is a batch, to which there is one reply.

    Args:
        tested: A command, a script or a stage.
        messages: Draws what is sent at once; by default up to five messages, which look
            as much like markers as they may.
        settings: Hypothesis's; by default 50 examples, which may take their time.
        timeout: How long each wait for the worker may take, in seconds.
        options: Of :class:`~etlstage.Stage`.

    Raises:
        WorkerMisbehaved: By the test, if the worker does not keep to the protocol, or
            to what ``expect`` of the stage has for each reply.

    """
    stage, launch = stage_of(tested, **options)
    if messages is None:
        messages = batches(getattr(stage.dialect, "markers", None))
    if settings is None:
        settings = hypothesis.settings(deadline=None, max_examples=50)

    async def ask(asked: Sequence[bytes]) -> list[Reply]:
        async with WorkerUnderTest(stage, launch=launch, timeout=timeout) as worker:
            replies = await worker.exchange(asked)
            worker.examine_contract(replies)
            await worker.close()
        return replies

    def decorate(test: Test) -> Test:
        if inspect.iscoroutinefunction(test):
            raise TypeError(f"{test.__name__} is a coroutine function; use def")

        whole = inspect.signature(test)
        kept = [p for name, p in whole.parameters.items() if name != "replies"]
        signature = whole.replace(parameters=kept)

        @wraps(test)
        def example(*args: object, **others: object) -> None:
            given = signature.bind(*args, **others).arguments
            test(**given, replies=anyio.run(ask, given["messages"]))

        example.__signature__ = signature  # type: ignore[attr-defined]
        return settings(hypothesis.given(messages=messages)(example))

    return decorate


T = TypeVar("T")
Entered = TypeVar("Entered", bound=AbstractAsyncContextManager[Any])
Expected: TypeAlias = list[bytes] | worker.Refuse

_TIMEOUT: Final = 60.0  # seconds for one step
_PATIENT: Final[Mapping[str, Any]] = {
    "restart": RestartPolicy(max=1_000_000, delay=0.001, max_delay=0.001),
    "on_error": ErrorPolicy(budget=ErrorBudget(share=1.0)),
}
"""We kill as often as we like, and a message once."""
_STEPS: Final = 30  # steps of the event loop, at most, before a death


class WorkerMachine(RuleBasedStateMachine):
    """
    Compares a stage, whatever befalls its workers, with a model.

    ::

        class Clean(WorkerMachine):
            tested = ["./clean.sh"]

            def model(self, message):
                return [message.strip()]

        TestClean = Clean.TestCase

    Its rules ask messages, or a batch, kill the worker while it has nothing to do, and
    kill it while it holds messages: these are tried again, so the same comes out. Add
    rules, and invariants, as to any machine of Hypothesis; :meth:`ask` is for them.

    Attributes:
        tested: A command, a script or a stage. The time of a script is virtual.
        options: Of :class:`~etlstage.Stage`; how often a worker may be restarted, and a
            message be tried again, is this machine's.
        messages: Draws what is asked at once; by default up to five messages.
        faults: Draws what is done to the workers beside that; then a message may be lost,
            but what comes out is right. See :func:`~etlstage.testing.strategies.fault_plans`.
        keeps_state: Whether a reply depends on what came before: then it is unknown
            what is right when a worker is killed while it holds messages.

    """

    tested: ClassVar[Tested]
    options: ClassVar[Mapping[str, Any]] = {}
    messages: ClassVar[st.SearchStrategy[list[bytes]] | None] = None
    faults: ClassVar[st.SearchStrategy[FaultPlan] | None] = None
    keeps_state: ClassVar[bool] = False

    def model(self, asked: Any) -> Iterable[bytes]:  # noqa: ANN401 - by the stage
        """
        Return the outputs to a message, or to a list of them where there are batches.

        ``raise worker.Refuse`` where the worker refuses; why does not matter.
        """
        raise NotImplementedError

    def restarted(self) -> None:
        """Note that the worker is a new one, if the model has a state."""

    def __init__(self) -> None:
        super().__init__()
        tested = type(self).tested  # of an instance a script would be a method
        self._stage, launch = stage_of(tested, **{**self.options, **_PATIENT})
        self._launch = _Watched(launch)
        markers = getattr(self._stage.dialect, "markers", None)
        usual = batches(markers, max_size=min(5, self._stage.batch.size))
        self._drawn = usual if self.messages is None else self.messages
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
        """Ask messages, or a batch."""
        messages = data.draw(self._drawn, label="messages")
        self._compare(messages, self.ask(messages), whole=self.faults is None)

    @rule()
    def restart(self) -> None:
        """Kill the workers, which have nothing to do."""
        self._supervisor.run(self._launch.kill())
        self.restarted()

    @precondition(lambda self: not self.keeps_state)
    @rule(data=st.data(), steps=st.integers(0, _STEPS))
    def ask_and_kill(self, data: st.DataObject, steps: int) -> None:
        """Ask, and kill the workers after so many steps of the event loop."""
        messages = data.draw(self._drawn, label="messages")
        results = self._supervisor.run(self._killed(messages, steps))
        self.restarted()
        self._compare(messages, results, whole=False)

    def ask(self, messages: Sequence[bytes]) -> list[Result]:
        """Return what becomes of the messages."""
        return self._supervisor.run(self._submitted(messages))

    def teardown(self) -> None:
        """Stop the workers."""
        if hasattr(self, "_supervisor"):
            self._supervisor.close()

    # --- how ----------------------------------------------------------------

    async def _submitted(self, messages: Sequence[bytes]) -> list[Result]:
        async with asyncio.timeout(_TIMEOUT):
            return await self._supervisor.entered.submit(messages)

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
        Compare with the model.

        Args:
            messages: What was asked.
            results: What became of it.
            whole: Whether we know that all of them were one batch, if it was not
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
            and isinstance(expected, list)
        ):
            assert self._agree(expected, results), _difference(expected, results)
        else:
            # Halved, or as large as the worker wants: in some parts it must fit.
            assert self._fits(results), _difference(expected, results)

    def _fits(self, results: list[Result]) -> bool:
        return not results or any(
            self._agree(self._expected([r.message for r in results[:n]]), results[:n])
            and self._fits(results[n:])
            for n in range(1, len(results) + 1)
        )

    def _agree(self, expected: Expected, results: Sequence[Result]) -> bool:
        """Return whether an exchange came out so; its last message has the reply."""
        errors = [result.error for result in results if result.error is not None]
        if errors and len(results) == 1 and self.faults is not None:
            return True
        if isinstance(expected, worker.Refuse):
            # A batch is halved until the message at fault is refused alone.
            return len(results) == 1 and isinstance(results[0].error, WorkerRefusal)
        outputs = [result.outputs for result in results]
        wanted = [()] * (len(results) - 1) + [tuple(expected)] * bool(results)
        return outputs == wanted and not errors

    def _expected(self, asked: bytes | list[bytes]) -> Expected:
        (expected,) = worker.run(self.model, [asked], on_error="exit")
        return expected


def _difference(expected: Expected, results: Sequence[Result]) -> str:
    shown = [(r.message, str(r.error) if r.error else r.outputs) for r in results]
    return f"the model returned {expected!r}, the workers {shown!r}"


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
        """Kill all that live, and wait for their end."""
        for child in (living := [c for c in self._children if c.returncode is None]):
            child.signal(SIGKILL)
        # The supervisor waits for them; no other code may.
        while any(child.returncode is None for child in living):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Held(Generic[Entered]):
    """
    What is entered, and open between two calls from code that is no coroutine.

    Its event loop runs only during a call. So nothing is done between them, and virtual
    time stands still.
    """

    def __init__(self, entered: Entered, *, virtual: bool) -> None:
        self.entered = entered
        factory = VirtualLoop if virtual else asyncio.new_event_loop
        self._runner = asyncio.Runner(loop_factory=factory)
        self._task: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
        self._over = asyncio.Event()

    def open(self) -> None:
        """Enter it, in a task of its own; raise what that raises."""
        self._task = self._runner.get_loop().create_task(self._hold())
        self.run(self._opened.wait())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something, unless the supervisor fails meanwhile."""
        return self._runner.run(self._watched(work))

    def close(self) -> None:
        """Leave it, and end its event loop."""
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
