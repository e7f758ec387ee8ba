"""Workers that connect to a socket, and the locator that takes their logs."""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import anyio
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.transport import LaunchRequest, LaunchTerms
from etlstage.transport.process import PipeChild, PipeReader, PipeWire
from etlstage.transport.socket import (
    Listener,
    LocatorServer,
    SocketWire,
    launch_over_socket,
    launch_worker,
)
from tests.patience import HANG
from tests.transport.test_process import forked

DIALECT = CocaineDialect()
CONNECTOR = DIALECT.connection
ENV = {"PATH": "/usr/bin:/bin"}
CONNECT = """
import socket, sys
told = dict(zip(sys.argv[1::2], sys.argv[2::2]))
at = told["--endpoint"]
if at.startswith("/"):
    wire = socket.socket(socket.AF_UNIX)
    wire.connect(at)
else:
    host, port = at.rsplit(":", 1)
    wire = socket.create_connection((host, int(port)))
wire.sendall(b"\\x93\\x01\\x00\\x91\\xd9\\x24" + told["--uuid"].encode())
"""
"""The beginning of each worker's program."""
LONG = b"\x94\x01\x00\x91\xda\xea\x60" + b"x" * 60000 + b"\xda\xea\x60" + b"x" * 9000
"""A handshake that does not end."""


def hello(token: str) -> bytes:
    """Return a handshake."""
    return b"\x93\x01\x00\x91\xd9" + bytes([len(token)]) + token.encode()


@contextmanager
def listening() -> Iterator[tuple[Listener, SocketWire]]:
    """Yield a listener and the wire of a worker that it expects."""
    listener = Listener(CONNECTOR)
    wire = listener.expect()
    try:
        yield listener, wire
    finally:
        wire.close()


def connected(listener: Listener, data: bytes = b"") -> socket.socket:
    """Return a connection to a listener, over which ``data`` has been sent."""
    client = socket.socket(socket.AF_UNIX)
    client.connect(listener.endpoint)
    client.sendall(data)
    return client


@contextmanager
def started(script: str) -> Iterator[tuple[SocketWire, PipeChild]]:
    """Start a worker in Python; kill and close it at the end."""
    command = (sys.executable, "-I", "-S", "-c", CONNECT + script)
    request = LaunchRequest(command, ENV, stage="clean", dialect=DIALECT)
    wire, child = launch_over_socket(request)
    try:
        yield wire, child
    finally:
        child.kill()
        wire.close()
        child.close()


def dismissed(client: socket.socket) -> bool:
    """Return whether we have closed a connection."""
    client.setblocking(False)
    try:
        return client.recv(10) == b""
    except ConnectionResetError:  # with something unread
        return True
    except BlockingIOError:
        return False


def mode(path: Path) -> int | None:
    """Return the permissions of a file or folder; None if there is none."""
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else None


async def read_all(wire: SocketWire) -> bytes:
    """Return all that comes."""
    output = b""
    with anyio.fail_after(HANG):
        while (data := wire.read(65536)) != b"":
            if data is None:
                await wire.readable()
            else:
                output += data
    return output


# --- who is who ----------------------------------------------------------------------


