from __future__ import annotations

import os
import stat
from pathlib import Path
from signal import SIGKILL, SIGTERM

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage.pipeline.secret import Secrets
from etlstage.protocol.base import Side
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.testing import (
    Fault,
    FaultKind,
    FaultPlan,
    ScriptedLaunch,
    ScriptedWorker,
    hostile_worker,
)
from etlstage.testing.dialect import kit_of
from etlstage.testing.recording.recording import (
    RecordedLaunch,
    Recording,
    RecordingFolder,
)
from etlstage.testing.recording.replay import play
from etlstage.testing.scripted import Script
from etlstage.testing.transcript import Channel, Entry
from etlstage.transport import Child, LaunchRequest, Wire, launch_over_pipes

MESSAGES = [b"one", b"", b"three", b"x" * 100_000]


async def recorded(folder: RecordingFolder, stage: Stage) -> None:
    """Record a stage that answers some messages."""
    launch = RecordedLaunch(launch_over_pipes, folder)
    with capture_logs():
        async with AsyncSupervisor(stage, launch=launch) as supervisor:
            await supervisor.submit(MESSAGES)


def upper(*faults: Fault) -> Stage:
    """Return a stage that turns messages into capitals, except for these faults."""
    command = hostile_worker(FaultPlan.of(*faults), transform="upper")
    return Stage(name="clean", worker=command)


async def test_conversation_is_kept_byte_for_byte(tmp_path: Path) -> None:
    """So are stderr and the end."""
    stage = upper(Fault(FaultKind.STDERR, message=1, data=b"note"))
    await recorded(RecordingFolder(tmp_path / "recordings"), stage)
    (path,) = (tmp_path / "recordings").iterdir()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    recording = Recording.load(path)
    assert path.name == "clean-1.1.rec"
    assert (recording.worker, recording.start) == ("clean-1", 1)
    assert recording.written(Channel.STDIN) == b"".join(m + b"\n" for m in MESSAGES)
    *replies, rest = kit_of(MarkerDialect()).cut(
        Side.WORKER, recording.written(Channel.STDOUT)
    )
    assert (replies, rest) == ([m.upper() + b"\n\0" for m in MESSAGES], b"")
    assert recording.written(Channel.STDERR) == b"note\n"
    assert (recording.exit, recording.stopped, recording.cut) == (0, False, "")
    times = [entry.at for entry in recording.entries]
    assert times == sorted(times)


async def test_recording_plays_equal(tmp_path: Path) -> None:
    """The same worker answers the same."""
    stage = upper()
    await recorded(RecordingFolder(tmp_path), stage)
    recording = Recording.load(tmp_path / "clean-1.1.rec")
    played = await play(recording, recording.command)
    for channel in (Channel.STDIN, Channel.STDOUT):
        assert played.written(channel) == recording.written(channel)
    assert played.exit == 0


async def test_each_start_has_a_file(tmp_path: Path) -> None:
    """There is one of the worker that crashed, and one of its replacement."""
    stage = upper(Fault(FaultKind.SEGFAULT, message=2, start=1))
    await recorded(RecordingFolder(tmp_path), stage)
    names = ("clean-1.1.rec", "clean-1.2.rec")
    first, second = (Recording.load(tmp_path / name) for name in names)
    assert (first.start, first.exit, first.stopped) == (1, -11, False)
    assert (second.start, second.exit) == (2, 0)


async def test_worker_that_was_killed_is_reported_as_such(tmp_path: Path) -> None:
    """Its exit status was caused by the supervisor."""
    stage = upper(Fault(FaultKind.STALL))
    launch = RecordedLaunch(launch_over_pipes, RecordingFolder(tmp_path))
    with anyio.move_on_after(0.2):
        async with AsyncSupervisor(stage, launch=launch) as supervisor:
            await supervisor.ask(b"one")
    recording = Recording.load(tmp_path / "clean-1.1.rec")
    assert (recording.exit, recording.stopped) == (-SIGTERM, True)


async def test_secrets_of_the_command_are_concealed(tmp_path: Path) -> None:
    """They are concealed as in errors."""
    stage = Stage(name="clean", worker=(*upper().program.command, "--key=hunter22"))
    folder = RecordingFolder(tmp_path)
    folder.secrets = Secrets({"hunter22": "${PASSWORD}"})
    await recorded(folder, stage)
    recording = Recording.load(tmp_path / "clean-1.1.rec")
    assert recording.command[-1] == "--key=${PASSWORD}"


