"""
A case that fails is made as short and as simple as can be.

Not by Hypothesis, which could only shrink what it has drawn: what fails may be all that
a process has seen. Each try is a fresh process, so the boldest comes first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

from etlstage.testing.fewest import fewest
from etlstage.testing.fuzzing.case import AnyCase, Case, Step
from etlstage.testing.fuzzing.sessions import Call, Calls, SessionCase

__all__ = ("shorten", "shorten_calls")

_SIMPLE: Final = (b"", b"x")
_LONG: Final = 4096  # bytes of a message from which on it is halved only
_C = TypeVar("_C", bound=AnyCase)
_S = TypeVar("_S", bound=Step | Calls)


def shorten(
    case: Case,
    fails: Callable[[Case], bool],
    *,
    size: int = 0,
    as_json: bool = False,
) -> Case:
    """
    Return the simplest case that fails, as far as it is found.

    Args:
        case: One that fails.
        fails: Plays a case; whether that fails in the same way.
        size: Messages of a full batch; 0: there are no batches.
        as_json: Whether messages are to stay JSON documents.

    """
    return _OfMessages(case, fails, size, as_json=as_json).run()


class _Shortening(Generic[_C, _S]):
    def __init__(self, case: _C, fails: Callable[[_C], bool], *, as_json: bool) -> None:
        self._case = case
        self._fails = fails
        self._as_json = as_json
        self._tried: dict[tuple[_S, ...], bool] = {}

    def run(self) -> _C:
        before: _C | None = None
        while before != self._case:
            before = self._case
            self._all_at_once()
            fewest(self._steps, self._takes)
            for at in range(len(self._steps)):
                self._simplify(at)
        return self._case

    @property
    def _steps(self) -> Sequence[_S]:
        steps: Sequence[Any] = self._case.steps
        return steps

    def _all_at_once(self) -> None:
        """Make all steps simpler."""
        self._takes([replace(step, cuts=()) for step in self._steps])

    def _simplify(self, at: int) -> None:
        """Make one step simpler."""
        raise NotImplementedError

    def _takes(self, steps: Sequence[_S]) -> bool:
        """Go on with these steps if they fail, too."""
        key = tuple(steps)
        if key == tuple(self._steps):
            return True
        if key not in self._tried:
            self._tried[key] = self._fails(self._case.having(key))
        if self._tried[key]:
            self._case = self._case.having(key)
        return self._tried[key]

    def _puts(self, at: int, step: _S) -> bool:
        return self._takes([*self._steps[:at], step, *self._steps[at + 1 :]])

    def _cut_less(self, at: int) -> None:
        step = self._steps[at]
        if step.cuts and not self._puts(at, replace(step, cuts=(1,))):
            fewest(step.cuts, lambda left: self._puts(at, replace(step, cuts=(*left,))))


class _OfMessages(_Shortening[Case, Step]):
    def __init__(
        self, case: Case, fails: Callable[[Case], bool], size: int, *, as_json: bool
    ) -> None:
        super().__init__(case, fails, as_json=as_json)
        self._size = size

    def _all_at_once(self) -> None:
        steps = self._case.steps
        if not self._size:
            simplest = b"0" if self._as_json else b""
            messages = [message for step in steps for message in step.messages]
            if self._takes([Step((simplest,))] * len(messages)):
                return
            self._takes([Step((message,)) for message in messages])
        super()._all_at_once()

    def _simplify(self, at: int) -> None:
        """Make one step simpler."""
        for candidate in self._boldly(self._case.steps[at]):
            if self._puts(at, candidate):
                break
        step = self._case.steps[at]
        if len(step.messages) > 1:
            fewest(step.messages, lambda left: self._has(at, left))
        step = self._case.steps[at]
        self._puts(at, replace(step, messages=tuple(sorted(step.messages, key=len))))
        self._cut_less(at)
        for place in range(len(self._case.steps[at].messages)):
            self._simplify_message(at, place)

    def _boldly(self, step: Step) -> Iterator[Step]:
        if self._as_json:
            return
        for message in _SIMPLE:
            for cuts in ((), (1,)):
                yield replace(step, messages=(message,) * len(step.messages), cuts=cuts)

    def _simplify_message(self, at: int, place: int) -> None:
        def puts(message: bytes) -> bool:
            step = self._case.steps[at]
            messages = [*step.messages]
            messages[place] = message
            return self._puts(at, replace(step, messages=tuple(messages)))

        message = self._case.steps[at].messages[place]
        _simplify(message, puts, as_json=self._as_json)

    def _has(self, at: int, messages: Sequence[bytes]) -> bool:
        step = Step(tuple(messages), self._case.steps[at].cuts)
        return self._puts(at, step) or self._puts(at, replace(step, cuts=()))


def shorten_calls(
    case: SessionCase, fails: Callable[[SessionCase], bool], *, as_json: bool = False
) -> SessionCase:
    """Return the simplest case that fails; see :func:`shorten`."""
    return _OfSessions(case, fails, as_json=as_json).run()


class _OfSessions(_Shortening[SessionCase, Calls]):
    def _simplify(self, at: int) -> None:
        """Make one step simpler."""
        step = self._case.steps[at]
        fewest(range(len(step.calls)), lambda left: self._puts(at, step.only(left)))
        for number in range(len(self._case.steps[at].calls)):
            self._simplify_call(at, number)
        step = self._case.steps[at]
        # One behind the other; or all at once, and then one behind the other.
        orders: list[tuple[int, ...]] = [(), tuple(range(len(step.calls)))]
        if not any(self._puts(at, replace(step, turns=turns)) for turns in orders):
            fewest(
                step.turns,
                lambda left: self._puts(at, replace(step, turns=(*left,))),
            )
        step = self._case.steps[at]
        if step.turns in orders:
            fewest(
                step.turns, lambda left: self._puts(at, replace(step, turns=(*left,)))
            )
        self._cut_less(at)

    def _simplify_call(self, at: int, number: int) -> None:
        def puts(call: Call) -> bool:
            step = self._case.steps[at]
            calls = [*step.calls]
            calls[number] = call
            return self._puts(at, replace(step, calls=tuple(calls)))

        def call() -> Call:
            return self._case.steps[at].calls[number]

        if call().cancelled:
            puts(replace(call(), cancelled=False))
        # The usual one is simpler than one without a chunk.
        if not self._as_json and any(puts(Call((simple,))) for simple in _SIMPLE):
            return
        if puts(Call()):
            return
        fewest(call().chunks, lambda left: puts(replace(call(), chunks=(*left,))))
        for place in range(len(call().chunks)):

            def puts_chunk(chunk: bytes, place: int = place) -> bool:
                chunks = [*call().chunks]
                chunks[place] = chunk
                return puts(replace(call(), chunks=tuple(chunks)))

            _simplify(call().chunks[place], puts_chunk, as_json=self._as_json)


def _simplify(message: bytes, puts: Callable[[bytes], bool], *, as_json: bool) -> None:
    """Make a message simpler, as far as ``puts`` takes it."""
    if as_json:
        for simple in _documents(json.loads(message)):
            puts(json.dumps(simple).encode())
        return
    if puts(b"") or puts(b"x"):
        return
    if len(message) > _LONG:
        # Its length tells most; where not, byte by byte would take for ever.
        few, many = 0, len(message)
        while many - few > 1:
            half = (few + many) // 2
            few, many = (few, half) if puts(message[:half]) else (half, many)
        if not puts(b"x" * many):
            puts(message[:many])
        if many > _LONG:
            return
        message = message[:many]
    kept = fewest([*message], lambda left: puts(bytes(left)))
    for number, byte in enumerate(kept):
        for simple in (ord("x"), 0x80):
            if simple == byte or puts(
                bytes([*kept[:number], simple, *kept[number + 1 :]])
            ):
                kept[number] = simple
                break


def _documents(document: object) -> Iterator[object]:
    """Yield simpler documents, and then its parts."""
    yield from (None, 0, "", [], {})
    match document:
        case dict():
            yield from document.values()
            for name in document:
                yield {key: value for key, value in document.items() if key != name}
        case list():
            yield from document
            for place in range(len(document)):
                yield document[:place] + document[place + 1 :]
