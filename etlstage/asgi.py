"""
A stage behind HTTP: what a service of Starlette or FastAPI needs around a supervisor.

::

    service = StageService(stage, meter=PrometheusMeter())


    async def clean(request: Request) -> Response:
        outputs = await service.ask(await service.body(request))
        return Response(b"".join(outputs))


    app = Starlette(routes=[Route("/", clean, methods=["POST"])], lifespan=service.lifespan)
    service.install(app)  # probes, metrics, errors

The workers run as long as the application does. Clients see only the part of an error
that concerns them: the worker's name, command and stderr are only logged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etlstage.errors import (
    EtlstageError,
    InvalidMessage,
    InvalidState,
    Overloaded,
    StageFailed,
    WorkerRefusal,
)
from etlstage.stage import Stage
from etlstage.supervisor import AsyncSupervisor, Health
from etlstage.supervisor.arguments import check_seconds, check_stage
from etlstage.telemetry import PrometheusMeter
from etlstage.telemetry.log import Log
from etlstage.telemetry.prometheus import CONTENT_TYPE
from etlstage.transport import Launch, launch_worker

__all__ = ("StageService",)

_log = Log()
_LATER: Final = {"Retry-After": "1"}  # seconds
_GONE: Final = 499
"""Status that middleware sees once the client is gone, as nginx has it in its logs."""


class StageService:
    """
    Runs the workers of a stage while an application serves.

    Args:
        stage: What to run.
        timeout: Seconds that one :meth:`ask` may wait; None: only the stage's limits.
        drain: Seconds that requests in progress may take once the application ends; a
            server may wait for open requests before, with a limit of its own.
        max_pending: Messages that may wait for their results; more are answered 503.
        meter: Where to count what happens; ``/metrics`` shows it.
        launch: Starts the workers; by default as their dialect requires.

    Raises:
        TypeError: If ``stage`` is not a stage, or a time is not a number.
        ValueError: If a time is not a number of seconds (NaN).

    """

    def __init__(
        self,
        stage: Stage,
        *,
        timeout: float | None = 20.0,
        drain: float = 20.0,
        max_pending: int | None = 10_000,
        meter: PrometheusMeter | None = None,
        launch: Launch = launch_worker,
    ) -> None:
        check_stage(stage)
        if timeout is not None:
            check_seconds("timeout", timeout)
        check_seconds("drain", drain)
        self.stage = stage
        self.meter = meter
        self._timeout = timeout
        self._drain = drain
        self._max_pending = max_pending
        self._launch = launch
        self._running: AsyncSupervisor | None = None

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """
        Run the workers: the ``lifespan`` of an application, or a part of it.

        Raises:
            WorkerStartFailed: If the program does not exist; then the server does not
                start.
            InvalidState: If it runs already, as for another application.

        """
        if self._running is not None:
            raise InvalidState(
                f"stage {self.stage.name}: the lifespan of this service runs already;"
                " make a service for each application"
            )
        self._running = supervisor = AsyncSupervisor(
            self.stage,
            max_pending=self._max_pending,
            meter=self.meter,
            launch=self._launch,
        )
        try:
            async with supervisor:
                yield
                await supervisor.aclose(drain=self._drain)
        finally:
            self._running = None

    def install(self, app: Starlette) -> None:
        """Add the probes, the metrics and the handlers of errors to an application."""
        app.router.routes.append(Route("/health", self._health))
        app.router.routes.append(Route("/ready", self._ready))
        if self.meter is not None:
            app.router.routes.append(Route("/metrics", self._metrics))
        # `ask` raises Python's own TimeoutError, so any other one becomes 504, too.
        for error in (EtlstageError, TimeoutError):
            app.add_exception_handler(error, self._explain)
        app.add_exception_handler(ClientDisconnect, _answer_nothing)

    @property
    def supervisor(self) -> AsyncSupervisor:
        """
        The supervisor, for everything that :meth:`ask` does not do.

        Raises:
            InvalidState: If the application is not serving.

        """
        if self._running is None:
            raise InvalidState(
                f"stage {self.stage.name}: the application is not serving; pass"
                " it the lifespan of this service"
            )
        return self._running

    async def ask(self, message: bytes) -> tuple[bytes, ...]:
        """Return what the workers made of a message; see ``AsyncSupervisor.ask()``."""
        return await self.supervisor.ask(message, timeout=self._timeout)

    async def body(self, request: Request) -> bytes:
        """
        Return the body of a request, to be a message.

        Raises:
            HTTPException: With 413, if it is longer than ``max_message`` of the stage;
                no more than that is read.

        """
        body, most = bytearray(), self.stage.max_message
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise HTTPException(413, f"the body is longer than {most} bytes")
        return bytes(body)

    @property
    def health(self) -> Health:
        """:attr:`AsyncSupervisor.health`; *starting* before the application is up."""
        running = self._running
        return Health("starting") if running is None else running.health

    # --- endpoints ------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        """Answer 503 where a restart of the service would help."""
        return self._probe(up=self.health.state != "failed")

    async def _ready(self, request: Request) -> Response:
        """Answer 503 while no request would be answered."""
        return self._probe(up=self.health.state in {"ready", "degraded"})

    def _probe(self, *, up: bool) -> Response:
        # Without the reason, which names workers and why they died.
        state = {"state": self.health.state}
        return JSONResponse(state, status_code=200 if up else 503)

    async def _metrics(self, request: Request) -> Response:
        assert self.meter is not None
        return Response(self.meter.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _explain(self, request: Request, error: Exception) -> Response:
        """Return what a client may know of an error; log it if the status is 5xx."""
        headers: dict[str, str] | None = None
        match error:
            case WorkerRefusal():
                status, detail = 422, error.reason or "refused"
            case InvalidMessage():
                status, detail = 422, str(error)
            case TimeoutError():
                status, detail = 504, "no result in time"
            case Overloaded():
                status, detail, headers = 503, "too many requests are waiting", _LATER
            case InvalidState() | StageFailed():
                status, detail = 503, "the service is not available"
            case _ if self.health.state in {"starting", "failed"}:
                status, detail = 503, "the service is not available"
            case _:
                status, detail = 502, "the message could not be processed"
        if status >= 500:
            _log.warning("request failed", status=status, error=str(error))
        return JSONResponse({"detail": detail}, status_code=status, headers=headers)


async def _answer_nothing(_request: Request, _error: Exception) -> Response:
    # The client is gone, but middleware of the application expects an answer.
    return Response(status_code=_GONE)
