from __future__ import annotations

from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest

from etlstage.columns import Column
from etlstage.errors import SinkFailed
from etlstage.messages import Run, StageKind
from etlstage.pipeline.capture import Capture
from etlstage.pipeline.ledger import Account


async def captured(path: Path, *runs: Run) -> Capture:
    """Return a capture of these runs."""
    capture = Capture(path)
    async with capture:
        for run in runs:
            await capture.write(run)
        await capture.finish()
    return capture


async def test_messages_come_back_in_order(tmp_path: Path) -> None:
    """Byte for byte, however often they are read."""
    messages = [b"one", b"", b"\0\n\xff", b"x" * 100_000]

    capture = await captured(tmp_path / "c", messages[:1], messages[1:])

    assert list(capture) == messages
    assert list(capture) == messages
    assert len(capture) == 4


async def test_column_is_captured_as_a_list_is(tmp_path: Path) -> None:
    """Between DataFrames, messages are Arrow columns."""
    messages = [b"one", b"", b"two"]
    column = Column(pa.array([b"-", *messages], pa.large_binary())[1:])

    assert list(await captured(tmp_path / "c", cast("Run", column))) == messages


async def test_capture_accounts_for_what_it_took(tmp_path: Path) -> None:
    """It keeps an account as any sink does; nothing is refused."""
    capture = await captured(tmp_path / "c", [b"one", b"two"], [b"three"])

    assert capture.account == Account("load", StageKind.LOAD, received=3, done=3)
    assert capture.landed() == "3 messages captured"


async def test_capture_of_nothing_is_empty(tmp_path: Path) -> None:
    """The file exists all the same."""
    capture = await captured(tmp_path / "c")

    assert (list(capture), len(capture)) == ([], 0)


async def test_capture_replaces_what_is_there(tmp_path: Path) -> None:
    """A file of another run is not appended to."""
    await captured(tmp_path / "c", [b"old"])

    assert list(await captured(tmp_path / "c", [b"new"])) == [b"new"]


async def test_reader_finds_whole_runs_while_the_writer_goes_on(
    tmp_path: Path,
) -> None:
    """Every run that was written is in the file at once."""
    capture = Capture(tmp_path / "c")
    async with capture:
        await capture.write([b"one"])
        assert list(capture) == [b"one"]
        await capture.write([b"two"])
        assert list(capture) == [b"one", b"two"]


async def test_place_that_can_not_be_written(tmp_path: Path) -> None:
    """The error comes on entering."""
    with pytest.raises(SinkFailed) as caught:
        await captured(tmp_path / "no" / "c")
    assert str(caught.value) == (
        f"load: can't capture messages in {tmp_path}/no/c: no such file or directory"
    )


async def test_full_disk_fails_the_sink() -> None:
    """Messages that were not written don't count as loaded."""
    capture = Capture(Path("/dev/full"))
    with pytest.raises(SinkFailed, match="in /dev/full: no space left on device"):
        async with capture:
            await capture.write([b"one"])
    assert (capture.account.received, capture.account.done) == (1, 0)
