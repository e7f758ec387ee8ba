"""Inject the faults of a pipeline file, and report what they led to."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from etlstage.cli.screen import Screen
from etlstage.config.fault import StageFaultKeys
from etlstage.messages import counted
from etlstage.settings.definition import broken
from etlstage.settings.problem import Invalid
from etlstage.testing.fault import FaultPlan
from etlstage.testing.faulty.wire import FaultyLaunch, Occurrence, unknown
from etlstage.transport import Launch

__all__ = ("InjectedFaults",)

_CONDITIONS: Final = (
    *("at", "message", "number", "equals", "contains", "probability", "start"),
    "worker",
)

_TIMES: Final = 1000  # occurrences of each fault in a report, at most


class InjectedFaults:
    """
    The faults that are injected into a run.

    Args:
        seed: Seed for faults with a probability.

    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._keys: dict[str, list[StageFaultKeys]] = defaultdict(list)
        self._launch: FaultyLaunch

    def launch(
        self,
        inner: Launch,
        faults: Sequence[StageFaultKeys],
        dialects: Mapping[str, str],
    ) -> Launch:
        """
        Return a function that starts workers as ``inner`` does, with these faults.

        Args:
            inner: Starts the workers.
            faults: The faults in the file.
            dialects: The name of each stage's dialect.

        Raises:
            Invalid: If a dialect can't have such a fault.

        """
        reasons = [unknown(f.kind, dialects[f.stage], f.size) for f in faults]
        wrong = [
            broken(("faults", number, "kind"), reason, at_key=False)
            for number, reason in enumerate(reasons)
            if reason
        ]
        if wrong:
            raise Invalid(*wrong)
        for keys in faults:
            self._keys[keys.stage].append(keys)
        self._launch = FaultyLaunch(
            inner,
            {
                stage: FaultPlan(tuple(keys.fault for keys in found), self._seed)
                for stage, found in self._keys.items()
            },
        )
        return self._launch

    def tell(self) -> None:
        """Print how often each fault happened, and what became of the workers."""
        out = Screen()
        for keys, mine in self._found():
            line = f"fault {_named(keys)}: {_summary(mine)}"
            out.print(line, soft_wrap=True, highlight=False, markup=False)

    def report(self) -> list[dict[str, object]]:
        """Return the same as plain JSON, with each occurrence listed."""
        return [
            {
                "stage": keys.stage,
                "kind": keys.kind,
                **dict(_conditions(keys)),
                "happened": len(mine),
                "times": [_plain(occurrence) for occurrence in mine[:_TIMES]],
            }
            for keys, mine in self._found()
        ]

    def _found(self) -> Iterator[tuple[StageFaultKeys, list[Occurrence]]]:
        happened = defaultdict(list)
        for occurrence in self._launch.happened:
            happened[occurrence.stage, occurrence.fault].append(occurrence)
        for stage, found in self._keys.items():
            for number, keys in enumerate(found):
                yield keys, happened[stage, number]


def _summary(mine: Sequence[Occurrence]) -> str:
    if not mine:
        return "never"
    fates = {(o.worker, o.start): _fate(o) for o in mine}
    led = "; ".join(
        f"{counted(times, 'worker')} {_of_many(fate, times)}"
        for fate, times in Counter(fates.values()).most_common()
    )
    return f"{counted(len(mine), 'time')}; {led}"


def _plain(occurrence: Occurrence) -> dict[str, object]:
    return {
        "worker": occurrence.worker,
        "start": occurrence.start,
        "message": occurrence.message,
        "exit": _fate(occurrence),
    }


def _fate(occurrence: Occurrence) -> str:
    return occurrence.fate or "did not exit"


def _of_many(fate: str, times: int) -> str:
    return fate if times == 1 else fate.replace("was ", "were ", 1)


def _named(keys: StageFaultKeys) -> str:
    conditions = "".join(f", {name} {value}" for name, value in _conditions(keys))
    return f"{keys.kind} in {keys.stage}{conditions}"


def _conditions(keys: StageFaultKeys) -> Iterator[tuple[str, object]]:
    for name in _CONDITIONS:
        value = getattr(keys, name)
        if value is not None:
            yield name, value