async def test_long_conversation_is_cut_and_reported(tmp_path: Path) -> None:
    """What is kept can be played; the conversation itself goes on."""
    stage = upper()
    folder = RecordingFolder(tmp_path, limit=50_000)
    launch = RecordedLaunch(launch_over_pipes, folder)
    async with AsyncSupervisor(stage, launch=launch) as supervisor:
        results = await supervisor.submit(MESSAGES)
    assert [result.outputs for result in results] == [(m.upper(),) for m in MESSAGES]
    recording = Recording.load(tmp_path / "clean-1.1.rec")
    assert recording.cut == "the rest was omitted because of its size"
    assert len(recording.written(Channel.STDIN)) <= 50_000


async def test_file_that_is_there_is_kept(tmp_path: Path) -> None:
    """It is reported; the conversation goes on, and is not recorded."""
    stage = upper()
    (tmp_path / "clean-1.1.rec").write_text("mine")
    folder = RecordingFolder(tmp_path)
    await recorded(folder, stage)
    (problem,) = folder.problems
    assert problem.startswith("a recording is not complete: [Errno 17]")
    assert (tmp_path / "clean-1.1.rec").read_text() == "mine"


async def test_recording_that_can_not_go_on_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, for example, is reported once; the conversation goes on."""
    stage = upper()
    reading, writing = os.pipe()
    monkeypatch.setattr(
        "etlstage.testing.recording.recording._private", lambda *_: writing
    )
    folder = RecordingFolder(tmp_path)
    launch = RecordedLaunch(launch_over_pipes, folder)
    async with AsyncSupervisor(stage, launch=launch) as supervisor:
        assert await supervisor.ask(b"one") == (b"ONE",)
        os.close(reading)
        assert await supervisor.ask(b"two") == (b"TWO",)
    assert folder.problems == ["a recording is not complete: [Errno 32] Broken pipe"]


class Notebook:
    """Keeps the entries and the end of a recording."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.ends: list[tuple[int | None, bool]] = []

    def add(self, entry: Entry, /) -> None:
        """Keep an entry."""
        self.entries.append(entry)

    def end(self, exit_: int | None, /, *, stopped: bool) -> None:
        """Keep the end."""
        self.ends.append((exit_, stopped))


def noted(script: Script, size: int = 100) -> tuple[Wire, Child, Notebook]:
    """Return a supervisor's ends of a worker, and what is recorded of them."""
    notes = Notebook()
    launch = RecordedLaunch(ScriptedLaunch(script, pipe_size=size), lambda _: notes)
    return *launch(LaunchRequest(("no-such-program",), {})), notes


async def read_all(worker: ScriptedWorker) -> None:
    """Read, and write a word at the end."""
    while await worker.read():
        pass
    await worker.write(b"bye")


async def test_it_is_noted_whether_the_worker_had_read() -> None:
    """A replay thus knows when to write the next piece."""
    wire, child, notes = noted(read_all)
    assert wire.write(b"one") == 3
    assert wire.write(b"four") == 4
    wire.close_write()
    assert await child.wait() == 0
    child.close()
    assert [(entry.data, entry.ahead) for entry in notes.entries] == [
        (b"one", 0),
        (b"four", 3),
        (b"", 7),
    ]
    assert notes.ends == [(0, False)]


async def test_only_what_was_taken_is_noted() -> None:
    """A pipe that is full takes a part, or nothing (issue 12)."""
    wire, child, notes = noted(read_all, 3)
    assert [wire.write(b"four"), wire.write(b"r")] == [3, 0]
    child.kill()
    assert [entry.data for entry in notes.entries] == [b"fou"]


async def test_end_is_noted_once_with_the_time_since_the_start() -> None:
    """The end may be read again and again (issue 12)."""
    wire, child, notes = noted(read_all)
    wire.close_write()
    await child.wait()
    assert [wire.read(9), wire.read(9), wire.read(9)] == [b"bye", b"", b""]
    noticed = [(entry.channel, entry.data) for entry in notes.entries]
    out = [(Channel.STDOUT, b"bye"), (Channel.STDOUT, b"")]
    assert noticed == [(Channel.STDIN, b""), *out]
    assert all(0 <= entry.at < 10 for entry in notes.entries)


async def test_signal_that_comes_after_the_exit_is_none() -> None:
    """The exit status is the worker's own then (issue 12)."""
    wire, child, notes = noted(read_all)
    wire.close_write()
    await child.wait()
    child.signal(SIGTERM)
    child.kill()
    child.close()
    _, other, stopped = noted(read_all)
    other.kill()
    other.close()
    assert (notes.ends, stopped.ends) == ([(0, False)], [(-SIGKILL, True)])
