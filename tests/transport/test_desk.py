from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import msgpack
import pytest

from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.protocol.registry import default_dialect
from etlstage.transport.desk import Desk
from etlstage.transport.pipe import PipeReader

EMIT = msgpack.packb([1, 0, [3, "app", "too hot", []], []])


@contextmanager
def open_desk() -> Iterator[tuple[Desk, int]]:
    """Give a desk, and what a worker writes its stderr to."""
    reading, writing = os.pipe()
    desk = Desk(CocaineDialect())
    desk.join(PipeReader(open(reading, "rb", buffering=0)))  # noqa: SIM115
    try:
        yield desk, writing
    finally:
        desk.close()
        os.close(writing)


def visit(desk: Desk, data: bytes) -> socket.socket:
    """Return a connection over which ``data`` has been sent."""
    host, port = desk.endpoint.split(":")
    visitor = socket.create_connection((host, int(port)))
    visitor.settimeout(5)
    visitor.sendall(data)
    return visitor


async def line_of(desk: Desk) -> bytes:
    """Return what is read next."""
    with anyio.fail_after(10):
        while (data := desk.read(1000)) is None:
            await desk.readable()
    return data


async def test_line_of_the_logging_service_is_one_of_stderr() -> None:
    """Also in the middle of another, which is cut then."""
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
    """Where the service is: at the same place."""
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
    """The next one is served."""
    with open_desk() as (desk, _), visit(desk, b"\xc1") as visitor:
        with visit(desk, EMIT):
            assert await line_of(desk) == b"ERROR app: too hot\n"
        assert desk.read(1) is None
        assert visitor.recv(10) == b""


async def test_desk_takes_so_many_visitors() -> None:
    """Who is one too many is shown out."""
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
    """Whoever still visits; before there is one, and behind the end, nobody waits."""
    desk = Desk(default_dialect())
    assert desk.read(1) == b""
    desk.stop_waiting()
    desk.close()
    await desk.readable()
    with open_desk() as (desk, stderr), visit(desk, b""):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stderr)
        os.close(null)
        assert await line_of(desk) == b""
