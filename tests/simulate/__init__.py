"""
Whole pipelines in virtual time: what is drawn, and what is asserted of them.

As :mod:`etlstage.testing.simulation`, for what is etlstage's own: ends that fail,
positions, epochs, and runs that break off and are started again.
``python -m tests.simulate`` does that with pipelines that are drawn, too.
"""

from __future__ import annotations

from etlstage.pipeline.delivery.delivery import Bounds as Bounds
from etlstage.testing import SimulationFailed as SimulationFailed
from etlstage.testing.scripted import Work as Work
from tests.simulate.pipelines import three_stages as three_stages
from tests.simulate.run import simulate as simulate
from tests.simulate.scenario import Scenario as Scenario

__all__ = ("Bounds", "Scenario", "SimulationFailed", "Work", "simulate", "three_stages")
