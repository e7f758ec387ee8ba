"""
The start of a worker: its markers, mode and descriptors.

Errors of a worker's author raise; errors of its user are one line on stderr and exit
status 2.
"""

from __future__ import annotations

import os
import sys
from typing import Final, NoReturn

from etlstage.errors import ConfigError
from etlstage.protocol.base import Limits, Side
from etlstage.protocol.marker import MarkerProtocol, Markers, Mode, escape
from etlstage.worker.descriptors import complain, take_over
from etlstage.worker.marking import find_markers

__all__ = ("open_session",)

# The supervisor decides how large a message may be.
_UNLIMITED = Limits(sys.maxsize, sys.maxsize)

_MADE_WITH: Final = {
    Mode.PLAIN: "extract()",
    Mode.CYCLIC: "extract_cycle()",
    Mode.SINGLE: "transform() or load()",
    Mode.BATCH_SUPERVISOR: "transform_batch() or load_batch()",
    Mode.BATCH_WORKER: "transform_batch() or load_batch(), with driver='worker'",
}


def open_session(
    mode: Mode, markers: Markers | None, *, makes_one: bool = True
) -> tuple[MarkerProtocol, tuple[int, int]]:
    """
    Take over stdin and stdout; return the protocol and its descriptors.

    Args:
        mode: The scenario.
        markers: The markers that the author of the worker has set, if any.
        makes_one: Whether each reply can be exactly one message.

    """
    try:
        markers = markers or find_markers(sys.argv[1:], os.environ)
    except ConfigError as error:
        _refuse(str(error))
    if markers.eop == markers.eom and not makes_one:
        _refuse(
            f"eop is eom ({escape(markers.eom)}), so each reply must be one message;"
            " a load stage, and on_error='skip', give empty replies: choose another eop"
        )
    # Otherwise the worker would wait for ever, or fail at each message.
    asked = Mode(os.environ.get("ETLSTAGE_MODE", mode.value))
    if asked is not mode:
        _refuse(
            f"the stage has mode {asked.value}, this worker {mode.value}: change the"
            " keys batch and dialect of the stage, or make the worker with"
            f" {_MADE_WITH[asked]}"
        )
    if "ETLSTAGE_EOB_AFTER_FULL" in os.environ:
        _refuse(
            "the stage has eob_after_full: false, this worker waits for EOB after each"
            " batch: remove that key of its dialect"
        )
    if "ETLSTAGE_BNC_AFTER_LAST" in os.environ:
        _refuse(
            "the stage has bnc_after_last: true, this worker writes no BNC after the"
            " last message of its batch: remove that key of its dialect"
        )
    try:
        descriptors = take_over()
    except OSError as error:
        _refuse(f"stdin or stdout is closed ({error.strerror})")
    if mode is not Mode.PLAIN and os.isatty(descriptors[0]):
        complain(
            "stdin is a terminal; normally a supervisor starts this program, see"
            f" `etlstage run`. Type messages, each ended by {escape(markers.eom)};"
            " Ctrl-D ends the input"
        )
    protocol = MarkerProtocol(
        Side.WORKER,
        mode,
        markers,
        limits=_UNLIMITED,
        eob_then_eom="ETLSTAGE_EOB_THEN_EOM" in os.environ,
        bnc_after_eob="ETLSTAGE_BNC_AFTER_EOB" in os.environ,
    )
    return protocol, descriptors


def _refuse(text: str) -> NoReturn:
    complain(text)
    raise SystemExit(2)
