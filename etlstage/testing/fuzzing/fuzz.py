"""
Hypothesis looks for a case that a worker does not stand.

One process is given many cases, and what it has seen is kept in mind. What fails there
is played to a fresh process. If it does not fail again, what came before is to blame:
then all that the process has seen is the case. What fails from a fresh start is made
shorter, each try with a process of its own; see ``shortening.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Final, NoReturn

from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

from etlstage.protocol.base import Dialect
from etlstage.protocol.marker import Markers
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage
from etlstage.testing.dialect import kit_of
from etlstage.testing.fuzzing.bench import Bench
from etlstage.testing.fuzzing.case import AnyCase, Case, CaseFailed, FailureKind, Step
from etlstage.testing.fuzzing.oracle import Oracles
from etlstage.testing.fuzzing.sessions import Call, Calls, SessionCase, ready
from etlstage.testing.fuzzing.shortening import shorten, shorten_calls
from etlstage.testing.sessions import chunks
from etlstage.testing.strategies import cuts, messages
from etlstage.transport import Launch, launch_worker

__all__ = ("Budget", "Found", "Fuzzer", "Progress", "cases", "session_cases")

_LIFE: Final = 40  # cases that one process is given
_ALONE: Final = 3  # cases at the beginning that have a process each
_QUICK: Final = 1.0  # seconds of patience while a case that hangs is shrunk
_AT_ONCE: Final = 4  # sessions, at most


@dataclass(frozen=True)
class Budget:
    """How long is searched."""

    examples: int = 300
    """Cases that are drawn, at most."""
    seconds: float = 60.0
    """After which none is drawn any more, and none is shrunk."""
    seed: int = 0
    """The same cases are drawn for the same seed."""


@dataclass(frozen=True)
class Found:
    """A case that a worker does not stand."""

    case: AnyCase
    failure: CaseFailed
    steady: bool = True
    """It fails whenever it is played to a fresh process."""


class _Over(BaseException):
    """Raised to leave Hypothesis, or the shortening, before it is done."""


@dataclass
class Progress:
    """What was done so far."""

    examples: int = 0
    """Cases that were drawn and played."""
    messages: int = 0
    """In all of them."""
    tries: int = 0
    """Cases that were played to make one that failed shorter."""


class Fuzzer:
    """
    Looks for a case that fails; a context manager, for one thread.

    Args:
        stage: Command and dialect; its markers, where the worker is given no others.
        drawn: What draws cases; see :func:`cases`, and :func:`session_cases`.
        oracles: What must be true of the replies.
        size: Messages of a full batch; 0: the worker answers single messages.
        as_json: Whether messages are JSON documents.
        timeout: How long each reply, and the exit, may take, in seconds.
        launch: What starts the workers.

    Attributes:
        progress: What was done so far.
        tell: Called when there is progress.

    """

    def __init__(
        self,
        stage: Stage,
        drawn: st.SearchStrategy[Any],
        oracles: Oracles,
        *,
        size: int = 0,
        as_json: bool = False,
        timeout: float = 5.0,
        launch: Launch = launch_worker,
    ) -> None:
        self.progress: Progress = Progress()
        self._drawn = drawn
        self._size = size
        self._as_json = as_json
        self._timeout = timeout
        self.tell: Callable[[Progress], None] = lambda progress: None
        self._bench = Bench(stage, oracles, timeout=timeout, launch=launch)
        self._found: Found | None = None
        self._until = 0.0
        self._portal: BlockingPortal

    @contextmanager
    def running(self) -> Iterator[Fuzzer]:
        """Have processes at hand."""
        with (
            start_blocking_portal() as self._portal,
            self._portal.wrap_async_context_manager(self._bench),
        ):
            yield self

    def play(self, case: AnyCase) -> CaseFailed | None:
        """Play a case to a fresh process; return how it failed."""
        return self._portal.call(self._bench.fresh, case)

    def search(self, budget: Budget) -> Found | None:
        """Look for a case that fails; return it as short as it was made."""
        self._until = monotonic() + budget.seconds
        self._found = None
        with suppress(_Over):
            self._let_draw(budget)
            self._look_at_end()
        if self._found is None:
            return None
        with suppress(_Over):
            self._make_short()
        return self._confirmed(self._found)

    def _let_draw(self, budget: Budget) -> None:
        @seed(budget.seed)
        @settings(
            max_examples=budget.examples,
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        )
        @given(self._drawn)
        def trial(case: AnyCase) -> None:
            self._check_time()
            self._try(case)
            self.tell(self.progress)

        trial()

    def _try(self, case: AnyCase) -> None:
        self.progress.examples += 1
        self.progress.messages += case.count
        number = self.progress.examples
        if number <= _ALONE:
            failure = self.play(case)
            if failure is not None:
                self._end_with(Found(case, failure))
            return
        if number % _LIFE == 0:
            self._look_at_end()
        failure, everything = self._portal.call(self._bench.again, case)
        if failure is not None:
            again = self.play(case)
            if again is not None:
                self._end_with(Found(case, again))
            self._blame_all(failure, everything)

    def _look_at_end(self) -> None:
        """End the process that has seen many cases."""
        failure, everything = self._portal.call(self._bench.renew)
        if failure is not None:
            self._blame_all(failure, everything)

    def _blame_all(self, failure: CaseFailed, everything: AnyCase) -> NoReturn:
        """Take all that a process has seen for the case."""
        again = self.play(everything)
        self._end_with(Found(everything, again or failure, steady=again is not None))

    def _end_with(self, found: Found) -> NoReturn:
        self._found = found
        raise _Over

    def _make_short(self) -> None:
        assert self._found is not None
        if not self._found.steady:
            return
        kind = self._found.failure.kind
        if kind is FailureKind.HANGS:
            self._bench.patience = min(_QUICK, self._timeout)

        def fails(case: AnyCase) -> bool:
            self._check_time()
            self.progress.tries += 1
            self.tell(self.progress)
            failure = self.play(case)
            if failure is None or failure.kind is not kind:
                return False
            self._found = Found(case, failure)
            return True

        case = self._found.case
        if isinstance(case, SessionCase):
            shorten_calls(case, fails, as_json=self._as_json)
        elif isinstance(case, Case):
            shorten(case, fails, size=self._size, as_json=self._as_json)

    def _check_time(self) -> None:
        if monotonic() > self._until:
            raise _Over

    def _confirmed(self, found: Found) -> Found:
        """Return what was found, played once more with all patience."""
        self._bench.patience = self._timeout
        failure = self.play(found.case) if found.steady else None
        if failure is None:
            return replace(found, steady=False)
        return replace(found, failure=failure)


# --- what is drawn -------------------------------------------------------------------


@st.composite
def cases(
    draw: st.DrawFn,
    dialect: Dialect,
    *,
    size: int = 3,
    speaking: Sequence[Markers] = (),
    drawn: Callable[[Markers], st.SearchStrategy[bytes]] = messages,
) -> Case:
    """
    Draw a case.

    Args:
        draw: Is given by Hypothesis.
        dialect: What the worker speaks.
        size: Messages that are drawn for a batch, at most.
        speaking: Other markers that the worker can be told to use.
        drawn: What draws messages, for some markers.

    """
    assert isinstance(dialect, MarkerDialect)
    spoken = draw(st.sampled_from([dialect.markers, *speaking]))
    one = st.tuples(drawn(spoken), st.booleans())
    groups: list[list[bytes]] = []
    if dialect.shape.batches:
        batch = st.lists(one, max_size=size).map(_repeated)
        groups = draw(st.lists(batch, max_size=6))
    else:
        flat = draw(st.lists(st.tuples(one, st.booleans()), max_size=12))
        together = [joins for _, joins in flat]
        for message, joins in zip(
            _repeated([m for m, _ in flat]), together, strict=True
        ):
            if joins and groups:
                groups[-1].append(message)
            else:
                groups.append([message])
    wires = kit_of(replace(dialect, markers=spoken))
    steps = []
    for group in groups:
        length = len(wires.raw(group))
        steps.append(Step(tuple(group), tuple(draw(cuts(length)))))
    return Case(tuple(steps), spoken)


@st.composite
def session_cases(
    draw: st.DrawFn,
    dialect: Dialect,
    *,
    size: int = 3,
    drawn: st.SearchStrategy[bytes] | None = None,
) -> SessionCase:
    """
    Draw a case for a worker whose exchanges have names.

    Args:
        draw: Is given by Hypothesis.
        dialect: What the worker speaks.
        size: Chunks of a session, at most.
        drawn: Draws a chunk.

    """
    chunk = chunks() if drawn is None else drawn
    most = int(min(_AT_ONCE, ready(dialect).room))
    several = st.lists(chunk, max_size=size).map(tuple)
    # Most are what a stage has.
    one = several if dialect.shape.batches else st.tuples(chunk) | several
    cancelled = st.sampled_from([False, False, False, True])
    some = st.lists(st.builds(Call, one, cancelled), min_size=1, max_size=most)
    steps = []
    for calls in draw(st.lists(some, max_size=5)):
        turn = st.integers(0, len(calls) - 1)
        turns = draw(st.lists(turn, max_size=3 * len(calls)))
        step = Calls(tuple(calls), tuple(turns))
        places = draw(cuts(len(step.wire(dialect))))
        steps.append(replace(step, cuts=tuple(places)))
    return SessionCase(tuple(steps))


def _repeated(drawn: Sequence[tuple[bytes, bool]]) -> list[bytes]:
    """Return messages, some of which are the one before."""
    found: list[bytes] = []
    for message, again in drawn:
        found.append(found[-1] if again and found else message)
    return found
