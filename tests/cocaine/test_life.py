"""
How workers end, as each of the frameworks does it.

Scripts imitate what the frameworks do, as observed or read in their source, when they
are asked to terminate, when they consider themselves abandoned, and at the end of the
connection.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from signal import SIGABRT

import anyio
import pytest
from anyio.streams.memory import MemoryObjectReceiveStream

from etlstage import AsyncSupervisor, Stage
from etlstage.errors import StageFailed
from etlstage.protocol.cocaine import CocaineVersion
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.stage.policy import RestartPolicy, Timeouts
from etlstage.supervisor.lifecycle.events import SupervisorEvent, WorkerExited
from tests.supervisor.conftest import _nothing_is_left as _nothing_is_left

pytestmark = pytest.mark.process

SCRIPT = """
import os, socket, sys
import msgpack
mode, ends = sys.argv[1:3]
told = dict(zip(sys.argv[3::2], sys.argv[4::2]))
zero = mode.endswith("-0")
beat, terminate, chunk, choke = (1, 2, 4, 6) if zero else (0, 1, 0, 2)
control = 0 if zero else 1

def say(session, kind, *args):
    frame = [kind, session, args] if zero else [session, kind, args]
    wire.sendall(msgpack.packb(frame, use_bin_type=False))

def end(args):
    if ends == "cut off":
        return
    if mode == "python-0":
        say(control, terminate, *args)
        sys.exit(1)
    if mode == "python-1":
        say(control, terminate, *args)
        sys.exit(0)
    if mode == "native-1":
        say(control, terminate, 0, "confirmed")
        sys.exit(0)
    if mode in ("go-0", "go-1"):
        os._exit(0)
    # Node does not understand it.

def disowned():
    if mode == "native-1":
        os.abort()  # it throws
    if mode != "node-1":  # whose timer is never armed
        sys.exit(0)

wire = socket.socket(socket.AF_UNIX)
wire.connect(told["--endpoint"])
say(control, 0, told["--uuid"])
say(control, beat)
unpacker = msgpack.Unpacker()
while data := wire.recv(65536):
    unpacker.feed(data)
    for frame in unpacker:
        session, kind = (frame[1], frame[0]) if zero else (frame[0], frame[1])
        if session == control and kind == terminate:
            end(frame[2])
        elif session != control and kind == choke:
            say(session, chunk, "done")
            say(session, choke)
            if ends == "disowned":
                disowned()
