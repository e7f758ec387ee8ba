"""The recordings of a run: where they go, and what is told of them."""

from __future__ import annotations

from pathlib import Path

from etlstage.cli.failure import complain
from etlstage.cli.screen import Screen
from etlstage.errors import ConfigError
from etlstage.messages import counted
from etlstage.testing.recording.recorder import RecordingFolder

__all__ = ("recording_folder", "tell_recordings")


def recording_folder(path: Path, limit: int, *, blank: bool) -> RecordingFolder:
    """
    Return where the conversations of a run go.

    Args:
        path: The folder; it is made if it is not there.
        limit: Bytes of a conversation that are kept.
        blank: Whether to leave out what messages say.

    Raises:
        ConfigError: If it can't be made, or holds recordings.

    """
    try:
        folder = RecordingFolder(path, limit=limit, blank=blank)
        if any(path.glob("*.rec")):
            raise ConfigError(
                f"--record {path}: holds recordings of another run; remove them, or name"
                " another folder"
            )
    except OSError as error:
        raise ConfigError(f"--record {path}: {error.strerror or error}") from None
    return folder


def tell_recordings(folder: RecordingFolder) -> None:
    """Say how many there are, and which are not complete."""
    for problem in folder.problems:
        complain(problem)
    said = f"{counted(folder.count, 'conversation')} recorded in {folder.path}"
    Screen().print(said, soft_wrap=True, highlight=False, markup=False)
