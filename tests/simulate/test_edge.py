"""Two halves of a pipeline with journals between them; each dies, and resumes."""

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
    """A sample of seeds: halves and the machine crash anywhere (issue 24)."""
    simulate(halves, SOME)


def test_any_halves_load_as_they_promise() -> None:
    """With any stages, faults, failing ends, drains and segment sizes."""
    simulate(any_halves, SOME)


append_intents = journal_sink.append_intents


def forget(sink: JournalSink, epochs: Epochs) -> None:
    """Begin without the recorded intents."""
    sink._once = epochs.once


def leave(journals: Journals, intents: Iterable[Any], *, stage: str) -> None:
    """Append an epoch's intents without syncing them."""
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
    """The seed that finds it passes without the bug (issue 24)."""
    bug, why = PLANTED[name]
    with patch.object(*bug), pytest.raises(SimulationFailed, match=why) as found:
        simulate(halves, SOME)
    simulate(halves, [found.value.seed])
