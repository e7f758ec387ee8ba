"""The files of dead letters: what is durable, and what is cut."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from hypothesis.strategies import integers, sampled_from

from etlstage.errors import StageError, StateUnusable, WorkerLost
from etlstage.pipeline.dead_letter.file import LetterFile, letter_files, read_letters
from etlstage.pipeline.dead_letter.record import DeadLetter
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import Delivery, take_over


async def put(letters: DeadLetters, stage: str = "t") -> None:
    """Dead-letter a message."""
    error = WorkerLost("died", stage=stage)
    letter = letters.letter(stage, 0, b"x", error, config={}, time="2026")
    await letters.keep([letter])


def test_line_that_is_appended_while_another_thread_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made durable by the next call (issue 14)."""
    file = LetterFile(tmp_path, "t", lambda: None)
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


class Holder:
    """A run that has the state directory, and may have been taken over."""

    def __init__(self, state: Path) -> None:
        take_over(state)
        self.delivery = Delivery(state, exactly_once=True)
        self.delivery.__enter__()
        self.letters = DeadLetters(state, pipeline="p", run="r")
        self.letters.fence = self.delivery.record.fence
        if self.delivery.begin("r", stages=["e"], letters={}):
            self.letters.resume("r", self.delivery.record.letters)

    def keep(self, stage: str, number: int) -> None:
        """Dead-letter a message."""
        error = WorkerLost("died", stage=stage)
        message = b"%d" % number
        letter = self.letters.letter(
            stage, number, message, error, config={}, time="2026"
        )
        self.letters.adopt(letter, place=number)

    def commit(self) -> None:
        """Have all letters recorded."""
        self.delivery.check()
        anyio.run(self.letters.sync)
        record = self.delivery.next(None, letters=self.letters.sizes())
        self.delivery.keep(record)

    def close(self) -> None:
        """Let go of the files."""
        self.letters.close()
        self.delivery.__exit__()


class TakeOvers(RuleBasedStateMachine):
    """Whoever was taken over goes on, at any time; one alone is heard."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = TemporaryDirectory()
        self.state = Path(self._folder.name) / "state"
        self.state.mkdir(mode=0o700)
        self.holders = [Holder(self.state)]
        self.number = 0
        self.kept: list[tuple[str, int]] = []
        self.recorded: list[tuple[str, int]] = []

    @rule()
    def take_over(self) -> None:
        """Start another run, which goes on behind the record."""
        self.holders.append(Holder(self.state))
        self.kept = [*self.recorded]

    @rule(which=integers(min_value=0), stage=sampled_from("tu"))
    def keep(self, which: int, stage: str) -> None:
        """Dead-letter a message, in whatever run."""
        holder = self.holders[which % len(self.holders)]
        self.number += 1
        if holder is self.holders[-1]:
            holder.keep(stage, self.number)
            self.kept.append((stage, self.number))
            return
        with suppress(StageError):
            holder.keep(stage, self.number)

    @rule(which=integers(min_value=0))
    def commit(self, which: int) -> None:
        """Record the letters, or be told."""
        holder = self.holders[which % len(self.holders)]
        if holder is self.holders[-1]:
            holder.commit()
            self.recorded = [*self.kept]
            return
        with pytest.raises(StateUnusable, match="has taken over"):
            holder.commit()

    @invariant()
    def letters_are_those_of_the_last(self) -> None:
        """And those on record, each once."""
        found = [
            (letter.stage, int(letter.message))
            for path in letter_files(self.state)
            for letter in read_letters(path)
            if isinstance(letter, DeadLetter)
        ]
        assert sorted(found) == sorted(self.kept)

    def teardown(self) -> None:
        """Leave nothing."""
        for holder in self.holders:
            holder.close()
        self._folder.cleanup()


TakeOvers.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=15,
    deadline=None,  # files
)
TestTakeOvers = TakeOvers.TestCase


def test_letter_of_a_run_that_was_taken_over(tmp_path: Path) -> None:
    """Its stage is told who has the files now, and nothing stays open (issue 14)."""
    first = Holder(tmp_path)
    first.close()
    second = Holder(tmp_path)
    with pytest.raises(StageError) as caught:
        first.keep("t", 1)
    assert str(caught.value) == (
        f"stage t: another run has taken over the state directory {tmp_path}: dead"
        " letters of this one are not kept there any more"
    )
    assert first.letters.sizes() == {"t": 0}
    second.close()


def test_start_that_is_taken_over_while_it_cuts(tmp_path: Path) -> None:
    """It leaves the file to the other (issue 14)."""
    first = Holder(tmp_path)
    first.keep("t", 1)
    first.close()
    second = Holder(tmp_path)
    second.keep("t", 2)
    before = second.letters.sizes()
    with pytest.raises(StateUnusable, match="has taken over the state directory"):
        first.letters.resume("r", {})
    assert second.letters.sizes() == before
    second.close()
