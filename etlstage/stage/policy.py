"""
How a stage treats its workers and their messages: batches, time, errors, resources.

Each setting is written here and nowhere else; ``etlstage.settings`` reads it. When
exactly a worker is started again is in ``supervisor/lifecycle/worker.py``.
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
    """In which order the replies of several workers are passed on."""

    TOTAL = "total"
    """As the messages came in."""
    KEY = "key"
    """Messages with one key as they came in: one worker gets all of them."""
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
    """Processes, at least."""
    max: Processes = 1
    """Processes, at most."""
    grow_at: Positive = 2.0
    """Messages that wait for each worker until there is one more."""
    idle: Duration = 60.0
    """How long a worker may have nothing to do, in seconds."""

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
        """Yield what contradicts itself."""
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
    """Messages in a batch, at most."""
    bytes: Size = MiB
    """Bytes in a batch, at most; a longer message is a batch of its own."""
    seconds: Duration = 1.0
    """How long the first message of a batch waits for others, in seconds."""

    def __str__(self) -> str:
        most, seconds = counted(self.size, "message"), self.shown("seconds")
        return f"up to {most}, {self.shown('bytes')} or {seconds}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts(Definition):
    """How long a worker may take, in seconds; None disables it."""

    label: ClassVar[tuple[str, ...]] = ("timeout",)
    start: Duration | None = 30.0
    """From its start until it reports that it is ready, if it does so at all."""
    message: Duration | None = 300.0
    """For the answer to a message or a batch, once its turn has come."""
    total: Annotated[Duration | None, Place.FED | Place.WRITE] = None
    """For the same, whatever progress the worker reports meanwhile; each report begins
    ``message`` anew."""
    heartbeat: Annotated[Duration | None, Place.WORKER | Place.WRITE] = None
    """Between two heartbeats of a worker that has nothing to do."""
    commit: Annotated[Duration, Place.WORKER | Place.WRITE] = 30.0
    """For us to store a position that a worker commits; then it is sent a failure.
    A worker's own time does not pass meanwhile."""
    farewell: Annotated[Duration | None, Place.WORKER | Place.WRITE] = None
    """For a worker that is asked to end, in a dialect that does so, before its stdin is
    closed; by default ``stop``."""
    stop: Duration = 5.0
    """For each step of stopping: closed stdin, SIGTERM, SIGKILL; and, where a worker
    ends by itself, for what it has started to end, too."""

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
    """Messages, at most."""
    share: Share | None = None
    """Of the messages taken in so far, at most; from 0 to 1. Until a hundred came in
    it is a share of a hundred, so that the first failure does not decide."""

    @classmethod
    def unfold(cls, value: Any) -> Any:
        """Return a number of messages, or a share, as the mapping that it stands for."""
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
        return " and ".join(bounds) or "no bound"

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
    """How often a message is given to a fresh worker after the first was lost; more
    often where it could have been another message's fault."""
    retries_refused: Annotated[CountOrZero, Place.FED | Place.WRITE] = 0
    """How often a message that a worker refused is tried again."""
    then: Annotated[
        Literal["dead_letter", "fail"],
        Noun("end of a message"),
        Place.FED | Place.SINK,
    ] = "dead_letter"
    """Whether the message is then dead-lettered and the run goes on, or fails."""
    budget: Annotated[ErrorBudget, Place.FED | Place.SINK] = ErrorBudget(share=0.01)
    """How many messages may be dead-lettered."""

    def text(self, *, retries: bool = True) -> str:
        """Return what becomes of a message, in a line."""
        tried = "1 retry" if self.retries == 1 else f"{self.retries} retries"
        before = f"{tried}, then " if retries else ""
        if self.then == "fail":
            return f"{before}the run fails"
        return f"{before}dead-lettered; budget {self.budget}"

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield what contradicts itself."""
        # Without a bound it has no effect.
        bounded = given.get("budget", ErrorBudget()) != ErrorBudget()
        if given.get("then") == "fail" and bounded:
            yield broken(("budget",), "needs then: dead_letter")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceLimits(Definition):
    """What the kernel grants a worker's process; None leaves a value as ours is."""

    label: ClassVar[tuple[str, ...]] = ("limits",)
    memory: Size | None = None
    """Address space, in bytes (RLIMIT_AS)."""
    cpu: Seconds | None = None
    """Seconds on a processor, in its whole life (RLIMIT_CPU)."""
    open_files: Count | None = None
    """Descriptors (RLIMIT_NOFILE)."""
    core: SizeOrZero | None = None
    """Core dump, in bytes (RLIMIT_CORE)."""
    nice: Annotated[int, Whole(-20, 19)] | None = None
    """Added to our own niceness; 19 is the kindest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecyclePolicy(Definition):
    """
    When a worker is replaced although nothing is wrong with it; None: never.

    It answers what it has, and is then stopped. Of several workers only one is
    replaced at a time.
    """

    label: ClassVar[tuple[str, ...]] = ("recycle",)
    max_messages: Count | None = None
    """Messages that one process answers."""
    max_age: Duration | None = None
    """Its life, in seconds."""
    max_rss: Size | None = None
    """Its resident memory, in bytes, looked at every second."""
    variance: ShareBelowOne = 0.1
    """Share by which each process gets less, at random, of messages and age: workers
    that were started together are not replaced together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy(Definition):
    """When a worker that ended by itself, or failed, is started again."""

    label: ClassVar[tuple[str, ...]] = ("restart",)
    policy: Literal["permanent", "transient", "temporary"] = "permanent"
    """Always; only when it failed; never."""
    max: CountOrZero = 5
    """Restarts without progress in a row; after them it failed permanently."""
    within: Duration = 60.0
    """How long these restarts are counted for, in seconds."""
    delay: Duration = 0.5
    """Seconds before the second such restart, and before a message is tried for the
    third time; it doubles each time."""
    max_delay: Duration = 30.0
    """Longest delay, in seconds."""
    never_on: frozenset[Annotated[int, Whole(0, 255)]] = frozenset()
    """Exit statuses of a worker that a restart won't help."""

    def __str__(self) -> str:
        within = self.shown("within")
        return f"{self.policy}, up to {self.max} without progress in {within}"

    def wanted(self, *, failed: bool, status: int) -> bool:
        """
        Return whether a worker is to be started again at all.

        Args:
            failed: Whether it ended otherwise than with status 0 and nothing to do.
            status: Its exit status, negative for a signal.

        """
        if status in self.never_on or self.policy == "temporary":
            return False
        return failed or self.policy == "permanent"


