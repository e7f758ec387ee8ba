"""What a run leaves behind so that the next one reads on from there."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from etlstage.errors import SourceFailed

__all__ = ("POSITIONS", "PositionFile", "locked", "store")

SUFFIX: Final = ".position.json"
POSITIONS: Final = f"*{SUFFIX}"
"""What such files are called, as a pattern."""


class PositionFile:
    """
    Keeps the position of one extract stage in a state directory.

    Args:
        folder: The state directory; made, for us alone, when something is stored.
        stage: Name of the extract stage.

    """

    def __init__(self, folder: Path, stage: str) -> None:
        self.path = folder / f"{stage}{SUFFIX}"
        self._stage = stage

    def load(self) -> object:
        """
        Return what was stored, or None.

        Raises:
            SourceFailed: If the file is there and can't be read or understood.

        """
        try:
            return json.loads(self.path.read_bytes())["position"]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed("read", error) from error
        except (ValueError, KeyError, TypeError) as error:
            raise SourceFailed(
                f"stage {self._stage}: can't read the position in {self.path}"
                f" ({error}); remove the file to start from the beginning",
                stage=self._stage,
            ) from error

    def store(self, position: object) -> None:
        """
        Replace what was stored, durably: after a crash it is the old or the new.

        Raises:
            SourceFailed: If the file can't be written.

        """
        try:
            store(self.path, {"position": position})
        except OSError as error:
            raise self._failed("store", error) from error

    def _failed(self, what: str, error: OSError) -> SourceFailed:
        said = (error.strerror or str(error)).lower()
        return SourceFailed(
            f"stage {self._stage}: can't {what} the position in {self.path}: {said}",
            stage=self._stage,
        )


def store(path: Path, value: object) -> None:
    """
    Write ``value`` as JSON, durably: after a crash it is the old or the new.

    Args:
        path: The file; its folder is made, for us alone, if it is not there.
        value: Plain JSON.

    """
    new = path.with_suffix(".new")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with new.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """
    Keep a state directory to ourselves; give False if another process has it.

    Args:
        folder: The state directory; made, for us alone, if it is not there.

    Raises:
        OSError: If it can't be made or written to.

    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The lock goes with the process, however that ends; the file stays.
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
