"""Sharded loads, whose runners, workers and tables fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from unittest.mock import patch

import pytest

from etlstage.shard.sink import ShardedSink
from etlstage.shard.table import MemoryLeases
from etlstage.shard.worker import ShardSink, ShardWorker
from etlstage.testing import SimulationFailed
from tests.simulate.shards import any_runners, simulate

pytestmark = pytest.mark.core

SOME: Final = range(40)


def test_runners_lose_no_record() -> None:
    """Runners and workers may die, drain or join, and requests may fail (issue 25)."""
    simulate(any_runners, SOME)


def swap(table: MemoryLeases, before: Any, after: Any, *_: object) -> bool:  # noqa: ANN401
    """Replace a row, even if another runner has written it meanwhile."""
    table._rows[before.shard] = after
    return True


async def nothing(*_: object) -> None:
    """Do nothing."""


PLANTED: Final[dict[str, tuple[type, str, Callable[..., Any], str]]] = {
    "what was given up is not noted": (
        *(ShardWorker, "_note_failure", lambda *_: None),
        "was not processed",
    ),
    "it is not durable when a lease is written": (
        *(ShardSink, "_sync_letters", nothing),
        "was not processed",
    ),
    "it is not settled for the file": (
        *(ShardedSink, "_keep_given_up", nothing),
        "was not processed",
    ),
    "a lease is written over that of another": (
        *(MemoryLeases, "swap", swap),
        "not committed|goes back|the table has|was not processed",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_found(name: str) -> None:
    """The seed that finds it passes without the bug."""
    of, attribute, bug, why = PLANTED[name]
    with (
        patch.object(of, attribute, bug),
        pytest.raises(SimulationFailed, match=why) as found,
    ):
        simulate(any_runners, range(400))
    simulate(any_runners, [found.value.seed])
