"""
The fuzzer: Hypothesis searches for cases that make a worker fail.

One process is given many cases, and everything it has received is recorded. A case
that fails there is run again in a fresh process. If it does not fail again, earlier
messages are to blame: then everything that the process has received becomes the case. A
case that fails from a fresh start is shortened, with a process for each try; see
``shortening.py``. Then the search continues for another bug, until known bugs have
recurred a number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Final

from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

from etlstage.protocol.base import Dialect
from etlstage.protocol.kcl.checkpoint import DEPENDENCY, SHUTDOWN, THROTTLING
from etlstage.protocol.marker import Markers
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage
from etlstage.testing.dialect import kit_of, ready
from etlstage.testing.fuzzing.bench import Bench
from etlstage.testing.fuzzing.oracle import Case, CaseFailed, FailureKind, Oracles
from etlstage.testing.fuzzing.shortening import shorten
from etlstage.testing.fuzzing.steps import (
    PROCESSOR_ENDS,
    Call,
    Calls,
    Records,
    Step,
    has_sessions,
)
from etlstage.testing.processors import actions
from etlstage.testing.sessions import chunks
from etlstage.testing.strategies import cuts, messages, sendable
from etlstage.transport import Launch, launch_worker

__all__ = (
    "Budget",
    "Found",
    "Fuzzer",
    "Progress",
    "cases",
    "large_cases",
    "processor_cases",
    "processor_ends",
    "session_cases",
)

_LIFE: Final = 40  # cases for one process
_ALONE: Final = 3  # first cases that get a process each
_QUICK: Final = 1.0  # seconds to wait while a case that hangs is shrunk
_AT_ONCE: Final = 4  # sessions, at most
_REPEATS: Final = 15  # failures by known bugs, after which the search ends
_HANGS: Final = 5  # the same for hangs, each of which takes the whole timeout
_OF_A_CONTRACT: Final = ("outputs", "schema", "where")  # those without an oracle
_BETWEEN: Final = 10  # cases that are drawn between two given ones
_SIZES: Final = (64 * 1024 + 1, 1024 * 1024)  # bytes; more than a pipe holds


@dataclass(frozen=True)
class Budget:
    """How long to search."""

    examples: int = 300
    """Maximum number of cases."""
    seconds: float = 60.0
    """Time after which no more cases are drawn, or shortened."""
    seed: int = 0
    """The same cases are drawn for the same seed."""


@dataclass(frozen=True)
class Found:
    """A case that makes a worker fail."""

    case: Case
    failure: CaseFailed
    steady: bool = True
    """Whether it failed again in a fresh process."""


class _Over(BaseException):
    """Raised to leave Hypothesis, or the shortening, early."""


@dataclass
class Progress:
    """The work done so far."""

    examples: int = 0
    """Number of cases that were drawn, or given, and played."""
    messages: int = 0
    """Number of messages in all of them."""
    tries: int = 0
    """Number of cases that were played to shorten a failed one."""
    stopped: bool = False
    """Whether time was up before all cases were drawn."""


class Fuzzer:
    """
    Searches for cases that fail, within :meth:`running`; for use by one thread.

    Args:
        stage: Command and dialect; a case may have other markers.
        drawn: Draws cases; see :func:`cases`, :func:`session_cases` and
            :func:`processor_cases`.
        oracles: Properties that the replies must have.
        size: Messages of a full batch; 0: the worker answers single messages.
        as_json: Whether messages are JSON documents.
        given: Cases to try in addition, between those that are drawn.
        valid: Decides which new messages may be tried to shorten a case; None: any, or
            if ``as_json`` is true, any JSON document.
        timeout: How long each reply, and the exit, may take, in seconds.
        launch: Starts the workers.

    Attributes:
        progress: The work done so far.
        tell: Called when there is progress.
        found: What the search has found so far; it may be the result of a search that
            an exception ended, whose last case may not be the shortest.

    """

    def __init__(
        self,
        stage: Stage,
        drawn: st.SearchStrategy[Any],
        oracles: Oracles,
        *,
        size: int = 0,
        as_json: bool = False,
        given: Iterable[Case] = (),
        valid: Callable[[bytes], bool] | None = None,
        timeout: float = 5.0,
        launch: Launch = launch_worker,
    ) -> None:
        self.progress: Progress = Progress()
        self._drawn = drawn
        self._size = size
        self._as_json = as_json
        self._given = [*given]
        self._valid = valid
        self._timeout = timeout
        self.tell: Callable[[Progress], None] = lambda progress: None
        self._bench = Bench(stage, oracles, timeout=timeout, launch=launch)
        self._oracles = oracles.joined(stage.expect)
        self._promised = [
            name for name in stage.expect.promised if name in _OF_A_CONTRACT
        ]
        self._kind = stage.kind
        self._marked = isinstance(stage.dialect, MarkerDialect)
        self.found: list[Found] = []
        self._known: set[tuple[str, ...]] = set()
        self._repeats = 0
        self._until = 0.0
        self._portal: BlockingPortal

    @contextmanager
    def running(self) -> Iterator[Fuzzer]:
        """Enter the context in which cases can be played."""
        with (
            start_blocking_portal() as self._portal,
            self._portal.wrap_async_context_manager(self._bench),
        ):
            yield self

    def play(self, case: Case) -> CaseFailed | None:
        """Play a case to a fresh process; return its failure, if it failed."""
        return self._portal.call(self._bench.fresh, case)

    def passed(self) -> str:
        """Return, as text, which properties were checked, and which were not."""
        left_out = self._oracles.left_out(self._kind)
        left_out = [name for name in left_out if name not in self._promised]
        asked = [n for n in Oracles().left_out(self._kind) if n not in left_out]
        asked += [name for name in self._promised if name not in asked]
        text = ", ".join(("answers", "protocol", *asked))
        if left_out:
            text += f". Not checked: {', '.join(left_out)}"
        if self._bench.refused:
            refused, replies = self._bench.refused, self._bench.replies
            text += f"; refused {refused:,} of {replies:,}"
        return text

    def search(
        self, budget: Budget, *, known: Iterable[CaseFailed] = ()
    ) -> list[Found]:
        """
        Search for cases that fail; return a shortened one for each bug.

        Args:
            budget: How long to search.
            known: Failures of bugs that are known, and not to be reported.

        """
        self._until = monotonic() + budget.seconds
        self.found = []
        self._known = {failure.signature for failure in known}
        with suppress(_Over):
            self._let_draw(budget)
            while self._given:
                self._try(self._given.pop())
            self._look_at_end()
        return self.found

    def _let_draw(self, budget: Budget) -> None:
        @seed(budget.seed)
        @settings(
            max_examples=max(1, budget.examples - len(self._given)),
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        )
        @given(self._drawn)
        def trial(case: Case) -> None:
            if monotonic() > self._until:
                self.progress.stopped = True
                raise _Over
            self._try(case)
            if self._given and self.progress.examples % _BETWEEN == 0:
                self._try(self._given.pop())
            self.tell(self.progress)

        trial()

    def _try(self, case: Case) -> None:
        self.progress.examples += 1
        self.progress.messages += case.count
        number = self.progress.examples
        if number <= _ALONE or case.fresh:
            failure = self.play(case)
            if failure is not None:
                self._note(Found(case, failure))
            return
        if number % _LIFE == 0:
            self._look_at_end()
        failure, everything = self._portal.call(self._bench.again, case)
        if failure is None or self._is_known(failure):
            return
        again = self.play(case)
        if again is not None:
            self._note(Found(case, again))
        else:
            self._blame_all(failure, everything)

    def _look_at_end(self) -> None:
        """End the process shared by many cases, which may fail at its end."""
        failure, everything = self._portal.call(self._bench.renew)
        if failure is not None and not self._is_known(failure):
            self._blame_all(failure, everything)

    def _blame_all(self, failure: CaseFailed, everything: Case) -> None:
        """Record a case made of everything that a process has received."""
        again = self.play(everything)
        self._note(Found(everything, again or failure, steady=again is not None))

    def _is_known(self, failure: CaseFailed) -> bool:
        if failure.signature not in self._known:
            return False
        hangs = failure.kind is FailureKind.HANGS
        self._repeats += _REPEATS // _HANGS if hangs else 1
        if self._repeats >= _REPEATS:
            raise _Over
        return True

    def _note(self, found: Found) -> None:
        """Shorten a case and record it, unless its bug is known."""
        if self._is_known(found.failure):
            return
        self._repeats = 0
        self._known.add(found.failure.signature)
        before = self.found
        self.found = [*before, found]
        if found.steady:
            found = self._shortest(found)
            self._bench.timeout = self._timeout
            failure = self.play(found.case)
            found = replace(
                found, failure=failure or found.failure, steady=failure is not None
            )
            self._known.add(found.failure.signature)
        # Protocol errors that look different may be the same once they are shortened.
        same = (found.case, found.failure.kind)
        new = same not in [(one.case, one.failure.kind) for one in before]
        self.found = [*before, found] if new else before

    def _shortest(self, found: Found) -> Found:
        kind, signature = found.failure.kind, found.failure.signature
        if kind is FailureKind.HANGS:
            self._bench.timeout = min(_QUICK, self._timeout)

        def fails(case: Case) -> bool:
            nonlocal found
            if monotonic() > self._until:
                raise _Over
            known = {message for step in found.case.steps for message in step.messages}
            new = {m for step in case.steps for m in step.messages} - known
            if not all(self._may_be_sent(m, case.markers) for m in new):
                return False
            self.progress.tries += 1
            self.tell(self.progress)
            failure = self.play(case)
            # A protocol error looks different with fewer messages.
            if failure is None or (
                failure.signature != signature
                if kind is FailureKind.CRASHES
                else failure.kind is not kind
            ):
                return False
            found = self.found[-1] = Found(case, failure)
            return True

        with suppress(_Over):
            shorten(found.case, fails, size=self._size, as_json=self._as_json)
        return found

    def _may_be_sent(self, message: bytes, markers: Markers) -> bool:
        if self._marked and not sendable(message, markers):
            return False
        return self._valid is None or self._valid(message)


# --- strategies ----------------------------------------------------------------------


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
    Draw a case for a dialect with markers.

    Args:
        draw: Passed by Hypothesis.
        dialect: The worker's dialect.
        size: Maximum number of messages of a batch.
        speaking: Other markers that the worker can be made to use.
        drawn: Returns a strategy for messages with given markers.

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
) -> Case:
    """
    Draw a case for a dialect with named exchanges (sessions).

    Args:
        draw: Passed by Hypothesis.
        dialect: The worker's dialect.
        size: Maximum number of chunks of a session.
        drawn: Draws a chunk.

    """
    chunk = chunks() if drawn is None else drawn
    most = int(min(_AT_ONCE, ready(dialect).room))
    several = st.lists(chunk, max_size=size).map(tuple)
    # Most sessions are such as a stage opens.
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
    return Case(tuple(steps))


@st.composite
def processor_cases(
    draw: st.DrawFn, *, size: int = 3, drawn: st.SearchStrategy[bytes] | None = None
) -> Case:
    """
    Draw a case for a record processor: actions, and errors of its checkpoints.

    Args:
        draw: Passed by Hypothesis.
        size: Maximum number of records of an action.
        drawn: Draws the data of a record.

    """
    errors = THROTTLING, DEPENDENCY, SHUTDOWN
    action = actions(drawn, max_records=size, errors=errors)
    steps = draw(st.lists(action, max_size=5))
    if steps:
        end = draw(st.sampled_from(["", *PROCESSOR_ENDS]))
        steps[-1] = replace(steps[-1], end=end)
    return Case(tuple(steps))


def processor_ends() -> list[Case]:
    """Return a case for each end of a record processor: a search may draw none of it."""
    return [Case((Records(end=end),)) for end in PROCESSOR_ENDS]


def large_cases(dialect: Dialect, *, as_json: bool = False) -> list[Case]:
    """
    Return cases of one message each that exceeds the capacity of a pipe.

    Those that the dialect's markers forbid are left out.
    """
    markers = getattr(dialect, "markers", None)
    found: list[Case] = []
    for size in _SIZES:
        texts = (filler * size for filler in (b"x", b"-", b"0", b" "))
        for message in (b'"%b"' % text if as_json else text for text in texts):
            if markers is None or sendable(message, markers):
                sessions = has_sessions(dialect)
                step = Calls((Call((message,)),)) if sessions else Step((message,))
                found.append(Case((step,), markers or Markers()))
                break
    return found


def _repeated(drawn: Sequence[tuple[bytes, bool]]) -> list[bytes]:
    """Return the messages, some of them replaced by the one before."""
    found: list[bytes] = []
    for message, again in drawn:
        found.append(found[-1] if again and found else message)
    return found
