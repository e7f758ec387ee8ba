"""
Simulate whole pipelines in virtual time: draw them, run them, and judge the runs.

This extends :mod:`etlstage.testing.simulation` to what etlstage itself is responsible
for: ends that fail, positions, epochs, and runs that are interrupted and started again.
``python -m tests.simulate`` runs randomly drawn pipelines, too.
"""

from __future__ import annotations

from etlstage.pipeline.delivery.delivery import Bounds as Bounds
from etlstage.testing import SimulationFailed as SimulationFailed
from etlstage.testing.scripted import Work as Work
from tests.simulate.pipelines import three_stages as three_stages
from tests.simulate.run import simulate as simulate
from tests.simulate.scenario import Scenario as Scenario

__all__ = ("Bounds", "Scenario", "SimulationFailed", "Work", "simulate", "three_stages")
