"""
Dialect ``marker``: the stage protocol with EOM, EOP, EOB, BNC and ERR.

Source: "Internal communication protocol" of PanDAWMS/dkb (the "page") and, where its
text can't be meant literally, the stages written for it. ERR is etlstage's own.

``protocol.py`` is the session. It owns the state, which decides what may follow what
(``state.py``), the reader, which interprets the peer's bytes (``reader.py``, with
``framing.py`` or, in Arrow, ``columnar.py``) and, on the supervisor's side, the proof
that replies belong to the exchanges that they are counted for (``proof.py``, a block at
a time: ``blocks.py``). Reader and session share one state; the proof knows neither, and
is given numbers. ``markers.py`` has the markers, ``settings.py`` the public settings.
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
