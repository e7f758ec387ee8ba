from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import anyio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from etlstage.cli.init import copy_examples
from etlstage.examples.asgi.app import STAGE
from etlstage.examples.asgi.worker import answer
from etlstage.worker import Refuse
from tests.patience import HANG

CLIENTS = 200
SECONDS = 4


class Server:
    """The example under uvicorn, as a user runs it."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url

    def children(self) -> set[int]:
        """Return the processes that it has started and that have not ended."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return {int(pid) for task in tasks for pid in task.read_text().split()}

    def workers(self) -> list[int]:
        """Return those of them that are workers."""
        return sorted(pid for pid in self.children() if "worker.py" in words(pid))


def words(pid: int) -> str:
    """Return a process's command line; nothing if it is gone, or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Write the example out and run it until the block ends."""
    copy_examples(folder, "asgi")
    log = folder / "log"
    command = [sys.executable, "-m", "uvicorn", "app:app", "--port", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--no-access-log"], cwd=folder, stdout=output, stderr=output
        )
    try:
        while not (found := re.search(r"running on (\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
        yield Server(process, found[1])
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_no_request_is_lost_while_workers_are_killed(tmp_path: Path) -> None:
    """200 clients, one worker killed every second; each gets its own answer."""
    random = Random(1)  # noqa: S311
    asked: set[str] = set()
    answered: dict[str, tuple[int, Any]] = {}
    over = anyio.Event()
    killed: list[int] = []

    async def ask(name: int) -> None:
        # A pool of connections that all share would be the bottleneck.
        async with visitor() as client:
            while not over.is_set():
                text = (
                    f"client {name} request {len(asked)}" + " and" * random.randrange(5)
                )
                asked.add(text)
                reply = await client.post("/", json={"text": text})
                answered[text] = (reply.status_code, reply.text)

    with serving(tmp_path) as server:
        visitor = partial(
            httpx.AsyncClient,
            base_url=server.url,
            timeout=30,
            trust_env=False,
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        )
        async with anyio.create_task_group() as clients:
            for name in range(CLIENTS):
                clients.start_soon(ask, name)
            for _ in range(SECONDS):
                await anyio.sleep(0.9)
                pid = random.choice(server.workers())
                # A worker is so quick that it would hardly hold a message when it dies.
                os.kill(pid, signal.SIGSTOP)
                await anyio.sleep(0.1)
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            await anyio.sleep(0.5)
            over.set()
        async with visitor() as client:
            health = await client.get("/health")
            metrics = await client.get("/metrics")
        children = server.children()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(HANG)
        assert "Application shutdown complete" in (tmp_path / "log").read_text()

    assert answered.keys() == asked
    assert {status for status, _ in answered.values()} == {200}
    for text, (_, reply) in answered.items():
        assert json.loads(reply) == json.loads(
            *answer(json.dumps({"text": text}).encode())
        )
    assert len({text.split(" request")[0] for text in answered}) == CLIENTS
    assert len(set(killed)) == SECONDS
    assert health.json() == {"state": "ready"}
    assert counted(metrics, "worker_exits_total", status="SIGKILL") == SECONDS
    assert counted(metrics, "worker_restarts_total") == SECONDS
    assert counted(metrics, "messages_retried_total") >= SECONDS
    assert counted(metrics, "messages_failed_total") == 0
    assert counted(metrics, "messages_total") >= len(answered)
    assert [words(pid) for pid in children if words(pid)] == []


def counted(metrics: httpx.Response, name: str, **labels: str) -> float:
    """Return a metric's sum over all series with these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(metrics.text)
        for sample in family.samples
        if sample.name == f"etlstage_{name}" and labels.items() <= sample.labels.items()
    )


async def test_answers_and_errors(tmp_path: Path) -> None:
    """What a client sees of the service: answers, refusals, probes and metrics."""
    with serving(tmp_path) as server:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as c:
            reply = await c.post("/", json={"text": "some words"})
            refused = await c.post("/", content=b"no JSON")
            split = await c.post("/", content=b'{"text":\n"some words"}')
            long = await c.post("/", content=b"x" * (STAGE.max_message + 1))
            ready, health = await c.get("/ready"), await c.get("/health")
            metrics, elsewhere = await c.get("/metrics"), await c.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json() == {"text": "some words", "words": 2, "characters": 10}
    assert refused.status_code == 422
    wanted = 'expected an object such as {"text": "some words"}'
    assert refused.json() == {"detail": wanted}
    assert (split.status_code, "eom" in split.json()["detail"]) == (422, True)
    assert long.status_code == 413
    assert (ready.status_code, health.status_code) == (200, 200)
    assert counted(metrics, "messages_total") == 2
    assert elsewhere.status_code == 405


@pytest.mark.parametrize(
    "body", [b"", b"no JSON", b"[1]", b"{}", b'{"text": 1}', b"[" * 100_000]
)
def test_request_that_makes_no_sense(body: bytes) -> None:
    """The worker's function refuses it with a reason."""
    with pytest.raises(Refuse, match="expected an object such as"):
        list(answer(body))
