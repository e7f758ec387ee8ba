"""
Folders and files of a state directory, private to its user.

They describe data, and what is read from them decides what is read and loaded. So a
folder that belongs to somebody else, or that others may write to, is refused, no link
in it is followed, and what is made is for us alone, whatever the umask.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from etlstage.disk import make

__all__ = (
    "EDGES",
    "JOURNALS",
    "READER",
    "behind",
    "edge_folder",
    "edge_name",
    "make_inside",
    "make_ours",
    "opened",
)

EDGES: Final = "edge-*"
"""The state directories of what is behind durable edges, in that of the whole."""
JOURNALS: Final = "journals"
"""In such a folder, that of the journals of the edge."""
READER: Final = "behind"
"""What reads them is called there."""

_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


def edge_folder(state: str, stage: str) -> str:
    """Return the state directory of what is behind the durable edge of a stage."""
    return f"{state}/{EDGES.removesuffix('*')}{stage}"


def behind(state: Path) -> list[Path]:
    """Return the state directories of what is behind durable edges, in one."""
    try:
        return sorted(path for path in state.glob(EDGES) if path.is_dir())
    except OSError:  # there can't be such a folder: its name is too long
        return []


def edge_name(stage: str) -> str:
    """Return what both ends at the edge are called: no stage has a slash."""
    return f"{stage}/edge"


def make_ours(folder: Path) -> None:
    """
    Do as :func:`~etlstage.disk.make`, for us alone, and assert that the folder is ours.

    Raises:
        OSError: If it can't be made, is somebody else's, or others may write to it.

    """
    make(folder, 0o700)
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if found.st_uid != os.geteuid():
        raise PermissionError(
            errno.EPERM,
            f"the folder belongs to user {found.st_uid}, and we are {os.geteuid()}",
        )
    if found.st_mode & _OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(
            errno.EPERM,
            f"others may write to the folder (mode {mode:o}): chmod go-w it",
        )


def make_inside(folder: Path) -> None:
    """
    Do as :func:`make_ours` with a folder in a state directory, which is no link.

    Raises:
        OSError: As there, or if it is one.

    """
    if folder.is_symlink():
        raise OSError(errno.ELOOP, f"{folder.name} is a link, which is not followed")
    make_ours(folder)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[BinaryIO]:
    """
    Open a file that is no link, and no pipe either; a new one is for us alone.

    Args:
        path: The file.
        flags: As ``os.open`` takes them.

    Raises:
        OSError: If that can't be done.

    """
    # Without waiting: to open a named pipe is to wait for its other end.
    safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags | safe, 0o600)
    # Python opens no folder, and leaves it to us to close that.
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file")
    reads = flags & os.O_ACCMODE == os.O_RDONLY
    with open(fd, "rb") if reads else open(fd, "r+b") as file:
        yield file
