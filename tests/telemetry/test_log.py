"""Events go to structlog if the host has set it up, otherwise to logging."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog
from structlog.testing import capture_logs

from etlstage.telemetry.log import Log


@pytest.fixture(autouse=True)
def no_structlog() -> Iterator[None]:
    """Reset structlog, as in a program that does not use it."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


def test_event_goes_to_logging(caplog: pytest.LogCaptureFixture) -> None:
    """Its values are at the end of the line, and in the record (issue 11)."""
    Log(stage="clean").bind(worker="clean-1").warning("worker exited", fate="it's gone")

    (record,) = caplog.records
    assert (record.name, record.levelname) == ("etlstage", "WARNING")
    assert record.getMessage() == (
        'worker exited stage=clean worker=clean-1 fate="it\'s gone"'
    )
    assert record.etlstage == {  # type: ignore[attr-defined]
        "stage": "clean",
        "worker": "clean-1",
        "fate": "it's gone",
        "event": "worker exited",
    }
    assert record.filename == "test_log.py"


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_level_is_kept(level: str, caplog: pytest.LogCaptureFixture) -> None:
    """A level set for logging applies to our events, too."""
    caplog.set_level(logging.INFO)
    getattr(Log(), level)("it")

    told = [record.levelname for record in caplog.records]
    assert told == ([] if level == "debug" else [level.upper()])
    with capture_logs() as logs:
        getattr(Log(), level)("it", n=1)
    assert logs == [{"event": "it", "log_level": level, "n": 1}]


def test_host_with_structlog_gets_events(caplog: pytest.LogCaptureFixture) -> None:
    """The host may set structlog up after it imports etlstage."""
    log = Log(stage="clean")
    with capture_logs() as logs:
        log.info("it")

    assert logs == [{"event": "it", "log_level": "info", "stage": "clean"}]
    assert not caplog.records


def test_control_characters_are_quoted(caplog: pytest.LogCaptureFixture) -> None:
    """An event stays one line, and can't control a terminal."""
    Log().error("it", line="a\n\x1b[2J", empty="", word="b")

    assert caplog.messages == [r"it line='a\n\x1b[2J' empty='' word=b"]


@pytest.mark.process
def test_structlog_is_the_hosts_choice() -> None:
    """A host that does not use structlog does not import it, nor does a Spark task."""
    program = "import sys, etlstage.pipeline, etlstage.cli.validate"
    program += "; assert 'structlog' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.process
def test_stdout_of_the_host_is_its_own() -> None:
    """With nothing set up at all, a crash is reported on stderr (issue 11)."""
    program = """
import sys, anyio
from etlstage import AsyncSupervisor, ErrorPolicy, Stage
async def main():
    command = (sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(3)")
    stage = Stage(name="t", worker=command, on_error=ErrorPolicy(retries=0))
    async with AsyncSupervisor(stage) as supervisor:
        await supervisor.submit([b"a"])
anyio.run(main)
print("done")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "done\n"
    assert "worker exited stage=t worker=t-1" in ended.stderr
