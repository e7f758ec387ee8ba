"""
``etlstage dlq retry``: run dead letters through their stage, and on into the load.

Letters are retried stage by stage, some thousands at a time. When these are processed
and the results are durable, that is recorded: an interrupted retry resumes after the
last record. A message that fails in a later stage becomes a new dead letter, for the
next retry.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import anyio
import typer

from etlstage.cli.failure import FAILED
from etlstage.cli.letters import Letters, check_ended, chosen, current, find, ids_of
from etlstage.cli.logs import configure
from etlstage.cli.options import (
    Debug,
    File,
    Overlays,
    Quiet,
    Values,
    Verbosity,
    changes_of,
)
from etlstage.cli.progress import exit_code, watch
from etlstage.cli.screen import Screen
from etlstage.cli.signals import Signals
from etlstage.config.build_retry import Retries
from etlstage.errors import ConfigError, guess
from etlstage.messages import counted
from etlstage.pipeline.dead_letter.files import FOLDER
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.retry import Retry, Settled, chunks
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.report import Report

__all__ = ("Ids", "OfStage", "retry")

Ids = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ID]...",
        help="Ids of dead letters, or the beginnings of them; default: all.",
    ),
]
OfStage = Annotated[
    str | None,
    typer.Option("--stage", metavar="NAME", help="Only dead letters of this stage."),
]


def retry(
    file: File,
    numbers: Ids = None,
    *,
    overlays: Overlays = None,
    values: Values = None,
    stage: OfStage = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Run dead letters through their stage and those after it, and load the results."""
    changes, verbosity = changes_of(overlays, values), Verbosity(debug, quiet)
    # No state directory is created where there is none.
    every = Retries.of_file(file, changes)
    parts = [one for one in every if os.path.exists(one.state)]
    if not parts:
        return _nothing(stage)
    with ExitStack() as stack, Signals() as signals:
        held = {part: stack.enter_context(Delivery(part.state)) for part in parts}
        for delivery in held.values():
            check_ended(delivery)
        work = _Work(signals, verbosity)
        for part in every:
            stack.callback(work.release, part)
        for part, delivery in held.items():
            part.recover(_next(part), delivery)
        found = find(file, changes)
        wanted = ids_of(found, numbers or (), stage)
        meant = Counter((x.stage, x.of_input) for x in _wanted(found, stage, wanted))
        stages = {name for name, of_input in meant if not of_input}
        _leave_out(found, stage, wanted)
        if damage := sum(count for (_, of_input), count in meant.items() if of_input):
            _leave_out_damage(damage, alone=not stages)
        if not stages:
            return _nothing(stage)
        _check(file, stages, [name for part in every for name in part.stages])
        for part in every:
            number = _next(part)
            for name in (name for name in part.stages if name in stages):
                # The part after a new durable edge may have no state directory yet.
                if part not in held:
                    held[part] = stack.enter_context(Delivery(part.state))
                for chunk in chunks(_wanted(found, name, wanted)):
                    work.do(part, held[part], Retry(chunk, number))
                    if work.ended:
                        return work.close(file)
                    number += 1
    return work.close(file)


def _next(part: Retries) -> int:
    return Settled(part.state / FOLDER).next


class _Work:
    def __init__(self, signals: Signals, verbosity: Verbosity) -> None:
        self._signals = signals
        self._verbosity = verbosity
        self._report: Report | None = None
        self._passed = self._again = self._new = 0
        self._waits: list[str] = []
        self.ended = False
        """Whether something went wrong, or a signal came."""

    def do(self, part: Retries, delivery: Delivery, retry: Retry) -> None:
        err, verbosity = Screen(stderr=True), self._verbosity
        pipeline = part.pipeline(retry, delivery)
        configure(err, verbosity, secrets=pipeline.secrets)
        self._report = report = watch(pipeline, self._signals, err, verbosity)
        pipeline.settle()
        # Which letters were left is not known: the next retry repeats all of them.
        left = any(account.unprocessed for account in report.ledger)
        if report.status in ("done", "drained") and not left:
            delivery.check()
            retry.record(part.state)
            self._passed += len(retry.passed)
            self._again += len(retry.again)
            self._new += len(retry.new)
            if part.waits is not None and part.waits not in self._waits:
                self._waits.append(part.waits)
        elif not report.ledger[-1].received:
            part.give_up()
        self.ended = report.status != "done"

    def release(self, part: Retries) -> None:
        error = self._report.error if self._report is not None else None
        anyio.run(part.release, error)

    def close(self, file: Path) -> int:
        report, again, new = self._report, self._again, self._new
        assert report is not None
        code = exit_code(report, debug=self._verbosity.debug)
        counts = [f"{counted(self._passed, 'dead letter')} passed"]
        counts += [f"{again:,} failed again"] if again else []
        counts += [f"{counted(new, 'new dead letter')} in later stages"] if new else []
        screen = Screen()
        screen.tell(", ".join(counts))
        for stage in self._waits:
            screen.tell(
                f"results are waiting in the journals of {stage}; to load them:"
                f" etlstage run {file} --only-behind {shlex.quote(stage)}"
            )
        if again or new:
            screen.tell(f"to see what is left: etlstage dlq ls {file}")
        if report.status == "drained":
            screen.tell("drained after a signal; run it again for the rest")
        return code or (FAILED if again or new else 0)


def _wanted(
    found: Letters, stage: str | None, ids: Collection[str] | None
) -> Iterator[DeadLetter]:
    return (x for x in current(found, stage) if ids is None or x.id in ids)


def _leave_out(found: Letters, stage: str | None, ids: Collection[str] | None) -> None:
    """Report the superseded letters, whose rows may be loaded anew."""
    old = sum(
        found.settled.superseded(x)
        for x in chosen(found, stage)
        if ids is None or x.id in ids
    )
    if old:
        are = "is" if old == 1 else "are"
        Screen().tell(
            f"{counted(old, 'dead letter')} {are} skipped:"
            f" {found.settled.superseded_by}; 'etlstage dlq drop' removes them"
        )


def _leave_out_damage(count: int, *, alone: bool) -> None:
    """Report letters that are not messages; raise ConfigError if all are such."""
    are, them = ("is", "it") if count == 1 else ("are", "them")
    text = (
        f"{counted(count, 'dead letter')} {are} damaged input, which no stage can"
        f" process: 'etlstage dlq export --raw' writes {them}, 'etlstage dlq drop'"
        f" removes {them}"
    )
    if alone:
        raise ConfigError(text)
    Screen().tell(text)


def _nothing(stage: str | None) -> int:
    of = f" of stage {stage}" if stage is not None else ""
    Screen().tell(f"no dead letters{of}: nothing to retry")
    return 0


def _check(file: Path, stages: Collection[str], known: Sequence[str]) -> None:
    """Raise ConfigError unless the file has the stages of all letters."""
    problems = [
        f"{file} has no stage {name!r}{guess(name, known)}, but there are dead"
        f" letters of {name!r}: give the stage this name again, choose another by"
        f" --stage, or see 'etlstage dlq drop --help'"
        for name in sorted(stages)
        if name not in known
    ]
    if problems:
        raise ConfigError(problems)
