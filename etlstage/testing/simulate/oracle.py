"""
What has to be true of a run, whatever went wrong in it.

The work of a stage is a function, so what should come out is known: it is computed
from the messages, the functions and the dead letters alone, and compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from etlstage.errors import RepliesDoubtful
from etlstage.messages import StageKind
from etlstage.pipeline import DeadLetter, Report
from etlstage.stage import Order, Stage
from etlstage.supervisor.exchange.keyed import keys_of
from etlstage.testing.simulate.scenario import Scenario

__all__ = ("Oracle", "Violation")


class Violation(AssertionError):
    """What was promised and did not come true."""


class Oracle:
    """
    Judges one run.

    Args:
        scenario: What runs.

    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        orders = {stage.order for stage in scenario.stages}
        self._ordered = orders <= {Order.TOTAL}
        keyed = {s.key: s for s in scenario.stages if s.order is Order.KEY}
        # By which stage's key there is an order, if it is one key in all of them.
        self._keyed: Stage | None = None
        if len(keyed) == 1 and Order.NONE not in orders:
            (self._keyed,) = keyed.values()
        self._committed = 0

    def check_commit(
        self, position: int, durable: Iterable[bytes], letters: Sequence[DeadLetter]
    ) -> None:
        """
        Assert that all before a position is durable, when it is stored.

        Args:
            position: How many messages are before it.
            durable: What the sink would not lose now.
            letters: Those that would not be lost now.

        """
        if position <= self._committed:
            raise Violation(
                f"position {position} is stored behind position {self._committed}"
            )
        self._committed = position
        missing = Counter(self._expected(position, letters))
        missing.subtract(durable)
        lacking = [message for message, count in missing.items() if count > 0]
        if lacking:
            raise Violation(
                f"position {position} is stored, but {_some(lacking)} is not durable"
            )

    def check_epoch(
        self, position: int, loaded: Sequence[bytes], letters: Sequence[DeadLetter]
    ) -> None:
        """
        Assert that all before a position is loaded once, when it is recorded.

        Args:
            position: How many messages are before it.
            loaded: What counts with the record.
            letters: Those that do; they would not be lost now.

        """
        if position < self._committed:
            raise Violation(
                f"position {position} is recorded behind position {self._committed}"
            )
        self._committed = position
        self.check_loaded(position, loaded, letters, whole=True)

    def check_end(
        self,
        report: Report,
        loaded: Sequence[bytes],
        letters: Sequence[DeadLetter],
        processed: Mapping[str, Mapping[bytes, int]],
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
            processed: By stage: which message was processed first, and so on.
            before: What runs before it have left: messages, and letters by stage.
            unproven: Whether it failed for a load worker that did not end well.

        """
        extracted = before[0] + report.ledger[0].produced
        if not before[0]:
            self._check_letters(extracted, letters)
        self._check_ledger(report, letters, before[1])
        count = len(self._scenario.messages)
        whole = report.status in {"done", "drained"}
        if report.status == "done" and extracted != count:
            raise Violation(f"{extracted} of {count} messages were extracted")
        if report.status == "failed" and not (unproven or self._scenario.may_fail):
            raise Violation(f"the run failed: {report.error}") from report.error
        if isinstance(report.error, RepliesDoubtful):
            return  # it says itself that it may have loaded what is wrong
        self.check_loaded(extracted, loaded, letters, whole=whole)
        if self._scenario.broken != "letters":
            # Else what is dead may be kept nowhere.
            self._check_processed(extracted, processed, letters)
        if report.status != "done":
            return
        if count and self._committed != count:
            raise Violation(
                f"the run is done, but the last position stored is {self._committed}"
            )
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
            raise Violation(f"{_some(few)} is lost: neither loaded nor dead-lettered")
        if self._scenario.sink is not None:
            # A worker may die between what it does and what it says.
            known = {*expected, *(letter.message for letter in letters)}
            many = [message for message in many if message not in known]
        if many:
            raise Violation(f"{_some(many)} is loaded too often, or by mistake")
        if self._scenario.broken == "letters" and not whole:
            # One may have been given up, and its letter could not be kept.
            came = {*loaded}
            expected = [message for message in expected if message in came]
        if self._scenario.sink is None and self._ordered:
            _compare(loaded, expected)
        elif self._scenario.sink is None and self._keyed is not None:
            self._check_keys(self._keyed, loaded, expected)

    # --- inside -------------------------------------------------------------

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

    def _check_processed(
        self,
        count: int,
        processed: Mapping[str, Mapping[bytes, int]],
        letters: Sequence[DeadLetter],
    ) -> None:
        """Assert that what has one key was processed one after the other."""
        messages = list(self._scenario.messages[:count])
        for stage in self._scenario.stages:
            if stage.order is Order.NONE:
                return
            mine = [letter for letter in letters if letter.stage == stage.name]
            if stage.order is Order.KEY:
                dead = {letter.message for letter in mine}
                turns = processed.get(stage.name, {})
                # Of equal ones nobody knows which was processed. A run that failed may
                # have given one up and not kept its letter.
                seen = [
                    m for m in dict.fromkeys(messages) if m not in dead and m in turns
                ]
                _check_in_turn(stage, seen, turns)
                if not self._keeps_keys(stage):
                    return
            messages = self._made(stage, messages, mine)

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
                    f"stage {stage.name}: {_some(innocent)} is dead-lettered, and is not"
                    " at fault"
                )
            if spared := right - found:
                raise Violation(
                    f"stage {stage.name}: {_some(spared)} is not dead-lettered"
                )
            messages = self._made(stage, messages, mine)


def _check_in_turn(
    stage: Stage, messages: Sequence[bytes], processed: Mapping[bytes, int]
) -> None:
    last: dict[int, int] = {}
    for key, message in zip(keys_of(stage, messages), messages, strict=True):
        turn = processed[message]
        if turn < last.get(key, 0):
            raise Violation(
                f"stage {stage.name}: {message!r} is processed before another one with"
                " its key, which was there first"
            )
        last[key] = turn


def _compare(loaded: Sequence[bytes], expected: Sequence[bytes]) -> None:
    for found, right in zip(loaded, expected, strict=False):
        if found != right:
            raise Violation(f"order: {found!r} is loaded before {right!r}")


def _some(messages: Iterable[bytes]) -> str:
    first, *others = sorted(messages)
    return f"{first!r} (and {len(others)} more)" if others else repr(first)
