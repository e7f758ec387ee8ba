"""
``etlstage fuzz``: cases that a worker does not stand, each as short as can be.

Exit code 0: none; 1: at least one; 2: it can't be tried.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import structlog
import typer
from rich.live import Live
from rich.text import Text

from etlstage.cli.failure import FAILED
from etlstage.cli.options import (
    Batch,
    Dialect,
    Kind,
    Markers,
    Sample,
    StageName,
    Timeout,
    Words,
    new_app,
)
from etlstage.cli.replay import SURE
from etlstage.cli.screen import Screen
from etlstage.cli.signals import interruptible
from etlstage.cli.subject import (
    Options,
    Program,
    drop,
    lines_of,
    program_of,
    refuse_who_commits,
)
from etlstage.config.lookup import stage_from_yaml
from etlstage.errors import ConfigError
from etlstage.messages import StageKind, counted
from etlstage.stage import Stage
from etlstage.testing.check.subject import examine_sample
from etlstage.testing.fuzzing.case import CaseFailed
from etlstage.testing.fuzzing.failures import Failure, FailureOrigin, Failures
from etlstage.testing.fuzzing.oracle import Oracles, model_of
from etlstage.testing.fuzzing.steps import has_sessions

try:
    from etlstage.testing.fuzzing.fuzz import (
        Budget,
        Fuzzer,
        Progress,
        cases,
        large_cases,
        session_cases,
    )
    from etlstage.testing.strategies import (
        MARKER_SETS,
        json_messages,
        json_messages_like,
        messages,
        messages_like,
    )
except ModuleNotFoundError as _error:
    if _error.name != "hypothesis":
        raise
    raise ConfigError(
        "fuzz needs Hypothesis: pip install 'etlstage[testing]'"
    ) from None

if TYPE_CHECKING:
    from hypothesis import strategies as st

__all__ = ("app",)

_SIZE: Final = 3
"""Messages of a batch, at most, if nobody has said how many one holds."""
_OF_OUTPUTS: Final[Mapping[str, str]] = {
    "one_output": "--expect-one-output",
    "json_out": "--json-out",
    "idempotent": "--idempotent",
}

app: typer.Typer = new_app()


class FuzzRequest(NamedTuple):
    """What the command line says of a worker."""

    options: Options
    sample: Path | None
    vary_markers: bool
    json_in: bool
    timeout: float
    oracles: Oracles


@app.command("fuzz")
def _fuzz(
    words: Words,
    *,
    kind: Kind = None,
    batch: Batch = None,
    markers: Markers = None,
    dialect: Dialect = None,
    stage: StageName = None,
    sample: Sample = None,
    vary_markers: Annotated[
        bool,
        typer.Option(
            "--vary-markers", help="The worker reads its markers from the environment."
        ),
    ] = False,
    max_examples: Annotated[
        int, typer.Option(metavar="N", min=1, help="Try at most N cases.")
    ] = 300,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0.1, help="Search at most S seconds.")
    ] = 60.0,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Seed of a previous run.")
    ] = None,
    timeout: Timeout = 5.0,
    one_output: Annotated[
        bool,
        typer.Option("--expect-one-output", help="Each message has one output."),
    ] = False,
    json_in: Annotated[
        bool, typer.Option("--json-in", help="Inputs are JSON documents.")
    ] = False,
    json_out: Annotated[
        bool, typer.Option("--json-out", help="Outputs are JSON documents.")
    ] = False,
    idempotent: Annotated[
        bool,
        typer.Option("--idempotent", help="An output sent again comes back unchanged."),
    ] = False,
    order_free: Annotated[
        bool,
        typer.Option("--order-free", help="Outputs do not depend on message order."),
    ] = False,
    stateless: Annotated[
        bool,
        typer.Option("--stateless", help="Outputs do not depend on earlier messages."),
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Python reference implementation to compare with.",
        ),
    ] = "",
) -> int:
    """
    Search for inputs and read boundaries that make a worker fail.

    It must answer, follow the protocol, and end properly; options say what else must
    hold. A load worker should run where it does no harm.
    """
    oracles = Oracles(one_output, json_out, idempotent, order_free, stateless, model)
    options = Options(kind, batch, markers=markers, stage=stage, dialect=dialect)
    wanted = FuzzRequest(options, sample, vary_markers, json_in, timeout, oracles)
    structlog.configure(processors=[drop])
    out = Screen()
    program = program_of(words, wanted.options)
    refuse_who_commits(program, "fuzzed")
    _examine(program.stage, wanted)
    fuzzer = _fuzzer(program.stage, wanted)
    kept = Failures(find=stage_from_yaml)
    origin = FailureOrigin(tuple(words), wanted.options.stage)
    with interruptible():
        known = _still_fails(out, kept, origin, program)
        seed = secrets.randbelow(10**6) if seed is None else seed
        with _progress() as tell, fuzzer.running():
            fuzzer.tell = tell
            found = fuzzer.search(Budget(max_examples, seconds, seed), known=known)
    done = fuzzer.progress
    tried = f"{counted(done.examples, 'case')}, {counted(done.messages, 'message')}"
    if done.stopped:
        tried += f", stopped after {seconds:g} s"
    for one in found:
        failure = Failure(
            program.stage,
            origin,
            one.case,
            wanted.oracles,
            one.failure.kind,
            wanted.timeout,
        )
        _show(out, kept.keep(failure, program.secrets), one.failure, program)
        if not one.steady:
            out.tell(
                "it did not fail each time: the worker may depend on chance, or time"
            )
    if found:
        bugs = f"{counted(len(found), 'bug')} " if len(found) > 1 else ""
        shortened = f", {done.tries:,} more to make it short" if done.tries else ""
        out.tell(f"{bugs}found after {tried}{shortened} (seed {seed})")
        return FAILED
    if known:
        out.tell(f"nothing else was found: {tried} (seed {seed})")
        return FAILED
    out.tell(f"passed: {fuzzer.passed()}")
    out.tell(f"tried {tried} (seed {seed})")
    return 0


def _examine(stage: Stage, wanted: FuzzRequest) -> None:
    """Raise ConfigError for what can't be asked of such a worker."""
    oracles = wanted.oracles
    if wanted.vary_markers and has_sessions(stage.dialect):
        raise ConfigError(f"--vary-markers: dialect {stage.dialect.name} has none")
    if stage.kind is StageKind.EXTRACT:
        raise ConfigError(
            "fuzz draws messages, and an extract worker is given none; 'etlstage check'"
            " looks whether its ranges fit together, and come again after a kill"
        )
    if stage.kind is StageKind.LOAD:
        for name, option in _OF_OUTPUTS.items():
            if getattr(oracles, name):
                raise ConfigError(f"{option}: a load worker has no outputs")
    if oracles.model:
        model_of(oracles.model)


