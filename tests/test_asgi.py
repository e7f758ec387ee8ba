"""The service is run by a real server on loopback, and asked by a real client."""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi import Request as FastAPIRequest
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from structlog.testing import capture_logs

from etlstage import ErrorPolicy, InvalidState, RestartPolicy, Stage, WorkerStartFailed
from etlstage.asgi import StageService
from etlstage.telemetry import PrometheusMeter
from etlstage.testing import ScriptedLaunch, ScriptedWorker
from tests.manual.fences import SECTIONS
from tests.patience import HANG

pytestmark = pytest.mark.process

STAGE = Stage(
    name="t",
    worker=["none"],
    window=1,
    max_message=100,
    on_error=ErrorPolicy(retries=0),
    restart=RestartPolicy(delay=0.01),
)
ONCE = RestartPolicy(policy="temporary")


@pytest.fixture
def anyio_backend() -> str:
    """Run on the event loop of uvicorn."""
    return "asyncio"


async def worker(worker: ScriptedWorker) -> int:
    """Answer, refuse, die, or be slow: as the message has it."""
    async for message in worker.messages():
        if message == b"no":
            await worker.refuse("not this one")
        elif message == b"die":
            await worker.complain("secret: hunter2")
            return 3
        elif message == b"sleep":
            await anyio.sleep(30)
        else:
            await worker.reply(message.upper())
    return 0


def service(stage: Stage = STAGE, **settings: Any) -> StageService:  # noqa: ANN401
    """Return a service of such workers."""
    return StageService(stage, launch=ScriptedLaunch(worker), **settings)


def starlette(service: StageService) -> Starlette:
    """Return an application of Starlette."""

    async def ask(request: Request) -> Response:
        outputs = await service.ask(await service.body(request))
        return PlainTextResponse(b"".join(outputs))

    routes = [Route("/", ask, methods=["POST"])]
    app = Starlette(routes=routes, lifespan=service.lifespan)
    service.install(app)
    return app


def fastapi(service: StageService) -> Starlette:
    """Return an application of FastAPI, with a plain function for a probe."""
    app = FastAPI(lifespan=service.lifespan)

    @app.post("/")
    async def ask(request: FastAPIRequest) -> Response:
        outputs = await service.ask(await service.body(request))
        return PlainTextResponse(b"".join(outputs))

    @app.get("/thread")
    def thread() -> str:
        return service.health.state

    service.install(app)
    return app


class Server(uvicorn.Server):
    """A server that sets an event when it is up."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(uvicorn.Config(app, port=0, log_config=None, lifespan="on"))
        self.up = anyio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and set the event."""
        await super().startup(sockets)
        self.up.set()


@asynccontextmanager
async def serving(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """Run an application under uvicorn."""
    server = Server(app)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve)
        with anyio.fail_after(HANG):
            await server.up.wait()
        host, port = server.servers[0].sockets[0].getsockname()
        url = f"http://{host}:{port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            yield client
        server.should_exit = True


@pytest.mark.parametrize("make", [starlette, fastapi])
async def test_answers(make: Any) -> None:  # noqa: ANN401
    """A body is a message, and its outputs are the response (issue 22)."""
    made = service(meter=PrometheusMeter())
    async with serving(make(made)) as client:
        reply = await client.post("/", content=b"abc")
        ready, health = await client.get("/ready"), await client.get("/health")
        metrics = await client.get("/metrics")
        if make is fastapi:
            assert (await client.get("/thread")).json() == "ready"
    assert (reply.status_code, reply.text) == (200, "ABC")
    assert (ready.status_code, ready.json()) == (200, {"state": "ready"})
    assert (health.status_code, health.json()) == (200, {"state": "ready"})
    assert 'etlstage_messages_total{stage="t",worker="t-1"} 1.0' in metrics.text


@pytest.mark.parametrize("make", [starlette, fastapi])
async def test_errors_have_a_status(make: Any) -> None:  # noqa: ANN401
    """A client is shown what concerns it, and no more (issue 22)."""
    made = service(timeout=2)
    with capture_logs() as logs:
        async with serving(make(made)) as client:
            replies = [
                await client.post("/", content=body)
                for body in (b"no", b"a\nb", b"x" * 101, b"die", b"sleep")
            ]
            assert (await client.get("/metrics")).status_code == 404
    assert [reply.status_code for reply in replies] == [422, 422, 413, 502, 504]
    details = [reply.json()["detail"] for reply in replies if reply.status_code != 413]
    assert details[0] == "not this one"
    assert "eom" in details[1]
    assert details[2:] == ["the message could not be processed", "no result in time"]
    for reply in replies:
        for word in ("hunter2", "pid", "command", "none"):
            assert word not in reply.text
    told = [log["error"] for log in logs if log["event"] == "request failed"]
    assert any("status 3" in error for error in told)