async def test_worker_is_met_and_its_greeting_is_handed_on() -> None:
    """Before it connects, nothing can be read or written; its greeting is kept."""
    with listening() as (listener, wire):
        assert wire.read(10) is None
        assert wire.write(b"x") == 0
        with connected(listener, hello(wire.token) + b"more") as worker:
            await wire.readable()
            assert wire.read(3) == b"\x93\x01\x00"
            assert wire.read(100) == hello(wire.token)[3:] + b"more"
            assert wire.read(100) is None
            await wire.writable()
            assert wire.write(b"hi") == 2
            assert worker.recv(10) == b"hi"
            wire.close_write()
            assert worker.recv(10) == b""


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(3)), st.lists(st.integers(1, 42), max_size=5))
def test_workers_of_one_listener_are_distinguished(
    order: list[int], cuts: list[int]
) -> None:
    """Whatever the order in which they come, and however their greetings are cut."""

    async def check() -> None:
        listener = Listener(CONNECTOR)
        wires = [listener.expect() for _ in order]
        clients = [connected(listener) for _ in order]
        edges = [0, *sorted(set(cuts)), 1000]
        for start, end in pairwise(edges):
            for index in order:
                clients[index].sendall(hello(wires[index].token)[start:end])
                wires[0].read(0)
        for wire, client in zip(wires, clients, strict=True):
            assert wire.read(100) == hello(wire.token)
            client.close()
            wire.close()
        assert listener.idle

    anyio.run(check)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (hello("somebody"), "it is not from an expected worker"),
        (b"\x93\x02\x00\x90", "the first frame is not a handshake"),
        (b"GET / HTTP/1.1\r\n", "the first frame is not a handshake"),
        (LONG, f"did not identify itself in {len(LONG)} bytes"),
    ],
    ids=["unknown", "no handshake", "no dialect", "too long"],
)
async def test_stranger_is_refused(
    data: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connection is closed, and the reason is logged without the token."""
    with listening() as (listener, wire), connected(listener, data) as stranger:
        for _ in range(3):
            assert wire.read(10) is None
        assert dismissed(stranger)
        mistaken = "under another name" in wire.mismatch_hint()
        assert mistaken is (data == hello("somebody"))
    assert reason in caplog.text
    assert wire.token not in caplog.text


async def test_worker_comes_once() -> None:
    """Another connection with the same token is refused."""
    with listening() as (listener, wire), connected(listener, hello(wire.token)) as one:
        assert wire.read(100) == hello(wire.token)
        with connected(listener, hello(wire.token)) as other:
            late = listener.expect()
            assert late.read(1) is None
            assert dismissed(other)
            late.close()
        assert not dismissed(one)


async def test_strangers_do_not_pile_up() -> None:
    """The oldest silent connection is closed when there are too many."""
    with listening() as (listener, wire):
        silent = []
        for _ in range(65):
            silent.append(connected(listener))
            wire.read(1)
        assert [dismissed(client) for client in silent[:2]] == [True, False]
        with connected(listener, hello(wire.token)):
            assert wire.read(100) == hello(wire.token)
        for client in silent:
            client.close()


async def test_who_is_not_expected_any_more_is_refused() -> None:
    """When a stage stops, nothing more can be read or written."""
    with listening() as (listener, wire):
        other = listener.expect()
        wire.close_write()
        assert wire.read(10) == b""
        await wire.readable()
        await wire.writable()
        with pytest.raises(BrokenPipeError):
            wire.write(b"x")
        with connected(listener, hello(wire.token)) as worker:
            other.read(1)
            assert dismissed(worker)
        other.close()


async def test_waiting_for_one_lets_others_in() -> None:
    """Any waiting wire accepts all connections, and both waiters are woken."""
    with listening() as (listener, wire):
        other = listener.expect()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wire.readable)
            tasks.start_soon(other.writable)
            await anyio.wait_all_tasks_blocked()
            clients = [connected(listener, hello(w.token)) for w in (other, wire)]
        assert other.read(100) == hello(other.token)
        for client in clients:
            client.close()
        other.close()


# --- where ---------------------------------------------------------------------------


async def test_no_other_user_gets_at_the_socket() -> None:
    """It is in a private folder; both are removed with the last wire."""
    with listening() as (listener, wire):
        other = listener.expect()
        path = Path(listener.endpoint)
        assert mode(path) == 0o600
        assert mode(path.parent) == 0o700
        other.close()
        other.close()
        assert mode(path)
        wire.stop_waiting()
    wire.stop_waiting()
    assert mode(path.parent) is None


async def test_path_is_short_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No system accepts a long path for a socket."""
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", os.fspath(deep))
    with listening() as (listener, _):
        assert listener.endpoint.startswith("/tmp/etlstage-socket-")  # noqa: S108
    assert not os.listdir(deep)


def test_each_loop_has_a_folder() -> None:
    """All workers of a loop share one; each task of Spark has its own."""
    folders = []

    async def start() -> None:
        with started("wire.recv(1)") as (one, _), started("wire.recv(1)") as (two, _):
            assert one.endpoint == two.endpoint
            folders.append(Path(one.endpoint).parent)
        assert mode(folders[-1]) is None

    for _ in range(2):
        anyio.run(start)
    assert folders[0] != folders[1]


async def test_program_that_cannot_be_started_leaves_nothing() -> None:
    """No folder is left, and no worker is expected any more."""
    with started("wire.recv(1)") as (wire, _):
        folder = Path(wire.endpoint).parent
        request = LaunchRequest(("no-such-program",), ENV, dialect=DIALECT)
        with pytest.raises(FileNotFoundError):
            launch_worker(request)
        assert mode(folder)
    assert mode(folder) is None


# --- processes -----------------------------------------------------------------------

TALK = """
print("told", sys.argv[1::2])
print("app", told["--app"], "stdin", repr(sys.stdin.read()), flush=True)
print("careful", file=sys.stderr, flush=True)
while data := wire.recv(10):
    wire.sendall(data.upper())
"""


async def test_worker_connects_and_identifies_itself() -> None:
    """Everything it writes to stdout and stderr is read as its stderr."""
    with started(TALK) as (wire, child):
        with anyio.fail_after(HANG):
            while not (written := wire.write(b"hello")):
                await wire.readable()
            assert written == 5
            wire.close_write()
            said = await read_all(wire)
            assert await child.wait() == 0
        assert said == hello(wire.token) + b"HELLO"
        lines = (child.stderr.read(1000) or b"").decode().splitlines()
        assert lines == [
            "told ['--app', '--endpoint', '--locator', '--uuid', '--protocol']",
            "app clean stdin ''",
            "careful",
        ]


async def test_worker_that_ends_before_it_is_met_has_sent_all() -> None:
    """Its output can be read after its exit."""
    with started("wire.sendall(b'bye')") as (wire, child):
        with anyio.fail_after(HANG):
            await child.wait()
        wire.close_write()
        assert await read_all(wire) == hello(wire.token) + b"bye"


async def test_what_is_unread_is_known() -> None:
    """While anything is unread, the last write counts, even after the worker's end."""
    with listening() as (listener, wire):
        assert wire.unread() == 0
        worker = connected(listener, hello(wire.token))
        assert wire.read(100) == hello(wire.token)
        wire.write(b"one")
        wire.write(b"more")
        assert wire.unread() == 4
        assert worker.recv(100) == b"onemore"
        assert wire.unread() == 0
        wire.write(b"last!")
        worker.close()
        assert wire.read(1) == b""
        assert wire.unread() == 5
        with pytest.raises(BrokenPipeError):
            wire.write(b"x")


async def test_full_socket_takes_a_part_and_then_nothing() -> None:
    """A write does not block; once the worker reads, there is room again."""
    with listening() as (listener, wire):
        worker = connected(listener, hello(wire.token))
        wire.read(100)
        written = wire.write(b"x" * 10_000_000)
        assert 0 < written < 10_000_000
        assert wire.write(b"x") == 0
        left = written
        while left:
            left -= len(worker.recv(left))
        await wire.writable()
        assert wire.write(b"x") == 1
        worker.close()
        with pytest.raises(BrokenPipeError):
            wire.write(b"x")


async def test_dialect_decides_what_a_worker_is_given() -> None:
    """A dialect that does not connect gets pipes."""
    wire, child = launch_worker(LaunchRequest(("true",), ENV, terms=LaunchTerms()))
    assert isinstance(wire, PipeWire)
    await child.wait()
    child.kill()
    wire.close()
    child.close()


@pytest.mark.parametrize("connects", [False, True])
async def test_who_is_called_can_be_woken(connects: bool) -> None:
    """This works before and after the worker has connected (issue 13)."""
    with listening() as (listener, wire):
        client = connected(listener, hello(wire.token)) if connects else None
        with anyio.fail_after(HANG):
            while connects and wire.read(100) is None:
                await wire.readable()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wire.pull, lambda: True)
                await anyio.wait_all_tasks_blocked()
                wire.stop_waiting()
        if client is not None:
            client.close()


