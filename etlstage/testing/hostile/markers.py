"""The markers of the stage, as the supervisor gives them to us."""

from __future__ import annotations

import os

__all__ = ("MarkerBytes",)


class MarkerBytes:
    """The byte strings of the stage protocol."""

    def __init__(self) -> None:
        self.eom: bytes = _marker("EOM", r"\012")
        self.eop: bytes = _marker("EOP", r"\000")
        self.eob: bytes = _marker("EOB", r"\027")
        self.bnc: bytes = _marker("BNC", r"\005")
        self.err: bytes = _marker("ERR", "")  # a stage may have none


def _marker(name: str, default: str) -> bytes:
    text = os.environ.get(f"ETLSTAGE_{name}", default)
    return text.encode().decode("unicode_escape").encode("latin-1")
