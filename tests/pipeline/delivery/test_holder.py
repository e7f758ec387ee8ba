from __future__ import annotations

import os
from pathlib import Path

import pytest

from etlstage.pipeline.delivery.holder import Claim


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the locks in the test's own folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_output_is_one_runs(tmp_path: Path, temporary: Path) -> None:
    """Whatever path names it; other outputs are independent (issue 23)."""
    (tmp_path / "link").symlink_to(tmp_path / "out")
    first, second = Claim(tmp_path / "out"), Claim(tmp_path / "link")
    assert first.take() is None
    holder = second.take()
    assert holder is not None
    assert holder.pid == os.getpid()
    other = Claim(tmp_path / "others")
    assert other.take() is None
    first.release()
    first.release()
    assert second.take() is None
    second.release()
    other.release()
    assert [list(path.iterdir()) for path in temporary.iterdir()] == [[]]


def test_lock_that_its_holder_has_just_removed(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removed lock file counts for nothing: a new one is taken (issue 23)."""
    flock, calls = Claim.take.__globals__["fcntl"].flock, 0

    def removed(file: object, how: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            (path,) = next(temporary.iterdir()).iterdir()
            path.unlink()
        flock(file, how)

    monkeypatch.setattr("fcntl.flock", removed)
    claim = Claim(tmp_path / "out")
    assert claim.take() is None
    assert Claim(tmp_path / "out").take() is not None
    claim.release()


@pytest.mark.usefixtures("temporary")
def test_output_whose_path_is_not_utf8(tmp_path: Path) -> None:
    """It is claimed as any other (issue 23)."""
    path = tmp_path / os.fsdecode(b"out\xff")
    claim = Claim(path)
    assert claim.take() is None
    assert Claim(path).take() is not None
    claim.release()


def test_folder_of_locks_that_others_may_write_to(
    tmp_path: Path, temporary: Path
) -> None:
    """It is refused: a writer there would decide which run may load (issue 23)."""
    folder = temporary / f"etlstage-outputs-{os.geteuid()}"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(PermissionError):
        Claim(tmp_path / "out").take()
