"""
What a stage is: its worker's program and how to treat it.

Plain data, checked when it is made. The YAML loader builds these, and so does
whoever embeds :class:`~etlstage.AsyncSupervisor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.protocol.marker import Markers, Mode

__all__ = ("BatchPolicy", "Stage", "Timeouts")

MiB = 1024 * 1024


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
    eob_then_eom: bool = False
    """Write EOM after EOB, for workers that see EOB only with the next EOM."""
    bnc_after_last: bool = False
    """The worker writes BNC also after message number ``size`` of a batch."""

    def __post_init__(self) -> None:
        for name in ("size", "bytes", "seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"batch.{name} must be positive, got {getattr(self, name)}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """How long a worker may take, in seconds; None waits for ever."""

    message: float | None = 300.0
    """For the answer to a message or a batch, once its turn has come."""
    stop: float = 5.0
    """For each step of stopping: closed stdin, SIGTERM, SIGKILL."""

    def __post_init__(self) -> None:
        for name in ("message", "stop"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"timeout.{name} must be positive, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """
    One stage: what to run and how.

    Raises:
        ConfigError: If the values contradict each other.

    """

    name: str
    """As reports, logs and errors call it."""
    command: tuple[str, ...]
    """Program and arguments; no shell. ``{eom}``, ``{eop}``, ``{eob}`` and
    ``{bnc}`` stand for the markers, escaped."""
    kind: StageKind = StageKind.TRANSFORM
    mode: Mode = Mode.SINGLE
    markers: Markers = field(default_factory=Markers)
    batch: BatchPolicy = field(default_factory=BatchPolicy)
    workers: int = 1
    """Processes that share the work; replies keep the order of the input."""
    window: int | None = None
    """Exchanges sent ahead of their EOP. None: 1 for a load stage, else as many as
    the worker answers in a moment."""
    timeout: Timeouts = field(default_factory=Timeouts)
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the worker's environment."""
    cwd: Path | None = None
    """Working directory of the worker; None is ours."""
    max_message_bytes: int = 64 * MiB
    """Longest message, in either direction."""
    max_reply_bytes: int = 256 * MiB
    """Longest reply to one message or batch, all its outputs together."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a stage needs a name")
        if not self.command:
            raise ConfigError(f"stage {self.name}: command is empty")
        if self.workers < 1:
            raise ConfigError(
                f"stage {self.name}: workers must be 1 or more, got {self.workers}"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(
                f"stage {self.name}: window must be 1 or more, got {self.window}"
            )
        if self.mode.extracts != (self.kind is StageKind.EXTRACT):
            raise ConfigError(
                f"stage {self.name}: mode {self.mode.value} does not fit"
                f" kind {self.kind.value}"
            )
