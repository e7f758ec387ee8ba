from __future__ import annotations

import json
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
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StateUnusable, match=f"can't read {path} .*set another state"):
        CommitRecord.latest(tmp_path)


def test_record_that_can_not_be_stored(tmp_path: Path) -> None:
    """The error has the file, the reason and what counts now (issue 14)."""
    (tmp_path / "state").touch()
    with pytest.raises(StateUnusable) as caught:
        WHOLE.store(tmp_path / "state")
    assert str(caught.value) == (
        f"can't store the record of epoch 17 in {tmp_path}/state/record.3.json: not a"
        " directory: the next run resumes from the record that is stored then; make"
        " room, or set another state"
    )
