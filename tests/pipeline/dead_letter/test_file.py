"""The files of dead letters: what is durable, and what is cut."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from etlstage.errors import StateUnusable, WorkerLost
from etlstage.pipeline.dead_letter.file import LetterFile
from etlstage.pipeline.dead_letter.store import DeadLetters


async def put(letters: DeadLetters, stage: str = "t") -> None:
    """Dead-letter a message."""
    error = WorkerLost("died", stage=stage)
    letter = letters.letter(stage, 0, b"x", error, config={}, time="2026")
    await letters.keep([letter])


def test_line_that_is_appended_while_another_thread_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made durable by the next call (issue 14)."""
    file = LetterFile(tmp_path, "t")
    file.append(b"{}\n")
    synced: list[int] = []
    write, fsync = os.write, os.fsync

    def write_behind_sync(fd: int, data: bytes) -> int:
        file.sync()
        return write(fd, data)

    def append_before_sync(fd: int) -> None:
        if not synced:
            monkeypatch.setattr(os, "write", write)
            file.append(b"{}\n")
        synced.append(os.fstat(fd).st_size)
        fsync(fd)

    monkeypatch.setattr(os, "write", write_behind_sync)
    file.append(b"{}\n")
    assert file.dirty
    monkeypatch.setattr(os, "fsync", append_before_sync)
    file.sync()
    assert file.dirty
    file.sync()
    assert not file.dirty
    assert synced == [9, 9]
    file.close()


async def test_stage_whose_first_letter_comes_while_others_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is one more of those that are looked at (issue 14)."""
    letters = DeadLetters(tmp_path, pipeline="p")
    await put(letters)
    await put(letters, "u")

    def dirty(_file: LetterFile) -> bool:
        letters._files.setdefault("v", letters._files["t"])
        return False

    monkeypatch.setattr(LetterFile, "dirty", property(dirty), raising=False)
    await letters.sync()
    letters.close()


@pytest.mark.parametrize("left", [None, 0, 7])
async def test_file_that_lacks_what_is_on_record(
    tmp_path: Path, left: int | None
) -> None:
    """A run does not go on as if all were there, and nothing is cut (issue 14)."""
    letters = DeadLetters(tmp_path, pipeline="p", run="r0")
    await put(letters)
    await put(letters, "u")
    letters.close()
    sizes = letters.sizes()
    path = tmp_path / "dead_letters" / "t.jsonl"
    if left is None:
        path.unlink()
    else:
        os.truncate(path, left)
    again = DeadLetters(tmp_path, pipeline="p")
    with pytest.raises(StateUnusable) as caught:
        again.resume("r0", {"u": 0, "t": sizes["t"]})
    assert str(caught.value) == (
        f"{path}: has {left or 0} bytes, expected at least {sizes['t']}, the dead letters"
        f" that are on record of the run r0: restore the file, or let 'etlstage state"
        f" reset {tmp_path}' forget the run, and begin from the beginning"
    )
    assert again.size("u") == sizes["u"]
