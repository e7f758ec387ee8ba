"""A dead letter as a line of JSON, and grouping letters by cause."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.errors import Attempt
from etlstage.pipeline.dead_letter.letter import Causes, DeadLetter, LetterGroup, folded

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
    load=TEXT,
)


@given(LETTERS)
def test_line_is_the_letter_as_json(letter: DeadLetter) -> None:
    """The hand-assembled line equals plain JSON, and is a single line."""
    line = letter.to_line()

    assert line.count(b"\n") == 1
    assert line.decode() == json.dumps(letter.to_dict()) + "\n"
    assert DeadLetter.from_line(line) == letter


LETTER = DeadLetter(
    id="r-1",
    time="2026-01-02T12:00:00.000+00:00",
    pipeline="p",
    run="r",
    stage="clean",
    place=0,
    message=b"m",
    error="no date in row 17",
    kind="Refused",
    attempts=(),
    config={},
)


ATTEMPT: dict[str, object] = {
    "worker": "clean-1",
    "pid": 7,
    "error": "died",
    "story": [],
    "stderr": [],
}


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: 5} for name in ("id", "time", "pipeline", "run", "stage", "error")),
        *({name: None} for name in ("kind", "config", "place", "attempts", "load")),
        *({"id": []}, {"config": []}, {"place": 1.5}, {"place": "1"}, {"pending": 1}),
        *({"attempts": [5]}, {"attempts": [[]]}, {"attempts": [{"worker": "clean-1"}]}),
        *({"attempts": [ATTEMPT | {name: 5.5}]} for name in ATTEMPT),
        *({"attempts": [ATTEMPT | {name: [5]}]} for name in ("story", "stderr")),
        *({"attempts": [ATTEMPT | {name: "text"}]} for name in ("story", "stderr")),
    ],
    ids=str,
)
def test_line_with_values_of_wrong_types_is_no_letter(wrong: dict[str, object]) -> None:
    """Each value of a dead letter has to have its type (issue 23)."""
    plain = LETTER.to_dict() | {"attempts": [ATTEMPT]}
    assert DeadLetter.from_line(json.dumps(plain).encode()).attempts[0].pid == 7
    with pytest.raises(ValueError, match=r"^not a dead letter: "):
        DeadLetter.from_line(json.dumps(plain | wrong).encode())


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("message is 70001 bytes long at offset 1,048,576", "message is # bytes long at offset #"),
        ("order 2026-01-02T12:00:00.5 is -3.5 days old", "order # is # days old"),
        ("row af32b1c9-17 and INV2024001", "row # and #"),
        ("key 123e4567-e89b-12d3-a456-426614174000", "key #"),
        ("at 0x7f3a: no int64 in column_2", "at #: no int64 in column_2"),
        ("exited with status 3 while it held 12 messages", "exited with status 3 while it held # messages"),
        ("'utf-8' codec can't decode byte 0xff in position 10", "'utf-8' codec can't decode byte # in position #"),
        ("stage s: worker s-2 (pid 4711) was killed by SIGSEGV; command: x", "was killed by SIGSEGV"),
        ("no date\nin line 2", "no date"),
        ("x" * 10_000, "x" * 300),
        ("", ""),
    ],
)  # fmt: skip
def test_numbers_and_ids_are_folded(error: str, cause: str) -> None:
    """Parts that differ from message to message don't separate causes (issue 11)."""
    assert folded(error) == cause


def test_letters_of_one_cause_are_one_group() -> None:
    """A group has a count, the first and last time, and an example's id (issue 11)."""
    causes = Causes()
    causes.add(replace(LETTER, stage="load"))
    for second in (7, 9, 8):
        time, why = f"2026-01-02T12:00:0{second}.000+00:00", f"no date in row {second}"
        causes.add(replace(LETTER, id=f"r-{second}", time=time, error=why))
    assert causes.groups() == [
        LetterGroup(
            stage="clean",
            kind="Refused",
            why="no date in row #",
            count=3,
            first="2026-01-02T12:00:07.000+00:00",
            last="2026-01-02T12:00:09.000+00:00",
            example="r-9",
        ),
        LetterGroup(
            "load", "Refused", "no date in row #", 1, LETTER.time, LETTER.time, "r-1"
        ),
    ]


def test_groups_are_bounded() -> None:
    """However many causes there are, memory stays bounded (issue 11)."""
    causes = Causes(most=2)
    for word in ("one", "two", "three", "four", "one"):
        causes.add(replace(LETTER, error=word))
    found = {group.why: group.count for group in causes.groups()}
    assert found == {"one": 2, "two": 1, "(other causes)": 2}
