"""
What may go wrong with a worker: each kind is one entry here.

A kind has its name, what it means, when it is of use, which workers can have
it, and, if that can be given in bytes, in time or in an exit status, what it does. Who
does it is a process to itself (``program.py``), a script in memory
(``testing/scripted.py``), or the wire between a supervisor and any worker
(``testing/faulty``).
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
    """Before an action of a record processor; also before the one that ends its shard."""
    CHECKPOINT = "checkpoint"
    """When a record processor has asked for a checkpoint, before the answer."""


class _Kind(NamedTuple):
    """What is declared of a kind; see :class:`FaultKind`."""

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
        meaning: That, in words.
        about: What a worker must have for it: markers, pipes, a connection,
            checkpoints; or a shard, of a daemon that is simulated.
        at: When it happens by default.
        shapes: Whether it changes a reply; all others are done at once.
        inside: Whether only a process can do it to itself.
        size: The default of ``size``.
        writes: What it writes, if that is always the same.
        status: The exit status it ends with, likewise; negative for a signal.

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
        """Make a member; one that is made is found by its name alone."""
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
        "Is killed by SIGKILL, as by the kernel when memory runs out.",
        status=-9,
    )
    SEGFAULT = _Kind("segfault", "Is killed by SIGSEGV.", status=-11)
    ABORT = _Kind("abort", "Aborts itself (SIGABRT).", status=-6)
    EXIT = _Kind("exit", "Exits with ``status``, which may be 0.")
    PARTIAL = _Kind(
        "partial",
        "Writes its reply, but for the EOP, and is killed by SIGKILL.",
        shapes=True,
    )

    # --- it takes its time
    STALL = _Kind("stall", "Does nothing more; SIGTERM ends it.")
    SPIN = _Kind(
        "spin", "Burns the processor from now on; SIGTERM ends it.", inside=True
    )
    STOP = _Kind(
        "stop", "Stops itself with SIGSTOP; only SIGKILL, or SIGCONT, reaches it."
    )
    PAUSE = _Kind(
        "pause",
        "Does nothing for ``seconds``, and goes on: a slow start, a late answer.",
    )
    SKIP = _Kind(
        "skip", "Does not answer, and goes on with the next message.", shapes=True
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
        "Writes ``data``, by default a line of text and EOM: a stray print. While a"
        " message is to be answered, it looks like a part of the reply.",
    )
    BYTE_ORDER_MARK = _Kind(
        "byte_order_mark",
        "Writes the byte order mark of UTF-8, as some languages do before all else.",
        at=Moment.START,
        writes=b"\xef\xbb\xbf",
    )
    WRONG_MARKER = _Kind(
        "wrong_marker",
        "Ends its reply with ``data``, by default BNC, in place of EOP; with nothing, if"
        " it is empty.",
        about="markers",
        shapes=True,
    )
    REFUSE = _Kind(
        "refuse",
        "Refuses, for the reason ``data``, by default what it would have replied; where"
        " there is no ERR, it answers.",
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
        "Writes ``size`` tiny messages before those of its reply.",
        shapes=True,
        size=10_000,
    )
    CUT = _Kind(
        "cut",
        "Writes each marker of its reply a byte at a time, with a pause before each.",
        shapes=True,
    )
    STDERR = _Kind(
        "stderr",
        "Writes ``size`` bytes to stderr: lines, by default of dots, of ``data``.",
        size=10_000_000,
    )
    LEAK = _Kind(
        "leak",
        "Takes ``size`` bytes of memory, and keeps them.",
        inside=True,
        size=10_000_000,
    )

    # --- it does not want to go
    CLOSE_STDOUT = _Kind(
        "close_stdout",
        "Closes stdout; lives on when its input has ended.",
        about="pipes",
    )
    CLOSE_STDIN = _Kind(
        "close_stdin",
        "Closes stdin, answers what it has read, and lives on; a batch that was not"
        " closed yet is never answered.",
        about="pipes",
    )
    IGNORE_SIGTERM = _Kind(
        "ignore_sigterm", "Ignores SIGTERM from now on.", at=Moment.START
    )
    GRANDCHILD = _Kind(
        "grandchild",
        "Starts a child that holds its pipes, ignores SIGTERM and outlives it; with"
        " ``own_session`` the child also leaves its process group.",
        inside=True,
    )

    # --- it is connected; only from outside
    LOSE_HEARTBEATS = _Kind(
        "lose_heartbeats",
        "None of its heartbeats arrives any more.",
        about="a connection",
    )
    LOSE_ANSWERS = _Kind(
        "lose_answers",
        "None of our heartbeats reaches it any more: it may think itself abandoned.",
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
        "Its session ends in the middle of the reply, with an error for the reason"
        " ``data``, or with a choke if that is empty; the rest comes all the same.",
        about="a connection",
        shapes=True,
    )
    DISCONNECT = _Kind(
        "disconnect", "Its connection is closed; it lives on.", about="a connection"
    )

    # --- it checkpoints; only from outside
    FAIL_CHECKPOINT = _Kind(
        "fail_checkpoint",
        "Its checkpoint is not stored, and answered with the name of the exception"
        " ``data``, by default ThrottlingException.",
        about="checkpoints",
        at=Moment.CHECKPOINT,
    )
    END_INPUT = _Kind(
        "end_input",
        "Its stdin ends in place of the answer to a checkpoint, or of an action.",
        about="checkpoints",
        at=Moment.CHECKPOINT,
    )

    # --- it has a shard, of a daemon that is simulated
    LOSE_LEASE = _Kind(
        "lose_lease",
        "Its lease is lost: a checkpoint in the same action is answered with"
        " ShutdownException, and leaseLost follows.",
        about="a shard",
        at=Moment.ACTION,
    )
    REQUEST_SHUTDOWN = _Kind(
        "request_shutdown",
        "It is requested to shut down, behind the action that it is at.",
        about="a shard",
        at=Moment.ACTION,
    )
    END_SHARD = _Kind(
        "end_shard",
        "Its shard ends, and has no more records.",
        about="a shard",
        at=Moment.ACTION,
    )
    SPLIT_SHARD = _Kind(
        "split_shard",
        "Its shard ends, and two new ones have the rest of its records; these are split"
        " no more.",
        about="a shard",
        at=Moment.ACTION,
    )
    MERGE_SHARDS = _Kind(
        "merge_shards",
        "Its shard ends, and another one with it; a new one has the rest of both.",
        about="a shard",
        at=Moment.ACTION,
    )
    NO_RECORDS = _Kind(
        "no_records",
        "It is given an action without records.",
        about="a shard",
        at=Moment.ACTION,
    )
    MANY_RECORDS = _Kind(
        "many_records",
        "The first record of the action comes ``size`` times, put as one.",
        about="a shard",
        at=Moment.ACTION,
        size=10_000,
    )
    RESTART = _Kind(
        "restart",
        "It is killed, and a new process begins at the checkpoint ``data``, by default"
        " at the last that was stored.",
        about="a shard",
        at=Moment.ACTION,
    )


class Exit(NamedTuple):
    """The end of a worker."""

    status: int
    """Negative for a signal."""


class Act(NamedTuple):
    """What a worker does that is neither bytes, nor time, nor its end."""

    kind: FaultKind
    fault: Fault


class ReadInput(NamedTuple):
    """It waits for input, ``b""`` at its end; None: nothing came in time."""

    seconds: float
    """How long it waits; 0: as long as it takes."""


class ShowLife(NamedTuple):
    """It reports that it is alive."""


if TYPE_CHECKING:
    Step: TypeAlias = bytes | float | str | Exit | Act | ReadInput | ShowLife
else:
    Step = object
"""What a worker does next: it writes, waits for so many seconds, reads, or is done with;
text is for its story."""


def effect(fault: Fault, stray: bytes, eop: bytes) -> Step:
    """
    Return what is done at once.

    Args:
        fault: Any but one that changes a reply.
        stray: What is written by mistake.
        eop: What ends a reply.

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
    """Return the bytes that JSON holds as text."""
    return None if text is None else text.encode("latin-1")


# --- which fault of a plan happens when ------------------------------------------------

_MASK: Final = 0xFFFFFFFFFFFFFFFF


class DueFaults:
    """
    The faults of one process, of a plan as ``testing/fault.py`` defines it.

    What comes by chance is drawn from the seed, the worker's name and its start: each
    process has other luck, and the same in each run.

    Args:
        faults: Those of all processes, as JSON has them.
        seed: That of the plan.
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
        """Yield what happens at that moment, with that message, counted from 1."""
        for hits, fault in self._faults.get(moment, ()):
            if hits(number, message):
                yield fault


def _trigger(fault: Fault, roll: Callable[[int], float]) -> Trigger:
    """Return what decides whether a fault happens at a message, by number and content."""
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
    """Return random numbers: others for each seed, the same in each run."""
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
