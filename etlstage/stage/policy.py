"""
How a stage treats its workers and their messages: batches, time, errors, resources.

Each setting is defined here and nowhere else; ``etlstage.settings`` reads it. When
exactly a worker is restarted is decided in ``supervisor/lifecycle/worker.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, Final, Literal

from etlstage.messages import counted
from etlstage.settings.definition import Definition, Place, broken
from etlstage.settings.kind import REFERENCE, Noun, Schema, Whole, WholeOr
from etlstage.settings.problem import Problem, unexpected
from etlstage.settings.units import (
    Argument,
    Count,
    CountOrZero,
    Duration,
    Positive,
    Seconds,
    Share,
    ShareBelowOne,
    Size,
    SizeOrZero,
)

__all__ = (
    "BatchPolicy",
    "ErrorBudget",
    "ErrorPolicy",
    "OffsetPolicy",
    "Order",
    "PoolPolicy",
    "RecyclePolicy",
    "ResourceLimits",
    "RestartPolicy",
    "Timeouts",
)

MiB: Final = 1024 * 1024
PROCESSES: Final = Whole(1, 1000)
Processes = Annotated[int, PROCESSES]


class Order(Enum):
    """The order in which the replies of several workers are passed on."""

    TOTAL = "total"
    """In the order in which the messages came in."""
    KEY = "key"
    """In that order for messages with the same key, all of which one worker gets."""
    NONE = "none"
    """As the workers answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPolicy(Definition):
    """
    How many workers a stage has: between two bounds, as there is work.

    One more is started when so many messages wait for each of them; one that has had
    nothing to do for long enough goes, when it is more than there must be.
    """

    label: ClassVar[tuple[str, ...]] = ("workers",)
    min: CountOrZero = 1
    """Minimum number of processes."""
    max: Processes = 1
    """Maximum number of processes."""
    grow_at: Positive = 2.0
    """Number of waiting messages per worker at which one more is started."""
    idle: Duration = 60.0
    """How long a worker may be idle before it is stopped, in seconds."""

    @classmethod
    def unfold(cls, value: Any) -> Any:
        """Return a number of processes as the mapping that it stands for."""
        if isinstance(value, Mapping | list | tuple) or value is None:
            return value
        number = PROCESSES.read(value)
        return {"min": number, "max": number}

    @classmethod
    def short_forms(cls) -> list[Schema]:
        """Describe a number of processes."""
        return [PROCESSES.schema()]

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield contradictions between settings."""
        least, most = given.get("min", 1), given.get("max", 1)
        if isinstance(least, int) and isinstance(most, int) and least > most:
            text = f"must be no more than workers.max ({most}), got {least}"
            yield broken(("min",), text, at_key=False)

    def __str__(self) -> str:
        return str(self.max) if self.min == self.max else f"{self.min} to {self.max}"

    @property
    def varies(self) -> bool:
        """Whether workers come and go."""
        return self.min < self.max


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPolicy(Definition):
    """
    When a batch is closed: at the first of three bounds.

    A batch also closes when the input ends, or when a worker that asks for more
    messages can't get any before ``seconds`` are over.
    """

    label: ClassVar[tuple[str, ...]] = ("batch",)
    size: Count = 100
    """Maximum number of messages in a batch."""
    bytes: Size = MiB
    """Maximum number of bytes in a batch; a longer message is a batch of its own."""
    seconds: Duration = 1.0
    """How long the first message of a batch waits for more, in seconds."""

    def __str__(self) -> str:
        most, seconds = counted(self.size, "message"), self.shown("seconds")
        return f"up to {most}, {self.shown('bytes')} or {seconds}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts(Definition):
    """How long a worker may take, in seconds; None disables it."""

    label: ClassVar[tuple[str, ...]] = ("timeout",)
    start: Duration | None = 30.0
    """Time from its start for a worker to report that it is ready, if it does."""
    message: Duration | None = 300.0
    """Time for the answer to a message or batch, once its turn has come; an extract
    worker that is asked nothing (mode: plain) may be silent for any time."""
    total: Annotated[Duration | None, Place.FED | Place.WRITE] = None
    """Time for the same, whatever progress the worker reports meanwhile; each such
    report restarts ``message``."""
    heartbeat: Annotated[Duration | None, Place.WORKER | Place.WRITE] = None
    """Time between two heartbeats of an idle worker; in dialect cocaine, of any
    worker."""
    commit: Annotated[Duration, Place.WORKER | Place.WRITE] = 30.0
    """Time for etlstage to store a position that a worker commits, before the worker is
    sent a failure. Meanwhile the worker's own time stands still."""
    farewell: Annotated[Duration | None, Place.WORKER | Place.WRITE] = None
    """Time for a worker to end on request, before its stdin is closed, in a dialect
    that has such a request; by default ``stop``. In dialect ``kcl`` it begins once the
    action in progress is answered, unless the lease is lost."""
    stop: Duration = 5.0
    """Time for each step of stopping: closed stdin, SIGTERM, SIGKILL; also for the
    processes that an ended worker leaves behind."""

    def __str__(self) -> str:
        start, message, stop = map(self.shown, ("start", "message", "stop"))
        return f"{start} to be ready, {message} for an answer, {stop} to stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorBudget(Definition):
    """
    How many messages of a stage may fail before the run does.

    Both bounds hold, where both are given.
    """

    label: ClassVar[tuple[str, ...]] = ("on_error", "budget")
    count: CountOrZero | None = None
    """Maximum number of messages."""
    share: Share | None = None
    """Maximum share of the messages received so far, from 0 to 1. Fewer than a hundred
    count as a hundred, so that the first failure is not decisive."""

    @classmethod
    def unfold(cls, value: Any) -> Any:
        """Return a number of messages, or a share, as the mapping that it means."""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return value
        if str(value).isdecimal():
            return {"count": value}
        if isinstance(value, float) or value.endswith("%"):  # type: ignore[union-attr]
            return {"share": value}
        wanted = "a number of messages such as 20, or a share such as 1%"
        raise unexpected(wanted, value)

    @classmethod
    def short_forms(cls) -> list[Schema]:
        """Describe a number of messages, and a share."""
        pattern = rf"^[0-9]+$|^([0-9]+(\.[0-9]+)?|\.[0-9]+) *%$|{REFERENCE}"
        return [{"type": ["integer", "string"], "minimum": 0, "pattern": pattern}]

    def __str__(self) -> str:
        bounds = []
        if self.count is not None:
            bounds.append(counted(self.count, "message"))
        if self.share is not None:
            bounds.append(f"{self.share * 100:g}%")
        return " and ".join(bounds) or "unlimited"

    def allows(self, failed: int, received: int) -> bool:
        """Return whether ``failed`` of the ``received`` messages may have failed."""
        if self.count is not None and failed > self.count:
            return False
        return self.share is None or failed <= math.floor(
            self.share * max(received, 100)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorPolicy(Definition):
    """What becomes of a message that a stage can't process."""

    label: ClassVar[tuple[str, ...]] = ("on_error",)
    retries: Annotated[CountOrZero, Place.FED | Place.WRITE] = 2
    """How often a message is retried by a fresh worker after the first was lost; more
    often where another message may have been the cause."""
    retries_refused: Annotated[CountOrZero, Place.FED | Place.WRITE] = 0
    """How often a message is retried after a worker refused it."""
    then: Annotated[
        Literal["dead_letter", "fail"],
        Noun("outcome"),
        Place.FED | Place.SINK,
    ] = "dead_letter"
    """What happens after the retries: the message is dead-lettered and the run
    continues (dead_letter), or the run fails (fail)."""
    budget: Annotated[ErrorBudget, Place.FED | Place.SINK] = ErrorBudget(share=0.01)
    """How many messages may be dead-lettered before the run fails."""

    def text(self, *, retries: bool = True) -> str:
        """Return a line that describes what happens to a message."""
        tried = "1 retry" if self.retries == 1 else f"{self.retries} retries"
        before = f"{tried}, then " if retries else ""
        if self.then == "fail":
            return f"{before}the run fails"
        return f"{before}dead-lettered; budget {self.budget}"

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield contradictions between settings."""
        # A budget without bounds has no effect.
        bounded = given.get("budget", ErrorBudget()) != ErrorBudget()
        if given.get("then") == "fail" and bounded:
            yield broken(("budget",), "needs then: dead_letter")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceLimits(Definition):
    """Resource limits of a worker's process; None: those of etlstage itself."""

    label: ClassVar[tuple[str, ...]] = ("limits",)
    memory: Size | None = None
    """Address space, in bytes (RLIMIT_AS)."""
    cpu: Seconds | None = None
    """Processor time of the process in its whole life, in seconds (RLIMIT_CPU)."""
    open_files: Count | None = None
    """Number of file descriptors (RLIMIT_NOFILE)."""
    core: SizeOrZero | None = None
    """Size of a core dump, in bytes (RLIMIT_CORE)."""
    nice: Annotated[int, Whole(-20, 19)] | None = None
    """Number added to the niceness of etlstage; 19 is the lowest priority."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecyclePolicy(Definition):
    """
    When a worker is replaced although nothing is wrong with it; None: never.

    It answers what it has, and is then stopped. Of several workers only one is
    replaced at a time.
    """

    label: ClassVar[tuple[str, ...]] = ("recycle",)
    max_messages: Count | None = None
    """Number of messages that one process answers."""
    max_age: Duration | None = None
    """Lifetime of a process, in seconds."""
    max_rss: Size | None = None
    """Resident memory of a process, in bytes, checked every second."""
    variance: ShareBelowOne = 0.1
    """Maximum share by which max_messages and max_age are lowered at random for each
    process, so that workers started together are not replaced together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy(Definition):
    """When a worker that ended by itself, or failed, is started again."""

    label: ClassVar[tuple[str, ...]] = ("restart",)
    policy: Literal["permanent", "transient", "temporary"] = "permanent"
    """When an ended worker is restarted: always (permanent), only if it failed
    (transient), or never (temporary)."""
    max: CountOrZero = 5
    """Maximum number of restarts in a row without progress; after that the worker has
    failed permanently."""
    within: Duration = 60.0
    """How long a restart without progress is counted, in seconds; delays are left
    out."""
    delay: Duration = 0.5
    """Delay before the second restart without progress, and before the third try of a
    message, in seconds; it doubles each time."""
    max_delay: Duration = 30.0
    """Maximum delay, in seconds."""
    never_on: frozenset[Annotated[int, Whole(0, 255)]] = frozenset()
    """Exit statuses after which a worker is not restarted."""

    def __str__(self) -> str:
        within = self.shown("within")
        return f"{self.policy}, up to {self.max} without progress in {within}"

    def wanted(self, *, failed: bool, status: int) -> bool:
        """
        Return whether a worker should be restarted at all.

        Args:
            failed: Whether its exit was not one with status 0 and nothing to do.
            status: Its exit status, negative for a signal.

        """
        if status in self.never_on or self.policy == "temporary":
            return False
        return failed or self.policy == "permanent"

    def obstacle(self, status: int) -> str:
        """Return the setting for which no restart is wanted after an exit status."""
        if status in self.never_on:
            return f"restart.never_on has {status}"
        return f"restart.policy is {self.policy}"


@dataclass(frozen=True, kw_only=True, slots=True)
class OffsetPolicy(Definition):
    """Who keeps the offsets of a cyclic extraction, and how they advance."""

    label: ClassVar[tuple[str, ...]] = ("offsets",)
    by: Annotated[
        Literal["worker", "supervisor"], Noun("keeper of offsets"), Place.EXTRACT
    ] = "worker"
    """Who keeps the offsets: the worker, or the supervisor, which then requests ranges
    of offsets."""
    start: Annotated[int | Literal["initial"], WholeOr("initial")] = 0
    """First offset of the first run, or initial, to ask the worker for it; a stored
    offset takes precedence."""
    step: Count = 1000
    """Number of offsets that one request covers."""
    end: Annotated[int | Literal["latest"], WholeOr("latest")] = "latest"
    """Where the offsets end: a number, or latest, to ask the worker for it."""
    template: Argument | None = None
    """Text of a request, with ``{start}`` and ``{end}``; by default a JSON object."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield contradictions between settings."""
        if given.get("by", "worker") == "worker":
            for key in given:
                if key != "by":
                    yield broken((key,), "needs by: supervisor")
        start, end = given.get("start", 0), given.get("end")
        if isinstance(start, int) and isinstance(end, int) and end < start:
            text = f"offsets.end is {end}, before offsets.start {start}"
            yield broken((), text, at_key=False)
