"""What must be true of whole runs: of commits, of epochs, and of processing order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from etlstage.errors import RepliesDoubtful
from etlstage.pipeline import DeadLetter, Report
from etlstage.stage import Order, Stage
from etlstage.supervisor.exchange.keyed import keys_of
from etlstage.testing import scenario
from etlstage.testing.scenario import Violation, some
from tests.simulate.scenario import Scenario

__all__ = ("Oracle", "Violation")


class Oracle(scenario.Oracle[Scenario]):
    """
    Judges one run, over all its starts.

    Args:
        runs: The scenario that is run.

    """

    def __init__(self, runs: Scenario) -> None:
        super().__init__(runs)
        self._committed = 0

    def check_commit(
        self, position: int, durable: Iterable[bytes], letters: Sequence[DeadLetter]
    ) -> None:
        """
        Assert that everything before a position is durable when it is stored.

        Args:
            position: Number of messages before the position.
            durable: Messages that the sink would not lose now.
            letters: Dead letters that would not be lost now.

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
                f"position {position} is stored, but {some(lacking)} is not durable"
            )

    def check_epoch(
        self, position: int, loaded: Sequence[bytes], letters: Sequence[DeadLetter]
    ) -> None:
        """
        Assert that everything before a position is loaded once when it is recorded.

        Args:
            position: Number of messages before the position.
            loaded: Messages that the record makes count.
            letters: Dead letters that the record makes count, all of them durable.

        """
        if position < self._committed:
            raise Violation(
                f"position {position} is recorded behind position {self._committed}"
            )
        self._committed = position
        self.check_loaded(position, loaded, letters, whole=True)

    def check_run(
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
        Assert what must be true of a run and its report; see :meth:`check_end`.

        Args:
            report: The report.
            loaded: All messages that reached the sink, in order.
            letters: All letters that were kept.
            processed: By stage, the turn at which each message was processed.
            before: Counts from earlier runs: messages, and letters by stage.
            unproven: Whether it failed for a load worker that did not end well.

        """
        self.check_end(report, loaded, letters, before, unproven=unproven)
        left = report.ledger.undelivered + sum(a.unprocessed for a in report.ledger)
        if report.status == "drained" and left and self._scenario.drain_limit is None:
            raise Violation(f"the run is drained, but {left} are unprocessed")
        # A doubtful run itself reports that it may have loaded wrong messages; and if
        # letters can't be kept, a message that was given up may be nowhere.
        doubtful = isinstance(report.error, RepliesDoubtful)
        if not doubtful and self._scenario.broken != "letters":
            extracted = before[0] + report.ledger[0].produced
            self._check_processed(extracted, processed, letters)
        count = len(self._scenario.messages)
        if report.status == "done" and count and self._committed != count:
            raise Violation(
                f"the run is done, but the last position stored is {self._committed}"
            )

    # --- inside -------------------------------------------------------------

    @property
    def _repeats(self) -> bool:
        return super()._repeats and self._scenario.epoch is None

    def _comparable(
        self, expected: list[bytes], loaded: Sequence[bytes], *, whole: bool
    ) -> list[bytes]:
        if self._scenario.broken == "letters" and not whole:
            # A message may have been given up whose letter could not be kept.
            came = {*loaded}
            return [message for message in expected if message in came]
        return expected

    def _check_processed(
        self,
        count: int,
        processed: Mapping[str, Mapping[bytes, int]],
        letters: Sequence[DeadLetter],
    ) -> None:
        """Assert that messages with the same key were processed in order."""
        messages = list(self._scenario.messages[:count])
        for stage in self._scenario.stages:
            if stage.order is Order.NONE:
                return
            mine = [letter for letter in letters if letter.stage == stage.name]
            if stage.order is Order.KEY:
                dead = {letter.message for letter in mine}
                turns = processed.get(stage.name, {})
                # Equal messages can't be told apart. A run that failed may have given a
                # message up without keeping its letter.
                seen = [
                    m for m in dict.fromkeys(messages) if m not in dead and m in turns
                ]
                _check_in_turn(stage, seen, turns)
                if not self._keeps_keys(stage):
                    return
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
