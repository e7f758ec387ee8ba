"""
Test kits of dialects, for recordings, transcripts and checks.

A stage needs none of them. A dialect's kit is in the module with the dialect's name;
for a dialect of another package, an entry point names it. A dialect without a kit of
its own has a plain one: bytes as Python writes them, and a conversation in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Final, Generic, Protocol, TypeVar

from etlstage.protocol.base import Dialect, DialectSession, Limits, Side
from etlstage.protocol.events import Opened, Ready
from etlstage.protocol.registry import class_of_entry

__all__ = ("GROUP", "KITS", "DialectKit", "FrameReader", "kit_of", "ready", "shortened")


KITS: Final = {"marker": "MarkerKit", "cocaine": "CocaineKit", "kcl": "KclKit"}
"""Kits by the name of their dialect, which is also that of their module."""
GROUP: Final = "etlstage.testing.dialects"
"""Group of entry points by which other packages name the kits of their dialects."""

_LIMITS: Final = Limits()
_LONG: Final = 48  # bytes shown at most, half of them from the end

D_co = TypeVar("D_co", bound=Dialect, covariant=True)


class FrameReader(Protocol):
    """Renders what two sides send as text, where bytes mean nothing to a person."""

    def read(self, side: Side, data: bytes) -> list[str]:
        """Return texts for what a side has sent that ``data`` completes."""
        ...


class DialectKit(Generic[D_co]):
    """
    A plain test kit; a dialect's own kit overrides what it can do better.

    Args:
        dialect: The dialect, with its settings.

    """

    def __init__(self, dialect: D_co) -> None:
        self._dialect: Final = dialect

    def shown(self, data: bytes) -> str:
        """Return ``data`` as printable ASCII, with delimiters of messages by name."""
        return repr(data)[2:-1]

    def reader(self) -> FrameReader | None:
        """Return a reader that renders a conversation; None: :meth:`shown` does."""
        return None

    def unsolicited(self, data: bytes) -> str:
        """Return the error for a worker that wrote ``data`` when no reply was due."""
        return f"wrote unsolicited output: {self.shown(data)}"

    def cut(self, side: Side, data: bytes) -> list[bytes]:
        """
        Return what a side wrote, cut after each request or reply.

        One request and one reply are a turn. The last piece, which may be empty, is
        incomplete. Nothing is validated: the worker may have broken the protocol.
        """
        return [data]

    def exchanges(self, side: Side, data: bytes) -> list[bytes]:
        """Return what a side sent in each exchange, without what varies by run."""
        *pieces, rest = self.cut(side, data)
        return [*pieces, rest] if rest else pieces

    def raw(self, messages: Sequence[bytes]) -> bytes:
        """Return what a worker has to read for ``messages`` as its first exchange."""
        longest = max(map(len, messages), default=0)
        ours = ready(self._dialect, Limits(longest + 1))
        ours.send(Opened(1, messages, each=False), 0.0)
        return b"".join(ours.data_to_send())


def ready(dialect: Dialect, limits: Limits = _LIMITS) -> DialectSession:
    """Return our side of a conversation whose worker has reported ready."""
    ours, theirs = (dialect.open(side, limits) for side in Side)
    theirs.send(Ready(), 0.0)
    ours.receive_data(b"".join(theirs.data_to_send()), 0.0)
    ours.data_to_send()  # drops its answer to that, if any
    return ours


def shortened(data: bytes) -> str:
    """Return bytes as Python writes them, without the ``b``; of many, both ends."""
    if len(data) <= _LONG:
        return repr(data)[1:]
    half = _LONG // 2
    ends = repr(data[:half])[1:], repr(data[-half:])[1:]
    return f"{ends[0]}... {len(data):,} bytes ...{ends[1]}"


def kit_of(dialect: Dialect) -> DialectKit[Dialect]:
    """
    Return the kit of a dialect.

    Raises:
        ConfigError: If an entry point names what is not a kit.

    """
    name = dialect.name
    kit: type[DialectKit[Dialect]] | None
    if name in KITS:
        kit = getattr(import_module(f"{__package__}.{name}"), KITS[name])
    else:
        kit = class_of_entry(GROUP, name, DialectKit)
    return (kit or DialectKit)(dialect)
