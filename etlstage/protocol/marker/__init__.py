"""
Dialect ``marker``: the stage protocol with EOM, EOP, EOB, BNC and ERR.

Source: "Internal communication protocol" of PanDAWMS/dkb, and, where its text can't
be meant as it stands, what the stages written for it do. ERR is ours.
"""

from __future__ import annotations

from etlstage.protocol.marker.markers import MARKER_NAMES as MARKER_NAMES
from etlstage.protocol.marker.markers import Markers as Markers
from etlstage.protocol.marker.markers import escape as escape
from etlstage.protocol.marker.markers import unescape as unescape
from etlstage.protocol.marker.protocol import MarkerProtocol as MarkerProtocol
from etlstage.protocol.marker.state import MarkerState as MarkerState
from etlstage.protocol.marker.state import Mode as Mode

__all__ = (
    "MARKER_NAMES",
    "MarkerProtocol",
    "MarkerState",
    "Markers",
    "Mode",
    "escape",
    "unescape",
)
