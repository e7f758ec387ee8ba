"""
Shortening of a case that fails, to one as short and simple as possible.

Hypothesis can't do it, as it only shrinks what it has drawn, and a case may consist of
everything that a process has received. Each try takes a fresh process, so the boldest
changes come first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

from etlstage.testing.fuzzing.oracle import Case
from etlstage.testing.fuzzing.steps import (
    PROCESSOR_ENDS,
    Call,
    Calls,
    Records,
    Saying,
    Step,
)

__all__ = ("fewest", "shorten")

S = TypeVar("S", Step, Calls, Records)
T = TypeVar("T")
_SIMPLE: Final = (b"", b"x")
_LONG: Final = 4096  # bytes; longer messages are only truncated by bisection


def shorten(
    case: Case,
    fails: Callable[[Case], bool],
    *,
    size: int = 0,
    as_json: bool = False,
) -> Case:
    """
    Return the simplest failing case that can be found.

    Args:
        case: A case that fails.
        fails: Plays a case, and returns whether it fails in the same way.
        size: Messages of a full batch; 0: there are no batches.
        as_json: Whether messages must remain JSON documents.

    """
    return _Shortening(case, fails, size, as_json=as_json).run()


def fewest(items: Sequence[T], enough: Callable[[list[T]], bool]) -> list[T]:
    """
    Return a minimal list of items that are enough, by leaving out runs of items.

    Longer runs are tried first, and among them later ones, as most of the items often
    come after the one at fault.
    """
    left = [*items]
    size = max(len(left) // 2, 1)
    while size:
        end = len(left)
        while end > 0:
            begin = max(end - size, 0)
            if enough(fewer := left[:begin] + left[end:]):
                left = fewer
            end = begin
        size //= 2
    return left


class _Shortening:
    def __init__(
        self, case: Case, fails: Callable[[Case], bool], size: int, *, as_json: bool
    ) -> None:
        self._case = case
        self._fails = fails
        self._size = size
        self._as_json = as_json
        self._tried: dict[tuple[Saying, ...], bool] = {}

    def run(self) -> Case:
        before: Case | None = None
        while before != self._case:
            before = self._case
            self._all_at_once()
            fewest(self._case.steps, self._takes)
            for at in range(len(self._case.steps)):
                self._simplify(at)
            self._sort()
        return self._case

    def _sort(self) -> None:
        """Try the steps sorted by length."""
        steps = [step for step in self._case.steps if isinstance(step, Step)]
        if len(steps) == len(self._case.steps):
            self._takes(sorted(steps, key=lambda step: sum(map(len, step.messages))))

    def _all_at_once(self) -> None:
        steps = self._case.steps
        if not self._size and all(isinstance(step, Step) for step in steps):
            simplest = b"0" if self._as_json else b""
            messages = [message for step in steps for message in step.messages]
            if self._takes([Step((simplest,))] * len(messages)):
                return
            self._takes([Step((message,)) for message in messages])
        self._takes([step.uncut() for step in self._case.steps])

    def _simplify(self, at: int) -> None:
        match self._case.steps[at]:
            case Step() as step:
                self._simplify_messages(_StepAt(self, at, step))
            case Calls() as step:
                self._simplify_calls(_StepAt(self, at, step))
            case Records() as step:
                self._simplify_records(_StepAt(self, at, step))

    def _takes(self, steps: Sequence[Saying]) -> bool:
        """Adopt these steps if they fail, too; return whether they do."""
        key = tuple(steps)
        if key == tuple(self._case.steps):
            return True
        if key not in self._tried:
            self._tried[key] = self._fails(self._case.having(key))
        if self._tried[key]:
            self._case = self._case.having(key)
        return self._tried[key]

    def puts(self, at: int, step: Saying) -> bool:
        steps = self._case.steps
        return self._takes([*steps[:at], step, *steps[at + 1 :]])

    # --- messages -----------------------------------------------------------

    def _simplify_messages(self, place: _StepAt[Step]) -> None:
        if not self._as_json:
            many = len(place.step.messages)
            bold = ((m, cuts) for m in _SIMPLE for cuts in ((), (1,)))
            any(place.puts(messages=(m,) * many, cuts=cuts) for m, cuts in bold)
        if len(place.step.messages) > 1:
            fewest(
                place.step.messages,
                lambda left: (
                    place.puts(messages=(*left,))
                    or place.puts(messages=(*left,), cuts=())
                ),
            )
        place.puts(messages=tuple(sorted(place.step.messages, key=len)))
        place.cut_less()
        self._simplify_each(place)

    def _simplify_each(self, place: _StepAt[Step] | _StepAt[Records]) -> None:
        for number in range(len(place.step.messages)):

            def puts(message: bytes, number: int = number) -> bool:
                return place.puts(messages=_with(place.step.messages, number, message))

            _simplify(place.step.messages[number], puts, as_json=self._as_json)

    # --- records ------------------------------------------------------------

    def _simplify_records(self, place: _StepAt[Records]) -> None:
        any(place.becomes(Records(end=end)) for end in PROCESSOR_ENDS)
        any(place.puts(end=end) for end in ("", *PROCESSOR_ENDS))
        place.puts(put_as_one=False)
        fewest(place.step.errors, lambda left: place.puts(errors=(*left,)))
        fewest(place.step.messages, lambda left: place.puts(messages=(*left,)))
        self._simplify_each(place)

    # --- sessions -----------------------------------------------------------

    def _simplify_calls(self, place: _StepAt[Calls]) -> None:
        whole = place.step
        fewest(range(len(whole.calls)), lambda left: place.becomes(whole.only(left)))
        for number in range(len(place.step.calls)):
            self._simplify_call(place, number)
        # One session after the other; or all opened at once, and then one by one.
        orders: list[tuple[int, ...]] = [(), tuple(range(len(place.step.calls)))]
        if not any(place.puts(turns=turns) for turns in orders):
            fewest(place.step.turns, lambda left: place.puts(turns=(*left,)))
        if place.step.turns in orders:
            fewest(place.step.turns, lambda left: place.puts(turns=(*left,)))
        place.cut_less()

    def _simplify_call(self, place: _StepAt[Calls], number: int) -> None:
        def puts(call: Call) -> bool:
            return place.puts(calls=_with(place.step.calls, number, call))

        def call() -> Call:
            return place.step.calls[number]

        if call().cancelled:
            puts(replace(call(), cancelled=False))
        # A session with one chunk, the usual kind, counts as simpler than an empty one.
        if not self._as_json and any(puts(Call((simple,))) for simple in _SIMPLE):
            return
        if puts(Call()):
            return
        fewest(call().chunks, lambda left: puts(replace(call(), chunks=(*left,))))
        for at in range(len(call().chunks)):

            def puts_chunk(chunk: bytes, at: int = at) -> bool:
                return puts(replace(call(), chunks=_with(call().chunks, at, chunk)))

            _simplify(call().chunks[at], puts_chunk, as_json=self._as_json)


class _StepAt(Generic[S]):
    def __init__(self, shortening: _Shortening, at: int, step: S) -> None:
        self.step: S = step
        self._at = at
        self._shortening = shortening

    def puts(self, **changes: Any) -> bool:  # noqa: ANN401 - those of a step
        return self.becomes(replace(self.step, **changes))

    def becomes(self, step: S) -> bool:
        if not self._shortening.puts(self._at, step):
            return False
        self.step = step
        return True

    def cut_less(self) -> None:
        cuts = getattr(self.step, "cuts", ())
        if cuts and not self.puts(cuts=(1,)):
            fewest(cuts, lambda left: self.puts(cuts=(*left,)))


def _with(items: Sequence[T], at: int, item: T) -> tuple[T, ...]:
    return (*items[:at], item, *items[at + 1 :])


def _simplify(message: bytes, puts: Callable[[bytes], bool], *, as_json: bool) -> None:
    """Try simpler forms of a message with ``puts``, which returns if it adopts one."""
    if as_json:
        for simple in _documents(json.loads(message)):
            puts(json.dumps(simple).encode())
        return
    if puts(b"") or puts(b"x"):
        return
    if len(message) > _LONG:
        # Usually only its length matters; trying every byte would take too long.
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
    """Yield simple documents, then the parts of this one, and it without a part."""
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