EMIT = msgpack.packb([1, 0, [3, "app", "too hot", []], []])


@contextmanager
def open_desk() -> Iterator[tuple[LocatorServer, int]]:
    """Yield a locator, and the descriptor that a worker writes its stderr to."""
    reading, writing = os.pipe()
    desk = LocatorServer(CONNECTOR)
    desk.join(PipeReader(open(reading, "rb", buffering=0)))  # noqa: SIM115
    try:
        yield desk, writing
    finally:
        desk.close()
        os.close(writing)


def visit(desk: LocatorServer, data: bytes) -> socket.socket:
    """Return a connection over which ``data`` has been sent."""
    host, port = desk.endpoint.split(":")
    visitor = socket.create_connection((host, int(port)))
    visitor.settimeout(5)
    visitor.sendall(data)
    return visitor


async def line_of(desk: LocatorServer) -> bytes:
    """Return what is read next."""
    with anyio.fail_after(HANG):
        while (data := desk.read(1000)) is None:
            await desk.readable()
    return data


async def test_line_of_the_logging_service_is_one_of_stderr() -> None:
    """It may interrupt another line, which is then cut."""
    with open_desk() as (desk, stderr):
        assert desk.read(10) is None
        with visit(desk, EMIT):
            assert await line_of(desk) == b"ERROR app: too hot\n"
        os.write(stderr, b"almo")
        assert await line_of(desk) == b"almo"
        with visit(desk, EMIT):
            assert await line_of(desk) == b"\nERROR app: too hot\n"
        os.write(stderr, b"st\n")
        assert await line_of(desk) == b"st\n"


