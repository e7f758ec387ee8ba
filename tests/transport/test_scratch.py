"""Folders that do not outlive who made them, and what the next one finds of the dead."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from etlstage.transport.descent import started_at
from etlstage.transport.scratch import _where, discard, make, scratch, sweep
from etlstage.transport.watchdog import WATCHDOG

US = os.getpid()
NOBODY = 1 << 30  # no pid is that large


def folder(place: Path, pid: int, start: int, *, kind: str = "spool") -> Path:
    """Make a folder as that process would have."""
    path = place / f"etlstage-{kind}-{pid}-{start}-{_where()}-abc_123"
    path.mkdir()
    (path / "message").write_text("secret")
    return path


def known(path: Path) -> bool:
    """Return whether the watchdog removes it."""
    return b">%s\n" % os.fsencode(path).hex().encode() in WATCHDOG._others


def test_folder_names_its_owner(tmp_path: Path) -> None:
    """It is ours alone, known to the watchdog, and gone behind its use (issue 10)."""
    path = make("spool", tmp_path)
    assert path.parent == tmp_path
    named = re.fullmatch(r"etlstage-spool-(\d+)-(\d+)-(\w{8})-\w+", path.name)
    assert named is not None
    assert (int(named[1]), int(named[2])) == (US, started_at(US))
    assert path.stat().st_mode & 0o777 == 0o700
    assert known(path)
    (path / "deep").mkdir()
    discard(path)
    assert not path.exists()
    assert not known(path)


def test_folder_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where temporary files are."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch("staging") as path:
        assert path.parent == tmp_path
        (path / "x").write_text("y")
    assert list(tmp_path.iterdir()) == []


def test_relative_folder_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog works elsewhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    path = make("spool", Path("here"))
    assert path.parent == tmp_path / "here"
    discard(path)


def test_what_the_dead_left_is_removed(tmp_path: Path) -> None:
    """Also if their pid is another's by now; the living keep theirs (issue 10)."""
    start = started_at(US)
    assert start is not None
    dead = folder(tmp_path, NOBODY, 1)
    recycled = folder(tmp_path, US, start - 1)
    ours = folder(tmp_path, US, start)
    others = [tmp_path / "etlstage-spool-abc", tmp_path / f"{dead.name}.old"]
    far = tmp_path / dead.name.replace(_where(), "0" * 8)
    for path in (*others, far):
        path.mkdir()
    link = tmp_path / dead.name.replace("abc", "link")
    link.symlink_to(others[0])
    file = tmp_path / dead.name.replace("abc", "file")
    file.write_text("x")
    discard(make("java", tmp_path))

    assert not dead.exists()
    assert not recycled.exists()
    assert all(path.exists() for path in (ours, *others, far, link, file))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_others_left_is_theirs(tmp_path: Path) -> None:
    """Root would be able to remove it."""
    path = folder(tmp_path, NOBODY, 1)
    os.chown(path, 12345, 12345)
    sweep(tmp_path)
    assert path.exists()


def test_table_in_a_warehouse_is_the_users(tmp_path: Path) -> None:
    """An empty warehouse is nobody's."""
    full = folder(tmp_path, NOBODY, 1, kind="warehouse")
    empty = folder(tmp_path, NOBODY, 2, kind="warehouse")
    (empty / "message").unlink()
    sweep(tmp_path)
    assert full.exists()
    assert not empty.exists()


def test_place_that_can_not_be_read_is_left_alone(tmp_path: Path) -> None:
    """It may be for writing only, or not there."""
    sweep(tmp_path / "nowhere")
