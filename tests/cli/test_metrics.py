"""What is served over HTTP while a pipeline runs."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen
from typing import cast
from unittest.mock import Mock

import httpx
import pytest

from etlstage.cli.metrics import MetricsServer
from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.pipeline.ledger import Account, Ledger
from tests.cli.conftest import Etlstage, Started, worker


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    """Serve on any port."""
    with MetricsServer("0") as server:
        yield server


def get(server: MetricsServer, path: str) -> httpx.Response:
    """Get a path of the server."""
    return httpx.get(server.url.replace("/metrics", path), trust_env=False)


def test_ready_once_messages_move(server: MetricsServer) -> None:
    """It is live all the time; /ready states what it waits for (issue 11)."""
    assert server.url.startswith("http://127.0.0.1:")
    assert get(server, "/live").status_code == 200
    assert get(server, "/ready").status_code == 503

    account = Account("read", StageKind.EXTRACT)
    server.ledger = Ledger([account])
    waiting = get(server, "/ready")
    assert (waiting.status_code, waiting.text) == (
        503,
        "waiting for the first message\n",
    )
    account.produced = 3
    assert get(server, "/ready").text == "ready\n"
    found = get(server, "/metrics")
    assert found.headers["content-type"].startswith("text/plain; version=0.0.4")
    line = 'etlstage_stage_messages_total{count="produced",stage="read"} 3.0'
    assert line in found.text.splitlines()


def test_anything_else_is_not_found(server: MetricsServer) -> None:
    """The answer lists the paths."""
    answer = get(server, "/etc/passwd")
    assert (answer.status_code, answer.text) == (
        404,
        "available paths: /metrics, /live and /ready\n",
    )


def test_answer_to_head_has_no_body(server: MetricsServer) -> None:
    """Its status and headers are those of GET (issue 26)."""
    for path, status in (("/live", 200), ("/ready", 503), ("/none", 404)):
        url = server.url.replace("/metrics", path)
        answer, full = httpx.head(url, trust_env=False), get(server, path)
        assert (answer.status_code, answer.content) == (status, b"")
        assert answer.headers["content-length"] == full.headers["content-length"]


def test_connection_that_is_reset_is_no_error(
    server: MetricsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check of the port prints nothing on stderr (issue 26)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(b"GET /metr")
            reset = struct.pack("ii", 1, 0)  # no lingering
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        server._server.process_request_thread(*listener.accept())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [KeyError("/live"), OSError("a device")])
def test_error_in_an_answer_is_reported(
    server: MetricsServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    """Unlike that of a connection, it is a bug (issue 26)."""
    monkeypatch.setattr(server, "answer", Mock(side_effect=error))
    ours, peer = socket.socketpair()
    with peer:
        peer.sendall(b"GET /live HTTP/1.0\r\n\r\n")
        server._server.process_request_thread(ours, "peer")
    assert f"{type(error).__name__}: {error}" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["", "x", "1:x", "1:70000", "host", "1:-1"])
def test_address_that_is_none(address: str) -> None:
    """The error states what an address looks like."""
    with pytest.raises(ConfigError, match=r"expected a port or HOST:PORT"):
        MetricsServer(address)


def test_address_that_is_taken(server: MetricsServer) -> None:
    """The error comes before the run begins."""
    port = server.url.rpartition(":")[2].partition("/")[0]
    with pytest.raises(
        ConfigError, match=f"--metrics {port}: can't listen on this address"
    ):
        MetricsServer(port)


def test_address_of_the_new_kind() -> None:
    """An IPv6 address is in brackets, as in a URL."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        # Without IPv6 on this machine only the error can be tested.
        with pytest.raises(ConfigError, match=str(error.strerror).lower()):
            MetricsServer("[::1]:0")
        return
    with MetricsServer("[::1]:0") as server:
        assert get(server, "/live").text == "live\n"


def address(run: Popen[str]) -> str:
    """Return the address of a run's metrics, from its log."""
    assert run.stderr is not None
    for line in run.stderr:
        event = json.loads(line)
        if event["event"] == "metrics are served":
            return cast("str", event["address"])
    raise AssertionError("it said nothing of metrics")


def test_metrics_of_all_stages_while_they_run(
    start: Started, pipeline: Path, tmp_path: Path
) -> None:
    """Extract and load have some, too; the server ends with the run (issue 11)."""
    worker(
        tmp_path / "keep.py",
        """
        import sys
        for line in sys.stdin.buffer:
            open("reached", "w").close()
            open("gate").read()
            sys.stdout.buffer.write(b"\\0")
            sys.stdout.flush()
        """,
    )
    os.mkfifo(tmp_path / "gate")
    run = start("run", pipeline, "--metrics", "0")
    url = address(run)
    while not (tmp_path / "reached").exists():
        assert run.poll() is None
    text = httpx.get(url, trust_env=False).text
    for stage in ("extract", "upper", "load"):
        assert f'worker_starts_total{{stage="{stage}",worker="{stage}-1"}} 1.0' in text
    assert re.search(
        r'stage_messages_total\{count="produced",stage="extract"\} 3', text
    )
    run.kill()
    run.wait()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_library_that_is_missing(etlstage: Etlstage, pipeline: Path) -> None:
    """The remedy is shown, and nothing runs."""
    path = pipeline.parent / "without" / "prometheus_client"
    path.mkdir(parents=True)
    (path / "__init__.py").write_text("raise ImportError")
    env = {"PYTHONPATH": f"{path.parent}:{os.getcwd()}"}
    result = etlstage("run", pipeline, "--metrics", "0", env=env, code=2)
    assert "pip install 'etlstage[prometheus]'" in result.stderr
    assert not (pipeline.parent / "loaded.txt").exists()
