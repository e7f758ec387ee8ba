"""
``etlstage fuzz``: cases that a worker does not stand, each as short as can be.

And ``etlstage replay`` without a file: all that were found, once more. Exit code 0: none;
1: at least one; 2: it can't be tried.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import structlog
from rich.live import Live
from rich.text import Text

from etlstage.cli.failure import FAILED
from etlstage.cli.screen import Screen
from etlstage.cli.signals import interruptible
from etlstage.cli.subject import Options, program_of
from etlstage.errors import ConfigError
from etlstage.messages import counted
from etlstage.stage import Stage
from etlstage.telemetry.terminal import harmless
from etlstage.testing.fuzzing.case import CaseFailed
from etlstage.testing.fuzzing.failures import FOLDER, Failure, Failures
from etlstage.testing.fuzzing.oracle import Oracles, model_of

try:
    from etlstage.testing.fuzzing.fuzz import Budget, Fuzzer, Progress, cases
    from etlstage.testing.strategies import MARKER_SETS, json_messages, messages
except ModuleNotFoundError as _error:
    if _error.name != "hypothesis":
        raise
    raise ConfigError(
        "fuzz needs Hypothesis: pip install 'etlstage[testing]'"
    ) from None

__all__ = ("Wanted", "fuzz", "replay_failures")

_SURE: Final = 3
"""How often a case has to pass before it is dropped."""
_SIZE: Final = 3


class Wanted(NamedTuple):
    """What the command line says of a worker."""

    batch: str | None
    markers: str | None
    vary_markers: bool
    json_in: bool
    timeout: float
    oracles: Oracles


def fuzz(
    command: Sequence[str],
    wanted: Wanted,
    *,
    max_examples: int,
    seconds: float,
    seed: int | None,
) -> int:
    """
    Look for a case that fails; return the exit code.

    Args:
        command: The worker.
        wanted: What it speaks, and what must be true of it.
        max_examples: Cases that are tried, at most.
        seconds: How long is searched, at most.
        seed: What the cases are drawn from; None: a new one.

    Raises:
        ConfigError: If something in the command line is wrong.
        WorkerStartFailed: If the program can't be run.

    """
    structlog.configure(processors=[_drop])
    out, kept = Screen(), Failures()
    options = Options(batch=wanted.batch, markers=wanted.markers)
    dialect = program_of(command, options).stage.dialect
    stage = Stage(name="worker", command=tuple(command), dialect=dialect)
    full = int((wanted.batch or "").partition(":")[2] or _SIZE)
    size = full if dialect.shape.batches else 0
    oracles = wanted.oracles
    if oracles.model:
        model_of(oracles.model)
    with interruptible():
        if _still_fails(out, kept, command):
            return FAILED
        seed = secrets.randbelow(10**6) if seed is None else seed
        fuzzer = Fuzzer(
            stage,
            cases(
                dialect,
                size=full,
                speaking=MARKER_SETS if wanted.vary_markers else (),
                drawn=json_messages if wanted.json_in else messages,
            ),
            oracles,
            size=size,
            as_json=wanted.json_in,
            timeout=wanted.timeout,
        )
        with _progress() as tell, fuzzer.running():
            fuzzer.tell = tell
            found = fuzzer.search(Budget(max_examples, seconds, seed))
    done = fuzzer.progress
    tried = f"{counted(done.examples, 'case')}, {counted(done.messages, 'message')}"
    if found is None:
        out.tell(f"passed: {tried} (seed {seed})")
        return 0
    failure = kept.keep(
        Failure(stage, found.case, oracles, found.failure.kind, wanted.timeout)
    )
    _show(out, failure, found.failure)
    shortened = f", {done.tries:,} more to make it short" if done.tries else ""
    out.tell(f"found after {tried}{shortened} (seed {seed})")
    if not found.steady:
        out.tell("it did not fail each time: the worker may depend on chance, or time")
    return FAILED


def replay_failures() -> int:
    """Play all cases that are kept; return the exit code."""
    structlog.configure(processors=[_drop])
    out, failed, all_kept = Screen(), 0, list(Failures())
    with interruptible():
        for kept in all_kept:
            failure = kept.play(_SURE)
            failed += failure is not None
            said = (
                f"FIXED  {kept.kind}" if failure is None else f"FAILED {failure.what}"
            )
            where = f"({kept.path.stem}; {shlex.join(kept.stage.command)})"
            out.tell(f"{harmless(said)} {harmless(where)}")
    count = len(all_kept)
    fixed = f"{count - failed:,} fixed, {failed:,} failed"
    out.tell(f"{counted(count, 'case')}: {fixed}" if count else f"no case in {FOLDER}")
    return FAILED if failed else 0


def _still_fails(out: Screen, failures: Failures, command: Sequence[str]) -> bool:
    """Play what failed before; drop what does not any more."""
    for kept in list(failures.of(command)):
        failure = kept.play(_SURE)
        if failure is not None:
            out.tell("what was found before still fails:")
            _show(out, kept, failure)
            return True
        kept.drop()
        out.tell(f"fixed: {kept.kind} ({kept.path.stem})")
    return False


def _drop(*_: object) -> str:
    raise structlog.DropEvent


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


def _show(out: Screen, failure: Failure, failed: CaseFailed) -> None:
    said = failed.what if failed.kind.of_any else f"{failed.kind}: {failed.what}"
    out.tell(harmless(f"FAILED {said}"))
    out.tell("")
    out.tell("the shortest messages, as they are written; | is where a write ends:")
    for line in failure.written():
        out.tell(f"  {line}")
    out.tell("")
    out.tell("what went both ways:")
    out.tell(failed.transcript)
    out.tell("")
    out.tell(f"kept in {failure.recording}: 'etlstage replay' plays it")
    out.tell("in Python:")
    for line in failure.program():
        out.tell(f"  {line}".rstrip())
