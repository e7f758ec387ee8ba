"""What the mode of a stage means for one worker: what we speak, and what it is fed."""

from __future__ import annotations

from etlstage.protocol.base import Limits, Side
from etlstage.protocol.marker import MarkerProtocol, Mode
from etlstage.protocol.marker.framing import LISTS, Framing
from etlstage.stage.stage import Stage
from etlstage.supervisor.exchange.batch import AskedFeeder, ClosingFeeder
from etlstage.supervisor.exchange.dispatch import Feeder
from etlstage.supervisor.exchange.submission import Work

__all__ = ("feeder", "session")


def session(stage: Stage, framing: Framing = LISTS) -> MarkerProtocol:
    """Return the supervisor's side of a session with a worker of ``stage``."""
    return MarkerProtocol(
        Side.SUPERVISOR,
        stage.mode,
        stage.markers,
        limits=Limits(stage.max_message_bytes, stage.max_reply_bytes),
        eob_then_eom=stage.batch.eob_then_eom,
        framing=framing,
    )


def feeder(
    stage: Stage, protocol: MarkerProtocol, work: Work, number: int = 0
) -> Feeder:
    """Return what feeds worker ``number`` of ``stage``."""
    kinds: dict[Mode, type[Feeder]] = {
        Mode.SINGLE: Feeder,
        Mode.BATCH_SUPERVISOR: ClosingFeeder,
        Mode.BATCH_WORKER: AskedFeeder,
    }
    return kinds[stage.mode](stage, protocol, work, number)
