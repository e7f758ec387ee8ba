"""One cell of the crash matrix: its trials, and what was killed in them."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from random import Random
from shutil import rmtree

from etlstage.pipeline.delivery.record import CommitRecord
from tests.crash.matrix import (
    EXECUTORS,
    SHOWN,
    SPARKLESS,
    STEPS,
    Case,
    Kill,
    check,
    check_gone,
    check_rows,
    prepare,
    retry,
    start,
)

__all__ = ("Cell",)

_ENDING = ("process", "jvm")
_STARTS = 12  # the last start of a trial in which something is killed at random
_SETUP = 0.4  # share of a whole run's time that passes before the first message


class Cell:
    """
    A series of trials of one case, with kills.

    Args:
        case: The pipeline to run.
        dice: Chooses what is killed, and when.
        tell: Called with lines of progress.

    Attributes:
        steps: Kills at steps that are still to be done.
        killed: Number of kills, by what was killed and the step, or ``moment``.
        failures: Number of trials that failed.

    """

    def __init__(self, case: Case, dice: Random, tell: Callable[[str], None]) -> None:
        self.case = case
        self._dice = dice
        self._tell = tell
        self._whats = ["process", "worker"]
        if case.ends not in SPARKLESS:
            self._whats += ["jvm", "python"]
        # Each step comes only once in a run that is a single epoch.
        most = 1 if case.ends.startswith("spark") else 2
        self.steps: list[Kill] = [
            Kill(what, step, dice.randrange(most))
            for step, what in product(STEPS, self._whats)
            if step != "performed" or case.ends in SHOWN
        ]
        dice.shuffle(self.steps)
        self.killed: Counter[tuple[str, str]] = Counter()
        self.failures = 0
        self._vain: Counter[tuple[str, str]] = Counter()
        self._trials = self._starts = self._messages = self._retries = 0
        self._seconds = 0.0  # duration of a whole run, as the first start took

    def __str__(self) -> str:
        return f"{self.case.ends}-{self.case.order}"

    @property
    def moments(self) -> int:
        """Number of kills at random moments."""
        return sum(n for (_, when), n in self.killed.items() if when == "moment")

    def trial(self, again: Sequence[Sequence[Kill]] | None = None) -> None:
        """Start until all is recorded, and check; report and count a failure."""
        folder = Path(tempfile.mkdtemp(prefix="crash-"))
        starts: list[list[Kill]] = []
        before, began = self.killed.total(), time.monotonic()
        try:
            self._run(folder, starts, again)
        except Exception as error:
            self.failures += 1
            told = " ".join(",".join(map(str, kills)) or "''" for kills in starts)
            case = self.case
            self._tell(
                f"{self} FAILED in {folder}: {error!r}\nonce more: python -m tests.crash"
                f" --ends {case.ends} --order {case.order} --messages {case.messages}"
                f" --epoch {case.epoch} --again {told}"
            )
        else:
            rmtree(folder)
        self._trials += 1
        self._starts += len(starts)
        self._messages += self.case.messages
        self._tell(
            f"{self}: {len(starts)} starts, {self.killed.total() - before} kills in"
            f" {time.monotonic() - began:.0f} s; so far {self.killed.total()} kills,"
            f" {self.moments} at moments, {len(self.steps)} steps to come"
        )

    def figures(self) -> dict[str, object]:
        """Return how often each kind of process was killed, as plain JSON."""
        kills = [[*at, count] for at, count in self.killed.items()]
        return {
            "cell": str(self),
            "trials": self._trials,
            "messages": self._messages,
            "failures": self.failures,
            "kills": kills,
        }

    def summary(self) -> str:
        """Return how often each kind of process was killed, as lines of text."""
        head = (
            f"{self}: {self._trials} trials, {self._starts} starts, {self._messages}"
            f" messages, {self._retries} retries killed, {self.failures} failures"
        )
        lines = [head]
        for what in self._whats:
            found = []
            for when in (*STEPS, "moment"):
                vain = self._vain[what, when]
                none = f" ({vain} with nothing there)" if vain else ""
                if vain or self.killed[what, when]:
                    found.append(f"{when} {self.killed[what, when]}{none}")
            lines.append(f"    {what}: {', '.join(found)}")
        return "\n".join([*lines, ""])

    def _run(
        self,
        folder: Path,
        starts: list[list[Kill]],
        again: Sequence[Sequence[Kill]] | None,
    ) -> None:
        prepare(folder, self.case)
        epoch, over, code = 0, False, 0
        while not over:
            if again is None:
                kills = self._choose(len(starts), epoch)
            else:
                kills = [*again[len(starts)]] if len(starts) < len(again) else []
            starts.append(kills)
            began = time.monotonic()
            code = self._start(folder, kills)
            if not self._seconds:
                self._seconds = time.monotonic() - began
            record = CommitRecord.latest(folder / "state")
            over = record.ended and record.epoch > 0 and not record.pending
            epoch = record.epoch
            assert over or code, f"not on record: {record}"
        check(folder, self.case, ended=not code)
        # A retry into journals appends at least once, so duplicates are allowed.
        once = self.case.ends != "journals"
        if again is None and not self._trials and not code and once:
            self._retry(folder)
        check_gone(folder)

    def _start(self, folder: Path, kills: list[Kill]) -> int:
        """Start once; return the exit code."""
        found = start(folder, self.case, kills)
        (folder / "said").write_text(found.said)
        for counts, those in ((self.killed, found.done), (self._vain, found.vain)):
            counts.update(
                (kill.what, "moment" if kill.when == "at" else kill.when)
                for kill in those
            )
        # Steps that the run did not reach are left for another trial.
        self.steps += [
            kill
            for kill in kills
            if kill.when != "at" and kill not in (*found.done, *found.vain)
        ]
        # Only a run that was killed may fail; a killed worker is replaced.
        fatal = {kill.what for kill in found.done} - {"worker"}
        said = found.said.splitlines()
        last = [line for line in said if line and "dead-lettered" not in line][-1:]
        codes = {0} | ({1, -9} if fatal else set())
        assert found.code in codes, f"exit code {found.code}: {last}"
        if found.code:
            told = ", ".join(map(str, found.done))
            self._tell(f"  {self}: {told}: {found.code} {' '.join(last)[:300]}")
        # Py4J prints a traceback of its own, which the command line silences.
        if any('File "' in line and "/etlstage/" in line for line in said):
            shown = [line for line in said if "dead-lettered" not in line]
            self._tell("\n".join([f"  {self} shows a traceback:", *shown[:60]]))
        return found.code

    def _choose(self, starts: int, epoch: int) -> list[Kill]:
        """
        Return the kills of the next start, one of which ends the run.

        Args:
            starts: Number of starts in this trial so far.
            epoch: The last recorded epoch.

        """
        if self.steps:
            return self._choose_steps(starts)
        if not self._seconds or starts > _STARTS:
            return []
        ending = [what for what in _ENDING if what in self._whats]
        chosen = ["worker"] * 4
        if self.case.ends.startswith(EXECUTORS):
            chosen.append("python")  # does not end the run: Spark retries the task
        elif "python" in self._whats and self._has_python(starts):
            ending.append("python")
        chosen.append(self._dice.choice(ending))
        setup = _SETUP * self._seconds
        left = (1 - epoch / self.case.files) * (self._seconds - setup)
        # Workers and Spark's Python workers only exist after the setup.
        return [
            Kill(what, "at", round(self._dice.uniform(0, most), 2))
            for what in chosen
            for most in [left + setup * (what in _ENDING)]
        ]

    def _choose_steps(self, starts: int) -> list[Kill]:
        """Return the next start's kills at steps; see :meth:`_choose`."""
        ending = [kill for kill in self.steps if kill.what in _ENDING]
        chosen = ending[:1] if self._seconds else []
        chosen += [kill for kill in self.steps if kill.what == "worker"][:2]
        if self._has_python(starts):
            chosen += [kill for kill in self.steps if kill.what == "python"]
        for kill in chosen:
            self.steps.remove(kill)
        return chosen

    def _has_python(self, starts: int) -> bool:
        """Return whether Spark runs Python workers in the next start of a trial."""
        # Where the stages are outside Spark, it has read everything in the first start.
        return not starts or self.case.ends.startswith(EXECUTORS)

    def _retry(self, folder: Path) -> None:
        """Retry the dead letters: kill the first attempt at random, then try again."""
        if not retry(folder, seconds=self._dice.uniform(2, 12)):
            self._retries += 1
            assert retry(folder)
        check_rows(folder, self.case, set())
