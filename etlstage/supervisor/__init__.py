"""Start, feed, watch and stop the workers of a stage."""

from __future__ import annotations

from etlstage.protocol.events import Assignment as Assignment
from etlstage.protocol.events import FarewellReason as FarewellReason
from etlstage.supervisor.exchange.exchange import Outcome as Outcome
from etlstage.supervisor.lifecycle.events import RemainsEnded as RemainsEnded
from etlstage.supervisor.lifecycle.events import StartFailed as StartFailed
from etlstage.supervisor.lifecycle.events import SupervisorEvent as SupervisorEvent
from etlstage.supervisor.lifecycle.events import WorkerExited as WorkerExited
from etlstage.supervisor.lifecycle.events import WorkerFailed as WorkerFailed
from etlstage.supervisor.lifecycle.events import (
    WorkerFailedPermanently as WorkerFailedPermanently,
)
from etlstage.supervisor.lifecycle.events import WorkerReady as WorkerReady
from etlstage.supervisor.lifecycle.events import WorkerRestarting as WorkerRestarting
from etlstage.supervisor.lifecycle.events import WorkerSilent as WorkerSilent
from etlstage.supervisor.lifecycle.events import WorkerStarted as WorkerStarted
from etlstage.supervisor.lifecycle.events import WorkerWorn as WorkerWorn
from etlstage.supervisor.lifecycle.pool import Health as Health
from etlstage.supervisor.lifecycle.pool import Silence as Silence
from etlstage.supervisor.pool import CommitRequest as CommitRequest
from etlstage.supervisor.stream import WorkerSession as WorkerSession
from etlstage.supervisor.supervisor import AsyncSupervisor as AsyncSupervisor

__all__ = (
    "Assignment",
    "AsyncSupervisor",
    "CommitRequest",
    "FarewellReason",
    "Health",
    "Outcome",
    "RemainsEnded",
    "Silence",
    "StartFailed",
    "SupervisorEvent",
    "WorkerExited",
    "WorkerFailed",
    "WorkerFailedPermanently",
    "WorkerReady",
    "WorkerRestarting",
    "WorkerSession",
    "WorkerSilent",
    "WorkerStarted",
    "WorkerWorn",
)
