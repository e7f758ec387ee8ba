"""A pipeline cut at a durable edge, run by processes that die and are taken over."""

from __future__ import annotations

from typing import Any, Final
from unittest.mock import patch

import pytest

from etlstage.journal import MemoryStorage
from etlstage.testing import SimulationFailed
from tests.simulate.divided import MemoryEdge, any_divided, simulate

pytestmark = pytest.mark.core

SOME: Final = range(40)


def test_cut_pipeline_loads_as_it_promises() -> None:
    """Whole or in halves, killed, drained, started twice, or taken over (issue 24)."""
    simulate(any_divided, SOME)


def wait(edge: MemoryEdge) -> bool:
    """Only check whether the half before the edge is running."""
    return not edge._whole._held(edge.before)


hold = MemoryStorage.hold


def keep(storage: MemoryStorage, path: str, *, take: bool = False) -> int | None:
    """Take no lock over from another holder."""
    return None if take else hold(storage, path)


PLANTED: Final[dict[str, tuple[tuple[type, str, Any], str]]] = {
    "what is recorded is not committed before the other half ends": (
        (MemoryEdge, "acknowledge", wait),
        "is lost|LedgerImbalance|the load is not over|no start",
    ),
    "a reader is not taken over": (
        (MemoryStorage, "hold", keep),
        "is in use by process",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_found(name: str) -> None:
    """The seed that finds it passes without the bug (issue 24)."""
    bug, why = PLANTED[name]
    with patch.object(*bug), pytest.raises(SimulationFailed, match=why) as found:
        simulate(any_divided, range(400))
    simulate(any_divided, [found.value.seed])
