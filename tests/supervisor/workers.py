"""
Stages that run the worker program, and ways to check results and processes.

A behavior is chosen by its name: ``silent``, which answers with nothing, as a load
worker does; ``ranges``, which yields the first numbers; a plan for the hostile worker;
or a function of ``program.py``, for what no such plan can do.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, TypedDict, TypeVar, Unpack

from etlstage.errors import EtlstageError
from etlstage.messages import Result, StageKind
from etlstage.protocol.base import Dialect
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import (
    BatchPolicy,
    ErrorPolicy,
    Order,
    RecyclePolicy,
    RestartPolicy,
    Stage,
    Timeouts,
)
from etlstage.testing import Fault, FaultKind, FaultPlan, Moment, hostile_worker
from tests.staged import staged

__all__ = (
    "ONCE",
    "PROGRAM",
    "QUICK",
    "Settings",
    "collect",
    "command",
    "cyclic",
    "ends",
    "errors",
    "load",
    "numbers",
    "open_files",
    "outputs",
    "plain",
    "runs",
    "stage",
)

T = TypeVar("T")

EXIT, STALL, STDERR = FaultKind.EXIT, FaultKind.STALL, FaultKind.STDERR
ENDLESS: Final = 10**12
"""A number of messages to extract that no test reaches."""
PROGRAM: Final = Path(__file__).with_name("program.py")
QUICK: Final = Timeouts(stop=0.2)
"""For workers that don't exit by themselves."""


HOSTILE: Final[Mapping[str, Callable[..., tuple[Fault, ...]]]] = {
    "exits": lambda status: (Fault(EXIT, at=Moment.START, status=status),),
    "exits_at": lambda number, status: (
        Fault(STDERR, message=number, data=b"can't go on at message %d" % number),
        Fault(EXIT, message=number, status=status),
    ),
    "exits_at_word": lambda word: (Fault(EXIT, equals=word.encode(), status=3),),
    "killed_at": lambda number: (Fault(FaultKind.KILL, message=number),),
    "killed_in_range": lambda *numbers: tuple(
        Fault(FaultKind.KILL, equals=b"%d" % number, start=start)
        for start, number in enumerate(numbers, 1)
    ),
    "killed_before": lambda number: (Fault(FaultKind.KILL, equals=b"%d" % number),),
    "closes_stdout": lambda: (Fault(FaultKind.CLOSE_STDOUT, message=1),),
    "closes_stdout_later": lambda: (Fault(FaultKind.CLOSE_STDOUT, message=2),),
    "closes_stdin": lambda: (Fault(FaultKind.CLOSE_STDIN, message=1),),
    "dies_in_round": lambda number: (
        Fault(STDERR, message=number, data=b"out of luck"),
        Fault(FaultKind.KILL, message=number),
    ),
    "never_answers": lambda: (Fault(FaultKind.SKIP),),
    "sleeps": lambda: (Fault(STALL, at=Moment.START),),
    "sleeps_at": lambda number: (Fault(STALL, message=number),),
    "slow_at": lambda word, seconds: (
        Fault(FaultKind.PAUSE, equals=word.encode(), seconds=seconds),
    ),
    "writes_no_eop_at": lambda number: (
        Fault(FaultKind.WRONG_MARKER, message=number, data=b""),
    ),
    "refuses": lambda word: (Fault(FaultKind.REFUSE, contains=word.encode()),),
    "skips_bad": lambda: (
        Fault(STDERR, equals=b"bad", data=b"(WARN) bad message"),
        Fault(FaultKind.SKIP, equals=b"bad"),
    ),
    "answers_twice": lambda: (Fault(FaultKind.TWICE),),
    "prints_first": lambda: (
        Fault(FaultKind.GARBAGE, at=Moment.START, data=b"Hello, I am ready\n"),
    ),
    "writes_eop": lambda: (Fault(FaultKind.EXTRA_EOP, at=Moment.MESSAGE, message=2),),
    "asks_for_more": lambda: (Fault(FaultKind.GARBAGE, data=b"\5"),),
    "hangs_behind_last": lambda size: (
        Fault(FaultKind.GARBAGE, message=size, data=b"\5"),
        Fault(STALL, message=size),
    ),
    "long_answer": lambda size: (Fault(FaultKind.HUGE, size=size),),
    "complains": lambda size: (Fault(STDERR, data=b"x" * size),),
    "complains_at_length": lambda: (Fault(STDERR, message=1),),
    "floods_stderr": lambda: (
        Fault(STDERR, at=Moment.START, data=b"still alive", size=10**12),
    ),
    "deaf_to_eof": lambda: (Fault(STALL, at=Moment.END),),
    "deaf_to_sigterm": lambda: (
        Fault(FaultKind.IGNORE_SIGTERM),
        Fault(STALL, at=Moment.END),
    ),
    "spins": lambda: (
        Fault(FaultKind.IGNORE_SIGTERM),
        Fault(FaultKind.SPIN, at=Moment.END),
    ),
}
"""The hostile worker's behaviors by name: the faults of its plan."""


