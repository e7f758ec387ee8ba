"""What tests know of dialect ``marker``: where markers are, all is known."""

from __future__ import annotations

import re
from collections.abc import Sequence

from etlstage.protocol.base import Side
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.testing.dialect.kit import DialectKit

__all__ = ("MarkerKit",)


class MarkerKit(DialectKit[MarkerDialect]):
    """Finds markers in bytes."""

    def shown(self, data: bytes) -> str:
        """Return ``data`` as printable ASCII, with the markers by name."""
        return self._dialect.markers.shown(data)

    def unsolicited(self, data: bytes) -> str:
        """Say what a worker did that wrote ``data`` although it owed nothing."""
        text = self._dialect.markers.unsolicited(data)
        if self._dialect.mode is Mode.BATCH_SUPERVISOR and self._dialect.eob_after_full:
            text += (
                "; for a worker that closes full batches by itself set"
                " dialect.eob_after_full: false"
            )
        return text

    def cut(self, side: Side, data: bytes) -> list[bytes]:
        """Return what a side wrote, cut behind each request or reply."""
        pieces, at = [], 0
        for end in self._ends(side).finditer(data):
            pieces.append(data[at : end.end()])
            at = end.end()
        return [*pieces, data[at:]]

    def blank(self, side: Side, data: bytes, *, last: bool = False) -> bytes:
        """Return what a side wrote with one byte for all that is no marker."""
        markers = self._dialect.markers
        used = b"".join(markers.named.values())
        filler = next(bytes([byte]) for byte in b"x-_oz" if byte not in used)
        spoken = markers if side is Side.WORKER else markers.without_err()
        marks = sorted(spoken.named.values(), key=len, reverse=True)
        parts = re.split(b"(%s)" % b"|".join(map(re.escape, marks)), data)
        if not last:
            begun = (mark[:n] for mark in marks for n in range(len(mark)))
            open_ = max(len(part) for part in begun if parts[-1].endswith(part))
            parts[-1] = parts[-1][: len(parts[-1]) - open_]
        parts[::2] = [filler * len(part) for part in parts[::2]]
        return b"".join(parts)

    def raw(self, messages: Sequence[bytes]) -> bytes:
        """Return the messages as a worker reads them."""
        dialect = self._dialect
        eom, eob = dialect.markers.eom, dialect.markers.eob
        wire = eom.join((*messages, b""))
        if dialect.mode is not Mode.BATCH_SUPERVISOR:
            return wire
        return wire + eob + (eom if dialect.eob_then_eom else b"")

    def _ends(self, side: Side) -> re.Pattern[bytes]:
        """Return what finds where a request ends, or a reply, or one more is wanted."""
        dialect = self._dialect
        eom, eop, eob, bnc, err = (marker or b"" for marker in dialect.markers)
        eob += eom * dialect.eob_then_eom
        # Where two of one direction differ, none is a part of the other.
        if side is Side.WORKER:
            ends = [eom] if dialect.mode is Mode.PLAIN else [eop, bnc, err]
        else:
            ends = [eob] if dialect.mode is Mode.BATCH_SUPERVISOR else [eom, eob]
        return re.compile(b"|".join(re.escape(end) for end in ends if end))
