from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from etlstage.config.loader import load
from tests.examples.conftest import Start
from tests.examples.languages import DEMO, PYTHONS, SHELLS, Language

each_shell = pytest.mark.parametrize("language", SHELLS, ids=str)
SDK = PYTHONS[1]


@cache
def extracted() -> Sequence[bytes]:
    """Return the records as Spark writes them: all text, and nothing for null."""
    with (DEMO / "birdstrikes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        json.dumps({name: text for name, text in row.items() if text}).encode()
        for row in rows
    ]


def answers(start: Start, language: Language, name: str) -> list[list[bytes]]:
    """Return the replies of a worker of the demo, per message that it was sent."""
    sent = extracted() if name == "clean.py" else cleaned(start)
    worker = start(language, DEMO / name)
    answer = worker.answer_to(
        b"".join(message + b"\n" for message in sent), until=b"\0", times=len(sent)
    )
    assert worker.finish() == (b"", 0)
    return [replies.split(b"\n")[:-1] for replies in answer.split(b"\0")[:-1]]


def cleaned(start: Start) -> list[bytes]:
    """Return what the first stage passes on to the second."""
    return [reply for replies in answers(start, SDK, "clean.py") for reply in replies]


def clean(
    start: Start, *changes: Mapping[str, str | None]
) -> Iterator[Mapping[str, Any] | None]:
    """Yield the first record cleaned, each time with other fields changed."""
    record = json.loads(extracted()[0])
    worker = start(SDK, DEMO / "clean.py")
    for change in changes:
        given = {name: text for name, text in {**record, **change}.items() if text}
        answer = worker.answer_to(json.dumps(given).encode() + b"\n", until=b"\0")
        reply = answer.removesuffix(b"\0")
        yield json.loads(reply) if reply else None


# --- The data set --------------------------------------------------------------------


def test_data_set_has_as_many_records_as_in_its_notice() -> None:
    """The report of a demo can be checked against a number that is known."""
    assert len(extracted()) == 4_000
    assert "| records in `birdstrikes.csv` | 4,000 |" in notice()


def notice() -> str:
    """Return the folder's notice about the data."""
    return (DEMO / "README.md").read_text()


def test_data_set_comes_with_its_source_and_licence() -> None:
    """Public domain, and it names the source."""
    assert "FAA Wildlife Strike Database" in notice()
    assert "public domain" in notice()


# --- clean.py ------------------------------------------------------------------------


def test_first_record_is_cleaned(start: Start) -> None:
    """Short names, numbers that are numbers, and the rest as it was."""
    (record,) = clean(start, {})
    assert record == {
        "date": "1990-01-08",
        "airport": "BARKSDALE AIR FORCE BASE ARPT",
        "state": "Louisiana",
        "operator": "MILITARY",
        "aircraft": "T-38A",
        "phase": "Climb",
        "time_of_day": "Day",
        "species": "Turkey vulture",
        "size": "Large",
        "speed_knots": 300,
        "damage": "none",
        "cost_usd": 0,
    }


DIRT = (
    ("Wildlife Species", "Unknown bird - small", "species", None),
    ("Aircraft Airline Operator", "UNKNOWN", "operator", None),
    ("Aircraft Airline Operator", "US AIRWAYS*", "operator", "US AIRWAYS"),
    ("Aircraft Make Model", "BE-90  KING", "aircraft", "BE-90 KING"),
    ("Speed IAS in knots", None, "speed_knots", None),
    ("Speed IAS in knots", "0", "speed_knots", None),
    ("Cost Total $", "144634", "cost_usd", 144_634),
    ("Effect Amount of damage", "Minor", "damage", "minor"),
)


def test_field_is_cleaned(start: Start) -> None:
    """Each kind of dirt that the data really has."""
    records = clean(start, *({title: text} for title, text, _, _ in DIRT))

    for (title, text, name, value), record in zip(DIRT, records, strict=True):
        assert record is not None
        assert record[name] == value, (title, text)


