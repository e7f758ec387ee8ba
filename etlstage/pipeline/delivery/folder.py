"""
Folders and files of a state directory, private to its user.

They describe data, and their content decides what is read and loaded. So a folder that
belongs to another user, or that others may write to, is refused; no link in it is
followed; and new files and folders are private to us, whatever the umask.
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
    "WAITING",
    "behind",
    "edge_folder",
    "edge_name",
    "make_inside",
    "make_ours",
    "opened",
)

WAITING: Final = ("spool-*", "staging-*")
"""Patterns of where messages wait that were read, or made by stages."""
EDGES: Final = "edge-*"
"""The state directories of the parts after durable edges, in the pipeline's own."""
JOURNALS: Final = "journals"
"""The folder of an edge's journals, in such a state directory."""
READER: Final = "behind"
"""The name of the journals' reader."""

_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


def edge_folder(state: str, stage: str) -> str:
    """Return the state directory of the part after a stage's durable edge."""
    return f"{state}/{EDGES.removesuffix('*')}{stage}"


def behind(state: Path) -> list[Path]:
    """Return the state directories, in ``state``, of the parts after durable edges."""
    try:
        return sorted(path for path in state.glob(EDGES) if path.is_dir())
    except OSError:  # there can't be such a folder: its name is too long
        return []


def edge_name(stage: str) -> str:
    """Return the name of both ends at an edge; its slash is in no stage's name."""
    return f"{stage}/edge"


def make_ours(folder: Path) -> None:
    """
    Create a private folder with :func:`~etlstage.disk.make`; assert that it is ours.

    Raises:
        OSError: If it can't be created, is another user's, or others may write to it.

    """
    make(folder, 0o700)
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if found.st_uid != os.geteuid():
        raise PermissionError(
            errno.EPERM,
            f"the folder belongs to user {found.st_uid}, but this process runs as"
            f" {os.geteuid()}",
        )
    if found.st_mode & _OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(
            errno.EPERM,
            f"others may write to the folder (mode {mode:o}): chmod go-w it",
        )


def make_inside(folder: Path) -> None:
    """
    Like :func:`make_ours`, for a folder in a state directory, which must not be a link.

    Raises:
        OSError: Like :func:`make_ours`, or if the folder is a link.

    """
    if folder.is_symlink():
        raise OSError(errno.ELOOP, f"{folder.name} is a link, which is not followed")
    make_ours(folder)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[BinaryIO]:
    """
    Open a regular file, neither a link nor a pipe; a new one is private to us.

    Args:
        path: The file.
        flags: Flags for ``os.open``.

    Raises:
        OSError: If the file can't be opened, or is not a regular one.

    """
    # Do not block: opening a named pipe waits for its other end.
    safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags | safe, 0o600)
    # open() below would refuse a folder without closing its descriptor.
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file")
    reads = flags & os.O_ACCMODE == os.O_RDONLY
    with open(fd, "rb") if reads else open(fd, "r+b") as file:
        yield file