@dataclass(frozen=True, kw_only=True, slots=True)
class OffsetPolicy(Definition):
    """Who keeps the offsets of a cyclic extraction, and how they advance."""

    label: ClassVar[tuple[str, ...]] = ("offsets",)
    by: Annotated[
        Literal["worker", "supervisor"], Noun("keeper of offsets"), Place.EXTRACT
    ] = "worker"
    """The worker, or the supervisor, which then asks for ranges."""
    start: Annotated[int | Literal["initial"], WholeOr("initial")] = 0
    """First offset of the first run, or initial, which asks the worker; a stored one
    comes before it."""
    step: Count = 1000
    """How far a request reaches."""
    end: Annotated[int | Literal["latest"], WholeOr("latest")] = "latest"
    """Where the offsets end; latest asks the worker, and a worker that can't answer
    needs a number."""
    template: Argument | None = None
    """Text of a request, with ``{start}`` and ``{end}``; by default a JSON object."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield what contradicts itself."""
        if given.get("by", "worker") == "worker":
            for key in given:
                if key != "by":
                    yield broken((key,), "needs by: supervisor")
        start, end = given.get("start", 0), given.get("end")
        if isinstance(start, int) and isinstance(end, int) and end < start:
            text = f"offsets.end is {end}, before offsets.start {start}"
            yield broken((), text, at_key=False)
