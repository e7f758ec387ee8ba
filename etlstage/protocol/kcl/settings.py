"""
The settings of dialect ``kcl``, and its implementation of ``Dialect``.

Workers do not import this file: dataclasses take longer to import than the dialect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from etlstage.errors import ConfigError
from etlstage.messages import StageKind, counted
from etlstage.protocol.base import Dialect, Limits, Shape, Side
from etlstage.protocol.events import Assignment
from etlstage.protocol.kcl.checkpoint import position_of
from etlstage.protocol.kcl.lines import Version
from etlstage.protocol.kcl.processor import ProcessorSession
from etlstage.protocol.kcl.properties import translated as translated
from etlstage.protocol.kcl.session import KclSession
from etlstage.settings.definition import Definition, Section, settings_of
from etlstage.settings.units import Count, Duration, Size

__all__ = ("KclDialect", "translated")

_KINDS: Final = (
    "dialect kcl does not fit kind {kind}: a record processor produces no messages;"
    " use it to load, and workers of dialect marker before it to extract and transform"
)
_SHARD: Final = Assignment("shardId-000000000000")


@dataclass(frozen=True, kw_only=True)
class KclDialect(Definition, Dialect):
    """The protocol of the Kinesis Client Library's multi-language daemon."""

    name: ClassVar[str] = "kcl"
    label: ClassVar[tuple[str, ...]] = ("dialect",)
    version: Version = Version.V2
    """Version of the lines to write: as daemons since 2.1 do (v2), from 1.7.2 to 1.15
    (v1), before 1.7.2 (2014), or as in the daemon's document (document). A processor
    may answer in any of them."""
    max_line: Size = 64 * 1024 * 1024
    """Maximum length of a line that a processor writes, in bytes."""
    max_uncommitted: Count = 100_000
    """Maximum number of records of a shard that no checkpoint covers; at this number no
    more are given."""
    max_uncommitted_bytes: Size = 256 * 1024 * 1024
    """Maximum number of bytes of such records; likewise."""
    commit_overdue: Duration | None = None
    """How long a shard may stay at max_uncommitted, or its bytes, before it fails, in
    seconds; by default without limit."""
    empty_after: Duration | None = None
    """Time without records after which an empty list is given, in seconds, for
    processors that act by time; by default never."""

    @classmethod
    def section(cls, kind: StageKind) -> Section:
        return Section(settings_of(cls), lambda given: cls(**given), model=cls)

    def problem(self, kind: StageKind) -> str | None:
        """Return why a stage of that kind can't have record processors."""
        if kind is StageKind.LOAD:
            return None
        return _KINDS.format(kind=kind.value)

    @property
    def shape(self) -> Shape:
        """How exchanges are made from messages: each is one, until a checkpoint."""
        return Shape.COMMITTED

    @property
    def holds(self) -> int:
        """How many bytes of records may be without a checkpoint."""
        return self.max_uncommitted_bytes

    @property
    def announces(self) -> bool:
        """Whether a worker reports that it is ready: it answers initialize."""
        return True

    def open(
        self,
        side: Side,
        limits: Limits,
        *,
        batch: int = 10_000,
        assignment: Assignment | None = None,
        answer: float | None = None,
        **_others: object,
    ) -> KclSession | ProcessorSession:
        """
        Return a fresh session, by default from the beginning of a shard.

        ``max_line`` bounds a processor, ``limits`` does not; a batch is an action.

        Raises:
            ConfigError: If the committed position is not a position in a shard.

        """
        if side is Side.WORKER:
            return ProcessorSession()
        share = assignment or _SHARD
        try:
            position_of(share.position)
        except ValueError as error:
            raise ConfigError(f"shard {share.name}: {error}") from None
        return KclSession(
            share,
            self.version,
            batch=batch,
            max_line=self.max_line,
            max_uncommitted=self.max_uncommitted,
            max_uncommitted_bytes=self.max_uncommitted_bytes,
            empty_after=self.empty_after,
            commit_overdue=self.commit_overdue,
            answer=answer,
        )

    def silence(self, received: int, *, ready: bool = True) -> str:
        wrote = counted(received, "byte") if received else "nothing"
        if not ready:
            return f"it wrote {wrote} instead of its status for initialize"
        if not received:
            return "it wrote nothing; does it flush its output after each status?"
        return f"it wrote {wrote} without a status or a checkpoint"

    def failed(
        self, status: int, *, stopped: bool, held: int, unproven: int = 0
    ) -> bool:
        """Return whether an exit is a failure: any that was not requested is."""
        return not stopped

    def plain(self) -> dict[str, object]:
        return {"name": self.name, **super().plain()}
