"""The worker with many sessions at once, and the service, as a user runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etlstage import AsyncSupervisor, CocaineDialect, Stage, WorkerRefusal
from etlstage.cli.init import copy_examples
from tests.patience import HANG


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copy them, as ``etlstage init`` does."""
    copy_examples(tmp_path, "cocaine")
    return tmp_path


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (b"1\n2\n-3", b"1\n3\n0\n"),
        (b"4\nfive\n6\n", b"4\nrefused: b'five\\n' is not a number\n"),
    ],
)
def test_service_adds_up_what_comes(folder: Path, numbers: bytes, said: bytes) -> None:
    """It does so until the worker refuses one (issue 15)."""
    service = [sys.executable, "service.py"]
    done = subprocess.run(
        service, input=numbers, cwd=folder, capture_output=True, check=False
    )
    assert (done.stdout, done.returncode) == (said, 0), done.stderr


def test_refusal_ends_the_service_whose_stdin_is_open(folder: Path) -> None:
    """It does not wait for another line (issue 22)."""
    with subprocess.Popen(
        [sys.executable, "service.py"],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as service:
        try:
            assert service.stdin is not None
            assert service.stdout is not None
            service.stdin.write(b"4\nfive\n")
            service.stdin.flush()
            assert service.wait(HANG) == 0
            said = b"4\nrefused: b'five\\n' is not a number\n"
            assert service.stdout.read() == said
        finally:
            service.kill()


@pytest.mark.parametrize("end", ["interrupted", "lost"])
def test_error_ends_the_service_whose_stdin_is_open(folder: Path, end: str) -> None:
    """Such as Ctrl-C, or that of a worker that was lost (issue 22)."""
    with subprocess.Popen(
        [sys.executable, "service.py"],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as service:
        try:
            assert service.stdin is not None
            assert service.stdout is not None
            assert service.stderr is not None
            service.stdin.write(b"4\n")
            service.stdin.flush()
            assert service.stdout.readline() == b"4\n"
            if end == "interrupted":
                service.send_signal(signal.SIGINT)
            else:
                os.kill(worker_of(service.pid), signal.SIGKILL)
            assert service.wait(HANG) == 1
            assert b"Traceback" in service.stderr.read()
        finally:
            service.kill()


def worker_of(service: int) -> int:
    """Return the pid of the service's worker."""
    children = Path(f"/proc/{service}/task/{service}/children").read_text().split()
    (worker,) = (
        int(child)
        for child in children
        if b"worker.py" in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    return worker


async def test_worker_is_a_stage_too(folder: Path) -> None:
    """A message is a session."""
    program = (sys.executable, str(folder / "worker.py"))
    stage = Stage(name="words", worker=program, dialect=CocaineDialect())
    async with AsyncSupervisor(stage) as supervisor:
        answered, refused = await supervisor.submit([b"a b c", b" "])
    assert answered.outputs == (b"c b a",)
    assert isinstance(refused.error, WorkerRefusal)
    assert refused.error.reason == "it contains no words"
