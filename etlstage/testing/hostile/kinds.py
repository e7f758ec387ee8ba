"""
The kinds of faults that a worker may have, with one entry for each.

A kind has a name, a meaning, a moment, what a worker needs for it, and, if that can be
given in bytes, in time or as an exit status, its effect. It is carried out by a process
on itself (``program.py``), by a script in memory (``testing/scripted.py``), or by the
wire between a supervisor and any worker (``testing/faulty``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from typing import Any, Self, TypeAlias

    Fault: TypeAlias = Mapping[str, Any]
    Trigger: TypeAlias = Callable[[int, bytes], bool]

__all__ = (
    "Act",
    "DueFaults",
    "Exit",
    "FaultKind",
    "Moment",
    "ReadInput",
    "ShowLife",
    "Step",
    "as_bytes",
    "effect",
)


class Moment(StrEnum):
    """When in the life of a worker a fault may happen."""

    START = "start"
    """Before it has read anything, or reported that it is ready."""
    MESSAGE = "message"
    """When it has read a message, and before it answers."""
    IDLE = "idle"
    """When there was nothing to do for a moment; again after each such moment."""
    END = "end"
    """When its input has ended, or it is asked to terminate."""
    ACTION = "action"
    """Before an action of a record processor, also the one that ends its shard."""
    CHECKPOINT = "checkpoint"
    """When a record processor has asked for a checkpoint, before the answer."""


class _Kind(NamedTuple):
    """The declaration of a kind; see :class:`FaultKind`."""

    name: str
    meaning: str
    about: str = ""
    at: Moment = Moment.MESSAGE
    shapes: bool = False
    inside: bool = False
    size: int | None = None
    writes: bytes | None = None
    status: int | None = None


class FaultKind(StrEnum):
    """
    What a worker does, or what is done to it.

    Attributes:
        meaning: The fault, in words.
        about: What a worker must have for it: markers, pipes, a connection,
            checkpoints; or a shard, of a simulated daemon; empty: nothing.
        at: When it happens by default.
        shapes: Whether it changes a reply; all others are done at once.
        inside: Whether only a process can do it to itself.
        size: The default of ``size``.
        writes: What it writes, if that is always the same.
        status: The exit status it ends with, if that is always the same; negative for a
            signal.

    """

    meaning: str
    about: str
    at: Moment
    shapes: bool
    inside: bool
    size: int | None
    writes: bytes | None
    status: int | None

    def __new__(cls, *values: Any) -> Self:  # noqa: ANN401 - those of _Kind
        """Make a member, which can then be found by its name alone."""
        kind = str.__new__(cls, values[0])
        kind._value_ = values[0]
        _, kind.meaning, kind.about, kind.at, kind.shapes, kind.inside = values[:6]
        kind.size, kind.writes, kind.status = values[6:]
        return kind

    @property
    def outside(self) -> bool:
        """Whether only a launch can do it; see ``FaultyLaunch``."""
        return self.about not in ("", "markers", "pipes")

    @property
    def moments(self) -> frozenset[Moment]:
        """When it may happen."""
        of_shard = frozenset({Moment.ACTION, Moment.CHECKPOINT})
        if self.shapes or self.name in (
            "FAIL_CHECKPOINT",
            "NO_RECORDS",
            "MANY_RECORDS",
        ):
            return frozenset({self.at})
        if self.at in of_shard:
            return of_shard
        return frozenset(Moment) - (frozenset() if self.name == "PAUSE" else of_shard)

    # --- it dies
    KILL = _Kind(
        "kill",
        "Is killed by SIGKILL, as by the kernel if memory runs out.",
        status=-9,
    )
    SEGFAULT = _Kind("segfault", "Is killed by SIGSEGV.", status=-11)
    ABORT = _Kind("abort", "Aborts itself (SIGABRT).", status=-6)
    EXIT = _Kind("exit", "Exits with ``status``, which may be 0.")
    PARTIAL = _Kind(
        "partial",
        "Writes its reply without the EOP, and is killed by SIGKILL.",
        shapes=True,
    )

    # --- it takes its time
    STALL = _Kind("stall", "Hangs; SIGTERM ends it.")
    SPIN = _Kind(
        "spin", "Keeps the CPU busy from then on; SIGTERM ends it.", inside=True
    )
    STOP = _Kind(
        "stop", "Stops itself with SIGSTOP; only SIGKILL or SIGCONT has an effect then."
    )
    PAUSE = _Kind(
        "pause",
        "Does nothing for ``seconds``, then continues: a slow start, a late answer.",
    )
    SKIP = _Kind(
        "skip", "Does not answer, and continues with the next message.", shapes=True
    )
    NEVER_READY = _Kind(
        "never_ready",
        "Sends no heartbeat, and never reports that it is ready.",
        at=Moment.START,
    )

    # --- it answers wrongly
    TWICE = _Kind("twice", "Writes its reply twice.", shapes=True)
    EXTRA_EOP = _Kind(
        "extra_eop",
        "Writes an unsolicited EOP.",
        about="markers",
        at=Moment.IDLE,
    )
    GARBAGE = _Kind(
        "garbage",
        "Writes ``data``, by default a line of text and EOM, as a stray print does. If"
        " a message is unanswered, this looks like a part of the reply.",
    )
    BYTE_ORDER_MARK = _Kind(
        "byte_order_mark",
        "Writes the byte order mark of UTF-8 first, as some languages do.",
        at=Moment.START,
        writes=b"\xef\xbb\xbf",
    )
    WRONG_MARKER = _Kind(
        "wrong_marker",
        "Ends its reply with ``data``, by default BNC, instead of EOP; with nothing if"
        " ``data`` is empty.",
        about="markers",
        shapes=True,
    )
    REFUSE = _Kind(
        "refuse",
        "Refuses the message with reason ``data``, by default its usual reply; without"
        " ERR, it answers.",
        shapes=True,
    )

    # --- it answers rightly, but ...
    HUGE = _Kind(
        "huge",
        "Answers with one message of ``size`` bytes.",
        shapes=True,
        size=1_000_000_000,
    )
    FLOOD = _Kind(
        "flood",
        "Writes ``size`` tiny messages before its reply.",
        shapes=True,
        size=10_000,
    )
    CUT = _Kind(
        "cut",
        "Writes the markers of its reply byte by byte, with a pause before each byte.",
        shapes=True,
    )
    STDERR = _Kind(
        "stderr",
        "Writes ``size`` bytes to stderr, in lines of ``data``, by default dots.",
        size=10_000_000,
    )
    LEAK = _Kind(
        "leak",
        "Allocates ``size`` bytes of memory, and keeps them.",
        inside=True,
        size=10_000_000,
    )

    # --- it does not want to go
    CLOSE_STDOUT = _Kind(
        "close_stdout",
        "Closes stdout, and does not exit when its input ends.",
        about="pipes",
    )
    CLOSE_STDIN = _Kind(
        "close_stdin",
        "Closes stdin, answers what it has read, and does not exit; a batch that was"
        " not closed yet is never answered.",
        about="pipes",
    )
    IGNORE_SIGTERM = _Kind(
        "ignore_sigterm", "Ignores SIGTERM from then on.", at=Moment.START
    )
    GRANDCHILD = _Kind(
        "grandchild",
        "Starts a child that keeps its pipes open, ignores SIGTERM and outlives it;"
        " with ``own_session`` the child also leaves the process group.",
        inside=True,
    )

    # --- it is connected; only from outside
    LOSE_HEARTBEATS = _Kind(
        "lose_heartbeats",
        "Its heartbeats no longer arrive.",
        about="a connection",
    )
    LOSE_ANSWERS = _Kind(
        "lose_answers",
        "Heartbeats no longer reach it: it may take the supervisor for dead.",
        about="a connection",
    )
    LOSE_TERMINATE = _Kind(
        "lose_terminate",
        "Its answer to a terminate does not arrive.",
        about="a connection",
        at=Moment.END,
    )
    REVOKE = _Kind(
        "revoke",
        "Its session ends in the middle of the reply, with an error of reason ``data``,"
        " or with a choke if ``data`` is empty; the rest of the reply still arrives.",
        about="a connection",
        shapes=True,
    )
    DISCONNECT = _Kind(
        "disconnect",
        "Its connection is closed, but it does not exit.",
        about="a connection",
    )

    # --- it checkpoints; only from outside
    FAIL_CHECKPOINT = _Kind(
        "fail_checkpoint",
        "Its checkpoint is not stored, and is answered with the exception ``data``, by"
        " default ThrottlingException.",
        about="checkpoints",
        at=Moment.CHECKPOINT,
    )
    END_INPUT = _Kind(
        "end_input",
        "Its stdin ends instead of the answer to a checkpoint, or instead of an action.",
        about="checkpoints",
        at=Moment.CHECKPOINT,
    )

    # --- it has a shard, of a daemon that is simulated
    LOSE_LEASE = _Kind(
        "lose_lease",
        "Its lease is lost: a checkpoint in the current action is answered with"
        " ShutdownException, and leaseLost follows.",
        about="a shard",
        at=Moment.ACTION,
    )
    REQUEST_SHUTDOWN = _Kind(
        "request_shutdown",
        "It is asked to shut down after the current action.",
        about="a shard",
        at=Moment.ACTION,
    )
    END_SHARD = _Kind(
        "end_shard",
        "Its shard ends, without further records.",
        about="a shard",
        at=Moment.ACTION,
    )
    SPLIT_SHARD = _Kind(
        "split_shard",
        "Its shard ends, and two new shards get the rest of its records; these are not"
        " split again.",
        about="a shard",
        at=Moment.ACTION,
    )
    MERGE_SHARDS = _Kind(
        "merge_shards",
        "Its shard and another one end, and a new shard gets the rest of both.",
        about="a shard",
        at=Moment.ACTION,
    )
    NO_RECORDS = _Kind(
        "no_records",
        "It receives an action without records.",
        about="a shard",
        at=Moment.ACTION,
    )
    MANY_RECORDS = _Kind(
        "many_records",
        "The action's first record comes ``size`` times, as aggregated records.",
        about="a shard",
        at=Moment.ACTION,
        size=10_000,
    )
    RESTART = _Kind(
        "restart",
        "It is killed, and a new process begins at checkpoint ``data``, by default the"
        " last one that was stored.",
        about="a shard",
        at=Moment.ACTION,
    )


class Exit(NamedTuple):
    """The end of a worker."""

    status: int
    """Negative for a signal."""


class Act(NamedTuple):
    """An action of a worker other than writing, waiting or exiting."""

    kind: FaultKind
    fault: Fault


class ReadInput(NamedTuple):
    """It reads input, ``b""`` at the end; it gets None if nothing came in time."""

    seconds: float
    """How long it waits; 0: as long as it takes."""


class ShowLife(NamedTuple):
    """It reports that it is alive."""


if TYPE_CHECKING:
    Step: TypeAlias = bytes | float | str | Exit | Act | ReadInput | ShowLife
else:
    Step = object
"""What a worker does next: write bytes, wait for seconds (a float), exit, act, read, or
show life; a text only describes what happens."""


def effect(fault: Fault, stray: bytes, eop: bytes) -> Step:
    """
    Return the immediate effect of a fault.

    Args:
        fault: Any fault but one that changes a reply.
        stray: The bytes of a stray print.
        eop: The bytes that end a reply.

    """
    kind = FaultKind(fault["kind"])
    if kind.writes is not None:
        return kind.writes
    if kind.status is not None:
        return Exit(kind.status)
    match kind:
        case FaultKind.EXIT:
            return Exit(fault["status"])
        case FaultKind.PAUSE:
            return float(fault["seconds"])
        case FaultKind.GARBAGE:
            return as_bytes(fault.get("data")) or stray
        case FaultKind.EXTRA_EOP:
            return eop
        case _:
            return Act(kind, fault)


def as_bytes(text: str | None) -> bytes | None:
    """Return the bytes that JSON holds as Latin-1 text."""
    return None if text is None else text.encode("latin-1")


# --- which fault of a plan happens when -----------------------------------------------

_MASK: Final = 0xFFFFFFFFFFFFFFFF


class DueFaults:
    """
    The faults of one process, from a plan as ``testing/fault.py`` defines it.

    Random faults are drawn from the seed, the worker's name and its start: they differ
    between processes, and are the same in each run.

    Args:
        faults: The faults of all processes, as in JSON.
        seed: The plan's seed.
        environment: Where the process finds its name and its start.

    """

    def __init__(
        self, faults: Sequence[Fault], seed: int, environment: Mapping[str, str]
    ) -> None:
        name = environment.get("ETLSTAGE_WORKER", "")
        start = int(environment.get("ETLSTAGE_START") or 1)
        self._faults: dict[str, list[tuple[Trigger, Fault]]] = {}
        for index, fault in enumerate(faults):
            if (fault.get("start", start), fault.get("worker", name)) == (start, name):
                roll = _random(f"{seed}/{name}/{start}/{index}")
                entry = _trigger(fault, roll), fault
                self._faults.setdefault(fault["at"], []).append(entry)

    def __contains__(self, moment: str) -> bool:
        return moment in self._faults

    def due(self, moment: str, number: int, message: bytes) -> Iterator[Fault]:
        """Yield the faults that happen at a moment, at message ``number`` (from 1)."""
        for hits, fault in self._faults.get(moment, ()):
            if hits(number, message):
                yield fault


def _trigger(fault: Fault, roll: Callable[[int], float]) -> Trigger:
    """Return a function that decides, by message, whether a fault happens at it."""
    at: int | None = fault.get("message")
    first: int | None = fault.get("number")
    last = None if first is None else first + fault.get("times", 1) - 1
    equals, contains = as_bytes(fault.get("equals")), as_bytes(fault.get("contains"))
    chance: float | None = fault.get("probability")

    def hits(number: int, message: bytes) -> bool:
        if at is not None and number != at:
            return False
        if first is not None and last is not None and not first <= number <= last:
            return False
        if equals is not None and message != equals:
            return False
        if contains is not None and contains not in message:
            return False
        return chance is None or roll(number) < chance

    return hits


def _random(seed: str) -> Callable[[int], float]:
    """Return a random function: different for each seed, the same in each run."""
    base = 0xCBF29CE484222325  # FNV-1a
    for byte in seed.encode():
        base = ((base ^ byte) * 0x100000001B3) & _MASK

    def roll(number: int) -> float:
        # SplitMix64: neighbouring numbers give unrelated values.
        x = (base + number * 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return (x ^ (x >> 31)) / (_MASK + 1)

    return roll
