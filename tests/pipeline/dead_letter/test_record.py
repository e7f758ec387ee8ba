"""A dead letter as a line of JSON, and back."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from etlstage.errors import Attempt
from etlstage.pipeline.dead_letter.record import DeadLetter

TEXT = st.text()
ATTEMPTS = st.builds(
    Attempt,
    worker=TEXT,
    pid=st.integers(0, 2**22),
    error=TEXT,
    story=st.lists(TEXT, max_size=2).map(tuple),
    stderr=st.lists(TEXT, max_size=2).map(tuple),
)
LETTERS = st.builds(
    DeadLetter,
    id=TEXT,
    time=TEXT,
    pipeline=TEXT,
    run=TEXT,
    stage=TEXT,
    place=st.integers(0, 2**40),
    message=st.binary(),
    error=TEXT,
    kind=TEXT,
    attempts=st.lists(ATTEMPTS, max_size=2).map(tuple),
    config=st.dictionaries(TEXT, st.none() | st.integers() | TEXT, max_size=2),
)


@given(LETTERS)
def test_line_is_the_letter_as_json(letter: DeadLetter) -> None:
    """Put together by hand, it says what plain JSON says; and it is one line."""
    line = letter.to_line()

    assert line.count(b"\n") == 1
    assert line.decode() == json.dumps(letter.to_dict()) + "\n"
    assert DeadLetter.from_line(line) == letter
