"""Words that several errors have."""

from __future__ import annotations

from etlstage.errors import guess


def test_close_word_is_what_was_meant() -> None:
    """Only the closest one, and only if it is close."""
    assert guess("wokers", ["window", "workers"]) == " (did you mean 'workers'?)"
    assert guess("wokers", ["mode"]) == ""
    assert guess("wokers", []) == ""
