"""Files with the position from which the next run resumes."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from etlstage.disk import make, sync
from etlstage.errors import SourceFailed, os_reason
from etlstage.pipeline.delivery.folder import opened

__all__ = ("PositionFile", "load", "put", "store")

SUFFIX: Final = ".position.json"
_LENGTH: Final = 16 * 1024 * 1024  # bytes; a position is a few


class PositionFile:
    """
    Keeps the position of one extract stage in a state directory.

    Args:
        folder: The state directory; created, private to us, when something is stored.
        stage: Name of the extract stage.

    """

    def __init__(self, folder: Path, stage: str) -> None:
        self.path: Path = folder / f"{stage}{SUFFIX}"
        self._stage = stage

    def load(self) -> object:
        """
        Return the stored position, or None.

        Raises:
            SourceFailed: If the file is there and can't be read or understood.

        """
        try:
            return load(self.path)["position"]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed("read", error) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SourceFailed(
                f"stage {self._stage}: can't read the position in {self.path}"
                f" ({error}); remove the file to start from the beginning",
                stage=self._stage,
            ) from error

    def store(self, position: object) -> None:
        """
        Replace the stored position, durably: after a crash it is the old or the new.

        Raises:
            SourceFailed: If the file can't be written.

        """
        try:
            store(self.path, {"position": position})
        except OSError as error:
            raise self._failed("store", error) from error

    def _failed(self, what: str, error: OSError) -> SourceFailed:
        return SourceFailed(
            f"stage {self._stage}: can't {what} the position in {self.path}:"
            f" {os_reason(error)}",
            stage=self._stage,
        )


def load(path: Path) -> Any:  # noqa: ANN401 - any JSON
    """Return the value written by :func:`store`."""
    with opened(path, os.O_RDONLY) as file:
        return json.loads(file.read(_LENGTH))


def store(path: Path, value: object) -> None:
    """
    Write ``value`` as JSON, durably: after a crash the file has the old or the new one.

    Args:
        path: The file; its folder is created, private to us, if it does not exist.
        value: Plain JSON.

    """
    put(path, value)
    sync(path.parent)


def put(path: Path, value: object, at: Callable[[str], None] | None = None) -> None:
    """
    Like :func:`store`, but without syncing the folder: a crash may bring back the old.

    Args:
        path: The file; its folder is created, private to us, if it does not exist.
        value: Plain JSON.
        at: Called with ``aside`` once the file is written but not in its place yet.

    Raises:
        OSError: If it can't be written, or would be too big for :func:`load`.

    """
    new = path.with_suffix(".new")
    text = json.dumps(value)
    if len(text) > _LENGTH:
        raise OSError(
            errno.EFBIG,
            f"it would have {len(text):,} bytes, expected no more than {_LENGTH:,}",
        )
    make(path.parent, 0o700)
    new.unlink(missing_ok=True)  # left by a run that was killed
    with opened(new, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
        file.write(text.encode())
        file.flush()
        # Bytes before the name, or a crash may replace the old file by an empty one.
        os.fsync(file.fileno())
    if at is not None:
        at("aside")
    new.replace(path)
