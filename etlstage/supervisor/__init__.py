"""Start, feed, watch and stop the workers of a stage."""

from __future__ import annotations

from etlstage.supervisor.events import StartFailed as StartFailed
from etlstage.supervisor.events import SupervisorEvent as SupervisorEvent
from etlstage.supervisor.events import WorkerExited as WorkerExited
from etlstage.supervisor.events import WorkerFailed as WorkerFailed
from etlstage.supervisor.events import WorkerGivenUp as WorkerGivenUp
from etlstage.supervisor.events import WorkerReady as WorkerReady
from etlstage.supervisor.events import WorkerRestarting as WorkerRestarting
from etlstage.supervisor.events import WorkerStarted as WorkerStarted
from etlstage.supervisor.events import WorkerWorn as WorkerWorn
from etlstage.supervisor.policy import BatchPolicy as BatchPolicy
from etlstage.supervisor.policy import ErrorBudget as ErrorBudget
from etlstage.supervisor.policy import ErrorPolicy as ErrorPolicy
from etlstage.supervisor.policy import Order as Order
from etlstage.supervisor.policy import RecyclePolicy as RecyclePolicy
from etlstage.supervisor.policy import ResourceLimits as ResourceLimits
from etlstage.supervisor.policy import Timeouts as Timeouts
from etlstage.supervisor.restart import RestartPolicy as RestartPolicy
from etlstage.supervisor.stage import Stage as Stage
from etlstage.supervisor.supervisor import AsyncSupervisor as AsyncSupervisor

__all__ = (
    "AsyncSupervisor",
    "BatchPolicy",
    "ErrorBudget",
    "ErrorPolicy",
    "Order",
    "RecyclePolicy",
    "ResourceLimits",
    "RestartPolicy",
    "Stage",
    "StartFailed",
    "SupervisorEvent",
    "Timeouts",
    "WorkerExited",
    "WorkerFailed",
    "WorkerGivenUp",
    "WorkerReady",
    "WorkerRestarting",
    "WorkerStarted",
    "WorkerWorn",
)