def _fuzzer(stage: Stage, wanted: FuzzRequest) -> Fuzzer:
    sample = lines_of(wanted.sample) if wanted.sample is not None else ()
    examine_sample(stage, sample)
    if wanted.json_in:
        for number, message in enumerate(sample, 1):
            _examine_json(message, number)
    drawn: Callable[..., st.SearchStrategy[bytes]] = (
        json_messages if wanted.json_in else messages
    )
    if sample:
        like = json_messages_like if wanted.json_in else messages_like
        drawn = partial(like, sample)
    _, _, written = (wanted.options.batch or "").partition(":")
    full = stage.batch.size if written or wanted.options.stage else _SIZE
    dialect, size = stage.dialect, full if written else min(full, _SIZE)
    searched: st.SearchStrategy[Any]
    if has_sessions(dialect):
        own = drawn() if sample or wanted.json_in else None
        searched = session_cases(dialect, size=size, drawn=own)
    else:
        searched = cases(
            dialect,
            size=size,
            speaking=MARKER_SETS if wanted.vary_markers else (),
            drawn=drawn,
        )
    return Fuzzer(
        stage,
        searched,
        wanted.oracles,
        size=full if dialect.shape.batches else 0,
        as_json=wanted.json_in,
        given=() if sample else large_cases(dialect, as_json=wanted.json_in),
        timeout=wanted.timeout,
    )


def _examine_json(message: bytes, number: int) -> None:
    try:
        json.loads(message)
    except ValueError as error:
        raise ConfigError(
            f"message {number} of the sample is no JSON document: {error}"
        ) from None


def _still_fails(
    out: Screen, failures: Failures, origin: FailureOrigin, program: Program
) -> list[CaseFailed]:
    """Play what failed before; drop what does not any more, and return what does."""
    known = []
    for kept in list(failures.of(origin)):
        failure = kept.play(SURE)
        if failure is not None:
            out.tell("what was found before still fails:")
            _show(out, kept, failure, program)
            known.append(failure)
            continue
        kept.drop()
        out.tell(f"fixed: {kept.kind} ({kept.path.stem})")
    return known


# --- what is shown -------------------------------------------------------------------


class _progress:  # noqa: N801 - used as a function
    """A line that renews itself, on a terminal only."""

    def __init__(self) -> None:
        self._screen = Screen(stderr=True)
        self._live = Live(console=self._screen, transient=True, refresh_per_second=4)

    def __enter__(self) -> Callable[[Progress], None]:
        if self._screen.renews:
            self._live.start()
        return self._tell

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _tell(self, done: Progress) -> None:
        tries = f", making it shorter: {done.tries:,}" if done.tries else ""
        said = f"{done.examples:,} cases, {done.messages:,} messages{tries}"
        if self._screen.renews:
            self._live.update(Text(said))


def _show(out: Screen, failure: Failure, failed: CaseFailed, program: Program) -> None:
    said = failed.what if failed.kind.of_any else f"{failed.kind}: {failed.what}"
    out.tell(program.shown(f"FAILED {said}"))
    out.tell("")
    out.tell("the shortest messages, as they are written; | is where a write ends:")
    for line in failure.written():
        out.tell(f"  {line}")
    out.tell("")
    out.tell("what went both ways:")
    out.tell(program.secrets.conceal(failed.transcript))
    out.tell("")
    out.tell(f"kept in {failure.recording}: 'etlstage replay' plays it")
    out.tell("in Python:")
    for line in failure.program():
        out.tell(f"  {line}".rstrip())
