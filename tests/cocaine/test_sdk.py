"""Workers of ``etlstage.worker.cocaine``."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from etlstage import AsyncSupervisor, Stage, WorkerProgram, WorkerRefusal, WorkerSession
from etlstage.messages import StageKind
from etlstage.pipeline.epoch_sink import EpochSink
from etlstage.pipeline.interfaces import Epochs
from etlstage.protocol.cocaine import CocaineVersion
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.protocol.events import (
    Alive,
    Cancelled,
    Farewell,
    Opened,
)
from etlstage.worker import cocaine
from tests.cocaine.talk import talking
from tests.supervisor.conftest import _nothing_is_left as _nothing_is_left

pytestmark = pytest.mark.process

WORKER = """
import os, queue, sys
from etlstage.worker import cocaine

cancelled = queue.SimpleQueue()

def shout(request, response):
    for chunk in request:
        response.write(chunk.upper())

def refuse(request, response):
    raise cocaine.Refuse(request.read().decode())

def boom(request, response):
    request.read()
    raise ValueError("handler raised")

def code(request, response):
    response.error(7, "explicit")

def wait(request, response):
    response.write(b"begun")
    try:
        request.read()
    except cocaine.SessionCancelled as error:
        cancelled.put(str(error).encode())

def seen(request, response):
    response.write(cancelled.get())

def block(request, response):
    name = request.read()
    response.write(b"blocked")
    response.write(open(name, "rb").read())

def generate(request, response):
    for chunk in request:
        yield chunk

async def wait_for(request, response):
    response.write(request.read())

def collect(request, response):
    return list(request)

cocaine.run({
    "generate": generate, "wait_for": wait_for, "collect": collect,
    "shout": shout, "refuse": refuse, "boom": boom, "code": code, "wait": wait,
    "block": block, "seen": seen,
})
"""
COMMAND = (sys.executable, "-c", WORKER)


def stage(event: str, **settings: Any) -> Stage:  # noqa: ANN401 - passed on
    """Return a stage of that worker."""
    dialect = CocaineDialect(event=event, **settings)
    return Stage(name="app", worker=COMMAND, dialect=dialect)


@pytest.mark.parametrize("version", [CocaineVersion.ZERO, CocaineVersion.ONE])
async def test_handlers_answer_sessions(version: CocaineVersion) -> None:
    """Many at once, in either version, with large chunks and an empty one."""
    messages = [b"m%d" % n for n in range(200)] + [b"", b"x" * 3_000_000]
    async with AsyncSupervisor(stage("shout", protocol=version)) as supervisor:
        results = await supervisor.submit(messages)
    assert [r.outputs for r in results] == [(m.upper(),) for m in messages]
    assert supervisor.faults.failures == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "[127.0.0.1]"])
def test_endpoint_may_be_one_of_tcp(host: str) -> None:
    """The protocol allows it, although our endpoint is a path."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = server.getsockname()
        with cocaine._connected(f"{host}:{at[1]}") as wire:
            assert wire.getpeername() == at


@pytest.mark.parametrize(
    ("event", "code", "reason"),
    [
        ("refuse", 100, "no date"),
        ("boom", 100, "ValueError: handler raised"),
        ("code", 7, "explicit"),
        ("nosuch", 200, "there is no handler for event 'nosuch'"),
    ],
)
async def test_handler_refuses(event: str, code: int, reason: str) -> None:
    """The worker continues."""
    async with AsyncSupervisor(stage(event)) as supervisor:
        for result in await supervisor.submit([b"no date"] * 2):
            assert isinstance(result.error, WorkerRefusal)
            assert (result.error.code, result.error.reason) == (code, reason)
    assert supervisor.faults.failures == 0


@pytest.mark.parametrize(
    ("event", "kind"),
    [("generate", "generator"), ("wait_for", "coroutine"), ("collect", "list")],
)
async def test_handler_that_returns_something_refuses(event: str, kind: str) -> None:
    """Its outputs would be missing without any sign (issue 26)."""
    async with AsyncSupervisor(stage(event)) as supervisor:
        (result,) = await supervisor.submit([b"x"])
    assert isinstance(result.error, WorkerRefusal)
    assert result.error.reason == (
        f"TypeError: handler for event {event!r} returned {kind}, expected None:"
        " call response.write()"
    )
    assert not any("never awaited" in line for line in result.error.attempts[0].stderr)


ARGUMENTS = """
from etlstage.worker import cocaine

class Mute(Exception):
    def __str__(self):
        raise ValueError

def call(request, response):
    text = request.read().decode()
    exec(text, {"response": response, "cocaine": cocaine, "Mute": Mute})

cocaine.run({"call": call})
"""


