"""
What a stage reports about itself: metrics, log events and spans.

Metrics go to a :class:`Meter`, which the host creates and passes in: nothing is
global. :class:`PrometheusMeter` and :class:`OpenTelemetryMeter` import their libraries
only when they are created. ``stage.py`` has the metrics.
"""

from __future__ import annotations

from etlstage.errors import FailureCause as FailureCause
from etlstage.telemetry.meter import Counter as Counter
from etlstage.telemetry.meter import Gauge as Gauge
from etlstage.telemetry.meter import Histogram as Histogram
from etlstage.telemetry.meter import Meter as Meter
from etlstage.telemetry.opentelemetry import OpenTelemetryMeter as OpenTelemetryMeter
from etlstage.telemetry.prometheus import PrometheusMeter as PrometheusMeter
from etlstage.telemetry.stage import StageMetrics as StageMetrics

__all__ = (
    "Counter",
    "FailureCause",
    "Gauge",
    "Histogram",
    "Meter",
    "OpenTelemetryMeter",
    "PrometheusMeter",
    "StageMetrics",
)
