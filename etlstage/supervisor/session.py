"""What the dialect of a stage means for one worker: what we speak, what it is fed."""

from __future__ import annotations

from etlstage.protocol.base import Limits, Shape, Side
from etlstage.protocol.marker import MarkerProtocol
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage.stage import Stage
from etlstage.supervisor.exchange.batch import AskedFeeder, ClosingFeeder
from etlstage.supervisor.exchange.dispatch import Feeder
from etlstage.supervisor.exchange.submission import Work

__all__ = ("feeder", "session")


def session(stage: Stage) -> MarkerProtocol:
    """Return the supervisor's side of a session with a worker of ``stage``."""
    assert isinstance(stage.dialect, MarkerDialect)
    limits = Limits(stage.max_message_bytes, stage.max_reply_bytes)
    return stage.dialect.open(Side.SUPERVISOR, limits)


def feeder(
    stage: Stage, protocol: MarkerProtocol, work: Work, number: int = 0
) -> Feeder:
    """Return what feeds worker ``number`` of ``stage``."""
    kinds: dict[Shape, type[Feeder]] = {
        Shape.MESSAGE: Feeder,
        Shape.BATCH: ClosingFeeder,
        Shape.ASKED_BATCH: AskedFeeder,
    }
    return kinds[stage.dialect.shape](stage, protocol, work, number)
