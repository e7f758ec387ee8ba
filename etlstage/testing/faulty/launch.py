"""
A launch that wraps another, and does to any worker what a hostile one does to itself.

It stands between the supervisor and the worker: it counts the messages that pass, holds
replies back, changes or invents them, closes what the worker has not closed, and sends
signals. The words are those of :mod:`etlstage.testing.fault`, and so is the luck: a plan
with a seed has the same faults here as with ``hostile_worker``.

``wire.py`` has what can be done to any conversation, and a module with the name of a
dialect the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final

from etlstage.errors import ConfigError
from etlstage.testing.fault import FaultKind, FaultPlan
from etlstage.testing.faulty.wire import Fault, FaultyWire, Occurrence, Victim
from etlstage.transport import Child, Launch, LaunchRequest, Wire

__all__ = ("FaultyLaunch", "unknown")


def unknown(kind: FaultKind, dialect: str) -> str:
    """Return why a worker that speaks this dialect can't have such a fault, or nothing."""
    if dialect not in _WIRES:
        known = " or ".join(sorted(_WIRES))
        return f"{kind.value} can't be done to dialect {dialect}, only to {known}"
    if not kind.about or kind.about in _wire(dialect).has:
        return ""
    if kind.about == "a shard":
        return f"{kind.value} can only be done by 'etlstage kcl simulate'"
    return f"{kind.value} is about {kind.about}, which dialect {dialect} has not"


class FaultyLaunch:
    """
    Starts workers that suffer from what a plan has.

    Args:
        launch: What starts them.
        plans: By the name of the stage; workers of others are left alone.

    Attributes:
        happened: What has happened, in order.

    Raises:
        ConfigError: If a fault can't be done from outside; or, when a worker is started,
            if its dialect knows no such fault.

    """

    def __init__(self, launch: Launch, plans: Mapping[str, FaultPlan]) -> None:
        for stage, plan in plans.items():
            for fault in plan.faults:
                if fault.kind.inside:
                    raise ConfigError(
                        f"stage {stage}: fault {fault.kind.value} happens inside a"
                        " process: it can't be done from outside"
                    )
        self.happened: list[Occurrence] = []
        self._launch = launch
        self._plans = dict(plans)

    def __call__(self, request: LaunchRequest, /) -> tuple[Wire, Child]:
        """Start a worker."""
        if request.stage not in self._plans:
            return self._launch(request)
        faults = self._plans[request.stage]
        for fault in faults.faults:
            if reason := unknown(fault.kind, request.dialect.name):
                raise ConfigError(f"stage {request.stage}: fault {reason}")
        inner, child = self._launch(request)
        mine: list[Occurrence] = []

        def note(fault: Fault, message: int) -> None:
            found = Occurrence(
                request.stage, fault["index"], request.worker, request.start, message
            )
            mine.append(found)
            self.happened.append(found)

        victim = Victim(child, mine)
        made = _wire(request.dialect.name)
        wire = made(inner, victim, request, faults.due(request.env), note)
        wire.begin()
        return wire, victim


_WIRES: Final = {"cocaine": "CocaineWire", "kcl": "KclWire", "marker": "MarkerWire"}
"""Names of dialects, and their wires in the modules of these names."""


def _wire(dialect: str) -> type[FaultyWire]:
    module = import_module(f"{__package__}.{dialect}")
    wire: type[FaultyWire] = getattr(module, _WIRES[dialect])
    return wire
