from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import anyio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from etlstage import RestartPolicy, Stage
from etlstage.cli.scaffold import copy_examples
from etlstage.examples.asgi.app import MAX_BODY, STAGE, Service
from etlstage.examples.asgi.worker import answer
from etlstage.worker import Refuse

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
@pytest.mark.timeout(90)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_no_request_is_lost_while_workers_are_killed(tmp_path: Path) -> None:
    """200 clients, one worker killed every second; each gets its own answer."""
    random = Random(1)  # noqa: S311
    asked: set[str] = set()
    answered: dict[str, tuple[int, Any]] = {}
    over = anyio.Event()
    killed: list[int] = []

    async def ask(name: int) -> None:
        # A pool that they share would be busy with itself.
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
                # It is quick: without that it would hardly hold anything when it dies.
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
        server.process.wait(20)
        assert "Application shutdown complete" in (tmp_path / "log").read_text()

    assert answered.keys() == asked
    assert {status for status, _ in answered.values()} == {200}
    for text, (_, reply) in answered.items():
        assert json.loads(reply) == json.loads(
            *answer(json.dumps({"text": text}).encode())
        )
    assert len({text.split(" request")[0] for text in answered}) == CLIENTS
    assert len(set(killed)) == SECONDS
    assert health.status_code == 200
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


@asynccontextmanager
async def client(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """Run the application without a server."""
    tell, told = anyio.create_memory_object_stream[dict[str, Any]](2)
    replies: list[str] = []
    started = anyio.Event()

    async def send(message: Any) -> None:  # noqa: ANN401 (as ASGI has it)
        replies.append(message["type"])
        started.set()

    async with tell, told, anyio.create_task_group() as tasks:
        tasks.start_soon(service, {"type": "lifespan"}, told.receive, send)
        await tell.send({"type": "lifespan.startup"})
        await started.wait()
        transport = httpx.ASGITransport(app=service)
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as c:
            yield c
        await tell.send({"type": "lifespan.shutdown"})
    assert replies == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_answer() -> None:
    """The worker's reply is the body."""
    async with client(Service(STAGE)) as c:
        reply = await c.post("/", json={"text": "some words"})
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json() == {"text": "some words", "words": 2, "characters": 10}


@pytest.mark.parametrize(
    "body", [b"", b"no JSON", b"[1]", b"{}", b'{"text": 1}', b"[" * 100_000]
)
async def test_request_that_makes_no_sense(body: bytes) -> None:
    """The worker refuses it, says why, and lives on."""
    async with client(Service(STAGE)) as c:
        reply = await c.post("/", content=body)
        health = await c.get("/health")
    with pytest.raises(Refuse):
        list(answer(body))
    assert reply.status_code == 422
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert reply.text == 'expected an object such as {"text": "some words"}\n'
    assert health.status_code == 200


async def test_message_that_fails() -> None:
    """What is not on one line can't be sent; the text says why."""
    async with client(Service(STAGE)) as c:
        reply = await c.post("/", content=b'{"text":\n"some words"}')
    assert reply.status_code == 422
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert "eom" in reply.text


async def test_body_that_is_too_long() -> None:
    """It is not read to its end."""
    chunks = [b"x" * (MAX_BODY // 2)] * 100

    async def receive() -> Any:  # noqa: ANN401 (as ASGI has it)
        return {"type": "http.request", "body": chunks.pop(), "more_body": True}

    status, _ = await Service(STAGE).respond(receive)
    assert status == 413
    assert len(chunks) == 97


async def test_stage_that_is_down() -> None:
    """Its worker can't live; health says so, too."""
    stage = Stage(
        name="answer",
        command=(sys.executable, "-S", "-c", "import sys; sys.exit(3)"),
        restart=RestartPolicy(max=1, delay=0.01),
    )
    async with client(Service(stage)) as c:
        with anyio.fail_after(10):
            while (await c.post("/", content=b"{}")).status_code != 503:
                pass
        health = await c.get("/health")
    assert health.status_code == 503


async def test_metrics_and_health() -> None:
    """For whoever watches it."""
    async with client(Service(STAGE)) as c:
        await c.post("/", json={"text": "some words"})
        health = await c.get("/health")
        metrics = await c.get("/metrics")
        elsewhere = await c.get("/")
    assert (health.status_code, health.text) == (200, "ready")
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert counted(metrics, "messages_total") == 1
    assert elsewhere.status_code == 404


async def test_service_that_is_not_running() -> None:
    """Before the start and behind the end."""
    transport = httpx.ASGITransport(app=Service(STAGE))
    async with httpx.AsyncClient(transport=transport, base_url="http://a") as c:
        reply = await c.post("/", content=b"{}")
    assert reply.status_code == 503


async def test_start_that_fails() -> None:
    """The server is told why, and ends."""
    said: list[Any] = []

    async def receive() -> Any:  # noqa: ANN401 (as ASGI has it)
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:  # noqa: ANN401 (as ASGI has it)
        said.append(message)

    service = Service(Stage(name="answer", command=("./not-there",)))
    await service({"type": "lifespan"}, receive, send)
    assert [m["type"] for m in said] == ["lifespan.startup.failed"]
    assert "there is no file ./not-there" in said[0]["message"]
