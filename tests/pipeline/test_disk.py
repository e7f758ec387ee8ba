"""A disk that fails at any call: what is reported, and whether data is lost."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from shutil import rmtree
from typing import Any, Final

import anyio
import pytest

from etlstage.errors import EtlstageError, SinkFailed
from etlstage.messages import Run
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.policy import DeadLetterPolicy
from etlstage.pipeline.dead_letter.retry import Settled
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery import folder as folder_module
from etlstage.pipeline.delivery.delivery import Bounds, Delivery
from etlstage.pipeline.delivery.place import EpochFiles
from etlstage.pipeline.interfaces import Epochs, Sink
from etlstage.pipeline.pipeline import Pipeline
from etlstage.pipeline.report import Report
from etlstage.stage import ErrorBudget, ErrorPolicy
from tests.patience import HANG
from tests.pipeline.test_loading import Numbers

CALLS: Final = ("fsync", "write", "open", "mkdir", "rename", "replace", "unlink")
COUNT: Final = 20
REFUSED: Final = {7, 17}


class Disk:
    """
    Fails at one call and, unless the error is a passing one (EIO), ever after.

    Args:
        number: The failing call, counted from 0.
        code: The error number.

    """

    def __init__(self, number: int, code: int) -> None:
        self.left = number
        self.failed = False
        self._code = code

    @contextmanager
    def used(self) -> Iterator[None]:
        """Replace the calls of ``os`` by those of this disk."""
        with pytest.MonkeyPatch.context() as patched:
            for name in CALLS:
                patched.setattr(os, name, partial(self._do, name, getattr(os, name)))
            files = partial(File, self)
            patched.setattr(folder_module, "open", files, raising=False)
            yield

    # Wraps any function with any arguments.
    def _do(self, name: str, call: Any, *given: Any, **named: Any) -> Any:  # noqa: ANN401
        reads = name == "open" and not given[1] & (os.O_CREAT | os.O_RDWR | os.O_WRONLY)
        if not reads and not (name == "unlink" and self._code == errno.ENOSPC):
            self.touch()
        return call(*given, **named)

    def touch(self) -> None:
        """Count a call; fail if it is time to."""
        self.left -= 1
        if self.left == -1 or (self.failed and self._code != errno.EIO):
            self.failed = True
            raise OSError(self._code, os.strerror(self._code))


class File(FileIO):
    """A file on that disk."""

    def __init__(self, disk: Disk, fd: int, mode: str) -> None:
        super().__init__(fd, mode)
        self._disk = disk

    def write(self, data: Any) -> int:  # noqa: ANN401 - a buffer
        """Write, unless the disk fails."""
        self._disk.touch()
        return super().write(data)


class Files(Sink):
    """A sink of one folder per epoch that refuses some messages."""

    def __init__(self, out: Path, letters: DeadLetters) -> None:
        super().__init__("load")
        self._out = out
        self._policy = DeadLetterPolicy(
            self.account, ErrorPolicy(budget=ErrorBudget()), {}, letters
        )
        self._taken: list[bytes] = []

    def begin(self, epochs: Epochs) -> None:
        """Remove unrecorded epochs and move recorded ones."""
        self._epochs, self._files = epochs, EpochFiles(self._out, epochs.load)
        for number in self._files.sweep(epochs.done, check=epochs.check):
            self._files.move(number, replaces=False, check=epochs.check)

    async def write(self, run: Run) -> None:
        """Take a run."""
        for message in run:
            self.account.received += 1
            if int(message) in REFUSED:
                refused = SinkFailed("no", stage="load")
                await self._policy.settle(refused, [message], place=int(message))
            else:
                self._taken.append(message)

    async def flush(self) -> None:
        """Write the epoch's messages."""
        number = self._epochs.done + 1
        aside = self._files.aside(number)
        try:
            rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            (aside / "part").write_bytes(b" ".join(self._taken))
            self._files.seal(number, always=False, check=self._epochs.check)
        except OSError as error:
            raise SinkFailed(f"{self._out}: {error}", stage="load") from error
        self.account.done += len(self._taken)
        self._epochs, self._taken = self._epochs._replace(done=number), []

    @property
    def performs(self) -> bool:
        """Whether files are moved after the record is stored."""
        return True

    async def perform(self) -> None:
        """Move the recorded epoch into place."""
        try:
            number, check = self._epochs.done, self._epochs.check
            self._files.move(number, replaces=False, check=check)
        except OSError as error:
            raise SinkFailed(f"{self._out}: {error}", stage="load") from error

    def landed(self) -> str:
        """Return nothing to report."""
        return ""


async def run(folder: Path) -> Report:
    """Run once, with epochs of ten messages."""
    bounds = Bounds(messages=10, seconds=3600)
    delivery = Delivery(folder / "state", exactly_once=True, bounds=bounds)
    letters = DeadLetters(folder / "state", pipeline="p")
    sink, source = Files(folder / "out", letters), Numbers(COUNT, 5)
    made = Pipeline(
        name="p", source=source, sink=sink, dead_letters=letters, delivery=delivery
    )
    with anyio.fail_after(HANG):
        return await made.run()


@pytest.mark.parametrize(
    "code",
    [errno.ENOSPC, errno.EIO, errno.EROFS],
    ids=errno.errorcode.get,
)
def test_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The error has the place, and the next run loads the rest (issue 14)."""
    # There is no power cut here, and a real fsync takes its time.
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    number, failed = 0, True
    while failed:
        folder = tmp_path / str(number)
        folder.mkdir()
        disk = Disk(number, code)
        with disk.used():
            report = anyio.run(run, folder)
        failed, number = disk.failed, number + 1
        if report.status == "failed":
            assert isinstance(report.error, EtlstageError), (number, report.error)
            assert str(folder) in str(report.error)
            ours = isinstance(report.error, SinkFailed)
            remedy = re.search(r"set another state|set state to its", str(report.error))
            assert ours or remedy
            assert os.strerror(code).lower() in str(report.error).lower()
            report = anyio.run(run, folder)
        assert report.status == "done", (number, report.error)
        assert_once(folder, report)
    assert number > 30


def assert_once(folder: Path, report: Report) -> None:
    """Assert that each message is a row or a dead letter, and is counted as such."""
    settled = Settled(folder / "state" / "dead_letters")
    letters = [
        int(letter.message)
        for letter in settled.letters("load")
        if isinstance(letter, DeadLetter)
    ]
    assert sorted(letters) == sorted(REFUSED)
    parts = (folder / "out").glob("part-*")
    rows = Counter(int(row) for part in parts for row in part.read_bytes().split())
    assert rows == Counter({*range(COUNT)} - REFUSED)
    account = report.ledger[-1]
    kept = COUNT - len(REFUSED)
    assert (account.received, account.done, account.dead) == (COUNT, kept, len(REFUSED))
