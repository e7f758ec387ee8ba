"""
How a stage treats its workers and their messages: batches, time, errors, resources.

Plain data, checked when it is made. When exactly a worker is started
again is in ``supervisor/lifecycle/restart.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum
from typing import Literal

from etlstage.errors import ConfigError
from etlstage.messages import counted

__all__ = (
    "BatchPolicy",
    "ErrorBudget",
    "ErrorPolicy",
    "Order",
    "PoolPolicy",
    "RecyclePolicy",
    "ResourceLimits",
    "RestartPolicy",
    "Timeouts",
)

MiB = 1024 * 1024


class Order(Enum):
    """In which order the replies of several workers are passed on."""

    TOTAL = "total"
    """As the messages came in."""
    KEY = "key"
    """Messages with one key as they came in: one worker gets all of them."""
    NONE = "none"
    """As the workers answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPolicy:
    """
    How many workers a stage has: between two bounds, as there is work.

    One more is started when so many messages wait for each of them; one that has had
    nothing to do for long enough goes, when it is more than there must be.
    """

    min: int = 1
    """Processes, at least."""
    max: int = 1
    """Processes, at most."""
    grow_at: float = 2.0
    """Messages that wait for each worker until there is one more."""
    idle: float = 60.0
    """How long a worker may have nothing to do, in seconds."""

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max:
            raise ConfigError(
                "workers.min must be 0 or more, and no more than workers.max"
                f" ({self.max}), got {self.min}"
            )
        for name in ("max", "grow_at", "idle"):
            _check_positive("workers", name, getattr(self, name))

    @property
    def varies(self) -> bool:
        """Whether workers come and go."""
        return self.min < self.max


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPolicy:
    """
    When a batch is closed: at the first of three bounds.

    A batch also closes when the input ends, or when a worker that asks for more
    messages can't get any before ``seconds`` are over.
    """

    size: int = 100
    """Messages in a batch, at most."""
    bytes: int = MiB
    """Bytes in a batch, at most; a longer message is a batch of its own."""
    seconds: float = 1.0
    """How long the first message of a batch waits for others, in seconds."""

    def __post_init__(self) -> None:
        for name in ("size", "bytes", "seconds"):
            _check_positive("batch", name, getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """How long a worker may take, in seconds; None waits for ever."""

    start: float | None = 30.0
    """From its start until it says that it is ready, if it does so at all."""
    message: float | None = 300.0
    """For the answer to a message or a batch, once its turn has come."""
    heartbeat: float | None = None
    """Between two signs of life of a worker that has nothing to do."""
    stop: float = 5.0
    """For each step of stopping: closed stdin, SIGTERM, SIGKILL."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                _check_positive("timeout", field.name, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorBudget:
    """
    How many messages of a stage may fail before the run does.

    Both bounds hold, where both are given.
    """

    count: int | None = None
    """Messages, at most."""
    share: float | None = 0.01
    """Of the messages taken in so far, at most; from 0 to 1. Until a hundred came in
    it is a share of a hundred, so that the first failure does not decide."""

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 0:
            raise ConfigError(f"budget must be 0 or more, got {self.count}")
        if self.share is not None and not 0 <= self.share <= 1:
            raise ConfigError(f"budget must be 0% to 100%, got {self.share:%}")

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
class ErrorPolicy:
    """What becomes of a message that a stage can't process."""

    retries: int = 2
    """How often a message is given to a fresh worker after the first was lost; more
    often where it could have been another message's fault."""
    then: Literal["dead_letter", "fail"] = "dead_letter"
    """Whether the run then puts it aside and goes on, or fails."""
    budget: ErrorBudget = ErrorBudget()
    """How many messages may be dead-lettered."""

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ConfigError(f"on_error.retries must be 0 or more, got {self.retries}")
        if self.then not in ("dead_letter", "fail"):
            raise ConfigError(
                f"on_error.then must be dead_letter or fail, got {self.then!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceLimits:
    """What the kernel grants a worker's process; None leaves a value as ours is."""

    memory: int | None = None
    """Address space, in bytes (RLIMIT_AS)."""
    cpu: int | None = None
    """Seconds on a processor, in its whole life (RLIMIT_CPU)."""
    open_files: int | None = None
    """Descriptors (RLIMIT_NOFILE)."""
    core: int | None = None
    """Core dump, in bytes (RLIMIT_CORE)."""
    nice: int | None = None
    """Added to our own niceness; 19 is the kindest."""

    def __post_init__(self) -> None:
        for name in ("memory", "cpu", "open_files"):
            value = getattr(self, name)
            if value is not None:
                _check_positive("limits", name, value)
        if self.core is not None and self.core < 0:
            raise ConfigError(f"limits.core must be 0 or more, got {self.core}")
        if self.nice is not None and not -20 <= self.nice <= 19:
            raise ConfigError(f"limits.nice must be -20 to 19, got {self.nice}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecyclePolicy:
    """
    When a worker is replaced although nothing is wrong with it; None: never.

    It answers what it has, and is then stopped. Of several workers only one is
    replaced at a time.
    """

    max_messages: int | None = None
    """Messages that one process answers."""
    max_age: float | None = None
    """Its life, in seconds."""
    max_rss: int | None = None
    """Its resident memory, in bytes, looked at every second."""
    variance: float = 0.1
    """Share by which each process gets less, at random, of messages and age: workers
    that were started together are not replaced together."""

    def __post_init__(self) -> None:
        for name in ("max_messages", "max_age", "max_rss"):
            value = getattr(self, name)
            if value is not None:
                _check_positive("recycle", name, value)
        if not 0 <= self.variance < 1:
            raise ConfigError(
                f"recycle.variance must be 0 or more and below 1, got {self.variance}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """When a worker that ended by itself, or failed, is started again."""

    policy: Literal["permanent", "transient", "temporary"] = "permanent"
    """Always; only when it failed; never."""
    max: int = 5
    """Restarts in a row, within ``within``, of which none was of use."""
    within: float = 60.0
    """Seconds that these restarts are counted for."""
    delay: float = 0.5
    """Seconds before the second such restart, and before a message is tried for the
    third time; it doubles each time."""
    max_delay: float = 30.0
    """Longest delay, in seconds."""
    never_on: frozenset[int] = frozenset()
    """Exit statuses by which a worker says that a restart won't help."""

    def __post_init__(self) -> None:
        if self.policy not in ("permanent", "transient", "temporary"):
            raise ConfigError(
                "restart.policy must be permanent, transient or temporary,"
                f" got {self.policy!r}"
            )
        if self.max < 0:
            raise ConfigError(f"restart.max must be 0 or more, got {self.max}")
        for name in ("within", "delay", "max_delay"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"restart.{name} must be positive, got {getattr(self, name)}"
                )

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


def _check_positive(group: str, name: str, value: float) -> None:
    if value <= 0:
        raise ConfigError(f"{group}.{name} must be positive, got {value}")