def command(
    behaviour: str, *arguments: object, mode: Mode = Mode.SINGLE
) -> tuple[str, ...]:
    """Return the command line of a worker with this behavior."""
    if behaviour == "silent":
        return hostile_worker(FaultPlan(), mode=mode, transform="nothing")
    if behaviour == "ranges":
        (count,) = arguments or (ENDLESS,)
        assert isinstance(count, int)
        return hostile_worker(FaultPlan(), mode=mode, messages=count)
    if behaviour in HOSTILE:
        plan = FaultPlan(HOSTILE[behaviour](*arguments))
        return hostile_worker(plan, mode=mode)
    # -S skips site, which halves the time of a start.
    words = (sys.executable, "-S", PROGRAM, behaviour, *arguments)
    return tuple(map(str, words))


class Settings(TypedDict, total=False):
    """The settings of a stage besides its command."""

    name: str
    kind: StageKind
    dialect: Dialect
    batch: BatchPolicy
    workers: int
    window: int | None
    timeout: Timeouts
    env: Mapping[str, str]
    cwd: Path | None
    max_message: int
    order: Order
    key: str | None
    ready: bool
    restart: RestartPolicy
    on_error: ErrorPolicy
    recycle: RecyclePolicy


ONCE: Final[Settings] = {
    "restart": RestartPolicy(policy="temporary"),
    "on_error": ErrorPolicy(retries=0),
}
"""For tests of a single start of a worker: it is not restarted."""


def stage(behaviour: str, *arguments: object, **settings: Unpack[Settings]) -> Stage:
    """Return a transform stage, called ``t``, with this behavior."""
    settings = {**ONCE, **settings}
    dialect = settings.get("dialect")
    mode = dialect.mode if isinstance(dialect, MarkerDialect) else Mode.SINGLE
    return staged(command(behaviour, *arguments, mode=mode), **settings)


def load(behaviour: str, *arguments: object, **settings: Unpack[Settings]) -> Stage:
    """Return a load stage, called ``l``."""
    settings["kind"] = StageKind.LOAD
    settings.setdefault("name", "l")
    return stage(behaviour, *arguments, **settings)


def plain(behaviour: str, *arguments: object, **settings: Unpack[Settings]) -> Stage:
    """Return an extract stage, called ``e``, in plain mode."""
    settings["kind"] = StageKind.EXTRACT
    settings.setdefault("dialect", MarkerDialect(mode=Mode.PLAIN))
    settings.setdefault("name", "e")
    return stage(behaviour, *arguments, **settings)


def cyclic(behaviour: str, *arguments: object, **settings: Unpack[Settings]) -> Stage:
    """Return an extract stage, called ``e``, in cyclic mode."""
    settings.setdefault("dialect", MarkerDialect(mode=Mode.CYCLIC))
    return plain(behaviour, *arguments, **settings)


def numbers(count: int) -> list[bytes]:
    """Return distinct messages."""
    return [b"%d" % n for n in range(count)]


def outputs(results: Iterable[Result]) -> list[tuple[bytes, ...]]:
    """Return the outputs of each result, none of which may be an error."""
    rows = list(results)
    assert [r.error for r in rows if r.error is not None] == []
    return [r.outputs for r in rows]


def errors(results: Iterable[Result]) -> list[str]:
    """Return each result's error with its story; empty where there is none."""
    return [told(r.error) if r.error is not None else "" for r in results]


def told(error: EtlstageError) -> str:
    """Return an error as a terminal shows it: the text, and the story below."""
    return "\n".join([str(error), *error.story])


def ends(pid: int) -> bool:
    """Return whether a process has ended, or does so soon; zombies have ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(2000))
    finally:
        os.close(process)


def runs(pid: int) -> bool:
    """Return whether a process is running; zombies are not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    # The program's name, in parentheses, may contain anything.
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


async def collect(seen: list[T], items: AsyncIterable[T]) -> None:
    """Append items as they come, so that those before an error are kept."""
    async for item in items:
        seen += [item]


def open_files() -> set[str]:
    """Return our open descriptors, with what each of them is."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found
