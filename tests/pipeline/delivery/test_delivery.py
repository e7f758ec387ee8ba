from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from etlstage.errors import StateUnusable
from etlstage.pipeline.delivery.delivery import LOCK, Delivery


def test_state_directory_is_held_by_one_run(tmp_path: Path) -> None:
    """The other is told who has it; when he lets it go it is free (issue 10)."""
    folder = tmp_path / "a" / "state"
    with (
        Delivery(folder),
        pytest.raises(StateUnusable) as caught,
        Delivery(folder),
    ):
        pass
    assert re.fullmatch(
        rf"another run uses the state directory {folder} \(pid {os.getpid()} on"
        rf" {socket.gethostname()}, since \d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00\):"
        r" wait until it has ended, or set another state",
        str(caught.value),
    )
    with Delivery(folder):
        pass
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("text", ["", "x", "[" * 5000, '{"pid": "me"}'])
def test_holder_who_can_not_be_read_is_left_out(tmp_path: Path, text: str) -> None:
    """What stands in the file decides nothing."""
    with Delivery(tmp_path):
        (tmp_path / LOCK).write_text(text)
        with (
            pytest.raises(StateUnusable, match=f"directory {tmp_path}: wait until"),
            Delivery(tmp_path),
        ):
            pass


def test_shorter_holder_replaces_a_longer_one(tmp_path: Path) -> None:
    """Nothing of him is left behind."""
    (tmp_path / LOCK).write_text("x" * 1000)
    with Delivery(tmp_path):
        assert (tmp_path / LOCK).read_text().endswith('"}')
        assert (tmp_path / LOCK).read_text().startswith('{"pid": ')


def test_lock_is_not_for_workers(tmp_path: Path) -> None:
    """Whoever outlives us does not hold it (issue 10)."""
    with Delivery(tmp_path):
        held = [
            int(fd)
            for fd in os.listdir("/proc/self/fd")
            if os.path.realpath(f"/proc/self/fd/{fd}") == str(tmp_path / LOCK)
        ]
        assert [os.get_inheritable(fd) for fd in held] == [False]


def test_state_directory_that_can_not_be_ours(tmp_path: Path) -> None:
    """The text has the folder and the reason; nothing is held then."""
    (tmp_path / "state").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name, why in ("state", "not a directory"), ("open", "others may write to"):
        with (
            pytest.raises(StateUnusable, match=f"directory {tmp_path}/{name}: {why}"),
            Delivery(tmp_path / name),
        ):
            pass
    (tmp_path / LOCK).symlink_to(tmp_path / "other")
    with pytest.raises(StateUnusable, match="symbolic links"), Delivery(tmp_path):
        pass
    assert not (tmp_path / "other").exists()
