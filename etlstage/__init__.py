"""
Run external programs as the supervised stages of an ETL pipeline.

Names are imported when they are used: a worker imports this package at every start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etlstage.errors import ConfigError as ConfigError
    from etlstage.errors import EtlstageError as EtlstageError
    from etlstage.errors import WorkerLost as WorkerLost
    from etlstage.messages import Result as Result
    from etlstage.messages import StageKind as StageKind
    from etlstage.pipeline import Pipeline as Pipeline
    from etlstage.pipeline import Report as Report
    from etlstage.protocol.marker import Markers as Markers
    from etlstage.protocol.marker import Mode as Mode
    from etlstage.protocol.marker.settings import MarkerDialect as MarkerDialect
    from etlstage.stage import BatchPolicy as BatchPolicy
    from etlstage.stage import ErrorBudget as ErrorBudget
    from etlstage.stage import ErrorPolicy as ErrorPolicy
    from etlstage.stage import Order as Order
    from etlstage.stage import PoolPolicy as PoolPolicy
    from etlstage.stage import RecyclePolicy as RecyclePolicy
    from etlstage.stage import ResourceLimits as ResourceLimits
    from etlstage.stage import RestartPolicy as RestartPolicy
    from etlstage.stage import Stage as Stage
    from etlstage.stage import Timeouts as Timeouts
    from etlstage.supervisor import AsyncSupervisor as AsyncSupervisor

__all__ = (
    "AsyncSupervisor",
    "BatchPolicy",
    "ConfigError",
    "ErrorBudget",
    "ErrorPolicy",
    "EtlstageError",
    "MarkerDialect",
    "Markers",
    "Mode",
    "Order",
    "Pipeline",
    "PoolPolicy",
    "RecyclePolicy",
    "Report",
    "ResourceLimits",
    "RestartPolicy",
    "Result",
    "Stage",
    "StageKind",
    "Timeouts",
    "WorkerLost",
)

_HOMES = {
    "AsyncSupervisor": "etlstage.supervisor",
    "BatchPolicy": "etlstage.stage",
    "ConfigError": "etlstage.errors",
    "EtlstageError": "etlstage.errors",
    "RestartPolicy": "etlstage.stage",
    "ResourceLimits": "etlstage.stage",
    "RecyclePolicy": "etlstage.stage",
    "Order": "etlstage.stage",
    "ErrorPolicy": "etlstage.stage",
    "ErrorBudget": "etlstage.stage",
    "MarkerDialect": "etlstage.protocol.marker.settings",
    "Markers": "etlstage.protocol.marker",
    "Mode": "etlstage.protocol.marker",
    "Pipeline": "etlstage.pipeline",
    "PoolPolicy": "etlstage.stage",
    "Report": "etlstage.pipeline",
    "Result": "etlstage.messages",
    "Stage": "etlstage.stage",
    "StageKind": "etlstage.messages",
    "Timeouts": "etlstage.stage",
    "WorkerLost": "etlstage.errors",
}


def __getattr__(name: str) -> object:
    """Import a public name from its home (PEP 562)."""
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, whether they are imported yet or not."""
    return sorted(set(globals()) | set(__all__))
