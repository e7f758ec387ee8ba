"""
Which fault of the plan happens when.

The words of the plan are defined in ``fault.py`` of the package above. What comes by
chance is drawn from the seed, the worker's name and its start: each process has other
luck, and the same in each run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from .kinds import as_bytes

if TYPE_CHECKING:
    from typing import TypeAlias

    from .kinds import Fault

    Trigger: TypeAlias = Callable[[int, bytes], bool]

__all__ = ("DueFaults",)

_MASK: Final = 0xFFFFFFFFFFFFFFFF


class DueFaults:
    """
    The faults of one process.

    Args:
        faults: Those of all processes, as JSON has them.
        seed: That of the plan.
        environment: Where the process finds its name and its start.

    """

    def __init__(
        self, faults: Sequence[Fault], seed: int, environment: Mapping[str, str]
    ) -> None:
        name = environment.get("ETLSTAGE_WORKER", "")
        start = int(environment.get("ETLSTAGE_START") or 1)
        self._faults: dict[str, list[tuple[Trigger, Fault]]] = {}
        for index, fault in enumerate(faults):
            if (fault.get("start", start), fault.get("worker", name)) == (start, name):
                roll = _random(f"{seed}/{name}/{start}/{index}")
                entry = _trigger(fault, roll), fault
                self._faults.setdefault(fault["at"], []).append(entry)

    def __contains__(self, moment: str) -> bool:
        return moment in self._faults

    def due(self, moment: str, number: int, message: bytes) -> Iterator[Fault]:
        """Yield what happens at that moment, with that message, counted from 1."""
        for hits, fault in self._faults.get(moment, ()):
            if hits(number, message):
                yield fault


def _trigger(fault: Fault, roll: Callable[[int], float]) -> Trigger:
    """Return what decides whether a fault happens at a message, by number and content."""
    at: int | None = fault.get("message")
    first: int | None = fault.get("number")
    last = None if first is None else first + fault.get("times", 1) - 1
    equals, contains = as_bytes(fault.get("equals")), as_bytes(fault.get("contains"))
    chance: float | None = fault.get("probability")

    def hits(number: int, message: bytes) -> bool:
        if at is not None and number != at:
            return False
        if first is not None and last is not None and not first <= number <= last:
            return False
        if equals is not None and message != equals:
            return False
        if contains is not None and contains not in message:
            return False
        return chance is None or roll(number) < chance

    return hits


def _random(seed: str) -> Callable[[int], float]:
    """Return random numbers: others for each seed, the same in each run."""
    base = 0xCBF29CE484222325  # FNV-1a
    for byte in seed.encode():
        base = ((base ^ byte) * 0x100000001B3) & _MASK

    def roll(number: int) -> float:
        # SplitMix64: neighbouring numbers give unrelated values.
        x = (base + number * 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return (x ^ (x >> 31)) / (_MASK + 1)

    return roll
