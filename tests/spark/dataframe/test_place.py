from __future__ import annotations

from pathlib import Path

import pytest

from etlstage.errors import StateUnusable
from etlstage.pipeline.delivery.folder import make
from etlstage.spark.dataframe.place import EpochFolders


def nothing() -> None:
    """Nobody has taken over."""


def lost() -> None:
    """Somebody has."""
    raise StateUnusable("taken over")


def written(folders: EpochFolders, number: int, text: str = "rows") -> None:
    """Write an epoch aside."""
    make(folders.aside(number))
    (folders.aside(number) / "part").write_text(text)


def names(path: Path) -> list[str]:
    """Return what is in a folder."""
    return sorted(entry.name for entry in path.iterdir())


def test_epoch_is_written_aside_and_renamed(tmp_path: Path) -> None:
    """Spark does not read what begins with a dot (issue 14)."""
    folders = EpochFolders(tmp_path, "ab12")
    written(folders, 1)
    assert names(tmp_path) == [".epoch=ab12-1.0"]
    folders.settle(1, replaces=False, check=nothing)
    folders.settle(2, replaces=False, check=nothing)
    assert names(tmp_path) == ["epoch=ab12-1"]
    assert folders.others() == []


def test_what_was_not_recorded_is_removed(tmp_path: Path) -> None:
    """Whole or not; and nothing of anybody else (issue 14)."""
    folders = EpochFolders(tmp_path / "out", "ab12")
    folders.sweep(0, check=nothing)
    for number in 1, 2, 10:
        written(folders, number)
        folders.settle(number, replaces=False, check=nothing)
    written(folders, 11)
    for name in "epoch=cd34-9", "mine":
        (tmp_path / "out" / name).mkdir()
    folders.sweep(2, check=nothing)
    left = ["epoch=ab12-1", "epoch=ab12-2", "epoch=cd34-9", "mine"]
    assert names(tmp_path / "out") == left
    assert sorted(path.name for path in folders.others()) == left[2:]


def test_starts_of_a_load_write_apart(tmp_path: Path) -> None:
    """Spark may go on with what another has begun that was taken over (issue 14)."""
    old, new = (EpochFolders(tmp_path, "ab12", start) for start in (1, 2))
    new.sweep(0, check=nothing)
    written(old, 1, "old")
    (old.aside(1) / "more").touch()
    written(new, 1, "new")
    new.settle(1, replaces=False, check=nothing)
    assert (tmp_path / "epoch=ab12-1" / "part").read_text() == "new"
    assert names(tmp_path / "epoch=ab12-1") == ["part"]
    EpochFolders(tmp_path, "ab12", 3).sweep(1, check=nothing)
    assert names(tmp_path) == ["epoch=ab12-1"]


def test_first_epoch_replaces_what_was_there(tmp_path: Path) -> None:
    """Where the mode says so, and nothing of its own (issue 14)."""
    folders = EpochFolders(tmp_path, "ab12")
    (tmp_path / "part-0").touch()
    (tmp_path / "epoch=cd34-9").mkdir()
    written(folders, 1)
    folders.settle(1, replaces=True, check=nothing)
    assert names(tmp_path) == ["epoch=ab12-1"]


def test_epoch_of_a_run_that_was_taken_over_is_replaced(tmp_path: Path) -> None:
    """By the one that has the fence, and by no other (issue 14)."""
    folders = EpochFolders(tmp_path, "ab12")
    written(folders, 1, "old")
    folders.settle(1, replaces=False, check=nothing)
    written(folders, 1, "new")
    (tmp_path / "mine").touch()
    with pytest.raises(StateUnusable):
        folders.settle(1, replaces=True, check=lost)
    with pytest.raises(StateUnusable):
        folders.sweep(0, check=lost)
    (tmp_path / "mine").unlink()
    assert (tmp_path / "epoch=ab12-1" / "part").read_text() == "old"
    folders.settle(1, replaces=False, check=nothing)
    assert (tmp_path / "epoch=ab12-1" / "part").read_text() == "new"
    assert names(tmp_path) == ["epoch=ab12-1"]


def test_epoch_and_mark_are_durable(tmp_path: Path, synced: list[Path]) -> None:
    """With the names of all folders that are new (issue 14)."""
    out = tmp_path / "new" / "out"
    folders = EpochFolders(out, "ab12")
    folders.aside(1).mkdir(parents=True)
    (folders.aside(1) / "part").write_text("rows")
    folders.settle(1, replaces=False, check=nothing)
    names = {out, out.parent, tmp_path}
    assert {folders.aside(1) / "part", folders.aside(1), *names} <= {*synced}
    synced.clear()
    folders.mark(whole=True)
    assert names <= {*synced}


def test_output_is_marked(tmp_path: Path) -> None:
    """When it is whole, also where there was nothing to write (issue 14)."""
    folders = EpochFolders(tmp_path / "out", "ab12")
    folders.mark(whole=False)
    folders.mark(whole=True)
    assert names(tmp_path / "out") == ["_SUCCESS"]
    folders.mark(whole=False)
    assert names(tmp_path / "out") == []