@pytest.mark.parametrize("version", [CocaineVersion.ZERO, CocaineVersion.ONE])
async def test_arguments_that_cant_be_sent(version: CocaineVersion) -> None:
    """Each refuses its own session, and the worker continues (issue 26)."""
    refusals = {
        rb"raise cocaine.Refuse('a \udcff\n b')": (100, "a b"),
        rb"raise cocaine.Refuse('x' * 100_000)": (100, "x" * 1000),
        rb"raise ValueError('a \udcff b')": (100, "ValueError: a b"),
        b"raise Mute": (100, "Mute"),
        rb"response.error(7, 'a \udcff b')": (7, "a b"),
        b"response.error(-(2**63), 'least')": (-(2**63), "least"),
        b"response.error(2**63 - 1, 'most')": (2**63 - 1, "most"),
        b"response.error(2**63, '')": (
            100,
            "ValueError: code is out of range, expected -2**63 to 2**63 - 1",
        ),
        b"response.error('7', '')": (100, "TypeError: code is str, expected int"),
        b"response.error(True, '')": (100, "TypeError: code is bool, expected int"),
        b"response.error(7, b'')": (100, "TypeError: reason is bytes, expected str"),
        b"response.write(None)": (
            100,
            "TypeError: chunk is NoneType, expected bytes",
        ),
        b"response.write('a')": (
            100,
            "TypeError: chunk is str, expected bytes; use .encode()",
        ),
    }
    dialect = CocaineDialect(event="call", protocol=version)
    command = (sys.executable, "-c", ARGUMENTS)
    run = Stage(name="app", worker=command, dialect=dialect)
    async with AsyncSupervisor(run) as supervisor:
        results = await supervisor.submit(list(refusals))
    for text, result in zip(refusals, results, strict=True):
        assert isinstance(result.error, WorkerRefusal), text
        assert (result.error.code, result.error.reason) == refusals[text]
    assert supervisor.faults.failures == 0


@pytest.mark.parametrize(
    ("ending", "status", "shown"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit(-1)", 255, ""),
        ("sys.exit('no such table')", 1, "no such table"),
        ("raise KeyboardInterrupt", 1, "KeyboardInterrupt"),
    ],
)
async def test_handler_may_end_the_process(
    ending: str, status: int, shown: str
) -> None:
    """What was answered before is sent; the session itself is not (issue 26)."""
    script = (
        "import sys\n"
        "from etlstage.worker import cocaine\n"
        "def end(request, response):\n"
        "    response.write(b'x' * 3_000_000)\n"
        f"    {ending}\n"
        "cocaine.run({'end': end})\n"
    )
    async with talking((sys.executable, "-c", script)) as talk:
        talk.send(Opened(1, [b"a"], each=False, event="end"))
        await talk.until(lambda: sum(map(len, talk.outputs[1])) == 3_000_000)
        assert await talk.exited() == status
        assert not talk.ended
        assert not talk.refused
        assert shown.encode() in (talk.child.stderr.read(65536) or b"")


async def test_busy_handler_does_not_keep_it_from_answering(tmp_path: Path) -> None:
    """A session that is open at the request to end is finished first."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    async with talking(COMMAND) as talk:
        talk.send(Opened(1, [bytes(fifo)], each=False, event="block"))
        await talk.until(lambda: talk.outputs[1])
        talk.send(Opened(2, [b"x"], each=False, event="shout"))
        await talk.until(lambda: 2 in talk.ended)
        talk.wire.write(b"\x93\x01\x01\x92\x01\xa3bye")
        await anyio.to_thread.run_sync(fifo.write_bytes, b"freed")
        await talk.until(lambda: 1 in talk.ended)
        await talk.until(lambda: talk.seen(Farewell))
        assert talk.outputs[1] == [b"blocked", b"freed"]
        assert await talk.exited() == 0


async def test_handler_is_notified_that_it_is_cancelled() -> None:
    """Its later output reaches no other session."""
    async with talking(COMMAND) as talk:
        talk.send(Opened(1, [], each=False, ended=False, event="wait"))
        await talk.until(lambda: talk.outputs[1])
        talk.send(Cancelled(1, 7, "client gone"))
        talk.send(Opened(2, [b"x"], each=False, event="shout"))
        await talk.until(lambda: 2 in talk.ended)
        assert talk.outputs[2] == [b"X"]
        talk.send(Opened(3, [b""], each=False, event="seen"))
        await talk.until(lambda: 3 in talk.ended)
        assert b"client gone" in b"".join(talk.outputs[3])


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_session_is_kept_open(backend: str) -> None:
    """Large chunks pass both ways, without a deadlock."""
    chunks = [b"%d" % n * 300_000 for n in range(30)]

    async def send(session: WorkerSession) -> None:
        for chunk in chunks:
            await session.send(chunk)
        await session.choke()

    async def main() -> None:
        async with (
            AsyncSupervisor(stage("refuse")) as supervisor,
            supervisor.session("shout") as session,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(send, session)
            assert [chunk async for chunk in session] == chunks

    anyio.run(main, backend=backend)


LATER = """
import queue
from etlstage.worker import cocaine

