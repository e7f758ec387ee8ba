"""
An HTTP service that has its requests answered by workers.

Run it with ``uvicorn app:app --timeout-graceful-shutdown 20``. ``POST /`` passes the
body to a worker; ``/health`` is for a liveness probe, ``/ready`` for a readiness probe,
and ``/metrics`` for Prometheus. The workers run as long as the server: requests that
came before it stops are answered, within those seconds. A FastAPI application does the
same, with the same service.
"""

from __future__ import annotations

import sys
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etlstage import Stage, Timeouts
from etlstage.asgi import StageService
from etlstage.telemetry import PrometheusMeter

STAGE = Stage(
    name="answer",
    worker=[sys.executable, str(Path(__file__).with_name("worker.py"))],
    workers=2,
    timeout=Timeouts(message=10),
    max_message=1024 * 1024,
)


def make(stage: Stage) -> Starlette:
    """Return an application whose requests are answered by ``stage``."""
    service = StageService(stage, meter=PrometheusMeter())

    async def answer(request: Request) -> Response:
        # The service itself answers what is refused, too much or too late.
        outputs = await service.ask(await service.body(request))
        return Response(b"\n".join(outputs), media_type="application/json")

    app = Starlette(
        routes=[Route("/", answer, methods=["POST"])], lifespan=service.lifespan
    )
    service.install(app)
    return app


app: Starlette = make(STAGE)
