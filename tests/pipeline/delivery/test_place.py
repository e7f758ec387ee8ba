from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.disk import make
from etlstage.errors import StateUnusable
from etlstage.pipeline.delivery.place import (
    UNRECORDED,
    EpochFiles,
    has_output,
    same_output,
)


def nothing() -> None:
    """Check that the run was not taken over: it was not."""


def lost() -> None:
    """Check that the run was not taken over: it was."""
    raise StateUnusable("taken over")


def written(files: EpochFiles, number: int, text: str = "rows", *at: str) -> None:
    """Write an epoch's temporary files, in a partition if one is given."""
    folder = files.aside(number).joinpath(*at)
    make(folder)
    (folder / "part-0.parquet").write_text(text)
    (folder / ".part-0.parquet.crc").touch()


def load(files: EpochFiles, number: int, text: str = "rows", *at: str) -> None:
    """Load an epoch up to the point where it is recorded."""
    written(files, number, text, *at)
    files.seal(number, always=False, check=nothing)


def names(path: Path) -> list[str]:
    """Return the relative paths of all files below a folder."""
    found = [Path(at, name) for at, _, names in os.walk(path) for name in names]
    return sorted(str(file.relative_to(path)) for file in found)


def test_epoch_is_moved_behind_its_record(tmp_path: Path) -> None:
    """Until then a dot hides it from Spark, rows and columns alike (issue 23)."""
    files = EpochFiles(tmp_path, "ab12")
    written(files, 1)
    assert [path.name for path in tmp_path.iterdir()] == [".epoch=ab12-1.0"]
    files.seal(1, always=False, check=nothing)
    assert [path.name for path in tmp_path.iterdir()] == [".epoch=ab12-1"]
    files.seal(2, always=False, check=nothing)
    for number in 1, 1, 2:
        files.move(number, replaces=False, check=nothing)
    assert names(tmp_path) == ["part-ab12-1-0.parquet"]
    assert not files.others()
    load(files, 2, "rows", "day=1", "hour=2")
    files.move(2, replaces=False, check=nothing)
    partition = "day=1/hour=2/part-ab12-2-0.parquet"
    assert names(tmp_path) == [partition, "part-ab12-1-0.parquet"]
    assert not files.others()


