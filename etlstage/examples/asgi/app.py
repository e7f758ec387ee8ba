"""
An HTTP service whose requests are answered by worker processes.

A plain ASGI application, to be copied into your framework. Run it in this folder::

    pip install 'etlstage[prometheus]' uvicorn
    uvicorn app:app

    curl -d '{"text": "some words"}' localhost:8000    # 200 and the worker's reply
    curl localhost:8000/health                         # 200 if it can answer
    curl localhost:8000/metrics                        # for Prometheus

Kill a worker (``pkill -9 -f worker.py``): it is started again, and what it had not
answered yet is answered by another. A request ends with status

* 200: with the reply;
* 413: its body is too long;
* 422: it can't be processed, for example because the worker refuses it, or because it
  is not on one line, or three workers died of it; the text says why;
* 503: too many wait already, it takes too long, no worker is left, or the service is
  stopping.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from etlstage import AsyncSupervisor, Stage, Timeouts
from etlstage.errors import (
    EtlstageError,
    Overloaded,
    RefusedByWorker,
    StageFailed,
)
from etlstage.telemetry import PrometheusMeter
from etlstage.telemetry.prometheus import CONTENT_TYPE

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]

MAX_BODY = 1024 * 1024
PATIENCE = 20.0  # seconds that a request may wait, and the end for requests
STAGE = Stage(
    name="answer",
    command=(sys.executable, str(Path(__file__).with_name("worker.py"))),
    workers=2,
    timeout=Timeouts(message=10),
)


class Service:
    """Answers requests by ``stage``, which runs as long as the server does."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.meter: PrometheusMeter = PrometheusMeter()
        self.supervisor: AsyncSupervisor | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve as ASGI says."""
        if scope["type"] == "lifespan":
            await self.live(receive, send)
        elif scope["type"] == "http":
            kind = "application/json"
            if scope["path"] == "/metrics":
                kind, status, body = CONTENT_TYPE, 200, self.meter.render().encode()
            elif scope["path"] == "/health":
                status, body = self.health()
            elif scope["path"] == "/" and scope["method"] == "POST":
                status, body = await self.respond(receive)
            else:
                status, body = 404, b"POST / or GET /health or GET /metrics\n"
            if status != 200:
                kind = "text/plain; charset=utf-8"
            headers = [(b"content-type", kind.encode())]
            start = {"type": "http.response.start", "status": status}
            await send(start | {"headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def live(self, receive: Receive, send: Send) -> None:
        """Run the supervisor from the server's start to its end."""
        await receive()  # lifespan.startup
        try:
            async with AsyncSupervisor(
                self.stage, meter=self.meter, max_pending=10_000
            ) as supervisor:
                self.supervisor = supervisor
                await send({"type": "lifespan.startup.complete"})
                await receive()  # lifespan.shutdown
                self.supervisor = None
                await supervisor.aclose(drain=PATIENCE)
        except EtlstageError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
        else:
            await send({"type": "lifespan.shutdown.complete"})

    async def respond(self, receive: Receive) -> tuple[int, bytes]:
        """Return status and body for a request."""
        body, more = b"", True
        while more:
            event = await receive()
            body += event.get("body", b"")
            more = event.get("more_body", False)
            if len(body) > MAX_BODY:
                return 413, b"the body is longer than %d bytes\n" % MAX_BODY
        return await self.answer(body)

    async def answer(self, message: bytes) -> tuple[int, bytes]:
        """Return status and body for a message."""
        if self.supervisor is None:
            return 503, b"the service is not running\n"
        try:
            outputs = await self.supervisor.ask(message, timeout=PATIENCE)
        except RefusedByWorker as refused:
            return 422, f"{refused.reason}\n".encode()
        except (Overloaded, StageFailed, TimeoutError) as error:
            return 503, f"{error}\n".encode()
        except EtlstageError as error:
            # It names the command and what the worker wrote to stderr: when strangers
            # can ask, log it, and tell them less.
            return 422, f"{error}\n".encode()
        return 200, b"\n".join(outputs)

    def health(self) -> tuple[int, bytes]:
        """Return status and body for a probe."""
        if self.supervisor is None:
            return 503, b"the service is not running\n"
        state, reason = self.supervisor.health
        serves = state in {"ready", "degraded"}
        return 200 if serves else 503, f"{state} {reason}".rstrip().encode()


app: Service = Service(STAGE)