async def test_locator_answers() -> None:
    """Its answer is its own address, where the logging service is, too."""
    with open_desk() as (desk, stderr):
        ask = msgpack.packb([7, 0, ["logging"], []])
        with visit(desk, ask) as visitor:
            await desk.readable()
            assert desk.read(10) is None
            await desk.readable()
            assert desk.read(10) is None
            channel, kind, (endpoints, *_) = msgpack.unpackb(
                visitor.recv(1000), strict_map_key=False
            )
        host, port = endpoints[0]
        assert (channel, kind, f"{host}:{port}") == (7, 0, desk.endpoint)
        os.write(stderr, b"x\n")
        assert await line_of(desk) == b"x\n"


async def test_visitor_who_talks_nonsense_is_shown_out() -> None:
    """Its connection is closed, and the next one is served."""
    with open_desk() as (desk, _), visit(desk, b"\xc1") as visitor:
        with visit(desk, EMIT):
            assert await line_of(desk) == b"ERROR app: too hot\n"
        assert desk.read(1) is None
        assert visitor.recv(10) == b""


async def test_desk_takes_so_many_visitors() -> None:
    """The first connection beyond the limit is closed."""
    with open_desk() as (desk, _):
        visitors = []
        for _ in range(17):
            visitors.append(visit(desk, b""))
            await desk.readable()
            assert desk.read(1) is None
        assert visitors[16].recv(1) == b""
        visitors[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            visitors[0].recv(1)
        for visitor in visitors:
            visitor.close()


async def test_end_of_stderr_is_the_end() -> None:
    """Open connections don't prevent it; without stderr there is no waiting."""
    desk = LocatorServer(CONNECTOR)
    assert desk.read(1) == b""
    desk.stop_waiting()
    desk.close()
    await desk.readable()
    with open_desk() as (desk, stderr), visit(desk, b""):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stderr)
        os.close(null)
        assert await line_of(desk) == b""


WITHOUT_OUTPUT = """
import os, sys
null = os.open(os.devnull, os.O_WRONLY)
os.dup2(null, 1)
os.dup2(null, 2)
host, port = told["--locator"].rsplit(":", 1)
for asked in range(2):
    with socket.create_connection((host, int(port))) as asking:
        asking.sendall(%r)
        assert asking.recv(1000)
"""


async def test_locator_answers_a_worker_without_stderr() -> None:
    """As long as it runs; its stderr has ended when it exits (issue 22)."""
    ask = msgpack.packb([7, 0, ["logging"], []])
    with started(WITHOUT_OUTPUT % ask) as (_, child):
        with anyio.fail_after(HANG):
            while child.stderr.read(1000) != b"":
                await child.stderr.readable()
            assert await child.wait() == 0


