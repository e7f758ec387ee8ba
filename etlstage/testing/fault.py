"""
Fault plans: what goes wrong with a worker, and when.

They are plain data, validated when created. The kinds of faults, and their effects, are
in ``hostile``, which is also a program of its own that gets its plan as JSON.
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

    A batch has a single reply: a fault that changes a reply changes that of the whole
    batch; any other fault happens when the message is read. In a worker that extracts,
    any other fault happens once the messages before that one are passed on.

    Raises:
        ConfigError: If the values contradict each other.

    """

    kind: FaultKind
    at: Moment | None = None
    """When it happens. None becomes the default of its kind: messages, but the start
    for NEVER_READY, BYTE_ORDER_MARK and IGNORE_SIGTERM, idle for EXTRA_EOP, the end for
    LOSE_TERMINATE, and actions or checkpoints for faults of record processors."""
    message: int | None = None
    """Only at this message of a process, counted from 1."""
    equals: bytes | None = None
    """Only at messages equal to this."""
    contains: bytes | None = None
    """Only at messages that contain this."""
    probability: float | None = None
    """At random, with this probability, from 0 to 1; determined by the plan's seed,
    the worker's name, its start and the number of the message."""
    start: int | None = None
    """Only in this start of a worker, counted from 1."""
    worker: str | None = None
    """Only in the worker of this name, such as ``clean-1``; in a simulation of shards,
    only in the processor of the shard of this name."""
    status: int = 1
    """For EXIT: the exit status."""
    seconds: float = 0.1
    """For PAUSE: how long, in seconds."""
    size: int | None = None
    """For STDERR, HUGE and LEAK: bytes; for FLOOD: messages; for MANY_RECORDS: records.
    None becomes 10 MB (one line, if there is ``data``), 1 GB, 10 MB; 10,000; 10,000."""
    data: bytes | None = None
    """For GARBAGE, WRONG_MARKER, REFUSE, REVOKE and STDERR: what is written (STDERR: as
    a line). For FAIL_CHECKPOINT: name of the exception; for RESTART: a checkpoint."""
    own_session: bool = False
    """For GRANDCHILD: whether it leaves its parent's session and process group."""
    number: int | None = None
    """Only at this action, or checkpoint, counted from 1: of a process, or in a
    simulation of shards, of the shard."""
    times: int | None = None
    """At this many actions, or checkpoints, from ``number`` on; None: at one."""

    def __post_init__(self) -> None:
        at = self.at or self.kind.at
        object.__setattr__(self, "at", at)
        if self.size is None:
            size = self.kind.size
            if self.kind is FaultKind.STDERR and self.data is not None:
                size = len(self.data) + 1
            object.__setattr__(self, "size", size)
        self._check_types()
        for name in ("message", "number", "times", "start"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"fault: {name} must be 1 or more, got {value}")
        for name in ("seconds", "size"):
            value = getattr(self, name)
            if value is not None and not value >= 0:  # nor NaN
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
                " omit number"
            )
        if self.times is not None and self.number is None:
            raise ConfigError(
                "fault: times counts from number on, and there is none; add number"
            )
        if at is not Moment.MESSAGE:
            self._check_without_message(at)

    def _check_types(self) -> None:
        # A plan in JSON may have anything.
        for name in ("message", "number", "times", "start", "status", "size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | None):
                raise ConfigError(
                    f"fault: {name} must be a whole number, got {value!r}"
                )
        for name in ("seconds", "probability"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, float | int | None):
                raise ConfigError(f"fault: {name} must be a number, got {value!r}")
        worker: object = self.worker
        if not isinstance(worker, str | None):
            raise ConfigError(f"fault: worker must be text, got {worker!r}")

    def _check_without_message(self, at: Moment) -> None:
        for name in ("message", "equals", "contains"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"fault: at {at.value} there is no message; omit {name}"
                )


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """
    The faults of a stage's workers; repeatable.

    At a message, all faults whose conditions hold happen, in the order of the plan.
    """

    faults: tuple[Fault, ...] = ()
    seed: int = 0
    """For faults with a probability."""

    def __post_init__(self) -> None:
        seed: object = self.seed  # a plan in JSON may have anything
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"fault plan: seed must be a whole number, got {seed!r}")

    @classmethod
    def of(cls, *faults: Fault, seed: int = 0) -> Self:
        """Return a plan of these faults."""
        return cls(faults, seed)

    def due(self, environment: Mapping[str, str]) -> DueFaults:
        """
        Return an object that decides which faults happen when in one process.

        Args:
            environment: Environment of the process, with its name and its start.

        """
        return DueFaults(_numbered(self), self.seed, environment)

    def to_json(self) -> str:
        """Return the plan as text for one argument or variable; bytes as Latin-1."""
        text = json.dumps(
            {"seed": self.seed, "faults": [_to_object(f) for f in self.faults]},
            separators=(",", ":"),
        )
        # Escaped, as placeholders for markers are replaced in a command line.
        for name in MARKER_NAMES:
            text = text.replace(f"{{{name}}}", f"\\u007b{name}}}")
        return text

    @classmethod
    def from_json(cls, text: str) -> Self:
        """
        Return the plan that :meth:`to_json` has written.

        Raises:
            ConfigError: If the text is not a plan, or a fault is invalid.

        """
        try:
            plan = json.loads(text)
            faults = tuple(_from_object(f) for f in plan.get("faults", ()))
            return cls(faults, plan.get("seed", 0))
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise ConfigError(f"can't read the fault plan: {error}") from error


