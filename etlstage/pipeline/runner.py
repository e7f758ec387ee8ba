"""
The base class of what runs a pipeline, on any engine.

All engines keep the same accounts, dead-letter messages in the same way, and end with
the same report; they differ in how they move messages.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from secrets import token_hex
from typing import Literal

import anyio

from etlstage.errors import ConfigError, RepliesDoubtful
from etlstage.messages import StageKind
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.interfaces import DeadLetterSink, Epochs, Landing
from etlstage.pipeline.ledger import COUNTS, Account, Ledger
from etlstage.pipeline.report import (
    Cell,
    KeptLetters,
    Report,
    Status,
    accounts,
    as_html,
    as_text,
)
from etlstage.pipeline.secret import Secrets
from etlstage.stage import Stage
from etlstage.telemetry.log import Log
from etlstage.telemetry.trace import Span

__all__ = ("Runner",)

_log = Log()


class Runner(ABC):
    """
    Runs a pipeline once.

    Args:
        name: Name of the pipeline, as shown in the report.
        source: Name of the extract stage.
        stages: The transform stages, in order.
        sink: Where messages are loaded.
        dead_letters: Where to keep messages that a stage can't process; None: the
            first such message ends the run. The sink has its own.
        dead_letter_sink: Receives the dead letters at the end of the run.
        release: Called last, with the error of the run if there is one, to release
            what its parts share, such as a Spark session.
        delivery: The state directory to hold during the run, if anything outlives it.
        drain_limit: Seconds of draining in which work in flight is completed, not cut
            short; None: the engine's default.

    Raises:
        ConfigError: If two stages have one name, or a stage in the middle is not of
            kind transform.

    """

    def __init__(
        self,
        name: str,
        *,
        source: str,
        stages: Sequence[Stage],
        sink: Landing,
        dead_letters: DeadLetters | None,
        dead_letter_sink: DeadLetterSink | None,
        release: Callable[[Exception | None], Awaitable[None]] | None = None,
        delivery: Delivery | None = None,
        drain_limit: float | None = None,
    ) -> None:
        self.name = name
        names = [stage.name for stage in stages]
        self.ledger: Ledger = Ledger.of_pipeline(source, names, sink.account)
        """The accounts of the stages, as current as the engine knows them."""
        self._stages = tuple(stages)
        self._input = f"stage {source}"
        self._reads_on = True  # whether a new run reads only what is new
        self._dead_letters = dead_letters
        self._number = dead_letters.run if dead_letters is not None else token_hex(4)
        self._error: Exception | None = None
        # By stage, the counts of interrupted starts.
        self._carried: Mapping[str, Sequence[int]] = {}
        self._phase: Literal["before", "running", "over"] = "before"
        self._started = self._ended = 0.0
        self._began = self._was_over = datetime.now(UTC)
        self._cut = False  # whether draining ended before everything was loaded
        self._landing = sink
        self._letter_sink = dead_letter_sink
        self.release = release
        self._delivery = delivery
        self._drain_limit = drain_limit
        self._held = ExitStack()  # closed when the load is over
        self._completed = False  # whether the run ended well but is not over yet
        self._elsewhere = ""  # where earlier runs of the load have loaded, for humans
        self._check()

    def __repr__(self) -> str:
        line = " -> ".join(account.stage for account in self.ledger)
        return f"<{type(self).__name__} {self.name!r} {line}: {self._condition}>"

    def __str__(self) -> str:
        """Return the accounts so far as a table, and the run's condition."""
        return f"{as_text(*self._table())}\n{self.name}: {self._condition}"

    def _repr_html_(self) -> str:
        """Return the same as HTML for a notebook."""
        return as_html(*self._table(), [f"{self.name}: {self._condition}"])

    def _table(self) -> tuple[list[str], list[list[Cell]]]:
        seconds = [f"{account.seconds:.1f}" for account in self.ledger]
        return accounts(self.ledger, "seconds", seconds)

    @property
    def _condition(self) -> str:
        match self._phase:
            case "before":
                return "has not run"
            case "running":
                return self.activity or "is running"
        status = "failed" if self._error is not None else "ended"
        return f"{status} in {self._ended - self._started:.1f} s"

    @property
    def drain_limit(self) -> float:
        """Seconds of draining in which work in flight is completed."""
        return math.inf if self._drain_limit is None else self._drain_limit

    @abstractmethod
    def drain(self) -> None:
        """Stop extracting; :meth:`run` returns when everything in flight is loaded."""

    @property
    def activity(self) -> str:
        """What the run waits for, for humans; empty while messages move."""
        waiting = "" if self.ledger.moving else f"waiting for {self.ledger.awaited}"
        return self._landing.activity or waiting

    async def run(self, *, settle: bool = True) -> Report:
        """
        Run to the end and return the report, which includes a failure.

        Cancelling stops the workers at once; :meth:`report` then shows what was loaded.
        A pipeline runs only once.

        Args:
            settle: Whether the load is over when the report is returned. If not, it is
                over after :meth:`settle`, and the state directory is held until then.

        """
        self._phase = "running"
        self._started, self._began = anyio.current_time(), datetime.now(UTC)
        # The spans of the stages are within this one.
        with Span("run", current=True, pipeline=self.name) as span:
            status = await self._run_to_end(settle=settle)
            if self._error is not None:
                span.fail(self._error)
        return self.report(status)

    def settle(self) -> None:
        """
        Record that the load is over, if it is, and release the state directory; blocks.

        To be called once everything that belongs to the run is done with its report: a
        run that is killed before is completed by the next start, which loads nothing
        twice.

        Raises:
            StateUnusable: If another run has taken over, or it can't be recorded.

        """
        with self._held:
            if self._completed:
                self._completed = False
                self._settle()

    async def _run_to_end(self, *, settle: bool) -> Status:
        with ExitStack() as held:
            status = await self._run_in(held)
            if status is None or self._error is not None:
                return "failed"
            self.ledger.check(whole=status != "forced" and not self._cut)
            self._completed = status != "forced"
            self._held = held.pop_all()
        if settle:
            try:
                self.settle()
            except Exception as error:
                self._fail(error)
                return "failed"
        return status

    async def _run_in(self, held: ExitStack) -> Status | None:
        """Run, and release all but the state directory; return None for a failure."""
        status: Status | None = None
        try:
            try:
                if self._dead_letters is not None:
                    self._dead_letters.check()
                if self._delivery is not None:
                    held.enter_context(self._delivery)
                status = await self._run()
            except Exception as error:
                self._fail(error)
            for account in self.ledger:
                if account.doubtful:
                    doubt = RepliesDoubtful(account.doubtful, stage=account.stage)
                    self._fail(doubt)
            await self._hand_over_letters()
        finally:
            with anyio.CancelScope(shield=True):
                await self._close_letters()
                if self.release is not None:
                    await self.release(self._error)
            self._phase = "over"
            self._ended, self._was_over = anyio.current_time(), datetime.now(UTC)
            # Messages that a complete run can't account for are a fault, not a loss.
            if status in (None, "forced") or self._error is not None or self._cut:
                self.ledger.settle()
        return status

    def _settle(self) -> None:
        if self._delivery is not None and self._landing.settles:
            self._delivery.settle()

    def count(self, account: Account, name: str) -> int:
        """Return a count of an account, without the counts of interrupted starts."""
        before = self._carried.get(account.stage)
        count: int = getattr(account, name)
        return count - (before[COUNTS.index(name)] if before else 0)

    def letters(self) -> Iterator[DeadLetter]:
        """Yield the dead letters of the run, after its end; blocks."""
        return iter(()) if self._dead_letters is None else self._dead_letters.letters()

    @property
    def secrets(self) -> Secrets:
        """The texts of this pipeline that must not be shown."""
        letters = self._dead_letters
        return letters.secrets if letters is not None else Secrets()

    async def _begin_delivery(self, *, from_start: bool = False) -> CommitRecord | None:
        """
        Begin recording this run's commits, and return the record to resume from.

        If the records of an interrupted run are whole, it resumes with its accounts,
        its id and its dead letters up to its last epoch. The returned record is that of
        an ended run only if the run was killed before :meth:`settle`, or if the sink
        has noted its end but it could not be recorded any more.
        """
        delivery, letters = self._delivery, self._dead_letters
        if delivery is None:
            return None
        if letters is not None:
            letters.fence = delivery.record.fence
        resumed = self._begin_run(delivery, from_start=from_start)
        await self._begin_landing(resumed=resumed)
        if resumed and delivery.record.ended and delivery.record.position is not None:
            # Only the sink's note shows that the run was drained: this is the next run.
            resumed = self._begin_run(delivery)
            await self._begin_landing(resumed=resumed)
        record = delivery.record
        if resumed and delivery.whole:
            if letters is not None:
                letters.resume(record.run, record.letters)
            self._carry(record)
        if record.epoch:
            _log.info(
                "resuming after the last recorded epoch",
                epoch=record.epoch,
                position=record.position,
                run=record.run,
            )
        if record.moved_from:
            self._elsewhere = (
                f"; earlier runs have loaded epochs up to {record.epoch:,}, the last into"
                f" {record.moved_from}"
            )
            _log.warning(
                "the load continues in another output: what is loaded stays where it is",
                before=record.moved_from,
                output=record.output,
                epoch=record.epoch,
            )
        return record

    def _carry(self, record: CommitRecord) -> None:
        """Continue the run of a record, with its accounts."""
        self._number = record.run
        self._carried = record.accounts
        for account in self.ledger:
            if counts := record.accounts[account.stage]:
                account.add(counts)
                account.carried = account.processed

    def check_resumable(self, *, runs: bool = True) -> None:
        """
        Assert that a run can resume what was interrupted; nothing is changed.

        Args:
            runs: Whether the stages are run, not only what they have appended is loaded.

        Raises:
            StateUnusable: If another pipeline was interrupted.

        """
        if self._delivery is not None:
            stages = self._stage_names if runs else None
            self._delivery.check_resumable(stages=stages, output=self.output)

    @property
    def _stage_names(self) -> list[str]:
        return [account.stage for account in self.ledger]

    @property
    def output(self) -> str:
        """Where the run loads, as in records."""
        return self._landing.recorded

    def _begin_run(self, delivery: Delivery, *, from_start: bool = False) -> bool:
        letters = self._dead_letters
        return delivery.begin(
            self._number,
            stages=self._stage_names,
            letters=letters.sizes() if letters is not None else {},
            output=self.output,
            input=self._input,
            from_start=from_start,
        )

    async def _begin_landing(self, *, resumed: bool) -> None:
        """Pass the sink the record of earlier loads, and adopt a newer one it noted."""
        delivery = self._delivery
        assert delivery is not None
        if self._dead_letters is not None:
            self._dead_letters.load = delivery.record.load
        self._landing.begin(self._epochs)
        once = delivery.exactly_once
        if resumed and once and (noted := await self._landing.noted()):
            delivery.adopt(noted)
            self._landing.begin(self._epochs._replace(ended=delivery.record.ended))

    @property
    def _epochs(self) -> Epochs:
        """The record of the load, for both ends."""
        assert self._delivery is not None
        now, delivery = self._delivery.record, self._delivery
        once, check = delivery.exactly_once, delivery.check
        ended, intents, moved = now.pending, now.intents, now.moved_from
        return Epochs(
            now.load, now.epoch, once, check, now.fence, ended, intents, moved
        )

    @abstractmethod
    async def _run(self) -> Status:
        """Move the messages; return how the run ended, or raise the first error."""

    def report(self, status: Status) -> Report:
        """Return the report of a run that ended with ``status``."""
        letters, kept = self._dead_letters, KeptLetters()
        if letters is not None and letters.count:
            kept = KeptLetters(letters.count, str(letters.folder), letters.look)
        return Report(
            name=self.name,
            run=self._number,
            status=status,
            error=self._error,
            started=self._began,
            ended=self._was_over,
            seconds=self._ended - self._started,
            ledger=self.ledger,
            landed=self._landing.landed() + self._elsewhere + self._covered(status),
            output=self._landing.output(),
            dead_letters=kept,
            secrets=self.secrets,
        )

    def _covered(self, status: Status) -> str:
        """Return the reminder that a new run loads everything again, where it does."""
        delivery = self._delivery
        once = delivery is not None and delivery.exactly_once
        if status != "done" or not once or self._reads_on:
            return ""
        return "; exactly-once covers this load only: a new run loads everything again"

    def _fail(self, error: Exception) -> None:
        """Store the error that fails the run: the first one wins."""
        self._error = self._error or _innermost(error)

    async def _hand_over_letters(self) -> None:
        """Make the dead letters durable; pass them to their sink if the run is over."""
        letters = self._dead_letters
        if letters is None:
            return
        try:
            await letters.sync()
            sink = self._letter_sink
            if sink is not None and letters.count and not self._resumes:
                await sink.write(letters.letters())
        except Exception as error:
            self._fail(error)

    @property
    def _resumes(self) -> bool:
        """Whether the next start resumes this run, with its dead letters."""
        if self._delivery is None or not self._delivery.whole:
            return False
        record = self._delivery.record
        return not record.ended or (record.pending and self._error is not None)

    async def _close_letters(self) -> None:
        if self._letter_sink is not None:
            await self._letter_sink.aclose()
        if self._dead_letters is not None:
            self._dead_letters.close()

    def _tick(self, account: Account) -> None:
        account.seconds = anyio.current_time() - self._started

    def _check(self) -> None:
        names = self._stage_names
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two stages are called {name}; names must differ")
        for stage in self._stages:
            if stage.kind is not StageKind.TRANSFORM:
                raise ConfigError(
                    f"stage {stage.name} is of kind {stage.kind.value}: between the"
                    " source and the sink only transform stages are allowed"
                )


def _innermost(error: Exception) -> Exception:
    """Return the only error in an exception group, else the error itself."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
