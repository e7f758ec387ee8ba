"""
Scenarios to simulate, and the oracle that checks their outcome.

The work of a stage is a function, so the correct outcome is known: it is computed from
the messages, the functions and the dead letters alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from etlstage.errors import ConfigError, RepliesDoubtful
from etlstage.messages import Position, Run, StageKind
from etlstage.pipeline import DeadLetter, Report
from etlstage.stage import OffsetPolicy, Order, Stage
from etlstage.supervisor.exchange.keyed import keys_of
from etlstage.testing.fault import FaultPlan
from etlstage.testing.scripted import Work

__all__ = ("Oracle", "Scenario", "Violation", "some")

S = TypeVar("S", bound="Scenario")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """
    The run of one seed: a pipeline, what its workers do, and what goes wrong.

    Raises:
        ConfigError: If a stage has no work.

    """

    messages: Sequence[bytes]
    """The messages that are extracted."""
    stages: Sequence[Stage]
    """The stages, in order. If the first does not extract, or the last does not load, a
    source or a sink in memory does. No program is started; commands are only shown."""
    work: Mapping[str, Work]
    """By stage: the function of its workers, which must be deterministic."""
    faults: Mapping[str, FaultPlan] = field(default_factory=dict)
    """By stage: what goes wrong."""
    starts_that_fail: Mapping[str, Collection[int]] = field(default_factory=dict)
    """By stage: the numbers of the starts of its workers that fail, as if the program
    were missing, from 2 on: if start 1 fails, so does the run."""
    pipe_size: int = 65536
    """Capacity of a worker's stdin and stdout, in bytes."""
    fatal: Mapping[str, Collection[bytes]] | None = None
    """By stage: the messages, and no others, that have to be dead-lettered in a run
    that succeeds. None: unknown."""
    may_fail: bool = False
    """Whether the run may fail; otherwise that is a violation."""
    position_every: int = 4
    """Number of messages between two positions of the source."""
    seconds: float = 3600.0
    """Virtual seconds within which the run has to end."""

    def __post_init__(self) -> None:
        for stage in self.stages:
            known = stage.name in self.work or stage.kind is not StageKind.TRANSFORM
            if not known:
                raise ConfigError(f"stage {stage.name} has no work")

    @property
    def source(self) -> Stage | None:
        """The stage that extracts, if the first one does."""
        first = self.stages[0] if self.stages else None
        return first if first and first.kind is StageKind.EXTRACT else None

    @property
    def between(self) -> list[Stage]:
        """All other stages, including extracts and loads in the wrong place."""
        first = self.source is not None
        return list(self.stages[first : len(self.stages) - (self.sink is not None)])

    @property
    def sink(self) -> Stage | None:
        """The stage that loads, if the last one does."""
        last = self.stages[-1] if self.stages else None
        return last if last and last.kind is StageKind.LOAD else None

    @property
    def offsets(self) -> OffsetPolicy:
        """The offset policy of the stage that extracts; the supervisor keeps them."""
        end = len(self.messages)
        return OffsetPolicy(by="supervisor", end=end, step=self.position_every)

    def items(self) -> Iterator[Run | Position]:
        """Yield messages, with positions between them, for a source in memory."""
        for start in range(0, len(self.messages), self.position_every):
            run = self.messages[start : start + self.position_every]
            yield run
            yield Position(start + len(run))


class Violation(AssertionError):
    """Raised when a run breaks a promise."""


