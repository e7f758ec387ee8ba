"""Words for what travels."""

from __future__ import annotations

import pytest

from etlstage.messages import counted


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 messages"), (1, "1 message"), (2, "2 messages"), (4000, "4,000 messages")],
)
def test_a_count_is_told_with_its_noun(count: int, words: str) -> None:
    """One message is not "1 messages"."""
    assert counted(count, "message") == words