async def test_end_of_stderr_is_the_end_without_pidfd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is unknown for how long the locator may be asked (issue 22)."""
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    with started("import os, time; os.closerange(1, 3); time.sleep(600)") as (_, child):
        with anyio.fail_after(HANG):
            while child.stderr.read(1000) != b"":
                await child.stderr.readable()
        assert child.returncode is None


# --- no descriptor left ------------------------------------------------------------


class Outage:
    """Has accepting fail, as when too many files are open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
        self.times: list[float] = []
        self._failures = failures
        self._accept = socket.socket.accept
        monkeypatch.setattr(socket.socket, "accept", lambda one: self.accept(one))

    def accept(self, listening: socket.socket) -> object:
        """Fail, as often as is to be, or accept."""
        self.times.append(anyio.current_time())
        if len(self.times) > self._failures:
            return self._accept(listening)
        raise OSError(errno.EMFILE, "Too many open files")

    @property
    def waited(self) -> bool:
        """Whether there was a pause after each failure."""
        tries = self.times[: self._failures + 1]
        return all(after - before >= 0.1 for before, after in pairwise(tries))


async def test_accepting_pauses_while_no_descriptor_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line is logged per outage, and each worker connects after it (issue 22)."""
    outage = Outage(monkeypatch, failures=3)
    with listening() as (listener, first):
        second = listener.expect()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read_all, first)
            tasks.start_soon(read_all, second)
            await anyio.wait_all_tasks_blocked()
            clients = [connected(listener, hello(w.token)) for w in (first, second)]
            for client in clients:
                client.shutdown(socket.SHUT_WR)
        for client in clients:
            client.close()
        second.close()
    assert outage.waited
    (record,) = caplog.records
    assert record.getMessage() == (
        "can't accept a worker's connection: [Errno 24] Too many open files; trying"
        " again every 0.1 s"
    )


async def test_worker_that_waits_is_woken_by_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its socket is not watched meanwhile, but tried again (issue 22)."""
    outage = Outage(monkeypatch, failures=1)
    with listening() as (listener, wire):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read_all, wire)
            await anyio.wait_all_tasks_blocked()
            with connected(listener, hello(wire.token)) as client:
                listener.serve()  # as another wire does before the task can run
                client.shutdown(socket.SHUT_WR)
    assert outage.waited


async def test_each_outage_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, also after a worker has connected in between (issue 22)."""
    with listening() as (listener, first):
        for wire in (first, listener.expect()):
            Outage(monkeypatch, failures=2)
            with connected(listener, hello(wire.token)) as client:
                client.shutdown(socket.SHUT_WR)
                await read_all(wire)
            monkeypatch.undo()
        wire.close()
    assert len(caplog.records) == 2


async def test_locator_pauses_while_no_descriptor_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes the line of a worker afterwards (issue 22)."""
    outage = Outage(monkeypatch, failures=2)
    with open_desk() as (desk, _), visit(desk, EMIT):
        assert await line_of(desk) == b"ERROR app: too hot\n"
    assert outage.waited
    assert len(caplog.records) == 1


# --- forks of the host ---------------------------------------------------------------


async def test_fork_of_the_host_keeps_no_connection_open() -> None:
    """A worker sees that we disconnect although the fork lives (issue 22)."""
    with listening() as (listener, wire):
        known, unknown = connected(listener, hello(wire.token)), connected(listener)
        listener.serve()
        stderr, held = os.pipe()
        pipe = PipeReader(os.fdopen(stderr, "rb", 0))
        locator = LocatorServer(CONNECTOR).join(pipe)
        host, port = locator.endpoint.split(":")
        asking = socket.create_connection((host, int(port)))
        with anyio.fail_after(HANG):
            await locator.readable()
        locator.read(10)
        with forked():
            wire.close()
            locator.close()
            assert all(map(dismissed, (known, unknown, asking)))
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host, int(port)))
        os.close(held)
        for client in (known, unknown, asking):
            client.close()
