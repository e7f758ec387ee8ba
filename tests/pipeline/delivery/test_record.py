from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from etlstage.errors import StateUnusable
from etlstage.pipeline.delivery.record import CommitRecord, fence_of

WHOLE = CommitRecord(
    fence=3,
    delivery="exactly-once",
    load="5f2d",
    run="a97b",
    epoch=17,
    position=["part", 4],
    ended=False,
    accounts={"extract": [0, 4], "clean": [4, 3]},
    letters={"clean": 10},
)


def test_what_is_stored_is_read(tmp_path: Path) -> None:
    """Without a file the record is empty, and reading creates no folder (issue 14)."""
    folder = tmp_path / "state"
    assert CommitRecord.latest(folder) == CommitRecord()
    assert not folder.exists()
    WHOLE.store(folder)
    assert CommitRecord.latest(folder) == WHOLE
    assert [path.name for path in folder.iterdir()] == ["record.3.json"]


def test_highest_fence_counts(tmp_path: Path) -> None:
    """A run that was taken over writes a record that is not read (issue 14)."""
    WHOLE.store(tmp_path)
    CommitRecord(fence=10, epoch=18).store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["record.10.json"]
    WHOLE.store(tmp_path)

    assert (fence_of(tmp_path), CommitRecord.latest(tmp_path).epoch) == (10, 18)


def test_record_that_is_not_in_its_place_does_not_count(tmp_path: Path) -> None:
    """A killed run leaves only a temporary file of its new record (issue 14)."""
    WHOLE.store(tmp_path)
    seen: list[tuple[str, int]] = []

    def look(step: str) -> None:
        seen.append((step, CommitRecord.latest(tmp_path).epoch))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CommitRecord(fence=3, epoch=18).store(tmp_path, look)
    assert seen == [("aside", 17)]
    assert (tmp_path / "record.3.new").exists()
    CommitRecord(fence=4, epoch=18).store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["record.4.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"epoch": "x"},
        {"load": "../x"},
        {"accounts": {"a": [None]}},
        {"output": 1},
        {"letters": {"a": "b"}},
        {"more": 1},
    ],
)
def test_record_that_can_not_be_understood(
    tmp_path: Path, change: dict[str, object]
) -> None:
    """The error names the file and the remedy (issue 14)."""
    WHOLE.store(tmp_path)
    path = tmp_path / "record.3.json"
    plain = json.loads(path.read_text())
    del plain["crc32"]  # the content is what is wrong
    path.write_text(json.dumps(plain | change))
    with pytest.raises(StateUnusable, match=f"can't read {path} .*set another state"):
        CommitRecord.latest(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "it is not a JSON object"),
        ("{}", "its format is None, expected 1"),
        ('{"format": 1, "enddd": true}', "its key 'enddd' is unknown"),
        ('{"format": 1, "load": 5}', "its values are not of the right types"),
        ('{"format": 1, "letters": [5]}', "its values are not of the right types"),
        (
            '{"format": 1, "accounts": {"a": 5}}',
            "its values are not of the right types",
        ),
        ('{"format": 1,', "Expecting .*"),
    ],
)
def test_reason_is_plain(tmp_path: Path, text: str, reason: str) -> None:
    """The remedy includes what another load would not remove (issue 23)."""
    path = tmp_path / "record.3.json"
    path.write_text(text)
    with pytest.raises(StateUnusable) as caught:
        CommitRecord.latest(tmp_path)
    assert re.fullmatch(
        rf"can't read {path} \({reason}\): to start from the beginning, remove what an"
        " interrupted load has written, and set another state",
        str(caught.value),
    )
    with pytest.raises(ValueError, match=reason):
        CommitRecord.of_note(text, fence=3)


@pytest.mark.parametrize("bit", [0, 4, 7])
def test_flipped_bit_is_found(tmp_path: Path, bit: int) -> None:
    """Wherever it is: another position, for example, loses messages (issue 23)."""
    WHOLE.store(tmp_path)
    path = tmp_path / "record.3.json"
    text = path.read_bytes()
    for at, byte in enumerate(text):
        path.write_bytes(text[:at] + bytes([byte ^ 1 << bit]) + text[at + 1 :])
        with pytest.raises(StateUnusable, match=f"can't read {path} "):
            CommitRecord.latest(tmp_path)


def test_wrong_checksum_is_reported(tmp_path: Path) -> None:
    """The error has the checksum that is stored, and that of the content (issue 23)."""
    WHOLE.store(tmp_path)
    path = tmp_path / "record.3.json"
    text = path.read_text()
    crc = json.loads(text)["crc32"]
    path.write_text(text.replace('["part", 4]', '["part", 5]'))
    with pytest.raises(
        StateUnusable, match=rf"\(its crc32 is {crc}, but its content has \d+\)"
    ):
        CommitRecord.latest(tmp_path)


@pytest.mark.parametrize(
    "position", [{2: "a", 10: "b"}, ("ü", 1e300, {"b": 1, "a": 2})]
)
def test_checksum_is_that_of_what_is_read(tmp_path: Path, position: object) -> None:
    """It is right for all that JSON can hold, in whatever layout (issue 23)."""
    replace(WHOLE, position=position).store(tmp_path)
    path = tmp_path / "record.3.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2))
    found = CommitRecord.latest(tmp_path).position
    assert found == json.loads(json.dumps(position))


def test_record_without_a_checksum_is_read(tmp_path: Path) -> None:
    """An earlier version has written it (issue 23)."""
    (tmp_path / "record.3.json").write_text(WHOLE.note)
    assert "crc32" not in WHOLE.note
    assert CommitRecord.latest(tmp_path) == WHOLE


def test_record_that_can_not_be_stored(tmp_path: Path) -> None:
    """The error has the file, the reason and what counts now (issue 14)."""
    (tmp_path / "state").touch()
    with pytest.raises(StateUnusable) as caught:
        WHOLE.store(tmp_path / "state")
    assert str(caught.value) == (
        f"can't store the record of epoch 17 in {tmp_path}/state/record.3.json: not a"
        " directory: the next run resumes from the record that is stored then; make"
        " room, or move the directory and set state to its new place"
    )
