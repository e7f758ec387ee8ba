from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from etlstage.disk import make, sync_all
from etlstage.pipeline.delivery.folder import make_ours, opened


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Clear the umask, so that modes are exactly those asked for."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    """Return the permission bits."""
    return path.stat().st_mode & 0o777


@pytest.mark.usefixtures("no_umask")
def test_folder_and_its_parents_are_made_for_us_alone(tmp_path: Path) -> None:
    """Whatever the umask; existing folders are left as they are (issue 10)."""
    tmp_path.chmod(0o755)
    make(tmp_path / "a" / "b" / "c", 0o700)
    folders = [tmp_path, tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/c"]
    assert [mode(folder) for folder in folders] == [0o755, 0o700, 0o700, 0o700]


def test_names_of_new_folders_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each parent of a new folder is synced; without new ones nothing is (issue 14)."""
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.path.realpath(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    for _ in range(2):
        make(tmp_path / "a" / "b")
    assert synced == [str(tmp_path), str(tmp_path / "a")]


@pytest.mark.usefixtures("no_umask")
def test_file_is_made_for_us_alone(tmp_path: Path) -> None:
    """The file isn't inherited by child processes, either."""
    with opened(tmp_path / "x", os.O_RDWR | os.O_CREAT) as file:
        assert not os.get_inheritable(file.fileno())
    assert mode(tmp_path / "x") == 0o600


def test_folder_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner would decide what is read and loaded (issue 10)."""
    us = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    with pytest.raises(PermissionError) as caught:
        make_ours(tmp_path)
    said = f"the folder belongs to user {us}, but this process runs as {us + 1}"
    assert caught.value.strerror == said


@pytest.mark.parametrize("others", [0o720, 0o702, 0o777])
def test_folder_that_others_may_write_to_is_refused(
    tmp_path: Path, others: int
) -> None:
    """The error has the remedy (issue 10)."""
    tmp_path.chmod(others)
    with pytest.raises(PermissionError, match=f"mode {others:o}\\): chmod go-w it"):
        make_ours(tmp_path)
    tmp_path.chmod(0o755)
    make_ours(tmp_path)


def test_file_in_place_of_a_folder(tmp_path: Path) -> None:
    """The error is the system's own."""
    (tmp_path / "state").touch()
    with pytest.raises(NotADirectoryError):
        make_ours(tmp_path / "state")


def test_pipe_is_no_file(tmp_path: Path) -> None:
    """Opening it doesn't wait for the pipe's other end (issue 10)."""
    os.mkfifo(tmp_path / "pipe")
    with (
        pytest.raises(OSError, match="it is not a regular file"),
        opened(tmp_path / "pipe", os.O_RDONLY),
    ):
        pass


def test_folder_is_no_file(tmp_path: Path) -> None:
    """Whatever its name; the descriptor is closed again (issue 23)."""
    with (
        pytest.raises(OSError, match="it is not a regular file"),
        opened(tmp_path, os.O_RDONLY),
    ):
        pass


def test_what_is_no_file_is_not_made_durable(tmp_path: Path) -> None:
    """A link may be dangling, and opening a pipe would block (issue 14)."""
    (tmp_path / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    sync_all(tmp_path)
