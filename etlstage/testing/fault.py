"""
What may go wrong with a worker, and when: the plan of a hostile worker.

Plain data, checked when it is made. The kinds, and what each does, are in ``hostile``,
which is a program of its own, too; a plan travels there as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, Self

from etlstage.errors import ConfigError
from etlstage.protocol.marker import MARKER_NAMES, Mode
from etlstage.testing.hostile.kinds import DueFaults
from etlstage.testing.hostile.kinds import FaultKind as FaultKind
from etlstage.testing.hostile.kinds import Moment as Moment

__all__ = ("DRIVERS", "Fault", "FaultKind", "FaultPlan", "Moment", "hostile_worker")


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
    """At random, with this probability, from 0 to 1: by the plan's
    seed, the worker's name, its start and the number of the message."""
    start: int | None = None
    """Only in this start of a worker, counted from 1."""
    worker: str | None = None
    """Only in the worker of this name, such as ``clean-1``; in a simulation of shards,
    in that of this shard."""
    status: int = 1
    """For EXIT: the exit status."""
    seconds: float = 0.1
    """For PAUSE: how long, in seconds."""
    size: int | None = None
    """For STDERR, HUGE and LEAK: bytes; for FLOOD: messages; for MANY_RECORDS: records.
    None becomes 10 MB, or one line of ``data``; 1 GB, 10 MB and ten thousand."""
    data: bytes | None = None
    """For GARBAGE, WRONG_MARKER, REFUSE, REVOKE and STDERR: what is written; to stderr,
    the line. For FAIL_CHECKPOINT the name of the exception, for RESTART a checkpoint."""
    own_session: bool = False
    """For GRANDCHILD: it leaves the session and process group of its parent."""
    number: int | None = None
    """Only at this action, or checkpoint, counted from 1: of a process, or in a
    simulation of shards, of the shard."""
    times: int = 1
    """At so many of them, from ``number`` on."""

    def __post_init__(self) -> None:
        at = self.at or self.kind.at
        object.__setattr__(self, "at", at)
        if self.size is None:
            size = self.kind.size
            if self.kind is FaultKind.STDERR and self.data is not None:
                size = len(self.data) + 1
            object.__setattr__(self, "size", size)
        for name in ("message", "number", "times", "start"):
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
        if at not in self.kind.moments:
            why = " changes a reply: it" if self.kind.shapes else ""
            raise ConfigError(
                f"fault: {self.kind.value}{why} can't happen at {at.value}"
            )
        if self.number is not None and at not in (Moment.ACTION, Moment.CHECKPOINT):
            raise ConfigError(
                f"fault: at {at.value} neither actions nor checkpoints are counted;"
                " leave out number"
            )
        if at is not Moment.MESSAGE:
            self._check_without_message(at)

    def _check_without_message(self, at: Moment) -> None:
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

    def due(self, environment: Mapping[str, str]) -> DueFaults:
        """
        Return what decides which of them happen when in one process.

        Args:
            environment: Where the process finds its name and its start.

        """
        return DueFaults(_numbered(self), self.seed, environment)

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


@lru_cache(maxsize=64)
def _numbered(plan: FaultPlan) -> list[dict[str, Any]]:
    faults: list[dict[str, Any]] = json.loads(plan.to_json())["faults"]
    return [{**each, "index": n} for n, each in enumerate(faults)]


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


_PROGRAM: Final = Path(__file__).with_name("hostile")
DRIVERS: Final = {
    Mode.PLAIN: "plain",
    Mode.CYCLIC: "cyclic",
    Mode.SINGLE: "single",
    Mode.BATCH_WORKER: "worker",
    Mode.BATCH_SUPERVISOR: "supervisor",
}
"""What a hostile worker is given of the mode of its stage."""


def hostile_worker(
    plan: FaultPlan | None,
    *,
    mode: Mode = Mode.SINGLE,
    batch: int = 3,
    messages: int = 100,
    transform: Literal["identity", "upper", "count", "nothing"] = "identity",
) -> tuple[str, ...]:
    """
    Return the command of a worker that misbehaves by ``plan``.

    It serves stages of all kinds, with whatever markers they have. What it extracts are
    the numbers from 0, which are their own offsets: those of a range, or, where the
    request is empty, those that it has not given yet. A fault at a message happens
    there when it is about to be passed on. Otherwise it is a worker like others, in
    Python, and starts in a few hundredths of a second.

    Args:
        plan: What goes wrong; None takes it from the variable ``ETLSTAGE_FAULTS``,
            where :meth:`FaultPlan.to_json` may have put it.
        mode: That of the stage.
        batch: Messages that the worker wants in a batch, in ``Mode.BATCH_WORKER``.
        messages: How many there are to extract, in ``Mode.PLAIN`` and ``Mode.CYCLIC``.
        transform: What it makes of each message: the same; the same in capitals; how
            many messages the process has read; nothing, as a load worker.

    Raises:
        ConfigError: If a number is too small, or a fault can only be done from outside.

    """
    for fault in () if plan is None else plan.faults:
        if fault.kind.outside:
            text = f"fault {fault.kind.value} is done from outside: see FaultyLaunch"
            raise ConfigError(text)
    if batch < 1:
        raise ConfigError(f"batch must be 1 or more, got {batch}")
    if messages < 0:
        raise ConfigError(f"messages must be 0 or more, got {messages}")
    size = messages if mode in (Mode.PLAIN, Mode.CYCLIC) else batch
    program = (sys.executable, "-I", "-S", str(_PROGRAM))
    arguments = (DRIVERS[mode], str(size), transform)
    return (*program, *arguments, *(() if plan is None else (plan.to_json(),)))