class Oracle(Generic[S]):
    """
    Checks the outcome of one run.

    Args:
        scenario: The scenario.

    """

    def __init__(self, scenario: S) -> None:
        self._scenario: S = scenario
        orders = {stage.order for stage in scenario.stages}
        self._ordered = orders <= {Order.TOTAL}
        keyed = {s.key: s for s in scenario.stages if s.order is Order.KEY}
        # A stage by whose key order is kept, if all keyed stages have the same key.
        self._keyed: Stage | None = None
        if len(keyed) == 1 and Order.NONE not in orders:
            (self._keyed,) = keyed.values()

    def check_end(
        self,
        report: Report,
        loaded: Sequence[bytes],
        letters: Sequence[DeadLetter],
        before: tuple[int, Counter[str]] = (0, Counter()),
        *,
        unproven: bool = False,
    ) -> None:
        """
        Check the report, the loaded messages and the dead letters of a run.

        Args:
            report: The report.
            loaded: All messages that reached the sink, in order.
            letters: All dead letters that were stored.
            before: From earlier runs: number of messages, and of dead letters by stage.
            unproven: Whether it failed because a load worker did not exit cleanly.

        Raises:
            Violation: If the run broke a promise.

        """
        extracted = before[0] + report.ledger[0].produced
        if not before[0]:
            self._check_letters(extracted, letters)
        self._check_ledger(report, letters, before[1])
        count = len(self._scenario.messages)
        if report.status == "done" and extracted != count:
            raise Violation(f"{extracted} of {count} messages were extracted")
        if report.status == "failed" and not (unproven or self._scenario.may_fail):
            raise Violation(f"the run failed: {report.error}") from report.error
        if isinstance(report.error, RepliesDoubtful):
            return  # the run itself reports that it may have loaded wrong messages
        # A drain that ran out of time leaves messages unprocessed.
        left = report.ledger.undelivered + sum(a.unprocessed for a in report.ledger)
        whole = report.status == "done" or (report.status == "drained" and not left)
        self.check_loaded(extracted, loaded, letters, whole=whole)
        if report.status == "done":
            self._check_fatal(letters)

    def check_loaded(
        self,
        extracted: int,
        loaded: Sequence[bytes],
        letters: Sequence[DeadLetter],
        *,
        whole: bool,
    ) -> None:
        """Check that the right messages reached the sink, in the promised order."""
        expected = self._expected(extracted, letters)
        missing = Counter(expected)
        missing.subtract(loaded)
        few = [message for message, count in missing.items() if count > 0]
        many = [message for message, count in missing.items() if count < 0]
        if whole and few:
            raise Violation(f"{some(few)} is lost: neither loaded nor dead-lettered")
        if self._repeats:
            known = {*expected, *(letter.message for letter in letters)}
            many = [message for message in many if message not in known]
        if many:
            raise Violation(f"{some(many)} is loaded too often, or by mistake")
        expected = self._comparable(expected, loaded, whole=whole)
        if self._scenario.sink is None and self._ordered:
            _compare(loaded, expected)
        elif self._scenario.sink is None and self._keyed is not None:
            self._check_keys(self._keyed, loaded, expected)

    # --- inside -------------------------------------------------------------

    @property
    def _repeats(self) -> bool:
        # A load worker may die after loading a message, and before reporting it.
        return self._scenario.sink is not None

    def _comparable(
        self, expected: list[bytes], _loaded: Sequence[bytes], *, whole: bool
    ) -> list[bytes]:
        """Return the messages with which to compare the order of ``_loaded``."""
        return expected

    def _expected(self, count: int, letters: Sequence[DeadLetter]) -> list[bytes]:
        """Return the correct outputs for the first ``count`` messages, in order."""
        messages = list(self._scenario.messages[:count])
        for stage in self._scenario.stages:
            dead = [letter for letter in letters if letter.stage == stage.name]
            messages = self._made(stage, messages, dead)
        return messages

    def _made(
        self, stage: Stage, messages: list[bytes], letters: Sequence[DeadLetter]
    ) -> list[bytes]:
        if stage.kind is StageKind.EXTRACT:
            return messages
        dead = Counter(letter.message for letter in letters)
        alive: list[bytes] = []
        for message in messages:
            if dead[message] > 0:
                dead[message] -= 1
            elif stage.kind is StageKind.LOAD:
                alive.append(message)
            else:
                # A rejected message that is not dead-lettered makes the run fail.
                with suppress(Exception):
                    alive.extend(self._scenario.work[stage.name](message))
        return alive

    def _check_keys(
        self, stage: Stage, loaded: Sequence[bytes], expected: Sequence[bytes]
    ) -> None:
        """Check the order within each key, if no stage changes a message's key."""
        if not self._keeps_keys(stage):
            return
        right: dict[int, list[bytes]] = {}
        for key, message in zip(keys_of(stage, expected), expected, strict=True):
            right.setdefault(key, []).append(message)
        found: dict[int, list[bytes]] = {}
        for key, message in zip(keys_of(stage, loaded), loaded, strict=True):
            found.setdefault(key, []).append(message)
        for key, messages in found.items():
            _compare(messages, right[key])

    def _keeps_keys(self, stage: Stage) -> bool:
        for message in self._scenario.messages:
            made = [message]
            for other in self._scenario.stages:
                made = self._made(other, made, ())
            if len({*keys_of(stage, [message, *made])}) > 1:
                return False
        return True

    def _check_letters(self, count: int, letters: Sequence[DeadLetter]) -> None:
        """Check that each letter has the message at its place, and no place has two."""
        messages, ordered = list(self._scenario.messages[:count]), True
        for stage in self._scenario.stages:
            mine = [letter for letter in letters if letter.stage == stage.name]
            if len({letter.place for letter in mine}) < len(mine):
                raise Violation(f"stage {stage.name}: a message is dead-lettered twice")
            for letter in mine:
                given = messages[letter.place : letter.place + 1]
                if letter.message not in (given if ordered else messages):
                    raise Violation(
                        f"stage {stage.name}: {letter.message!r} is dead-lettered as"
                        f" number {letter.place}, where the stage was given {given}"
                    )
            messages = self._made(stage, messages, mine)
            ordered = ordered and stage.order is Order.TOTAL

    def _check_ledger(
        self, report: Report, letters: Sequence[DeadLetter], before: Counter[str]
    ) -> None:
        report.ledger.check(whole=report.status == "done")
        dead = Counter(letter.stage for letter in letters)
        dead.subtract(before)
        for account in report.ledger:
            if account.dead != dead[account.stage]:
                raise Violation(
                    f"stage {account.stage}: the ledger has {account.dead} dead letters,"
                    f" {dead[account.stage]} are kept"
                )

    def _check_fatal(self, letters: Sequence[DeadLetter]) -> None:
        fatal, messages = self._scenario.fatal, list(self._scenario.messages)
        for stage in self._scenario.stages if fatal is not None else ():
            assert fatal is not None
            mine = [letter for letter in letters if letter.stage == stage.name]
            found = {letter.message for letter in mine}
            right = {*fatal.get(stage.name, ())}.intersection(messages)
            if innocent := found - right:
                raise Violation(
                    f"stage {stage.name}: {some(innocent)} is dead-lettered, and is not"
                    " at fault"
                )
            if spared := right - found:
                raise Violation(
                    f"stage {stage.name}: {some(spared)} is not dead-lettered"
                )
            messages = self._made(stage, messages, mine)


def _compare(loaded: Sequence[bytes], expected: Sequence[bytes]) -> None:
    for found, right in zip(loaded, expected, strict=False):
        if found != right:
            raise Violation(f"order: {found!r} is loaded before {right!r}")


def some(messages: Iterable[bytes]) -> str:
    """Return one of several messages, and how many more there are."""
    first, *others = sorted(messages)
    return f"{first!r} (and {len(others)} more)" if others else repr(first)
