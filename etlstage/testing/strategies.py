"""
Strategies for Hypothesis: messages, and what may go wrong with them.

They need the extra ``testing``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from hypothesis import strategies as st

from etlstage.protocol.marker import Markers
from etlstage.testing.fault import Fault, FaultKind, FaultPlan

__all__ = ("DEADLY", "HARMLESS", "fault_plans", "faults", "messages")

HARMLESS: Final = frozenset(
    {
        FaultKind.PAUSE,
        FaultKind.CUT,
        FaultKind.STDERR,
        FaultKind.LEAK,
        FaultKind.IGNORE_SIGTERM,
        FaultKind.GRANDCHILD,
    }
)
"""Kinds that keep no message from its right answer, if there is time enough."""

DEADLY: Final = frozenset(
    {
        FaultKind.KILL,
        FaultKind.SEGFAULT,
        FaultKind.ABORT,
        FaultKind.EXIT,
        FaultKind.PARTIAL,
    }
)
"""Kinds at which a worker is gone at once, without an answer."""

_SIZES: Final = {
    FaultKind.STDERR: 200_000,
    FaultKind.HUGE: 2_000_000,
    FaultKind.FLOOD: 1000,
    FaultKind.LEAK: 1_000_000,
}
_LATER: Final = frozenset(
    {FaultKind.NEVER_READY, FaultKind.IGNORE_SIGTERM, FaultKind.EXTRA_EOP}
)
"""Kinds that don't happen at messages."""
_POISON: Final = (b"poison",)


def messages(markers: Markers | None = None) -> st.SearchStrategy[bytes]:
    """
    Draw a message that may be sent with these markers, and back.

    It looks as much like them as it may: it begins, ends and continues as they do.
    """
    markers = markers or Markers()
    named = markers.named.values()
    parts = {marker[:n] for marker in named for n in range(1, len(marker))}
    parts |= {marker[n:] for marker in named for n in range(1, len(marker))}
    pieces = st.sampled_from([b"x", b"yy", b"\xc3\xa9", *sorted(parts)])
    free = st.binary(max_size=8)
    joined = st.lists(pieces | free, max_size=5).map(b"".join)
    return joined.filter(lambda message: _sendable(message, markers))


def faults(
    kinds: Collection[FaultKind] = frozenset(FaultKind),
    *,
    poison: Sequence[bytes] = _POISON,
) -> st.SearchStrategy[Fault]:
    """
    Draw a fault; it happens at some message, or in some start.

    Args:
        kinds: Which may be drawn.
        poison: Messages at which a fault may happen each time.

    Raises:
        ValueError: If there are no kinds.

    """
    if not kinds:
        raise ValueError("kinds is empty")
    when = st.one_of(
        st.fixed_dictionaries({"message": st.integers(1, 20)}),
        st.fixed_dictionaries(
            {"message": st.integers(1, 20), "start": st.integers(1, 3)}
        ),
        st.fixed_dictionaries({"probability": st.sampled_from([0.01, 0.05])}),
        st.fixed_dictionaries({"equals": st.sampled_from(list(poison))}),
    )
    start = st.fixed_dictionaries({"start": st.none() | st.integers(1, 3)})
    # In the order of the class, which is how they shrink.
    drawn = [kind for kind in FaultKind if kind in kinds]
    return st.sampled_from(drawn).flatmap(
        lambda kind: st.builds(_fault, st.just(kind), start if kind in _LATER else when)
    )


def fault_plans(
    kinds: Collection[FaultKind] = frozenset(FaultKind),
    *,
    poison: Sequence[bytes] = _POISON,
    max_faults: int = 3,
) -> st.SearchStrategy[FaultPlan]:
    """Draw a plan of at most ``max_faults`` faults; see :func:`faults`."""
    some = st.lists(faults(kinds, poison=poison), max_size=max_faults)
    return st.builds(FaultPlan, some.map(tuple), st.integers(0, 2**32 - 1))


def _fault(kind: FaultKind, when: dict[str, Any]) -> Fault:
    return Fault(kind, size=_SIZES.get(kind), **when)


def _sendable(message: bytes, markers: Markers) -> bool:
    """Return whether no marker begins in ``message``, its EOM behind it."""
    framed = message + markers.eom
    named = markers.named.values()
    return not any(0 <= framed.find(marker) < len(message) for marker in named)
