"""The service on trio, as a user runs it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import trio

from etlstage.cli.init import copy_examples

CLIENTS = 200
LINES = 20


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Run the service on some port; end it as Ctrl-C does."""
    copy_examples(tmp_path, "trio")
    # A process started in the background of a shell ignores SIGINT, as its children do.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "server.py", "0"], cwd=tmp_path, stdout=subprocess.PIPE
    )
    signal.signal(signal.SIGINT, before)
    with process:
        assert process.stdout is not None
        yield int(process.stdout.readline().rpartition(b" ")[2])
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"stopped\n"
    assert process.returncode == 0


async def conversation(port: int, lines: list[bytes]) -> list[bytes]:
    """Return the answers to some lines."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(b"".join(line + b"\n" for line in lines))
        answers = b""
        while answers.count(b"\n") < len(lines):
            answers += await stream.receive_some()
    return answers.splitlines()


def test_each_client_has_its_own_answers(port: int) -> None:
    """There are 200 clients, and workers crash now and then (issue 11)."""
    random = Random(1)  # noqa: S311
    crashes = {random.randrange(CLIENTS * LINES) for _ in range(8)}

    async def client(number: int) -> None:
        lines = [
            b"crash"
            if number * LINES + at in crashes
            else b"client %d %d" % (number, at)
            for at in range(LINES)
        ]
        for line, answer in zip(lines, await conversation(port, lines), strict=True):
            if line == b"crash":
                assert answer.startswith(b"error: stage answer: worker answer-")
            else:
                assert answer == b" ".join(reversed(line.split()))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(client, number)

    trio.run(main)


def test_line_that_is_refused(port: int) -> None:
    """The worker's reason is the answer, and the next line is still answered."""

    async def main() -> None:
        refused, fine = await conversation(port, [b" ", b"a b"])
        assert refused.endswith(b"refused the message: it contains no words")
        assert fine == b"b a"

    trio.run(main)


def test_line_that_never_ends(port: int) -> None:
    """Its client is disconnected; others are still served."""

    async def main() -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            with suppress(trio.BrokenResourceError):
                while True:
                    await stream.send_all(b"x" * 65536)
        assert await conversation(port, [b"a b"]) == [b"b a"]

    trio.run(main)