freed = queue.SimpleQueue()

def later(request, response):
    response.close()
    freed.get()
    freed.put(None)

def free(request, response):
    freed.put(None)

cocaine.run({"later": later, "free": free}, threads=3)
"""


async def test_handler_may_work_on_after_its_answer() -> None:
    """New sessions are handled by other threads meanwhile (issue 22)."""
    async with talking((sys.executable, "-c", LATER)) as talk:
        for id_, event in enumerate(("later", "later", "free", "free", "free"), 1):
            talk.send(Opened(id_, [b""], each=False, event=event))
            await talk.until(partial(talk.ended.__contains__, id_))


POUR = """
import os, sys
from etlstage.worker import cocaine

def pour(request, response):
    size = int(sys.argv[1])
    with open(sys.argv[2], "wb", buffering=0) as progress:
        for written in range(0, 48 * 1024 * 1024, size):
            response.write(bytes(size))
            progress.write(b"." * ((written + size >> 20) - (written >> 20)))

cocaine.run({"pour": pour})
"""


@pytest.mark.parametrize("size", [1000, 300_000])
async def test_handler_waits_while_its_output_is_not_read(
    tmp_path: Path, size: int
) -> None:
    """It goes on when it is: chunks of any size take bounded memory (issue 22)."""
    progress = tmp_path / "progress"
    os.mkfifo(progress)
    command = (sys.executable, "-c", POUR, str(size), str(progress))
    async with talking(command) as talk:
        talk.send(Opened(1, [b""], each=False, event="pour"))
        await talk.until(lambda: True)
        with progress.open("rb", buffering=0) as lines:
            written = 0
            while select.select([lines], [], [], 1.0)[0] and (some := lines.read(99)):
                written += len(some)
            assert written < 24
            await talk.until(lambda: 1 in talk.ended)
            assert written + len(lines.read(99) or b"") == 48
        assert sum(map(len, talk.outputs[1])) >= 48 * 1024 * 1024


async def test_epochs_are_loaded_and_committed(tmp_path: Path) -> None:
    """The programs connect as the workers do (issue 15)."""
    script = (
        "import os, sys\n"
        "from etlstage.worker import cocaine\n"
        "def load(request, response):\n"
        "    with open(sys.argv[1], 'ab') as file: file.write(request.read() + b';')\n"
        "cocaine.run({'load': load})\n"
    )
    program = (sys.executable, "-c", script)
    run = Stage(
        name="load",
        kind=StageKind.LOAD,
        worker=WorkerProgram(command=(*program, "loaded"), cwd=tmp_path),
        dialect=CocaineDialect(event="load"),
    )
    sink = EpochSink(run, commit=(*program, "told"), abort=(*program, "told"))
    sink.begin(Epochs("ab12", 3, once=True, check=lambda: None))
    async with sink:
        await sink.write([b"one", b"two"])
        await sink.flush()
    loaded = (tmp_path / "loaded").read_bytes().split(b";")
    assert sorted(loaded) == [b"", b"one", b"two"]
    told = (tmp_path / "told").read_text().split(";")
    assert [json.loads(text)["messages"] for text in told[:-1]] == [0, 2]
    assert sink.account.done == 2


async def test_supervisor_that_is_gone_is_no_success() -> None:
    """Its connection ended without a request to end."""
    async with talking(COMMAND) as talk:
        talk.wire.close_write()
        assert await talk.exited() == 1


async def test_heartbeats_come_as_often_as_the_supervisor_asks() -> None:
    """Whatever a handler does meanwhile (issue 22)."""
    async with talking(COMMAND, ETLSTAGE_HEARTBEAT="0.03") as talk:
        talk.send(Opened(1, [], each=False, ended=False, event="wait"))
        await talk.until(lambda: sum(isinstance(e, Alive) for e in talk.events) > 5)
        assert talk.ended == []


def test_worker_alone_shows_what_is_missing() -> None:
    """A user who starts it by hand learns that a supervisor has to."""
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--uuid is missing: a supervisor has to start this program" in done.stderr


def test_heartbeat_that_is_no_number_is_named() -> None:
    """It can't be started with one (issue 22)."""
    command = (*COMMAND, "--uuid", "u", "--endpoint", "/nowhere")
    env = os.environ | {"ETLSTAGE_HEARTBEAT": "often"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 2
    assert "ETLSTAGE_HEARTBEAT is 'often', expected seconds" in done.stderr


def test_without_msgpack_it_shows_what_to_install() -> None:
    """Importing the module does not need msgpack."""
    script = f"import sys; sys.modules['msgpack'] = None\n{WORKER}"
    command = (sys.executable, "-c", script, "--uuid", "u", "--endpoint", "/nowhere")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'etlstage[cocaine]'" in done.stderr