def test_what_was_not_recorded_is_removed(tmp_path: Path) -> None:
    """Complete or not, moved or not; other loads' files stay (issues 14, 23)."""
    files = EpochFiles(tmp_path / "out", "ab12")
    assert files.sweep(0, check=nothing) == []
    assert not files.others()
    for number in 1, 2, 10:
        load(files, number, "rows", f"day={number}")
    files.move(10, replaces=False, check=nothing)
    written(files, 11)
    (tmp_path / "out" / "part-cd34-9-0.parquet").touch()
    (tmp_path / "out" / "empty").mkdir()
    assert files.sweep(2, check=nothing) == [1, 2]
    left = {"part-cd34-9-0.parquet", "empty", ".epoch=ab12-1", ".epoch=ab12-2"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == left
    assert files.others()


def test_starts_of_a_load_write_apart(tmp_path: Path) -> None:
    """Spark may still be writing for a start that was taken over (issue 14)."""
    old, new = (EpochFiles(tmp_path, "ab12", start) for start in (1, 2))
    new.sweep(0, check=nothing)
    written(old, 1, "old")
    (old.aside(1) / "part-more").touch()
    load(new, 1, "new")
    new.move(1, replaces=False, check=nothing)
    EpochFiles(tmp_path, "ab12", 3).sweep(1, check=nothing)
    assert names(tmp_path) == ["part-ab12-1-0.parquet"]
    assert (tmp_path / "part-ab12-1-0.parquet").read_text() == "new"


@pytest.mark.parametrize("rows", [True, False])
def test_first_epoch_replaces_what_was_there(tmp_path: Path, *, rows: bool) -> None:
    """In a mode that replaces: after the record, and not its own files (issue 14)."""
    files = EpochFiles(tmp_path, "ab12")
    (tmp_path / "part-0").touch()
    for name in ("epoch=cd34-9", "empty", "day=1"):
        (tmp_path / name).mkdir()
    (tmp_path / "day=1" / "part-cd34-1-0").touch()
    (tmp_path / "epoch=cd34-9" / "part-0").touch()
    if rows:
        written(files, 1, "rows", "day=1")
    files.seal(1, always=True, check=nothing)
    assert (tmp_path / "part-0").exists()
    files.move(1, replaces=True, check=nothing)
    files.move(1, replaces=True, check=nothing)
    assert names(tmp_path) == (["day=1/part-ab12-1-0.parquet"] if rows else [])
    assert len(list(tmp_path.iterdir())) == rows


def test_epoch_of_a_run_that_was_taken_over_is_replaced(tmp_path: Path) -> None:
    """Only by the run that holds the fence (issue 14)."""
    files = EpochFiles(tmp_path, "ab12")
    load(files, 1, "old")
    written(files, 1, "new")
    (tmp_path / "mine").touch()
    for call in (
        lambda: files.seal(1, always=False, check=lost),
        lambda: files.move(1, replaces=True, check=lost),
        lambda: files.sweep(0, check=lost),
    ):
        with pytest.raises(StateUnusable):
            call()
    assert (tmp_path / "mine").exists()
    assert (tmp_path / ".epoch=ab12-1" / "part-0.parquet").read_text() == "old"
    files.seal(1, always=False, check=nothing)
    files.move(1, replaces=False, check=nothing)
    assert (tmp_path / "part-ab12-1-0.parquet").read_text() == "new"
    with pytest.raises(StateUnusable):
        files.sweep(0, check=lost)


class Killed(Exception):
    """Stand-in for the end of the process."""


@contextmanager
def _counted(left: int, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Raise Killed at the ``left``-th rename or removal; 0: never."""
    count = 0

    def counting(real: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object, **more: object) -> None:
            nonlocal count
            count += 1
            if count == left:
                raise Killed
            real(*arguments, **more)

        return call

    for name in ("rename", "unlink", "rmdir"):
        patch.setattr(os, name, counting(getattr(os, name)))
    with suppress(Killed):
        yield


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.lists(st.integers(1, 12), max_size=4),
    st.booleans(),
)
def test_moves_that_break_off_are_finished(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[int],
    kills: list[int],
    replaces: bool,
) -> None:
    """Wherever and however often they stop, each file is there once (issue 23)."""
    out = tmp_path_factory.mktemp("out")
    files = EpochFiles(out, "ab12")
    (out / "old").touch()
    for number, part in enumerate(parts):
        folder = files.aside(1) / f"p={part}"
        make(folder)
        (folder / f"part-{number}").write_text(str(number))
    files.seal(1, always=True, check=nothing)
    for left in [*kills, 0]:
        with pytest.MonkeyPatch.context() as patch, _counted(left, patch):
            for number in EpochFiles(out, "ab12").sweep(1, check=nothing):
                files.move(number, replaces=replaces, check=nothing)
    wanted = [f"p={part}/part-ab12-1-{n}" for n, part in enumerate(parts)]
    assert names(out) == sorted([*wanted, *(() if replaces else ("old",))])


def test_epoch_and_mark_are_durable(tmp_path: Path, synced: list[Path]) -> None:
    """As are the names of all new folders (issue 14)."""
    out = tmp_path / "new" / "out"
    files = EpochFiles(out, "ab12")
    load(files, 1, "rows", "day=1")
    aside = files.aside(1)
    above = {out, out.parent, tmp_path}
    assert {aside / "day=1" / "part-0.parquet", aside, *above} <= {*synced}
    synced.clear()
    files.move(1, replaces=False, check=nothing)
    assert {out / "day=1", out} <= {*synced}
    synced.clear()
    files.mark(whole=True)
    assert above <= {*synced}


def test_mark_that_is_removed_does_not_come_back(
    tmp_path: Path, synced: list[Path]
) -> None:
    """Not in a power failure, either; without a mark nothing is synced (issue 23)."""
    files = EpochFiles(tmp_path, "ab12")
    files.mark(whole=True)
    synced.clear()
    for _ in range(2):
        files.mark(whole=False)
        assert synced == [tmp_path]


def test_output_is_marked(tmp_path: Path) -> None:
    """When it is complete, even if there was nothing to write (issue 14)."""
    files = EpochFiles(tmp_path / "out", "ab12")
    files.mark(whole=False)
    files.mark(whole=True)
    assert names(tmp_path / "out") == ["_SUCCESS"]
    files.mark(whole=False)
    assert names(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        ("text a", "text ../a", True),
        ("text a", "text file:link", True),
        ("text c:/d", "text b", True),
        ("text a", "json a", False),
        ("text a", "text b", False),
        ("text a", "text gone/a", False),
        ("text gone/a", "text b/a", False),
    ],
)
def test_outputs_are_the_same_where_their_paths_lead_to_the_same_place(
    tmp_path: Path, before: str, now: str, *, same: bool
) -> None:
    """One that is gone may be on a disk that is not mounted (issue 23)."""
    here = tmp_path / "here"
    for name in ("a", "b/a", "c:"):
        (here / name).mkdir(parents=True)
    (here / "c:" / "d").symlink_to(here / "b")
    (tmp_path / "a").symlink_to(here / "a")
    (here / "link").symlink_to(here / "a")
    outputs = [
        f"{kind} {scheme}{':' if scheme else ''}{here / path}"
        for kind, _, place in (before.partition(" "), now.partition(" "))
        for scheme, path in [("file", place[5:]) if "file:" in place else ("", place)]
    ]
    assert same_output(*outputs) is same


def test_outputs_that_are_no_paths_are_compared_as_they_are() -> None:
    """On other machines and in databases, and with a relative path (issue 23)."""
    for kind, place in (("text", "s3a://b/gone"), ("table", "gone"), ("sink", "load")):
        assert same_output(f"{kind} {place}", f"{kind} {place}")
        assert not same_output(f"{kind} {place}", f"{kind} elsewhere/{place}")


def test_hidden_names_are_no_output(tmp_path: Path) -> None:
    """A mark, what is being written, and an empty folder (issue 23)."""
    path = tmp_path / "out"
    assert not has_output(path)
    for name in ("", ".epoch=a-1.1", "_SUCCESS", "_temporary"):
        (path / name).mkdir(parents=True)
        assert not has_output(path)
    for name in ("_part=1", "part-0.txt"):
        (path / name).touch()
        assert has_output(path)
        assert has_output(path / name)
        (path / name).unlink()


def test_epochs_that_are_to_be_moved_are_output_of_others(tmp_path: Path) -> None:
    """But not those that no record has: nothing moves them (issue 23)."""
    files, other = EpochFiles(tmp_path, "ab12"), EpochFiles(tmp_path, "cd34")
    for mine in (files, EpochFiles(tmp_path, f"{UNRECORDED}1a")):
        load(mine, 1)
    written(other, 1)
    assert not files.others(hidden=False)
    other.seal(1, always=False, check=nothing)
    assert files.others(hidden=False)
    assert has_output(tmp_path, sealed=True)
    assert not has_output(tmp_path)
