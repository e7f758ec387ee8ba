"""
What may go wrong with a worker, and when: the plan of a hostile worker.

Plain data, checked when it is made. Who acts upon it is the program in ``hostile``,
a process of its own; a plan travels there as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final, Self

from etlstage.errors import ConfigError
from etlstage.protocol.marker import MARKER_NAMES

__all__ = ("CONNECTED", "Fault", "FaultKind", "FaultPlan", "Moment")


class FaultKind(StrEnum):
    """What a hostile worker does."""

    # --- it dies
    KILL = "kill"
    """Is killed by SIGKILL, as by the kernel when memory runs out."""
    SEGFAULT = "segfault"
    """Is killed by SIGSEGV."""
    ABORT = "abort"
    """Aborts itself (SIGABRT)."""
    EXIT = "exit"
    """Exits with ``status``, which may be 0."""
    PARTIAL = "partial"
    """Writes its reply, but for the EOP, and is killed by SIGKILL."""

    # --- it takes its time
    STALL = "stall"
    """Does nothing more; SIGTERM ends it."""
    SPIN = "spin"
    """Burns the processor from now on; SIGTERM ends it."""
    STOP = "stop"
    """Stops itself with SIGSTOP; only SIGKILL, or SIGCONT, reaches it."""
    PAUSE = "pause"
    """Does nothing for ``seconds``, and goes on: a slow start, a late answer."""
    SKIP = "skip"
    """Does not answer, and goes on with the next message."""
    NEVER_READY = "never_ready"
    """Sends no heartbeat, and never says that it is ready."""

    # --- it answers wrongly
    TWICE = "twice"
    """Writes its reply twice."""
    EXTRA_EOP = "extra_eop"
    """Writes an EOP that nobody asked for."""
    GARBAGE = "garbage"
    """Writes ``data``, by default a line of text and EOM: a stray print. While a
    message is to be answered, nobody can tell that from a part of the reply."""
    WRONG_MARKER = "wrong_marker"
    """Ends its reply with ``data``, by default BNC, in place of EOP; with nothing, if
    it is empty."""
    REFUSE = "refuse"
    """Refuses, for the reason ``data``, by default what it would have replied; where
    there is no ERR, it answers."""

    # --- it answers rightly, but ...
    HUGE = "huge"
    """Answers with one message of ``size`` bytes."""
    FLOOD = "flood"
    """Writes ``size`` tiny messages before those of its reply."""
    CUT = "cut"
    """Writes each marker of its reply a byte at a time, with a pause before each."""
    STDERR = "stderr"
    """Writes ``size`` bytes to stderr: lines, by default of dots, of ``data``."""
    LEAK = "leak"
    """Takes ``size`` bytes of memory, and keeps them."""

    # --- it does not want to go
    CLOSE_STDOUT = "close_stdout"
    """Closes stdout; lives on when its input has ended."""
    CLOSE_STDIN = "close_stdin"
    """Closes stdin, answers what it has read, and lives on; a batch that was not
    closed yet is never answered."""
    IGNORE_SIGTERM = "ignore_sigterm"
    """Ignores SIGTERM from now on."""
    GRANDCHILD = "grandchild"
    """Starts a child that holds its pipes, ignores SIGTERM and outlives it; with
    ``own_session`` the child also leaves its process group."""

    # --- it is connected; only from outside
    LOSE_HEARTBEATS = "lose_heartbeats"
    """None of its heartbeats arrives any more."""
    LOSE_ANSWERS = "lose_answers"
    """None of our heartbeats reaches it any more: it may think itself abandoned."""
    LOSE_TERMINATE = "lose_terminate"
    """What it says when it is told to terminate does not arrive."""
    REVOKE = "revoke"
    """Its session ends in the middle of the reply, with an error for the reason
    ``data``, or with a choke if that is empty; the rest comes all the same."""
    DISCONNECT = "disconnect"
    """Its connection is closed; it lives on."""


class Moment(StrEnum):
    """When in the life of a worker a fault may happen."""

    START = "start"
    """Before it has read anything, or said that it is ready."""
    MESSAGE = "message"
    """When it has read a message, and before it answers."""
    IDLE = "idle"
    """When there was nothing to do for a moment; again after each such moment."""
    END = "end"
    """When its input has ended, or it is told to terminate."""


CONNECTED: Final = frozenset(
    {
        FaultKind.LOSE_HEARTBEATS,
        FaultKind.LOSE_ANSWERS,
        FaultKind.LOSE_TERMINATE,
        FaultKind.REVOKE,
        FaultKind.DISCONNECT,
    }
)
"""Kinds of workers that are connected, which only a launch can do to them."""


_OWN_MOMENT: Final = {
    FaultKind.NEVER_READY: Moment.START,
    FaultKind.IGNORE_SIGTERM: Moment.START,
    FaultKind.EXTRA_EOP: Moment.IDLE,
    FaultKind.LOSE_TERMINATE: Moment.END,
}
_ONLY_AT_MESSAGES: Final = frozenset(
    {
        FaultKind.PARTIAL,
        FaultKind.SKIP,
        FaultKind.TWICE,
        FaultKind.WRONG_MARKER,
        FaultKind.REFUSE,
        FaultKind.HUGE,
        FaultKind.FLOOD,
        FaultKind.CUT,
        FaultKind.REVOKE,
    }
)
_OWN_SIZE: Final = {
    FaultKind.STDERR: 10_000_000,
    FaultKind.HUGE: 1_000_000_000,
    FaultKind.FLOOD: 10_000,
    FaultKind.LEAK: 10_000_000,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """
    One thing that goes wrong, whenever all of its conditions hold.

    ::

        Fault(FaultKind.KILL, contains=b"poison")
        Fault(FaultKind.STALL, message=100, start=1)

    A batch is answered as a whole: a fault that changes a reply changes that of the
    batch; any other happens when the message is read. Likewise what is extracted:
    any other fault happens when those before the message are passed on.

    Raises:
        ConfigError: If the values contradict each other.

    """

    kind: FaultKind
    at: Moment | None = None
    """When; None becomes the moment at which that kind is of use: NEVER_READY and
    IGNORE_SIGTERM at the start, EXTRA_EOP when idle, LOSE_TERMINATE at the end, all
    others at messages."""
    message: int | None = None
    """Only at this message of a process, counted from 1."""
    equals: bytes | None = None
    """Only at messages that are this."""
    contains: bytes | None = None
    """Only at messages that contain this."""
    probability: float | None = None
    """At random, with this probability, from 0 to 1. The dice depend on the plan's
    seed, the worker's name, its start and the number of the message."""
    start: int | None = None
    """Only in this start of a worker, counted from 1."""
    worker: str | None = None
    """Only in the worker of this name, such as ``clean-1``."""
    status: int = 1
    """For EXIT: the exit status."""
    seconds: float = 0.1
    """For PAUSE: how long, in seconds."""
    size: int | None = None
    """For STDERR, HUGE and LEAK: bytes; for FLOOD: messages. None becomes 10 MB, or
    one line of ``data``; 1 GB, 10 MB and ten thousand."""
    data: bytes | None = None
    """For GARBAGE, WRONG_MARKER, REFUSE, REVOKE and STDERR: what is written; to stderr,
    the line."""
    own_session: bool = False
    """For GRANDCHILD: it leaves the session and process group of its parent."""

    def __post_init__(self) -> None:
        at = self.at or _OWN_MOMENT.get(self.kind, Moment.MESSAGE)
        object.__setattr__(self, "at", at)
        if self.size is None:
            size = _OWN_SIZE.get(self.kind)
            if self.kind is FaultKind.STDERR and self.data is not None:
                size = len(self.data) + 1
            object.__setattr__(self, "size", size)
        for name in ("message", "start"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"fault: {name} must be 1 or more, got {value}")
        for name in ("seconds", "size"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"fault: {name} must be 0 or more, got {value}")
        if self.probability is not None and not 0 <= self.probability <= 1:
            raise ConfigError(
                f"fault: probability must be 0 to 1, got {self.probability}"
            )
        if not 0 <= self.status <= 255:
            raise ConfigError(f"fault: status must be 0 to 255, got {self.status}")
        if at is not Moment.MESSAGE:
            self._check_without_message(at)

    def _check_without_message(self, at: Moment) -> None:
        if self.kind in _ONLY_AT_MESSAGES:
            raise ConfigError(
                f"fault: {self.kind.value} changes a reply: it can't happen at"
                f" {at.value}"
            )
        for name in ("message", "equals", "contains"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"fault: at {at.value} there is no message; leave out {name}"
                )


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """
    All that goes wrong in the workers of a stage; repeatable.

    At one message everything happens whose conditions hold, in the order of the plan.
    """

    faults: tuple[Fault, ...] = ()
    seed: int = 0
    """For faults with a probability."""

    @classmethod
    def of(cls, *faults: Fault, seed: int = 0) -> Self:
        """Return a plan of these faults."""
        return cls(faults, seed)

    def to_json(self) -> str:
        """Return the plan as text for one argument or variable; bytes as Latin-1."""
        text = json.dumps(
            {"seed": self.seed, "faults": [_to_object(f) for f in self.faults]},
            separators=(",", ":"),
        )
        # What stands for a marker in a command line stays as it is.
        for name in MARKER_NAMES:
            text = text.replace(f"{{{name}}}", f"\\u007b{name}}}")
        return text

    @classmethod
    def from_json(cls, text: str) -> Self:
        """
        Return the plan that :meth:`to_json` has written.

        Raises:
            ConfigError: If it is no plan, or one of its faults is refused.

        """
        try:
            plan = json.loads(text)
            faults = tuple(_from_object(f) for f in plan.get("faults", ()))
            return cls(faults, plan.get("seed", 0))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"can't read the fault plan: {error}") from error


_BYTES: Final = {"equals", "contains", "data"}
_ALWAYS: Final = {"kind", "at", "status", "seconds", "size"}
"""The program knows no defaults."""


def _to_object(fault: Fault) -> dict[str, object]:
    given = {
        field.name: getattr(fault, field.name)
        for field in fields(fault)
        if field.name in _ALWAYS or getattr(fault, field.name) != field.default
    }
    for name in _BYTES & given.keys():
        given[name] = given[name].decode("latin-1")
    return given


def _from_object(given: Mapping[str, Any]) -> Fault:
    values: dict[str, Any] = dict(given)
    for name in _BYTES & values.keys():
        values[name] = values[name].encode("latin-1")
    values["kind"] = FaultKind(values["kind"])
    if values.get("at") is not None:
        values["at"] = Moment(values["at"])
    return Fault(**values)