@lru_cache(maxsize=64)
def _numbered(plan: FaultPlan) -> list[dict[str, Any]]:
    faults: list[dict[str, Any]] = json.loads(plan.to_json())["faults"]
    return [{**each, "index": n} for n, each in enumerate(faults)]


_BYTES: Final = {"equals", "contains", "data"}
_ALWAYS: Final = {"kind", "at", "status", "seconds", "size"}
"""Fields that are always written, as the program does not know their defaults."""


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
"""The argument of a hostile worker for the mode of its stage."""


def hostile_worker(
    plan: FaultPlan | None,
    *,
    mode: Mode = Mode.SINGLE,
    batch: int = 3,
    messages: int = 100,
    transform: Literal["identity", "upper", "count", "nothing"] = "identity",
) -> tuple[str, ...]:
    """
    Return the command of a worker that misbehaves according to ``plan``.

    It serves stages of all kinds, with any markers. It extracts the numbers from 0,
    which are also their offsets: those of the requested range, or if the request is
    empty, those not extracted yet. There, a fault at a message happens when the message
    is about to be passed on. Otherwise it is an ordinary worker in Python, and starts
    in a few hundredths of a second.

    Args:
        plan: What goes wrong; None: the plan is read from the environment variable
            ``ETLSTAGE_FAULTS``, as written by :meth:`FaultPlan.to_json`.
        mode: The mode of the stage.
        batch: Messages that the worker wants in a batch, in ``Mode.BATCH_WORKER``.
        messages: How many there are to extract, in ``Mode.PLAIN`` and ``Mode.CYCLIC``.
        transform: Its output for a message: the same; the same in capitals; the number
            of messages that the process has read; nothing, for a load worker.

    Raises:
        ConfigError: If a number is too small, or a fault can only be done from outside.

    """
    for fault in () if plan is None else plan.faults:
        if fault.kind.outside:
            text = f"fault {fault.kind.value} can only be done from outside"
            raise ConfigError(f"{text}: see FaultyLaunch")
    if batch < 1:
        raise ConfigError(f"batch must be 1 or more, got {batch}")
    if messages < 0:
        raise ConfigError(f"messages must be 0 or more, got {messages}")
    size = messages if mode in (Mode.PLAIN, Mode.CYCLIC) else batch
    program = (sys.executable, "-I", "-S", str(_PROGRAM))
    arguments = (DRIVERS[mode], str(size), transform)
    return (*program, *arguments, *(() if plan is None else (plan.to_json(),)))