def test_record_without_a_level_of_damage_is_dropped(start: Start) -> None:
    """It gets no reply, only EOP."""
    assert [*clean(start, {"Effect Amount of damage": "C"})] == [None]


def test_seven_records_are_dropped(start: Start) -> None:
    """A record that is dropped is answered, so that the ledger knows of it."""
    replies = answers(start, SDK, "clean.py")

    assert Counter(map(len, replies)) == {0: 7, 1: 3_993}
    assert "a level of damage | 7 |" in notice()


# --- grade.sh ------------------------------------------------------------------------


@each_shell
def test_records_are_graded(start: Start, language: Language) -> None:
    """Each awk counts the same, and the notice shows how many of each grade."""
    before = [json.loads(record) for record in cleaned(start)]

    replies = answers(start, language, "grade.sh")

    assert {len(group) for group in replies} == {1}
    after = [json.loads(record) for (record,) in replies]
    grades = Counter(record.pop("grade") for record in after)
    assert after == before
    assert grades == {0: 3_580, 1: 211, 2: 69, 3: 133}
    assert "graded by `grade.sh` and loaded | 3,993 |" in notice()
    assert "grade 0, 1, 2, 3 | 3,580, 211, 69, 133 |" in notice()


GRADES = (
    (b"none", 0, 0),
    (b"none", 1, 1),
    (b"minor", 0, 1),
    (b"minor", 9_999, 1),
    (b"none", 10_000, 2),
    (b"medium", 0, 2),
    (b"medium", 99_999, 2),
    (b"none", 100_000, 3),
    (b"substantial", 0, 3),
)


@each_shell
def test_grade_is_the_worse_of_damage_and_cost(
    start: Start, language: Language
) -> None:
    """Both ends of each step."""
    worker = start(language, DEMO / "grade.sh")
    for damage, cost, grade in GRADES:
        head = b'{"damage":"%s","cost_usd":%d' % (damage, cost)

        answer = worker.answer_to(head + b"}\n", until=b"\0")

        assert answer == head + b',"grade":%d}\n\0' % grade


@each_shell
def test_text_that_looks_like_a_field_is_none(start: Start, language: Language) -> None:
    """Within a JSON text each quote has a backslash, so that no field begins there."""
    worker = start(language, DEMO / "grade.sh")
    text = json.dumps('"cost_usd":999999,"damage":"substantial"} \\').encode()
    head = b'{"airport":' + text + b',"damage":"none","cost_usd":0'

    answer = worker.answer_to(head + b"}\n", until=b"\0")

    assert answer == head + b',"grade":0}\n\0'


@each_shell
def test_record_without_its_fields_ends_the_grader(
    start: Start, language: Language
) -> None:
    """It shows which field is missing, and answers nothing that would be wrong."""
    worker = start(language, DEMO / "grade.sh")
    worker.write(b'{"damage":"none"}\n')

    assert worker.finish() == (b"", 1)
    assert "grade.sh: a record has no field cost_usd" in worker.stderr


# --- pipeline.yaml -------------------------------------------------------------------


def test_pipeline_is_one_that_the_loader_takes() -> None:
    """Two stages in two languages between a CSV file and Parquet."""
    pipeline, _ = load(DEMO / "pipeline.yaml")

    extract, target = pipeline.extract.end.given(), pipeline.load.end.given()
    assert extract["path"] == "birdstrikes.csv"
    assert [stage.stage.program.command for stage in pipeline.transform] == [
        ("python", "clean.py"),
        ("sh", "grade.sh"),
    ]
    assert target["mode"] == "overwrite"


def test_schema_has_the_fields_of_the_graded_records(start: Start) -> None:
    """In their order, so that no column stays empty and none is lost."""
    pipeline, _ = load(DEMO / "pipeline.yaml")
    schema = pipeline.load.end.given()["schema_"] or ""

    ((record,), *_) = answers(start, SHELLS[0], "grade.sh")

    columns = [re.fullmatch(r"(\w+) (\w+)", c) for c in schema.split(", ")]
    assert [column and column[1] for column in columns] == list(json.loads(record))
