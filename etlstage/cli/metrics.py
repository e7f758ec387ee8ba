"""
What ``etlstage run --metrics`` serves over HTTP while a pipeline runs.

``/metrics`` is for Prometheus, ``/live`` and ``/ready`` are for whatever manages the
container. A thread serves them, so that they answer whatever the run is waiting for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from socket import AF_INET, AF_INET6
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING, Any, Final, Self

from etlstage.errors import ConfigError, os_reason
from etlstage.pipeline.ledger import Ledger
from etlstage.telemetry.prometheus import CONTENT_TYPE, PrometheusMeter

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ("MetricsServer",)

_LOOPBACK: Final = "127.0.0.1"
_COUNTS: Final = (
    *("received", "produced", "done", "dead", "failed", "unprocessed"),
    *("skipped", "doubtful", "mismatched"),
)
_TEXT: Final = "text/plain; charset=utf-8"


class MetricsServer:
    """
    Serves the metrics of one run, while the server is entered.

    Args:
        address: ``PORT`` or ``HOST:PORT``; without a host, only this machine is
            served. Port 0 is any free port.

    Raises:
        ConfigError: If the address is invalid or can't be listened on, or
            prometheus-client is not installed.

    """

    def __init__(self, address: str) -> None:
        self.meter: PrometheusMeter = PrometheusMeter()
        """Counts what happens in the run."""
        self.ledger: Ledger | None = None
        """The ledger of the run, which is not ready until this is set."""
        host, port = _parsed(address)
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise ConfigError(
                f"--metrics {address}: can't listen on this address: {os_reason(error)}"
            ) from None
        self._server.metrics = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="etlstage-metrics", daemon=True
        )
        self.meter.registry.register(_LedgerCollector(self))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """The URL of the metrics."""
        host, port = self._server.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else host
        return f"http://{name!s}:{port}/metrics"

    def answer(self, path: str) -> tuple[int, str, str]:
        """Return status, type and text of the answer to a request."""
        match path.partition("?")[0]:
            case "/metrics":
                return 200, CONTENT_TYPE, self.meter.render()
            case "/live":
                return 200, _TEXT, "live\n"
            case "/ready":
                return self._readiness()
        return 404, _TEXT, "available paths: /metrics, /live and /ready\n"

    def _readiness(self) -> tuple[int, str, str]:
        if self.ledger is None:
            return 503, _TEXT, "starting\n"
        if not self.ledger.moving:
            return 503, _TEXT, f"waiting for {self.ledger.awaited}\n"
        return 200, _TEXT, "ready\n"


class _Server(ThreadingTCPServer):
    # HTTPServer would look up its own name in the network.
    allow_reuse_address = True
    daemon_threads = True
    metrics: MetricsServer

    def __init__(self, host: str, port: int) -> None:
        self.address_family = AF_INET6 if ":" in host else AF_INET
        super().__init__((host, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as there
        """Report an error, but not that a client is gone, as a check of the port is."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10.0  # seconds to wait for a request

    def do_GET(self) -> None:
        status, kind, text = self.server.metrics.answer(self.path)
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - by the method of a request

    def log_message(self, *_: object) -> None:
        """Print nothing: a request every few seconds is not worth a line."""


class _LedgerCollector:
    """Reads the ledger when it is asked; every engine keeps one."""

    def __init__(self, server: MetricsServer) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(
            "etlstage_stage_messages",
            "Messages of a stage, as the closing report counts them.",
            labels=("stage", "count"),
        )
        for account in self._server.ledger or ():
            for count in _COUNTS:
                family.add_metric((account.stage, count), getattr(account, count))
        yield family


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--metrics {address}: expected a port or HOST:PORT, as in 9100 or"
            " 0.0.0.0:9100"
        )
    return host.strip("[]") or _LOOPBACK, int(port)
