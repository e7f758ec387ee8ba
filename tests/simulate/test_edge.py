"""Two halves of a pipeline and the journals between them: each dies, and goes on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final
from unittest.mock import patch

import pytest

from etlstage.journal import Journals
from etlstage.pipeline import journal_sink
from etlstage.pipeline.interfaces import Epochs
from etlstage.pipeline.journal_sink import JournalSink
from etlstage.testing import SimulationFailed
from tests.simulate.edge import any_halves, halves, simulate

pytestmark = pytest.mark.core

SOME: Final = range(40)


def test_each_message_passes_an_edge_once() -> None:
    """In a sample, wherever the halves, or the machine, break off (issue 24)."""
    simulate(halves, SOME)


def test_any_halves_load_as_they_promise() -> None:
    """Whatever stages, faults, ends that fail, drains and segments are drawn."""
    simulate(any_halves, SOME)


append_intents = journal_sink.append_intents


def forget(sink: JournalSink, epochs: Epochs) -> None:
    """Begin without what is recorded."""
    sink._once = epochs.once


def leave(journals: Journals, intents: Iterable[Any], *, stage: str) -> None:
    """Append what acknowledges an epoch, and force nothing to the disk."""
    with patch.object(Journals, "sync"):
        append_intents(journals, intents, stage=stage)


PLANTED = {
    "recorded intents are not appended at the start": (
        (JournalSink, "begin", forget),
        "is lost",
    ),
    "positions do not wait for intents": (
        (journal_sink, "append_intents", leave),
        "acknowledged before its intents are safe",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_found(name: str) -> None:
    """And by no seed where there is none (issue 24)."""
    bug, why = PLANTED[name]
    with patch.object(*bug), pytest.raises(SimulationFailed, match=why) as found:
        simulate(halves, SOME)
    simulate(halves, [found.value.seed])
