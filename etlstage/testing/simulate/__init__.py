"""
Whole pipelines in virtual time, on one thread, with every choice from one seed.

::

    def draw(chance: random.Random) -> Scenario:
        return Scenario(
            messages=[b"%d" % n for n in range(20)],
            stages=[CLEAN, ENRICH],
            work={"clean": clean, "enrich": enrich},
            faults={"clean": FaultPlan.of(Fault(FaultKind.KILL, probability=0.05))},
        )

    simulate(draw, seeds=range(1000))

Supervisors, exchanges and delivery are the real ones; workers are scripted, and both
ends are in memory. A seed that fails tells its story, and runs again the same.
``python -m etlstage.testing.simulate`` does that with pipelines that are drawn, too.
"""

from __future__ import annotations

from etlstage.pipeline.delivery.delivery import Bounds as Bounds
from etlstage.testing.simulate.pipelines import three_stages as three_stages
from etlstage.testing.simulate.scenario import Scenario as Scenario
from etlstage.testing.simulate.seeds import SimulationFailed as SimulationFailed
from etlstage.testing.simulate.seeds import simulate as simulate
from etlstage.testing.simulate.worker import Work as Work

__all__ = ("Bounds", "Scenario", "SimulationFailed", "Work", "simulate", "three_stages")
