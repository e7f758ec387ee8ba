"""
``etlstage fuzz``: search for cases that make a worker fail, and shorten them.

Exit code 0: none found; 1: at least one; 2: the worker can't be tried.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import anyio.to_thread
import typer
from rich.live import Live
from rich.text import Text

from etlstage.cli.failure import FAILED, complain, naming
from etlstage.cli.options import (
    Batch,
    Dialect,
    Kind,
    Markers,
    Sample,
    StageName,
    Timeout,
    Words,
    of_seconds,
)
from etlstage.cli.replay import SURE
from etlstage.cli.screen import Screen
from etlstage.cli.signals import run_interruptible
from etlstage.cli.subject import (
    Options,
    Program,
    lines_of,
    program_of,
    silence,
)
from etlstage.config.lookup import stage_from_yaml
from etlstage.errors import ConfigError, WorkerStartFailed
from etlstage.messages import StageKind, counted
from etlstage.protocol.base import Shape
from etlstage.stage import ReplyContract, Stage
from etlstage.stage.contract import Checker
from etlstage.testing.check.suite import examine_sample
from etlstage.testing.fuzzing.failures import Failure, FailureOrigin, Failures
from etlstage.testing.fuzzing.oracle import Case, CaseFailed, Oracles, model_of
from etlstage.testing.fuzzing.steps import has_sessions

if TYPE_CHECKING:
    from hypothesis import strategies as st

    from etlstage.testing.fuzzing.fuzz import Found, Fuzzer, Progress

__all__ = ("main",)

_SIZE: Final = 3
"""Maximum number of messages in a batch, if its size is not given."""
_OF_OUTPUTS: Final[Mapping[str, str]] = {
    "one_output": "--expect-one-output",
    "json_out": "--json-out",
    "idempotent": "--idempotent",
}


class DrawnInput(NamedTuple):
    """The options for the messages that are drawn."""

    json_in: bool = False
    text: bool = False
    json_schema: Path | None = None
    strategy: str = ""

    def examine(self, *, sample: bool) -> None:
        """Raise ConfigError for options that contradict each other."""
        given = [
            f"--{n.replace('_', '-')}" for n, value in self._asdict().items() if value
        ]
        if sample and given not in ([], ["--json-in"]):
            given.append("--sample")
        if len(given) > 1:
            raise ConfigError(f"{given[0]} can't be used with {given[1]}")

    def strategy_like(
        self, sample: Sequence[bytes]
    ) -> Callable[..., st.SearchStrategy[bytes]]:
        """Return a function that makes a strategy of messages, given markers."""
        from etlstage.testing import strategies as drawn

        if self.text:
            return drawn.text_messages
        if self.json_schema is not None:
            return partial(drawn.schema_messages, self._schema)
        if self.strategy:
            from etlstage.testing.fuzzing.strategy import NamedStrategy

            return NamedStrategy(self.strategy)
        if sample:
            like = drawn.json_messages_like if self.json_in else drawn.messages_like
            return partial(like, sample)
        return drawn.json_messages if self.json_in else drawn.messages

    @property
    def valid(self) -> Callable[[bytes], bool] | None:
        """Decides which messages a shortened case may contain; None: any messages."""
        if self.text:
            from etlstage.testing.strategies import is_text

            return is_text
        if self.json_schema is not None:
            checker = Checker(ReplyContract(schema=self._schema))
            return lambda message: checker([message]) is None
        return (lambda message: False) if self.strategy else None

    @property
    def _schema(self) -> Mapping[str, Any]:
        path = self.json_schema
        assert path is not None
        try:
            with naming(f"--json-schema {path}"):
                schema = json.loads(path.read_bytes())
        except ValueError as error:
            text = f"--json-schema {path} is not a JSON document: {error}"
            raise ConfigError(text) from None
        if not isinstance(schema, dict):
            raise ConfigError(f"--json-schema {path} is not a JSON object")
        return schema


def main(
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
            "--vary-markers",
            help="Vary the markers; the worker must read them from the environment.",
        ),
    ] = False,
    max_examples: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum number of cases to try.")
    ] = 300,
    seconds: Annotated[float, of_seconds("Maximum time to search.")] = 60.0,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Seed, such as that of a previous run."),
    ] = None,
    timeout: Timeout = 5.0,
    one_output: Annotated[
        bool,
        typer.Option(
            "--expect-one-output", help="Require one output for each message."
        ),
    ] = False,
    json_in: Annotated[
        bool, typer.Option("--json-in", help="Generate JSON documents as inputs.")
    ] = False,
    text: Annotated[
        bool, typer.Option("--text", help="Generate UTF-8 text as inputs.")
    ] = False,
    json_schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Generate inputs that are valid for this schema."
        ),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            metavar="MODULE:NAME", help="Hypothesis strategy that generates an input."
        ),
    ] = "",
    json_out: Annotated[
        bool, typer.Option("--json-out", help="Require outputs to be JSON documents.")
    ] = False,
    idempotent: Annotated[
        bool,
        typer.Option(
            "--idempotent",
            help="Require an output that is sent again to come back unchanged.",
        ),
    ] = False,
    order_free: Annotated[
        bool,
        typer.Option(
            "--order-free", help="Require outputs not to depend on message order."
        ),
    ] = False,
    stateless: Annotated[
        bool,
        typer.Option(
            "--stateless", help="Require outputs not to depend on earlier messages."
        ),
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Python reference implementation to compare outputs with.",
        ),
    ] = "",
) -> int:
    """
    Search for inputs and read boundaries that make a worker fail.

    The worker must answer, follow the protocol, and end properly; options add further
    requirements. Run a load worker only where it can do no harm.
    """
    if find_spec("hypothesis") is None:
        raise ConfigError("fuzz needs Hypothesis: pip install 'etlstage[testing]'")
    # Not needed for help, and it takes as long to import as everything else.
    from etlstage.testing.fuzzing.fuzz import Budget
    from etlstage.testing.fuzzing.strategy import NamedStrategy

    oracles = Oracles(one_output, json_out, idempotent, order_free, stateless, model)
    options = Options(kind, batch, markers=markers, stage=stage, dialect=dialect)
    drawn = DrawnInput(json_in, text, json_schema, strategy)
    drawn.examine(sample=sample is not None)
    silence()
    out = Screen()
    program = program_of(words, options)
    _examine(program.stage, oracles, vary_markers=vary_markers)
    messages = lines_of(sample) if sample is not None else ()
    like = drawn.strategy_like(messages)
    fuzzer = _fuzzer(
        program.stage,
        options,
        like,
        oracles,
        as_json=json_in,
        sample=messages,
        valid=drawn.valid,
        vary_markers=vary_markers,
        timeout=timeout,
    )
    kept = Failures(find=stage_from_yaml)
    origin = FailureOrigin(tuple(words), options.stage)
    seed = secrets.randbelow(10**6) if seed is None else seed
    budget = Budget(max_examples, seconds, seed)
    found: list[Found] = []

    async def search() -> list[CaseFailed]:
        known = await _still_fails(out, kept, origin, program)
        searching = partial(fuzzer.search, budget, known=known)
        with _progress() as tell, fuzzer.running():
            fuzzer.tell = tell
            try:
                await anyio.to_thread.run_sync(searching, abandon_on_cancel=True)
            finally:
                # Before the worker is ended, which an abandoned search takes for a bug.
                found.extend(fuzzer.found)
        return known

    try:
        with _trying():
            known = run_interruptible(search)
    finally:  # however the search ends
        for one in found:
            kind_found = one.failure.kind
            failure = Failure(
                program.stage, origin, one.case, oracles, kind_found, timeout
            )
            _show(out, kept.keep(failure, program.secrets), one.failure, program)
            if not one.steady:
                out.tell(
                    "it did not fail every time: the worker may depend on chance, or"
                    " time"
                )
    done = fuzzer.progress
    tried = f"{counted(done.examples, 'case')}, {counted(done.messages, 'message')}"
    if done.stopped:
        tried += f", stopped after {seconds:g} s"
    if json_schema is not None and not (found or known or done.messages):
        raise ConfigError(
            f"--json-schema {json_schema}: no message was drawn, expected some; the"
            " schema may allow none, or too few of what is tried"
        )
    if isinstance(like, NamedStrategy):
        if not (found or known):
            like.check()
        if like.left_out:
            out.tell(
                f"left out {like.left_out:,} of {counted(like.drawn, 'message')} drawn,"
                " which contain a marker"
            )
    if found:
        bugs = f"{counted(len(found), 'bug')} " if len(found) > 1 else ""
        shortened = f", {counted(done.tries, 'shrinking step')}" if done.tries else ""
        out.tell(f"{bugs}found after {tried}{shortened} (seed {seed})")
        return FAILED
    if known:
        out.tell(f"nothing else was found: {tried} (seed {seed})")
        return FAILED
    out.tell(f"passed: {fuzzer.passed()}")
    out.tell(f"tried {tried} (seed {seed})")
    return 0


@contextmanager
def _trying() -> Iterator[None]:
    """Turn the failure to start the worker into an error of usage: no bug was found."""
    try:
        yield
    except WorkerStartFailed as error:
        raise ConfigError(str(error)) from None


def _examine(stage: Stage, oracles: Oracles, *, vary_markers: bool) -> None:
    """Raise ConfigError for options that do not apply to such a worker."""
    if vary_markers and not hasattr(stage.dialect, "markers"):
        raise ConfigError(f"--vary-markers: dialect {stage.dialect.name} has none")
    if stage.dialect.shape is Shape.COMMITTED and oracles.given:
        raise ConfigError(
            f"--{next(iter(oracles.given)).replace('_', '-')}: a worker of dialect"
            f" {stage.dialect.name} commits, and has no replies"
        )
    if stage.kind is StageKind.EXTRACT:
        raise ConfigError(
            "fuzz generates messages, and an extract worker is given none; 'etlstage"
            " check' tests whether its ranges fit together, and are repeated after a"
            " kill"
        )
    if stage.kind is StageKind.LOAD:
        for name, option in _OF_OUTPUTS.items():
            if getattr(oracles, name):
                raise ConfigError(f"{option}: a load worker has no outputs")
    if oracles.model:
        model_of(oracles.model)


def _fuzzer(
    stage: Stage,
    options: Options,
    drawn: Callable[..., st.SearchStrategy[bytes]],
    oracles: Oracles,
    *,
    as_json: bool,
    sample: Sequence[bytes],
    valid: Callable[[bytes], bool] | None,
    vary_markers: bool,
    timeout: float,
) -> Fuzzer:
    from etlstage.testing import strategies
    from etlstage.testing.fuzzing import fuzz

    examine_sample(stage, sample)
    for number, message in enumerate(sample if as_json else (), 1):
        try:
            json.loads(message)
        except ValueError as error:
            raise ConfigError(
                f"message {number} of the sample is not a JSON document: {error}"
            ) from None
    _, _, written = (options.batch or "").partition(":")
    full = stage.batch.size if written or options.stage else _SIZE
    dialect, size = stage.dialect, full if written else min(full, _SIZE)
    searched: st.SearchStrategy[Any]
    own = None if drawn is strategies.messages else drawn
    given: Sequence[Case] = ()
    if dialect.shape is Shape.COMMITTED:
        searched = fuzz.processor_cases(size=size, drawn=own and own())
        given = fuzz.processor_ends()
    elif has_sessions(dialect):
        searched = fuzz.session_cases(dialect, size=size, drawn=own and own())
    else:
        searched = fuzz.cases(
            dialect,
            size=size,
            speaking=strategies.MARKER_SETS if vary_markers else (),
            drawn=drawn,
        )
    usual = strategies.messages, strategies.json_messages, strategies.text_messages
    if drawn in usual and not given:
        given = fuzz.large_cases(dialect, as_json=as_json)
    return fuzz.Fuzzer(
        stage,
        searched,
        oracles,
        size=full if dialect.shape.batches else 0,
        as_json=as_json,
        given=given,
        valid=valid,
        timeout=timeout,
    )


async def _still_fails(
    out: Screen, failures: Failures, origin: FailureOrigin, program: Program
) -> list[CaseFailed]:
    """Replay saved cases; drop those that pass now, and return the other failures."""
    known = []
    for kept in list(failures.of(origin, _skipped)):
        failure = await kept.play(SURE)
        if failure is not None:
            out.tell("regression: a saved case still fails:")
            _show(out, kept, failure, program)
            known.append(failure)
            continue
        kept.drop()
        out.tell(f"fixed: {kept.kind} ({kept.path.stem})")
    return known


def _skipped(error: ConfigError) -> None:
    complain(f"{error}: skipped", as_="warning")


# --- what is shown -------------------------------------------------------------------


class _progress:  # noqa: N801 - used as a function
    """A progress line that updates itself, on a terminal only."""

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
        tries = f", shrinking: {done.tries:,}" if done.tries else ""
        text = f"{done.examples:,} cases, {done.messages:,} messages{tries}"
        if self._screen.renews:
            self._live.update(Text(text))


def _show(out: Screen, failure: Failure, failed: CaseFailed, program: Program) -> None:
    text = failed.what if failed.kind.of_any else f"{failed.kind}: {failed.what}"
    out.tell(program.shown(f"FAILED {text}"))
    out.tell("")
    out.tell("the shortest messages, as they are written; | is where a write ends:")
    for line in failure.written():
        out.tell(f"  {line}")
    out.tell("")
    out.tell("transcript:")
    out.tell(program.secrets.conceal(failed.transcript))
    out.tell("")
    out.tell(f"kept in {failure.recording}: 'etlstage replay' replays it")
    out.tell("in Python:")
    for line in failure.program():
        out.tell(f"  {line}".rstrip())
