from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
import structlog

from etlstage.cli.logs import configure
from etlstage.cli.options import Verbosity
from etlstage.cli.screen import Screen
from tests.cli.test_screen import Terminal


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Leave structlog as other tests expect it."""
    yield
    structlog.reset_defaults()


def logged(*, debug: bool = False) -> str:
    """Return what a terminal shows of three events."""
    console = Screen(file=Terminal(), color_system=None, width=40)
    configure(console, Verbosity(debug=debug))
    log = structlog.get_logger("etlstage").bind(stage="clean", worker="clean-1", pid=7)
    with console.capture() as capture:
        log.debug("fine")
        log.info("worker wrote to stderr", line="a\x1b[31mred\x1b[0m\x07[bold] " * 9)
        log.warning("worker failed", error="the run goes on")
        log.warning("worker exited", status=1)
    return capture.get()


def test_worker_line_on_a_terminal() -> None:
    """It follows the worker's name, is wrapped at words, not cut, and escaped."""
    assert max(map(len, logged().splitlines())) <= 40
    words = logged().split()
    end = words.index("warning") - 1
    assert words[1:end] == ["clean-1", "(7)", *["ared\\x07[bold]"] * 9]
    assert words[end + 1 : end + 4] == ["warning", "worker", "failed"]
    assert words[-4:] == ["stage=clean", "worker=clean-1", "pid=7", "status=1"]


@pytest.mark.parametrize("debug", [False, True])
def test_long_event_takes_three_lines_of_a_terminal(debug: bool) -> None:
    """The rest is cut; ``--debug`` shows all (issue 11)."""
    console = Screen(file=Terminal(), color_system=None, width=40)
    configure(console, Verbosity(debug=debug))
    with console.capture() as capture:
        structlog.get_logger().warning("worker failed", error="no date; " * 40)
    shown = " ".join(line.strip() for line in capture.get().splitlines())
    assert shown.count("no date") == 40 if debug else shown.count("no date") < 13
    end = "no date;" if debug else " ... (--debug shows all)"
    assert shown.rstrip().endswith(end)
    assert debug or len(capture.get().splitlines()) == 3


def test_debug_lets_everything_through() -> None:
    """Events for developers are hidden unless asked for."""
    assert "debug fine" not in logged()
    assert "debug fine" in logged(debug=True)


@pytest.mark.parametrize("debug", [False, True])
def test_steps_to_an_outcome_are_for_developers(
    capsys: pytest.CaptureFixture[str], debug: bool
) -> None:
    """Only outcomes are shown: of a message, or of a worker that died without one."""
    configure(Screen(stderr=True), Verbosity(debug=debug))
    log = structlog.get_logger("etlstage")
    log.warning("worker exited", in_flight=2)
    log.info("worker is restarted", seconds=0.1)
    log.warning("worker exited", in_flight=0)
    log.warning("worker failed", error="silent")
    log.warning("message dead-lettered", id="r-1")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(x["event"], x.get("in_flight")) for x in lines] == [
        *[("worker exited", 2), ("worker is restarted", None)][: 2 * debug],
        ("worker exited", 0),
        ("worker failed", None),
        ("message dead-lettered", None),
    ]


def test_json_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Machines get one object per line."""
    configure(Screen(stderr=True), Verbosity())
    log = structlog.get_logger("etlstage").bind(stage="clean")
    log.info("worker wrote to stderr", line="é\n\x1b", path=object)
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        log.exception("odd")
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second = map(json.loads, captured.err.splitlines())
    assert first.pop("timestamp").endswith("Z")
    assert first == {
        "event": "worker wrote to stderr",
        "level": "info",
        "line": "é\n\x1b",
        "path": "<class 'object'>",
        "stage": "clean",
    }
    assert second["exception"].endswith("ZeroDivisionError: division by zero")


def test_exception_on_a_terminal() -> None:
    """The traceback stands below its event."""
    console = Screen(file=Terminal(), color_system=None, width=80)
    configure(console, Verbosity())
    with console.capture() as capture:
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            structlog.get_logger().exception("odd")
    assert "error odd\nTraceback" in capture.get()
    assert capture.get().endswith("ZeroDivisionError: division by zero\n")


JVM_IS_GONE = """
import logging, sys
from py4j.java_gateway import GatewayClient
from etlstage.cli.logs import configure
from etlstage.cli.screen import Screen
from etlstage.cli.options import Verbosity

configure(Screen(stderr=True), Verbosity(debug=sys.argv[2] == "True"))
GatewayClient(port=int(sys.argv[1])).send_command("x\\n")
if sys.argv[2] == "False":
    logging.getLogger("grpc").addHandler(logging.NullHandler())
    logging.getLogger("grpc.aio").error("nor this")
logging.getLogger("asyncio").error("but this")
"""


@pytest.mark.parametrize("debug", [False, True])
def test_py4j_prints_no_tracebacks(debug: bool) -> None:
    """Py4J logs to the root logger, which would set up logging; other loggers go on."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def die() -> None:
            # Close each connection before an answer; the client tries again.
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.close()

        thread = threading.Thread(target=die)
        thread.start()
        port = str(server.getsockname()[1])
        process = subprocess.run(
            [sys.executable, "-c", JVM_IS_GONE, port, str(debug)],
            capture_output=True,
            text=True,
            check=False,
        )
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert process.returncode == 0, process.stderr
    if debug:
        assert "Traceback" in process.stderr
        assert process.stderr.endswith("but this\n")
    else:
        assert process.stderr == "but this\n"
