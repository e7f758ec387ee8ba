"""How a message becomes a record of a shard, and what may be wrong with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from etlstage.shard.cut import (
    Cut,
    RecordRun,
    ShardRecord,
    number_of,
    place_of,
    wrong_key,
)

pytestmark = pytest.mark.core


def cut(**settings: Any) -> Cut:  # noqa: ANN401 - passed on
    """Return a cut into two shards by the user."""
    return Cut(2, "/user", **settings)


def test_columns_of_a_message() -> None:
    """They come from the pointers' places; a text value is its own partition key."""
    message = b'{"user": "ann", "n": "12", "at": "1970-01-01T00:00:02Z"}'
    found = cut(sequence="/n", arrival="/at").record(message, 7)
    assert found == ShardRecord(found.shard, "ann", 12, 2000)
    assert cut().record(message, 7) == ShardRecord(found.shard, "ann", 7)


def test_index_of_a_list_is_that_of_a_pointer() -> None:
    """It has no sign: there is no key (issue 22)."""
    wrong = Cut(2, "/-1").record(b'["ann"]').wrong
    assert wrong == "there is no partition key at /-1"


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("0", 0),
        ('"007"', 7),
        ("9" * 128, 10**128 - 1),
        ("1" + "0" * 128, None),
        ("9" * 5000, None),
        ("null", None),
        ("true", None),
        ("1.0", None),
        ("-1", None),
        ('""', None),
        ('"\\u0665"', None),
        ("[1]", None),
    ],
)
def test_sequence_number(value: str, number: int | None) -> None:
    """It is a decimal number or text, with at most 128 digits."""
    found = cut(sequence="/n").record(b'{"user": 1, "n": %b}' % value.encode())
    assert found.number == (-1 if number is None else number)
    assert bool(found.wrong) == (number is None)


@pytest.mark.parametrize(
    ("value", "milliseconds"),
    [
        ("1500", 1500),
        ('"1970-01-01T01:00:00+01:00"', 0),
        ('"1970-01-01 00:00:01.5"', 1500),
        ("null", None),
        ("true", None),
        ("-1", None),
        ('"yesterday"', None),
        ("1" + "0" * 200, None),
    ],
)
def test_arrival(value: str, milliseconds: int | None) -> None:
    """It is in milliseconds since 1970, or a timestamp, which is UTC without a zone."""
    found = cut(arrival="/at").record(b'{"user": 1, "at": %b}' % value.encode())
    assert found.arrival == milliseconds
    assert bool(found.wrong) == (milliseconds is None)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (
            {"n": 1},
            "there is no partition key at /user; correct it, or filter out such rows",
        ),
        ({"user": None, "n": 1}, "there is no partition key at /user; correct it"),
        (
            {"user": "x" * 257, "n": 1},
            "its partition key is 257 characters long, expected 1",
        ),
        (
            {"user": 1, "n": None},
            "its sequence number at /n is null, expected a decimal number of",
        ),
        ({"user": 1, "n": "x" * 99}, f'is "{"x" * 39}..., expected a decimal'),
        (
            {"user": 1, "n": 4},
            "its sequence number is 4, expected more than 4, that of the record",
        ),
    ],
)
def test_what_is_wrong_is_reported_with_its_place(
    record: dict[str, object], text: str
) -> None:
    """The error names the row, its shard, and the wrong value."""
    made = cut(sequence="/n")
    found = made.record(json.dumps(record).encode())
    wrong = made.wrong(found, 41, 4)
    assert wrong.startswith(f"shard {made.names[found.shard]}: row 42: ")
    assert text in wrong


def test_messages_that_are_no_json() -> None:
    """They have no columns; without pointers their hash serves as the key."""
    assert cut().record(b"[").wrong
    assert cut().record(b"[1]").wrong
    assert Cut(2).record(b"[", 3) == ShardRecord(1, "2ebb67f1", 3)
    assert not cut().record(b'{"user": "\\ud800"}').wrong


def test_columns_of_a_run() -> None:
    """There is an arrival column only if the records have arrivals."""
    run = RecordRun()
    run.add(b"a", ShardRecord(0, "k", 3, 5))
    run.add(b"b", ShardRecord(0, "l", 4, 6))
    assert (len(run), run.up_to(3), run.wrong) == (2, 1, ["", ""])
    assert run.run().columns == {
        "sequence": [3, 4],
        "partition": ["k", "l"],
        "arrival": [5, 6],
    }


def test_wrong_record_leaves_others_their_arrival() -> None:
    """Whichever of them is first in the run (issue 25)."""
    run = RecordRun()
    run.add(b"a", ShardRecord(0, "k", 3, None, "no arrival"), "no arrival")
    run.add(b"b", ShardRecord(0, "l", 4, 6))
    assert run.run().columns["arrival"] == [0, 6]


@pytest.mark.parametrize(
    ("position", "number"), [(["12", 0], 12), (["SHARD_END", 0], -1), (None, -1)]
)
def test_number_of_a_position(position: object, number: int) -> None:
    """A sentinel, such as the end of a shard, has no number."""
    assert number_of(position) == number


def test_places_of_records_of_an_aggregate() -> None:
    """They have one number, so the sub-sequence number orders them (issue 25)."""
    places = [place_of(position) for position in (None, ["9", 1], ["12", 0], ["12", 3])]
    assert places == sorted(places) == [(-1, 0), (9, 1), (12, 0), (12, 3)]


def test_longest_partition_key() -> None:
    """Kinesis allows 256 characters."""
    assert wrong_key("x" * 256) == ""
    text = "its partition key is 257 characters long, expected 1 to 256"
    assert wrong_key("x" * 257) == text