async def pass_on(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Do nothing, as middleware."""
    return await call_next(request)


@pytest.mark.parametrize("make", [starlette, fastapi])
async def test_client_that_leaves_within_its_body(make: Any) -> None:  # noqa: ANN401
    """Its request ends without an error, also in middleware (issue 22)."""
    app = make(service())
    app.add_middleware(BaseHTTPMiddleware, dispatch=pass_on)
    parts: list[dict[str, Any]] = [
        {"type": "http.request", "body": b"ab", "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return parts.pop(0)

    async def send(message: Any) -> None:  # noqa: ANN401
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "http_version": "1.1"}
    await app(scope | {"query_string": b"", "headers": []}, receive, send)
    start, end = sent
    assert (parts, start["status"], end["body"]) == ([], 499, b"")


async def test_too_many_requests() -> None:
    """They are asked to retry later, and the others are answered."""
    held, free = anyio.Event(), anyio.Event()

    async def busy(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            held.set()
            await free.wait()
            await worker.reply(message)
        return 0

    answers: list[str] = []

    async def ask(client: httpx.AsyncClient) -> None:
        answers.append((await client.post("/", content=b"first")).text)

    made = StageService(STAGE, launch=ScriptedLaunch(busy), max_pending=1)
    async with serving(starlette(made)) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, client)
        with anyio.fail_after(HANG):
            await held.wait()
        reply = await client.post("/", content=b"second")
        ready = await client.get("/ready")
        free.set()
    assert (reply.status_code, ready.status_code) == (503, 200)
    assert reply.json() == {"detail": "too many requests are waiting"}
    assert reply.headers["retry-after"] == "1"
    assert answers == ["first"]


async def test_stage_that_has_failed() -> None:
    """Both probes report it, and so does each request."""
    stage = Stage(name="t", worker=["none"], window=1, restart=ONCE)
    async with serving(starlette(service(stage))) as client:
        await client.post("/", content=b"die")
        reply = await client.post("/", content=b"a")
        ready, health = await client.get("/ready"), await client.get("/health")
    assert (reply.status_code, ready.status_code, health.status_code) == (503,) * 3
    assert reply.json() == {"detail": "the service is not available"}
    assert health.json() == {"state": "failed"}


async def test_application_that_does_not_serve() -> None:
    """Without the lifespan no workers are run, and the error names what is missing."""
    made = service()
    app = starlette(made)
    with pytest.raises(InvalidState, match="pass it the lifespan of this service"):
        await made.ask(b"a")
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        reply = await client.post("/", content=b"a")
        ready, health = await client.get("/ready"), await client.get("/health")
    assert (reply.status_code, ready.status_code, health.status_code) == (503, 503, 200)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"timeout": "2"}, TypeError, "timeout: expected a number of seconds, got '2'"),
        ({"timeout": math.nan}, ValueError, "timeout is nan, expected a number"),
        ({"drain": None}, TypeError, "drain: expected a number of seconds, got None"),
        ({"stage": "t"}, TypeError, "expected a Stage, got str; make one with"),
    ],
)
def test_arguments_are_validated(
    settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    """Otherwise each request would fail, or the end of the server (issue 22)."""
    assert service(timeout=None)
    with pytest.raises(error, match=text):
        service(**settings)


async def test_lifespan_that_runs_already() -> None:
    """Another application is refused, and the first goes on (issue 22)."""
    made = service()
    for _ in range(2):
        async with made.lifespan(starlette(made)):
            with pytest.raises(InvalidState, match="runs already; make a service for"):
                async with made.lifespan(starlette(made)):
                    pass
            assert await made.ask(b"a") == (b"A",)


async def test_program_that_is_not_there() -> None:
    """The server does not start."""
    made = StageService(Stage(name="t", worker=[sys.executable, "no-such-file.py"]))
    with pytest.raises(WorkerStartFailed, match="there is no file"):
        async with made.lifespan(starlette(made)):
            pass


UPPER = "from etlstage import worker; worker.transform(lambda m: [m.upper()])"


async def test_application_of_the_manual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves as it stands there (issue 22)."""
    (tmp_path / "clean.py").write_text(UPPER)
    monkeypatch.chdir(tmp_path)
    programs = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", programs + os.pathsep + os.environ["PATH"])
    names: dict[str, Any] = {}
    (fence,) = SECTIONS["how-to/embed.md#Serve HTTP with Starlette or FastAPI"]
    exec(compile(fence.text, "manual", "exec", dont_inherit=True), names)  # noqa: S102 - the manual's own
    async with serving(names["app"]) as client:
        assert (await client.post("/", content=b"abc")).text == "ABC"
        assert (await client.get("/metrics")).status_code == 200
