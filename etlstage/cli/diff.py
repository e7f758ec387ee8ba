"""
``etlstage diff``: run a pipeline on two engines, or with two ends, and compare.

The two run one after the other, on the same input. Neither loads anything: messages
that reach the load stage are captured in a temporary folder, which has their positions
and dead letters, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeAlias

import typer

from etlstage.cli.failure import FAILED, complain
from etlstage.cli.logs import configure
from etlstage.cli.options import (
    Debug,
    File,
    Overlays,
    Values,
    Verbosity,
    changes_of,
)
from etlstage.cli.progress import exit_code, watch
from etlstage.cli.screen import Screen
from etlstage.cli.signals import Signals, interruptible
from etlstage.config.build import pipeline_from_yaml
from etlstage.config.document import Document
from etlstage.config.end import SourceKeys, ends, name_of
from etlstage.config.loader import examine
from etlstage.config.model import PipelineKeys
from etlstage.config.reading import Changes
from etlstage.config.variant import DryRun
from etlstage.errors import ConfigError, guess
from etlstage.messages import counted
from etlstage.pipeline.comparison import (
    ledger_difference,
    letter_difference,
    message_difference,
)
from etlstage.pipeline.interfaces import Sink
from etlstage.pipeline.report import Report
from etlstage.pipeline.runner import Runner
from etlstage.stage import Order
from etlstage.transport.watchdog import scratch

if TYPE_CHECKING:
    from etlstage.pipeline.capture import Capture

__all__ = ("Build", "compare", "main")


ENGINES: Final = ("local", "spark")
"""A stream has no end at which it could be compared."""

ENDINGS: Final = {
    "failed": "failed",
    "drained": "was drained after a signal",
    "forced": "was stopped by force",
}

Build: TypeAlias = Callable[[Path, Sink], Runner]
"""Makes the pipeline of a run, from its state directory and its sink."""


class _Side(NamedTuple):
    """One of the two: a pipeline, and where its results are."""

    pipeline: Runner
    state: Path
    messages: Capture


def main(
    file: File,
    *,
    overlays: Overlays = None,
    values: Values = None,
    engines: Annotated[
        str,
        typer.Option(
            "--on", metavar="A,B", help="Two engines, or two ends, as in files,spark."
        ),
    ] = "local,spark",
    debug: Debug = False,
) -> int:
    """Run a pipeline on two engines or ends, load nothing, and compare the results."""
    named = [name.strip() for name in engines.split(",")]
    changes = changes_of(overlays, values)
    keys, document = examine(file, changes, loads=False)
    ordered = all(stage.stage.order is Order.TOTAL for stage in keys.transform)
    rows = _rows(named)
    if any(name in rows and name not in ENGINES for name in named):
        first, second = _two(engines, list(rows))
        sides = [partial(_with_end, file, changes, keys, document, n) for n in named]
        # Each reads the files of a folder in an order of its own.
        ordered = ordered and first == second
    else:
        first, second = _two(engines, ENGINES)
        _check_engines(keys, document, first, second)
        sides = [partial(_on, file, changes, name) for name in (first, second)]
    return compare(
        (first, sides[0]),
        (second if second != first else f"{second} again", sides[1]),
        load_stage=keys.load.name,
        ordered=ordered,
        debug=debug,
    )


def compare(
    first: tuple[str, Build],
    second: tuple[str, Build],
    *,
    load_stage: str,
    ordered: bool,
    debug: bool,
) -> int:
    """
    Run two pipelines and compare what they make; return the exit code.

    Args:
        first: The name of one pipeline, and what builds it.
        second: Those of the other.
        load_stage: Name of their load stage.
        ordered: Whether the order of messages counts.
        debug: Whether to log everything and show tracebacks.

    """
    names = first[0], second[0]
    out, err = Screen(), Screen(stderr=True)
    verbosity = Verbosity(debug=debug)
    with (
        interruptible(),
        scratch("diff") as folder,
    ):
        # Both are built first: errors of the second are known before the first runs.
        trials = [
            _side(build, folder / str(number), load_stage)
            for number, (_, build) in enumerate((first, second))
        ]
        configure(err, verbosity, secrets=trials[0].pipeline.secrets)
        for name, trial in zip(names, trials, strict=True):
            with Signals() as signals:
                report = watch(trial.pipeline, signals, err, verbosity)
            if report.status != "done":
                return _not_compared(name, report, debug=debug)
        differences = list(_differences(names, *trials, ordered=ordered))
    for line in differences or [_agreement(names, trials[0], ordered=ordered)]:
        out.tell(line)
    return FAILED if differences else 0


def _rows(named: Sequence[str]) -> dict[str, type[SourceKeys]]:
    """Return the ends that make messages of rows: one may replace another."""
    known = ends(others=True, named=named)
    found = {name: end.source for name, end in known.items()}
    return {n: source for n, source in found.items() if source and source.rows}


def _two(text: str, known: Sequence[str]) -> tuple[str, str]:
    names = [name.strip() for name in text.split(",")]
    what = "engines" if known is ENGINES else "ends"
    if len(names) != 2:
        raise ConfigError(
            f"--on needs two {what}, as in A,B, got {len(names)}: {text!r}"
        )
    expected = f", expected {' or '.join(map(repr, known))}"
    problems = [
        f"--on: unknown {what[:-1]} {name!r}{guess(name, known) or expected}"
        for name in names
        if name not in known
    ]
    if problems:
        raise ConfigError(problems)
    return names[0], names[1]


def _check_engines(keys: PipelineKeys, document: Document, *engines: str) -> None:
    """Assert that the extract stage can run on these engines; loading is replaced."""
    end = keys.extract.end
    for engine in engines:
        if engine not in end.engines:
            instead = ": compare ends, as in --on files,spark" if end.rows else ""
            raise ConfigError(
                f"--on: {document.where(('extract',))}: the end"
                f" {name_of(end)} is not for engine {engine}{instead}"
            )


def _with_end(
    file: Path,
    changes: Changes,
    keys: PipelineKeys,
    document: Document,
    name: str,
    state: Path,
    sink: Sink,
) -> Runner:
    """Build the pipeline on engine local, with rows from the end of that name."""
    extract: Any = document.data["extract"]
    written = name_of(keys.extract.end)
    rows = _rows((name, written))
    if written not in rows:
        raise ConfigError(
            f"--on: {document.where(('extract',))}: the extract stage is a {written}:"
            f" only ends for rows can replace each other, {' and '.join(rows)}"
        )
    if name != written:
        given = json.dumps(rows[written].instead(extract[written]))
        values = [f"extract.{written}=null", f"extract.{name}={given}"]
        changes = changes._replace(values=[*changes.values, *values])
    return _on(file, changes, "local", state, sink)


def _on(file: Path, changes: Changes, engine: str, state: Path, sink: Sink) -> Runner:
    return pipeline_from_yaml(file, changes, trial=DryRun(engine, state, sink))


def _side(build: Build, state: Path, load_stage: str) -> _Side:
    state.mkdir(mode=0o700)
    try:
        from etlstage.pipeline.capture import Capture  # needs Arrow, as --help does not
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise ConfigError("diff needs Arrow: pip install 'etlstage[arrow]'") from None
    capture = Capture(state / "messages", name=load_stage)
    return _Side(build(state, capture), state, capture)


def _not_compared(name: str, report: Report, *, debug: bool) -> int:
    code = exit_code(report, debug=debug)
    complain(f"not compared: the run on {name} {ENDINGS[report.status]}")
    return code


def _differences(
    names: tuple[str, str], first: _Side, second: _Side, *, ordered: bool
) -> Iterator[str]:
    """Yield the first difference of each kind; the ledgers name the stage."""
    found = (
        ledger_difference(names, first.pipeline.ledger, second.pipeline.ledger),
        message_difference(names, first.messages, second.messages, ordered=ordered),
        letter_difference(names, first.state, second.state),
    )
    yield from filter(None, found)


def _agreement(names: tuple[str, str], one: _Side, *, ordered: bool) -> str:
    dead = sum(account.dead for account in one.pipeline.ledger)
    return (
        f"{names[0]} and {names[1]} agree: {counted(len(one.messages), 'message')}"
        f" {'in order' if ordered else 'in any order'}, ledgers equal,"
        f" {counted(dead, 'dead letter')}"
    )
