from __future__ import annotations

import stat
from pathlib import Path

import pytest

from etlstage.errors import SourceFailed
from etlstage.pipeline.delivery.position import PositionFile


def test_nothing_stored_is_none(tmp_path: Path) -> None:
    """And loading creates no folder."""
    assert PositionFile(tmp_path / "state", "read").load() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("position", [0, 12, "2020-01-01", None, {"a": [1, 2.5]}])
def test_what_is_stored_is_loaded(tmp_path: Path, position: object) -> None:
    """Also by another object, as after a restart; the last position counts."""
    PositionFile(tmp_path, "read").store(-1)
    PositionFile(tmp_path, "read").store(position)

    assert PositionFile(tmp_path, "read").load() == position
    assert PositionFile(tmp_path, "other").load() is None


def test_folder_is_for_us_alone(tmp_path: Path) -> None:
    """Positions may reveal data; parent folders are created, too."""
    folder = tmp_path / "a" / "b"
    PositionFile(folder, "read").store(1)

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == ["read.position.json"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", '"position"', "\xff", '{"other": 1}'),
        '{"position": ' + "[" * 100_000,
    ],
)
def test_file_that_can_not_be_understood(tmp_path: Path, text: str) -> None:
    """The error names the stage, the file and the remedy."""
    file = tmp_path / "read.position.json"
    file.write_text(text, "latin-1")

    with pytest.raises(SourceFailed) as caught:
        PositionFile(tmp_path, "read").load()
    assert str(caught.value).startswith(
        f"stage read: can't read the position in {file} ("
    )
    assert str(caught.value).endswith("; remove the file to start from the beginning")
    assert caught.value.stage == "read"


def test_folder_that_can_not_be_made(tmp_path: Path) -> None:
    """The error has the file and the system's error."""
    (tmp_path / "state").write_text("a file")

    with pytest.raises(
        SourceFailed,
        match=r"stage read: can't store the position in \S+/state/read.position.json:"
        r" (file exists|not a directory)$",
    ):
        PositionFile(tmp_path / "state", "read").store(1)


def test_file_that_can_not_be_opened(tmp_path: Path) -> None:
    """The system's error, without the advice to remove a file that isn't there."""
    (tmp_path / "state").write_text("a file")

    with pytest.raises(SourceFailed) as caught:
        PositionFile(tmp_path / "state", "read").load()
    file = tmp_path / "state" / "read.position.json"
    assert str(caught.value) == (
        f"stage read: can't read the position in {file}: not a directory"
    )


def test_failed_store_keeps_the_old_position(tmp_path: Path) -> None:
    """A position that isn't JSON is a bug of the source, and must do no harm."""
    file = PositionFile(tmp_path, "read")
    file.store(1)
    with pytest.raises(TypeError, match="not JSON serializable"):
        file.store(object())

    assert PositionFile(tmp_path, "read").load() == 1


def test_position_is_not_stored_if_it_can_not_be_read_again(tmp_path: Path) -> None:
    """The error has the limit, and the old position stays (issue 23)."""
    file, empty = PositionFile(tmp_path, "read"), len('{"position": ""}')
    longest = "x" * (16 * 1024 * 1024 - empty)
    file.store(longest)
    with pytest.raises(
        SourceFailed,
        match=r"it would have 16,777,217 bytes, expected no more than 16,777,216$",
    ):
        file.store(f"{longest}x")

    assert file.load() == longest


def test_name_with_a_dot_is_kept_apart(tmp_path: Path) -> None:
    """The temporary file of one stage is never that of another."""
    names = ["a", "a.b", "a.new", "a.position"]
    for number, name in enumerate(names):
        PositionFile(tmp_path, name).store(number)

    assert [PositionFile(tmp_path, name).load() for name in names] == [0, 1, 2, 3]


def test_file_of_a_run_that_was_killed_is_replaced(tmp_path: Path) -> None:
    """If its temporary file is a link, the link's target is untouched (issue 10)."""
    other = tmp_path / "other"
    other.write_text("theirs")
    folder = tmp_path / "state"
    file = PositionFile(folder, "read")
    file.store(1)
    (folder / "read.position.new").symlink_to(other)
    file.store(2)

    assert (file.load(), other.read_text()) == (2, "theirs")


def test_link_is_not_followed(tmp_path: Path) -> None:
    """Otherwise another user could decide where reading resumes (issue 10)."""
    (tmp_path / "other").write_text('{"position": 7}')
    PositionFile(tmp_path, "read").path.symlink_to(tmp_path / "other")

    with pytest.raises(SourceFailed, match="too many levels of symbolic links"):
        PositionFile(tmp_path, "read").load()
