"""``etlstage test``: the tests of a pipeline file, with nothing loaded for real."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import anyio
import structlog

from etlstage.cli import junit as xml
from etlstage.cli.case import CaseFailure, CaseRun
from etlstage.cli.failure import FAILED
from etlstage.cli.logs import configure
from etlstage.cli.options import (
    Debug,
    File,
    JunitFile,
    Overlays,
    Values,
    Verbosity,
    changes_of,
    new_app,
)
from etlstage.cli.rows import RowEnds
from etlstage.cli.screen import Screen
from etlstage.cli.signals import interruptible
from etlstage.config.build import hidden_texts
from etlstage.config.loader import LoadedCase, cases_of, load
from etlstage.config.model import PipelineKeys
from etlstage.errors import ConfigError
from etlstage.messages import counted
from etlstage.pipeline.secret import Secrets
from etlstage.telemetry.terminal import harmless
from etlstage.transport.watchdog import scratch

__all__ = ("app",)

app = new_app()


class CaseResult(NamedTuple):
    """What became of a test."""

    case: LoadedCase
    failures: Sequence[CaseFailure]
    seconds: float


@app.command("test")
def _test(
    file: File,
    *,
    overlays: Overlays = None,
    values: Values = None,
    junit: JunitFile = None,
    debug: Debug = False,
) -> int:
    """Run the tests of a pipeline file, and of the file of tests beside it."""
    keys, document = load(file, changes_of(overlays, values))
    cases = cases_of(keys, document)
    if not cases:
        raise ConfigError(f"{file}: has no tests; write them under the key tests")
    secrets = Secrets(hidden_texts(keys, document))
    screen = Screen()
    if debug:
        configure(Screen(stderr=True), Verbosity(debug=True), secrets=secrets)
    else:
        structlog.configure(processors=[_drop])
    outcomes = []
    with interruptible(), scratch("test") as folder, _rows(keys) as rows:
        for i, case in enumerate(cases):
            (own := folder / str(i)).mkdir()
            trial = CaseRun(keys, document, case, own, rows=rows)
            outcomes.append(_outcome(trial, case, secrets))
            for line in _lines(outcomes[-1]):
                screen.print(line, soft_wrap=True, highlight=False, markup=False)
    failed = sum(1 for outcome in outcomes if outcome.failures)
    total = f"{counted(len(outcomes), 'test')}: {len(outcomes) - failed} passed"
    screen.print(f"{total}, {failed} failed" if failed else total, highlight=False)
    if junit is not None:
        xml.write(junit, xml.junit(str(file), [*map(_case, outcomes)]))
    return FAILED if failed else 0


@contextmanager
def _rows(keys: PipelineKeys) -> Iterator[RowEnds]:
    rows = RowEnds(keys)
    try:
        yield rows
    finally:
        rows.stop()


def _drop(*_: object) -> NoReturn:
    raise structlog.DropEvent


def _outcome(trial: CaseRun, case: LoadedCase, secrets: Secrets) -> CaseResult:
    began = time.monotonic()
    failures = [
        failure._replace(
            what=secrets.conceal(failure.what),
            lines=tuple(map(secrets.conceal, failure.lines)),
        )
        for failure in anyio.run(trial.run)
    ]
    return CaseResult(case, failures, time.monotonic() - began)


def _lines(outcome: CaseResult) -> Iterator[str]:
    said = "FAIL" if outcome.failures else "ok  "
    yield f"{said} {outcome.case.keys.name} ({outcome.seconds:.2f} s)"
    for failure in outcome.failures:
        yield f"     {failure.where}: {harmless(failure.what)}"
        yield from (f"       {harmless(line)}" for line in failure.lines)


def _case(outcome: CaseResult) -> xml.XmlCase:
    failures = [
        (failure.what, "\n".join((f"{failure.where}: {failure.what}", *failure.lines)))
        for failure in outcome.failures
    ]
    return xml.XmlCase(outcome.case.keys.name, outcome.seconds, failures)
