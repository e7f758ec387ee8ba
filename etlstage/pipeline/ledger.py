"""
The accounts of a run: the outcome of every message.

A stage takes in messages and gives each exactly one outcome: done, dead, failed or
unprocessed. The messages that it makes of them are what the next stage takes in.
:meth:`Ledger.check` proves both; a run that can't prove them has not succeeded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from etlstage.errors import Faults, LedgerImbalance, WorkerFailure
from etlstage.messages import StageKind
from etlstage.stage.contract import PROMISES

__all__ = ("COUNTS", "Account", "JoinedLedger", "Ledger")

COUNTS: Final = (
    "received",
    "done",
    "dead",
    "failed",
    "unprocessed",
    "produced",
    "skipped",
    "doubtful",
    "restarts",
    "failures",
    *(f"mismatched_{promise}" for promise in PROMISES),
)
"""The names of an account's counts."""


@dataclass(slots=True)
class Account:
    """Counts the messages of one stage while it runs."""

    stage: str
    kind: StageKind
    received: int = 0
    """Messages taken in; for an extract stage damaged places of its input, all dead."""
    done: int = 0
    """Messages answered; in a load stage, durable."""
    dead: int = 0
    """Messages that could not be processed and were dead-lettered."""
    failed: int = 0
    """Messages refused by the worker or the destination, and not dead-lettered."""
    unprocessed: int = 0
    """Messages without another outcome when the run ended early: their worker died, or
    was stopped, while it held them."""
    produced: int = 0
    """Messages made for the next stage."""
    doubtful: int = 0
    """Messages whose replies may be those of others, see ``RepliesDoubtful``; they
    count as done, too."""
    skipped: int = 0
    """Messages, counted as done, that a worker reported as not processed and answered
    without output. For an extract stage: damaged places of its input that were skipped
    because dead letters are not kept."""
    restarts: int = 0
    """Workers that were started to replace one that was gone."""
    failures: int = 0
    """Workers that were found at fault, or died."""
    mismatched_outputs: int = 0
    """Messages whose replies broke ``expect``, by the first key that they broke. They
    count as dead or failed, too; or as done, where they are only counted."""
    mismatched_json: int = 0
    mismatched_schema: int = 0
    mismatched_where: int = 0
    mismatched_max_seconds: int = 0
    faults: tuple[WorkerFailure, ...] = ()
    """The last failures, unless the workers were on Spark's executors."""
    seconds: float = 0.0
    """When the stage last moved a message, in seconds since the start of the run."""
    began: float | None = None
    """When the stage was given its first message, or began to extract, in seconds since
    the start of the run; None: not yet, or its workers were on Spark's executors."""
    busy: float = 0.0
    """Seconds in which any of its workers held a message, unless they were on Spark's
    executors."""
    carried: int = 0
    """Messages that interrupted starts have dealt with, which all counts include."""

    @property
    def counts(self) -> list[int]:
        """The counts, as :data:`COUNTS` names them."""
        return [getattr(self, name) for name in COUNTS]

    def settled(self, running: Faults, skipped: int = 0) -> list[int]:
        """
        Return the counts without pending messages, which belong to a later epoch.

        Args:
            running: Restarts and failures of workers that still run.
            skipped: Messages that these reported as skipped.

        """
        settled = replace(
            self,
            received=self.moved if self.kind is not StageKind.EXTRACT else self.dead,
            skipped=self.skipped + skipped,
            restarts=self.restarts + running.restarts,
            failures=self.failures + running.failures,
        )
        return settled.counts

    def add(self, counts: Sequence[int]) -> None:
        """Add the counts of another account of the stage."""
        # A record of a version that counted less has fewer.
        for name, count in zip(COUNTS, counts, strict=False):
            setattr(self, name, getattr(self, name) + count)

    def add_mismatches(self, promises: Iterable[str]) -> None:
        """Count replies, each by the promise that it broke."""
        for promise in promises:
            name = f"mismatched_{promise}"
            setattr(self, name, getattr(self, name) + 1)

    @property
    def mismatches(self) -> dict[str, int]:
        """Number of replies that broke each promise, where there are any."""
        counts = {name: getattr(self, f"mismatched_{name}") for name in PROMISES}
        return {name: count for name, count in counts.items() if count}

    @property
    def mismatched(self) -> int:
        """Number of replies that broke a promise."""
        return sum(self.mismatches.values())

    def add_faults(self, faults: Faults) -> None:
        """Add the failures and restarts of a supervisor's workers."""
        self.restarts += faults.restarts
        self.failures += faults.failures
        self.faults += faults.last

    @property
    def made(self) -> int:
        """Messages that came out of the stage; for a load stage, those durable."""
        return self.done if self.kind is StageKind.LOAD else self.produced

    @property
    def moved(self) -> int:
        """Messages that the stage has dealt with."""
        if self.kind is StageKind.EXTRACT:
            return self.produced
        return self.done + self.dead + self.failed + self.unprocessed

    @property
    def processed(self) -> int:
        """Messages that this start has dealt with, except unprocessed; gives rates."""
        left = 0 if self.kind is StageKind.EXTRACT else self.unprocessed
        return self.moved - left - self.carried

    @property
    def pending(self) -> int:
        """Messages taken in that have no outcome yet."""
        return self.received - self.done - self.dead - self.failed - self.unprocessed


