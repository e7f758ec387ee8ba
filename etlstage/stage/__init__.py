"""The definition of a stage: its program, its dialect, and the policies for both."""

from __future__ import annotations

from etlstage.stage.contract import ReplyContract as ReplyContract
from etlstage.stage.policy import BatchPolicy as BatchPolicy
from etlstage.stage.policy import ErrorBudget as ErrorBudget
from etlstage.stage.policy import ErrorPolicy as ErrorPolicy
from etlstage.stage.policy import OffsetPolicy as OffsetPolicy
from etlstage.stage.policy import Order as Order
from etlstage.stage.policy import PoolPolicy as PoolPolicy
from etlstage.stage.policy import RecyclePolicy as RecyclePolicy
from etlstage.stage.policy import ResourceLimits as ResourceLimits
from etlstage.stage.policy import RestartPolicy as RestartPolicy
from etlstage.stage.policy import Timeouts as Timeouts
from etlstage.stage.stage import Stage as Stage
from etlstage.stage.stage import WorkerProgram as WorkerProgram

__all__ = (
    "BatchPolicy",
    "ErrorBudget",
    "ErrorPolicy",
    "OffsetPolicy",
    "Order",
    "PoolPolicy",
    "RecyclePolicy",
    "ReplyContract",
    "ResourceLimits",
    "RestartPolicy",
    "Stage",
    "Timeouts",
    "WorkerProgram",
)
