"""The test kit of dialect ``marker``, which needs only the places of markers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from etlstage.protocol.base import Side
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.testing.dialect import DialectKit

__all__ = ("MarkerKit",)


class MarkerKit(DialectKit[MarkerDialect]):
    """Finds markers in bytes."""

    def shown(self, data: bytes) -> str:
        """Return ``data`` as printable ASCII, with the markers by name."""
        return self._dialect.markers.shown(data)

    def unsolicited(self, data: bytes) -> str:
        """Return the error for a worker that wrote ``data`` when no reply was due."""
        text = self._dialect.markers.unsolicited(data)
        if self._dialect.mode is Mode.BATCH_SUPERVISOR and self._dialect.eob_after_full:
            text += (
                "; for a worker that closes full batches by itself set"
                " dialect.eob_after_full: false"
            )
        return text

    def cut(self, side: Side, data: bytes) -> list[bytes]:
        """Return what a side wrote, cut after each request or reply."""
        pieces, at = [], 0
        for end in self._ends(side).finditer(data):
            pieces.append(data[at : end.end()])
            at = end.end()
        return [*pieces, data[at:]]

    def raw(self, messages: Sequence[bytes]) -> bytes:
        """Return the messages as a worker reads them."""
        dialect = self._dialect
        eom, eob = dialect.markers.eom, dialect.markers.eob
        wire = eom.join((*messages, b""))
        if dialect.mode is not Mode.BATCH_SUPERVISOR:
            return wire
        return wire + eob + (eom if dialect.eob_then_eom else b"")

    def _ends(self, side: Side) -> re.Pattern[bytes]:
        """Return a pattern for the ends of requests or of replies, and for BNC."""
        dialect = self._dialect
        eom, eop, eob, bnc, err = (marker or b"" for marker in dialect.markers)
        eob += eom * dialect.eob_then_eom
        # Different markers of one direction do not contain each other.
        if side is Side.WORKER:
            ends = [eom] if dialect.mode is Mode.PLAIN else [eop, bnc, err]
        else:
            ends = [eob] if dialect.mode is Mode.BATCH_SUPERVISOR else [eom, eob]
        return re.compile(b"|".join(re.escape(end) for end in ends if end))