class Ledger:
    """
    Holds the accounts of a run, in the order of the stages.

    Args:
        accounts: The accounts, incremented where what they count happens.

    """

    def __init__(self, accounts: Iterable[Account]) -> None:
        self._accounts = tuple(accounts)
        self.awaited = "the first message"
        """What the accounts wait for until they move, for humans."""
        self.expected: int | None = None
        """Number of messages to extract, if known."""

    @classmethod
    def of_pipeline(cls, source: str, stages: Iterable[str], load: Account) -> Ledger:
        """
        Return the ledger of a pipeline.

        Args:
            source: Name of the extract stage.
            stages: Names of the transform stages.
            load: The account of the load stage.

        """
        middle = (Account(name, StageKind.TRANSFORM) for name in stages)
        return cls([Account(source, StageKind.EXTRACT), *middle, load])

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts)

    def __len__(self) -> int:
        return len(self._accounts)

    def __getitem__(self, index: int) -> Account:
        return self._accounts[index]

    @property
    def moving(self) -> bool:
        """Whether any stage has dealt with a message."""
        return any(account.moved for account in self._accounts)

    @property
    def gaps(self) -> list[int]:
        """Between each two stages, how many messages the next has not taken in."""
        return [a.produced - b.received for a, b in pairwise(self._accounts)]

    @property
    def undelivered(self) -> int:
        """Messages that one stage made and the next never took in."""
        return sum(self.gaps)

    @property
    def waiting(self) -> int:
        """Messages without an outcome yet, or not taken in by the next stage."""
        return sum(account.pending for account in self._accounts) + self.undelivered

    def settle(self) -> None:
        """Book messages without an outcome as unprocessed: their workers are gone."""
        for account in self._accounts:
            account.unprocessed += account.pending

    def check(self, *, whole: bool = True) -> None:
        """
        Assert that every message has one outcome.

        Args:
            whole: Whether the run ended by itself, so that nothing may be left between
                two stages.

        Raises:
            LedgerImbalance: If a count does not add up; the text names the stages.

        """
        wrong = [
            f"stage {a.stage}: {a.received} received, but {a.done} done"
            f" + {a.dead} dead + {a.failed} failed + {a.unprocessed} unprocessed"
            for a in self._accounts
            if a.pending
        ]
        wrong += [
            f"{a.produced} left stage {a.stage}, but {b.received} reached {b.stage}"
            for a, b in pairwise(self._accounts)
            if b.received > a.produced or (whole and b.received != a.produced)
        ]
        if wrong:
            raise LedgerImbalance("; ".join(wrong))


class JoinedLedger(Ledger):
    """
    Holds the accounts of the parts of a pipeline that is cut at journals.

    A part may read in another run what the part before it has appended. So their counts
    need not match, and their accounts of the journals are not shown.

    Args:
        ledgers: The ledgers of the parts, in order.

    """

    def __init__(self, ledgers: Sequence[Ledger]) -> None:
        self._ledgers = ledgers
        accounts = list(ledgers[0])
        for ledger in ledgers[1:]:
            accounts[-1:] = list(ledger)[1:]
        super().__init__(accounts)

    @property
    def gaps(self) -> list[int]:
        """The gaps of all ledgers; in the journals nothing is lost."""
        first, *others = (ledger.gaps for ledger in self._ledgers)
        for gaps in others:
            first[-1:] = [first[-1] + gaps[0], *gaps[1:]]
        return first

    def check(self, *, whole: bool = True) -> None:
        """Check each part's ledger; raises like :meth:`Ledger.check`."""
        for ledger in self._ledgers:
            ledger.check(whole=whole)
