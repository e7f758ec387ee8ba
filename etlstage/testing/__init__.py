"""
Tools for testing workers and pipelines.

A *hostile worker* does on purpose what workers do by accident::

    plan = FaultPlan.of(
        Fault(FaultKind.KILL, contains=b"poison"),
        Fault(FaultKind.STALL, probability=0.001),
        seed=1,
    )
    stage = Stage(name="clean", command=hostile_worker(plan))

Strategies for Hypothesis are in :mod:`etlstage.testing.strategies`; they need the
extra ``testing``, nothing else here does.
"""

from __future__ import annotations

from etlstage.testing.fault import Fault as Fault
from etlstage.testing.fault import FaultKind as FaultKind
from etlstage.testing.fault import FaultPlan as FaultPlan
from etlstage.testing.fault import Moment as Moment
from etlstage.testing.worker import hostile_worker as hostile_worker

__all__ = ("Fault", "FaultKind", "FaultPlan", "Moment", "hostile_worker")
