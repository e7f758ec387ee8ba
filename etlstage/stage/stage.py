"""
What a stage is: its worker's program and how to treat it.

Plain data, checked when it is made. The YAML loader builds these, and so does
whoever embeds :class:`~etlstage.AsyncSupervisor`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.protocol.base import Dialect
from etlstage.protocol.registry import default_dialect
from etlstage.stage.policy import (
    BatchPolicy,
    ErrorPolicy,
    Order,
    PoolPolicy,
    RecyclePolicy,
    ResourceLimits,
    RestartPolicy,
    Timeouts,
)

__all__ = ("PYTHONS", "Stage")

MiB = 1024 * 1024

PYTHONS: Final = ("python", "python3")
"""In front of a command that is written down: the interpreter that runs etlstage."""


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
    """Program and arguments; no shell. Names in braces are the dialect's, such as
    ``{eom}`` for a marker, escaped."""
    kind: StageKind = StageKind.TRANSFORM
    dialect: Dialect = field(default_factory=default_dialect)
    """What the worker speaks, with its settings."""
    batch: BatchPolicy = field(default_factory=BatchPolicy)
    workers: int | PoolPolicy = 1
    """Processes that share the work; their number, or how it follows the work."""
    order: Order = Order.TOTAL
    """In which order their replies are passed on."""
    key: str | None = None
    """For ``Order.KEY``: a JSON pointer (RFC 6901) into each message; None takes the
    key that the source has put beside the message."""
    window: int | None = None
    """Exchanges sent ahead of their EOP. None: 1 for a load stage, else as many as
    the worker answers in a moment."""
    timeout: Timeouts = field(default_factory=Timeouts)
    ready: bool = False
    """The worker says when it is ready, on the descriptor that ``ETLSTAGE_STATUS``
    names; it is given nothing before that."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    on_error: ErrorPolicy = field(default_factory=ErrorPolicy)
    recycle: RecyclePolicy = field(default_factory=RecyclePolicy)
    limits: ResourceLimits = field(default_factory=ResourceLimits)
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the worker's environment."""
    cwd: Path | None = None
    """Working directory of the worker; None is ours."""
    user: str | None = None
    """Who the worker runs as, by name or number; None is us."""
    group: str | None = None
    """Its group, by name or number; None is the user's, or ours."""
    umask: int | None = None
    """Its file mode mask; None is ours."""
    max_message_bytes: int = 64 * MiB
    """Longest message, in either direction."""
    max_reply_bytes: int = 256 * MiB
    """Longest reply to one message or batch, all its outputs together."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a stage needs a name")
        if not self.command:
            raise ConfigError(f"stage {self.name}: command is empty")
        if isinstance(self.command, str):
            # Its first letter would be the program.
            raise ConfigError(
                f"stage {self.name}: command is the text {self.command!r}, expected"
                " its words, as in ('python', 'clean.py'): there is no shell"
            )
        if isinstance(self.workers, int) and self.workers < 1:
            raise ConfigError(
                f"stage {self.name}: workers must be 1 or more, got {self.workers}"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(
                f"stage {self.name}: window must be 1 or more, got {self.window}"
            )
        problem = self.dialect.problem(self.kind)
        if problem is not None:
            raise ConfigError(f"stage {self.name}: {problem}")
        if self.timeout.heartbeat is not None and self.kind is StageKind.EXTRACT:
            raise ConfigError(
                f"stage {self.name}: an extract stage has no timeout.heartbeat: its"
                " worker is never watched while it is idle"
            )
        if self.key is not None:
            self._check_key(self.key)

    @property
    def pool(self) -> PoolPolicy:
        """How many workers there are; an extractor runs when it is asked."""
        if self.kind is StageKind.EXTRACT:
            return PoolPolicy(min=0, max=1, grow_at=1, idle=math.inf)
        if isinstance(self.workers, PoolPolicy):
            return self.workers
        return PoolPolicy(min=self.workers, max=self.workers)

    def _check_key(self, key: str) -> None:
        if self.order is not Order.KEY:
            raise ConfigError(f"stage {self.name}: a key needs order: key")
        if key and not key.startswith("/"):
            raise ConfigError(
                f"stage {self.name}: key must be a JSON pointer such as /id, got {key!r}"
            )
