"""Start, feed, watch and stop the workers of a stage."""

from __future__ import annotations

from etlstage.supervisor.events import SupervisorEvent as SupervisorEvent
from etlstage.supervisor.events import WorkerExited as WorkerExited
from etlstage.supervisor.events import WorkerFailed as WorkerFailed
from etlstage.supervisor.events import WorkerStarted as WorkerStarted
from etlstage.supervisor.stage import BatchPolicy as BatchPolicy
from etlstage.supervisor.stage import Stage as Stage
from etlstage.supervisor.stage import Timeouts as Timeouts
from etlstage.supervisor.supervisor import AsyncSupervisor as AsyncSupervisor

__all__ = (
    "AsyncSupervisor",
    "BatchPolicy",
    "Stage",
    "SupervisorEvent",
    "Timeouts",
    "WorkerExited",
    "WorkerFailed",
    "WorkerStarted",
)
