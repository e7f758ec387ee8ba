"""
Run external programs as the supervised stages of an ETL pipeline.

Names are imported when they are used: a worker imports this package at every start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    """Version of the installed distribution; 0+unknown if it is not installed."""

    from etlstage.errors import ConfigError as ConfigError
    from etlstage.errors import ContractBroken as ContractBroken
    from etlstage.errors import EtlstageError as EtlstageError
    from etlstage.errors import InvalidMessage as InvalidMessage
    from etlstage.errors import InvalidState as InvalidState
    from etlstage.errors import LocalProtocolError as LocalProtocolError
    from etlstage.errors import Overloaded as Overloaded
    from etlstage.errors import RemoteProtocolError as RemoteProtocolError
    from etlstage.errors import RepliesDoubtful as RepliesDoubtful
    from etlstage.errors import StageFailed as StageFailed
    from etlstage.errors import WorkerLost as WorkerLost
    from etlstage.errors import WorkerRefusal as WorkerRefusal
    from etlstage.errors import WorkerStartFailed as WorkerStartFailed
    from etlstage.messages import Result as Result
    from etlstage.messages import StageKind as StageKind
    from etlstage.pipeline import Pipeline as Pipeline
    from etlstage.pipeline import Report as Report
    from etlstage.protocol.cocaine.settings import CocaineDialect as CocaineDialect
    from etlstage.protocol.marker import Markers as Markers
    from etlstage.protocol.marker import Mode as Mode
    from etlstage.protocol.marker.settings import MarkerDialect as MarkerDialect
    from etlstage.stage import BatchPolicy as BatchPolicy
    from etlstage.stage import ErrorBudget as ErrorBudget
    from etlstage.stage import ErrorPolicy as ErrorPolicy
    from etlstage.stage import Order as Order
    from etlstage.stage import PoolPolicy as PoolPolicy
    from etlstage.stage import RecyclePolicy as RecyclePolicy
    from etlstage.stage import ReplyContract as ReplyContract
    from etlstage.stage import ResourceLimits as ResourceLimits
    from etlstage.stage import RestartPolicy as RestartPolicy
    from etlstage.stage import Stage as Stage
    from etlstage.stage import Timeouts as Timeouts
    from etlstage.stage import WorkerProgram as WorkerProgram
    from etlstage.supervisor import AsyncSupervisor as AsyncSupervisor
    from etlstage.supervisor import Health as Health
    from etlstage.supervisor import RemainsEnded as RemainsEnded
    from etlstage.supervisor import StartFailed as StartFailed
    from etlstage.supervisor import SupervisorEvent as SupervisorEvent
    from etlstage.supervisor import WorkerExited as WorkerExited
    from etlstage.supervisor import WorkerFailed as WorkerFailed
    from etlstage.supervisor import WorkerFailedPermanently as WorkerFailedPermanently
    from etlstage.supervisor import WorkerReady as WorkerReady
    from etlstage.supervisor import WorkerRestarting as WorkerRestarting
    from etlstage.supervisor import WorkerSession as WorkerSession
    from etlstage.supervisor import WorkerSilent as WorkerSilent
    from etlstage.supervisor import WorkerStarted as WorkerStarted
    from etlstage.supervisor import WorkerWorn as WorkerWorn

__all__ = (
    "AsyncSupervisor",
    "BatchPolicy",
    "CocaineDialect",
    "ConfigError",
    "ContractBroken",
    "ErrorBudget",
    "ErrorPolicy",
    "EtlstageError",
    "Health",
    "InvalidMessage",
    "InvalidState",
    "LocalProtocolError",
    "MarkerDialect",
    "Markers",
    "Mode",
    "Order",
    "Overloaded",
    "Pipeline",
    "PoolPolicy",
    "RecyclePolicy",
    "RemainsEnded",
    "RemoteProtocolError",
    "RepliesDoubtful",
    "ReplyContract",
    "Report",
    "ResourceLimits",
    "RestartPolicy",
    "Result",
    "Stage",
    "StageFailed",
    "StageKind",
    "StartFailed",
    "SupervisorEvent",
    "Timeouts",
    "WorkerExited",
    "WorkerFailed",
    "WorkerFailedPermanently",
    "WorkerLost",
    "WorkerProgram",
    "WorkerReady",
    "WorkerRefusal",
    "WorkerRestarting",
    "WorkerSession",
    "WorkerSilent",
    "WorkerStartFailed",
    "WorkerStarted",
    "WorkerWorn",
)

_HOMES = {
    "AsyncSupervisor": "etlstage.supervisor",
    "BatchPolicy": "etlstage.stage",
    "CocaineDialect": "etlstage.protocol.cocaine.settings",
    "ConfigError": "etlstage.errors",
    "ContractBroken": "etlstage.errors",
    "ErrorBudget": "etlstage.stage",
    "ErrorPolicy": "etlstage.stage",
    "EtlstageError": "etlstage.errors",
    "Health": "etlstage.supervisor",
    "InvalidState": "etlstage.errors",
    "LocalProtocolError": "etlstage.errors",
    "MarkerDialect": "etlstage.protocol.marker.settings",
    "Markers": "etlstage.protocol.marker",
    "InvalidMessage": "etlstage.errors",
    "Mode": "etlstage.protocol.marker",
    "Order": "etlstage.stage",
    "Overloaded": "etlstage.errors",
    "Pipeline": "etlstage.pipeline",
    "PoolPolicy": "etlstage.stage",
    "RecyclePolicy": "etlstage.stage",
    "WorkerRefusal": "etlstage.errors",
    "RemainsEnded": "etlstage.supervisor",
    "RemoteProtocolError": "etlstage.errors",
    "RepliesDoubtful": "etlstage.errors",
    "Report": "etlstage.pipeline",
    "ReplyContract": "etlstage.stage",
    "ResourceLimits": "etlstage.stage",
    "RestartPolicy": "etlstage.stage",
    "Result": "etlstage.messages",
    "Stage": "etlstage.stage",
    "StageFailed": "etlstage.errors",
    "StageKind": "etlstage.messages",
    "StartFailed": "etlstage.supervisor",
    "SupervisorEvent": "etlstage.supervisor",
    "Timeouts": "etlstage.stage",
    "WorkerExited": "etlstage.supervisor",
    "WorkerFailed": "etlstage.supervisor",
    "WorkerFailedPermanently": "etlstage.supervisor",
    "WorkerLost": "etlstage.errors",
    "WorkerProgram": "etlstage.stage",
    "WorkerReady": "etlstage.supervisor",
    "WorkerRestarting": "etlstage.supervisor",
    "WorkerSession": "etlstage.supervisor",
    "WorkerSilent": "etlstage.supervisor",
    "WorkerStartFailed": "etlstage.errors",
    "WorkerStarted": "etlstage.supervisor",
    "WorkerWorn": "etlstage.supervisor",
}


def __getattr__(name: str) -> object:
    """Import a public name from its home (PEP 562)."""
    if name == "__version__":
        return _version()
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
    private = [name for name in globals() if name.startswith("__")]
    return sorted({*private, *__all__, "__version__"})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("etlstage")
    except PackageNotFoundError:
        return "0+unknown"