sys.exit(1 if mode == "node-1" else 0)
"""


def stage(mode: str, ends: str) -> Stage:
    """Return a stage whose worker imitates a framework, and ends in this way."""
    return Stage(
        name="app",
        worker=(sys.executable, "-c", SCRIPT, mode, ends),
        dialect=CocaineDialect(seal=0.1),
        timeout=Timeouts(stop=3),
    )


async def exits_of(
    events: MemoryObjectReceiveStream[SupervisorEvent],
) -> list[WorkerExited]:
    """Return the ends of workers among events."""
    async with events:
        return [event async for event in events if isinstance(event, WorkerExited)]


@pytest.mark.parametrize("ends", ["told", "cut off"])
@pytest.mark.parametrize(
    "mode", ["python-0", "python-1", "native-1", "go-0", "go-1", "node-1"]
)
async def test_worker_that_is_asked_to_end_may_end_as_it_likes(
    mode: str, ends: str
) -> None:
    """
    It may answer or not, have any status, and exit only when its socket is closed.

    So nothing has to be killed, and nothing has failed, even if it did not hear the
    request (issue 15).
    """
    loud = mode == "node-1" or (mode, ends) == ("python-0", "told")
    async with AsyncSupervisor(stage(mode, ends)) as supervisor:
        assert await supervisor.ask(b"x", timeout=10) == (b"done",)
        events = supervisor.events()
    exits = await exits_of(events)
    assert [(event.status, event.stopped) for event in exits] == [(int(loud), True)]
    assert supervisor.faults.failures == 0


@pytest.mark.parametrize(
    ("mode", "status"),
    [
        ("python-0", 0),
        ("python-1", 0),
        ("native-1", -SIGABRT),
        ("go-0", 0),
        ("go-1", 0),
    ],
)
async def test_worker_that_thinks_itself_abandoned_has_failed(
    mode: str, status: int
) -> None:
    """Most exit with status 0 without being asked to; another worker continues."""
    async with AsyncSupervisor(stage(mode, "disowned")) as supervisor:
        events = supervisor.events()
        assert await supervisor.ask(b"x", timeout=10) == (b"done",)
        assert await supervisor.ask(b"y", timeout=10) == (b"done",)
    exits = await exits_of(events)
    assert (exits[0].status, exits[0].stopped) == (status, False)
    assert supervisor.faults.failures >= 1


async def test_worker_that_never_thinks_so_stays() -> None:
    """Workers of Node do so, as their timer is not armed (issue 15)."""
    async with AsyncSupervisor(stage("node-1", "disowned")) as supervisor:
        assert await supervisor.ask(b"x", timeout=10) == (b"done",)
        assert await supervisor.ask(b"y", timeout=10) == (b"done",)
    assert supervisor.faults.failures == 0


STRANGER = """
import socket, sys
told = dict(zip(sys.argv[1::2], sys.argv[2::2]))
wire = socket.socket(socket.AF_UNIX)
wire.connect(told["--endpoint"])
wire.sendall(bytes.fromhex("93010091a56f74686572"))
wire.recv(1)
"""


async def test_worker_that_calls_itself_otherwise_is_reported() -> None:
    """The error mentions a client that connected under another name (issue 15)."""
    made = Stage(
        name="app",
        worker=(sys.executable, "-c", STRANGER),
        dialect=CocaineDialect(),
        restart=RestartPolicy(policy="temporary"),
    )
    async with AsyncSupervisor(made) as supervisor:
        with pytest.raises(StageFailed) as failed:
            await supervisor.ask(b"x", timeout=10)
    said = "exited with status 0 (a client connected under another name)"
    assert said in str(failed.value)


@pytest.mark.parametrize(
    ("script", "fate"),
    [
        ("import sys; sys.exit(3)", "exited with status 3"),
        ("import sys; sys.stdin.read()", "exited with status 0"),
        ("import time; time.sleep(60)", "it did not connect and send a handshake"),
    ],
    ids=["exits", "reads stdin", "never connects"],
)
async def test_worker_that_does_not_connect_may_speak_markers(
    script: str, fate: str
) -> None:
    """It may be a worker of lines, with this dialect by mistake (issue 23)."""
    made = Stage(
        name="app",
        worker=(sys.executable, "-c", script),
        dialect=CocaineDialect(),
        restart=RestartPolicy(policy="temporary"),
        timeout=Timeouts(start=2, stop=1),
    )
    async with AsyncSupervisor(made) as supervisor:
        with pytest.raises(StageFailed) as failed:
            await supervisor.ask(b"x", timeout=10)
    assert fate in str(failed.value)
    hint = "it never connected: omit dialect if it reads its stdin"
    assert str(failed.value).count(hint) >= 1


@pytest.mark.parametrize("protocol", [CocaineVersion.AUTO, CocaineVersion.ONE])
async def test_worker_that_connects_late_is_asked_to_end(
    tmp_path: Path, protocol: CocaineVersion
) -> None:
    """If the stage ends while it starts, it may still connect for that (issue 22)."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    wait = f"open({str(gate)!r}).close()\n"
    late = Stage(
        name="app",
        worker=(sys.executable, "-c", wait + SCRIPT, "python-1", "told"),
        dialect=CocaineDialect(protocol=protocol),
        timeout=Timeouts(stop=8),
    )
    async with AsyncSupervisor(late) as supervisor, anyio.create_task_group() as tasks:
        events = supervisor.events()
        tasks.start_soon(supervisor.aclose)
        await anyio.wait_all_tasks_blocked()
        await anyio.to_thread.run_sync(gate.write_bytes, b"")
    (end,) = await exits_of(events)
    assert (end.status, end.stopped) == (0, True)
