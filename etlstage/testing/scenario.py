"""
What is simulated, and what has to be true of it, whatever went wrong.

The work of a stage is a function, so what should come out is known: it is computed from
the messages, the functions and the dead letters alone, and compared.
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
    What one seed runs: a pipeline, what its workers do, and what goes wrong.

    Raises:
        ConfigError: If a stage has no work.

    """

    messages: Sequence[bytes]
    """What is extracted."""
    stages: Sequence[Stage]
    """In their order. Where the first does not extract, or the last does not load, a
    source or a sink in memory does. No program is started: the command is for show."""
    work: Mapping[str, Work]
    """By stage: what its workers make of a message, the same each time."""
    faults: Mapping[str, FaultPlan] = field(default_factory=dict)
    """By stage: what goes wrong."""
    starts_that_fail: Mapping[str, Collection[int]] = field(default_factory=dict)
    """By stage: which starts of its workers fail, from 2 on: the program is missing.
    With the first one the run does."""
    pipe_size: int = 65536
    """Bytes for which a worker's stdin and stdout have room."""
    fatal: Mapping[str, Collection[bytes]] | None = None
    """By stage: the messages that are to be dead-lettered, of a run that succeeds; no
    stage is to dead-letter others. None: that is unknown."""
    may_fail: bool = False
    """Whether the run may fail; else that is a finding."""
    position_every: int = 4
    """Messages between two positions of the source."""
    seconds: float = 3600.0
    """Virtual seconds in which the run is to be over."""

    def __post_init__(self) -> None:
        for stage in self.stages:
            known = stage.name in self.work or stage.kind is not StageKind.TRANSFORM
            if not known:
                raise ConfigError(f"stage {stage.name} has no work")

    @property
    def source(self) -> Stage | None:
        """The stage that extracts."""
        first = self.stages[0] if self.stages else None
        return first if first and first.kind is StageKind.EXTRACT else None

    @property
    def between(self) -> list[Stage]:
        """The stages that transform, and those that are at the wrong place."""
        first = self.source is not None
        return list(self.stages[first : len(self.stages) - (self.sink is not None)])

    @property
    def sink(self) -> Stage | None:
        """The stage that loads."""
        last = self.stages[-1] if self.stages else None
        return last if last and last.kind is StageKind.LOAD else None

    @property
    def offsets(self) -> OffsetPolicy:
        """Those of the stage that extracts: we keep them."""
        end = len(self.messages)
        return OffsetPolicy(by="supervisor", end=end, step=self.position_every)

    def items(self) -> Iterator[Run | Position]:
        """Yield the messages, and the positions between them, for a source in memory."""
        for start in range(0, len(self.messages), self.position_every):
            run = self.messages[start : start + self.position_every]
            yield run
            yield Position(start + len(run))


class Violation(AssertionError):
    """What was promised and did not come true."""


class Oracle(Generic[S]):
    """
    Judges one run.

    Args:
        scenario: What runs.

    """

    def __init__(self, scenario: S) -> None:
        self._scenario: S = scenario
        orders = {stage.order for stage in scenario.stages}
        self._ordered = orders <= {Order.TOTAL}
        keyed = {s.key: s for s in scenario.stages if s.order is Order.KEY}
        # By which stage's key there is an order, if it is one key in all of them.
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
        Assert what is true of the report of a run.

        Args:
            report: The report.
            loaded: All that reached the sink, in order.
            letters: All that were kept.
            before: What runs before it have left: messages, and letters by stage.
            unproven: Whether it failed for a load worker that did not end well.

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
            return  # it reports itself that it may have loaded what is wrong
        # Who drains for no longer than it may leaves the rest.
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
        """Assert that what reached the sink is what should, in the order promised."""
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
        # A worker may die between what it does and what it reports.
        return self._scenario.sink is not None

    def _comparable(
        self, expected: list[bytes], _loaded: Sequence[bytes], *, whole: bool
    ) -> list[bytes]:
        """Return what the order of what was loaded is compared with."""
        return expected

    def _expected(self, count: int, letters: Sequence[DeadLetter]) -> list[bytes]:
        """Return what should come of so many messages, in order."""
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
                # What its worker refuses makes the run fail, if it is not dead.
                with suppress(Exception):
                    alive.extend(self._scenario.work[stage.name](message))
        return alive

    def _check_keys(
        self, stage: Stage, loaded: Sequence[bytes], expected: Sequence[bytes]
    ) -> None:
        """Assert the order of the messages with one key, if they keep it all the way."""
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
        """Assert that each is of the message at its place, and the only one of that."""
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
                        f" number {letter.place}, where it was given {given}"
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
