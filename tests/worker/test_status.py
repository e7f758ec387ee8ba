"""Signs of life: that a worker is ready, and that it lives while it is idle."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etlstage import worker
from etlstage.worker.status import Status as StatusOfWorker
from tests.patience import HANG
from tests.worker.conftest import ENVIRONMENT, Fence, Start

ECHO = "worker.transform(lambda message: [message])"


class Status:
    """A named pipe to which a worker writes its signs of life."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    @property
    def env(self) -> dict[str, str]:
        """The environment that passes the pipe to a worker."""
        return {"ETLSTAGE_STATUS": str(self.path)}

    def expect(self, count: int = 1) -> None:
        """Wait for ``count`` signs."""
        while count > 0:
            assert select.select([self._reading], [], [], HANG)[0]
            count -= len(os.read(self._reading, count))

    @property
    def silent(self) -> bool:
        """Whether there is nothing to read now."""
        return not select.select([self._reading], [], [], 0)[0]

    @property
    def ended(self) -> bool:
        """Whether every writer has closed the pipe."""
        assert select.select([self._reading], [], [], HANG)[0]
        return os.read(self._reading, 1) == b""

    def drain(self) -> None:
        """Discard everything written so far."""
        while not self.silent:
            os.read(self._reading, 65536)

    def rest(self) -> list[str]:
        """Return the lines up to the end."""
        text = b""
        while select.select([self._reading], [], [], HANG)[0]:
            chunk = os.read(self._reading, 65536)
            if not chunk:
                return text.decode().splitlines()
            text += chunk
        raise AssertionError("the worker did not close it")

    def close(self) -> None:
        """Close the reading end; safe to call twice."""
        if self._reading != -1:
            os.close(self._reading)
            self._reading = -1


@pytest.fixture
def status(tmp_path: Path) -> Iterator[Status]:
    """Return a pipe that has no writer yet."""
    status = Status(tmp_path / "status")
    yield status
    status.close()


def test_worker_is_ready_when_it_is_about_to_read(
    start: Start, status: Status, fence: Fence
) -> None:
    """Earlier work, such as loading a model, is part of its start."""
    stage = start(
        f"import sys; open(sys.argv[1]).read()\n{ECHO}", fence, env=status.env
    )
    fence.open()
    status.expect()
    stage.ask(b"a\n", b"a\n\0")


def test_worker_is_not_ready_before(start: Start, status: Status, fence: Fence) -> None:
    """Nothing is written while it still prepares, however long that takes."""
    wait = "import os, sys; os.write(2, b'here'); open(sys.argv[1]).read()"
    stage = start(f"{wait}\n{ECHO}", fence, env=status.env)
    stage.wait_for_stderr("here")
    assert status.silent
    fence.open()
    status.expect()


@pytest.mark.parametrize(
    ("call", "request_", "answer"),
    [
        ("transform_batch(lambda messages: messages)", b"a\n\x17", b"a\n\0"),
        ("load(lambda message: None)", b"a\n", b"\0"),
        ("extract_cycle(lambda: [b'a'])", b"\n", b"a\n\0"),
        ("extract(lambda: [b'a'])", b"", b"a\n"),
    ],
)
def test_every_sort_of_worker_reports(
    start: Start, status: Status, call: str, request_: bytes, answer: bytes
) -> None:
    """An extractor that reads nothing is ready when it begins."""
    stage = start(f"worker.{call}", env=status.env)
    status.expect()
    stage.write(request_)
    assert stage.finish() == (answer, 0)
    assert status.ended


def test_worker_reports_once_where_no_heartbeat_is_asked_for(
    start: Start, status: Status
) -> None:
    """Without heartbeats, its replies are enough."""
    stage = start(ECHO, env=status.env)
    status.expect()
    for _ in range(3):
        stage.ask(b"a\n", b"a\n\0")
    assert status.silent


def test_idle_worker_reports_that_it_lives(start: Start, status: Status) -> None:
    """It writes heartbeats, and still answers messages."""
    stage = start(ECHO, env=status.env | {"ETLSTAGE_HEARTBEAT": "0.03"})
    status.expect(10)
    stage.ask(b"a\n", b"a\n\0")
    status.expect(10)
    stage.ask(b"b\n", b"b\n\0")
    assert stage.finish() == (b"", 0)


def test_patient_supervisor_is_not_bothered(start: Start, status: Status) -> None:
    """The interval is in seconds: no heartbeat is due within the test."""
    stage = start(ECHO, env=status.env | {"ETLSTAGE_HEARTBEAT": "600"})
    status.expect()
    stage.ask(b"a\n", b"a\n\0")
    assert status.silent


def test_worker_does_not_care_whether_it_is_heard(start: Start, status: Status) -> None:
    """Neither a full pipe nor a pipe without a reader disturbs it."""
    filling = os.open(status.path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(filling, b"x" * 4096)
    except BlockingIOError:
        os.close(filling)
    stage = start(ECHO, env=status.env | {"ETLSTAGE_HEARTBEAT": "0.003"})
    stage.ask(b"a\n", b"a\n\0")
    status.close()
    stage.ask(b"b\n", b"b\n\0")
    assert stage.finish() == (b"", 0)
    assert stage.stderr == ""


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ({"ETLSTAGE_STATUS": "/no/such/file"}, "No such file or directory"),
        (
            {"ETLSTAGE_STATUS": "/dev/null", "ETLSTAGE_HEARTBEAT": "often"},
            "could not convert string to float: 'often'",
        ),
    ],
)
def test_what_can_not_be_done_is_reported(
    start: Start, env: dict[str, str], problem: str
) -> None:
    """The worker processes messages all the same."""
    stage = start(ECHO, env=env)
    stage.ask(b"a\n", b"a\n\0")
    assert stage.finish() == (b"", 0)
    assert stage.stderr.startswith("etlstage.worker: can't use ETLSTAGE_STATUS and")
    assert problem in stage.stderr


def test_forked_child_does_not_hold_it(
    start: Start, status: Status, fence: Fence
) -> None:
    """Like the other descriptors of the protocol, it is closed in a child."""
    stage = start(
        """
        import os, sys
        def f(message):
            if not os.fork():
                open(sys.argv[1]).read()
                os._exit(0)
            return [message]
        worker.transform(f)
        """,
        fence,
        env=status.env,
    )
    status.expect()
    stage.ask(b"a\n", b"a\n\0")
    assert stage.finish() == (b"", 0)
    assert status.ended
    fence.open()


def test_programs_are_not_notified_of_it() -> None:
    """Otherwise they could report in our name, or write to a reused descriptor."""
    code = """
from etlstage import worker
import subprocess
def f(message):
    ls = ["ls", "/proc/self/fd"]
    opened = subprocess.run(ls, stdout=subprocess.PIPE, close_fds=False).stdout.split()
    seen = subprocess.run(["env"], stdout=subprocess.PIPE).stdout
    return [b" ".join(opened), b"%d" % (b"ETLSTAGE_" in seen)]
worker.transform(f)
"""
    reading, writing = os.pipe()
    result = subprocess.run(
        [sys.executable, "-c", code],
        input=b"a\n",
        stdout=subprocess.PIPE,
        pass_fds=[writing],
        env=ENVIRONMENT
        | {"ETLSTAGE_STATUS": f"/dev/fd/{writing}", "ETLSTAGE_HEARTBEAT": "60"},
        check=True,
    )
    os.close(writing)
    # ls itself has the folder open.
    assert result.stdout == b"0 1 2 3\n0\n\0"
    assert os.read(reading, 10) == b"\n"
    assert os.read(reading, 10) == b""
    os.close(reading)


@pytest.mark.parametrize(
    ("call", "asked", "skipped"),
    [
        ("transform(f, on_error='skip')", b"a\nbad\nb\nbad\n", 2),
        ("transform(g, on_error='skip')", b"a\nbad\nb\nbad\n", 2),
        ("load(f, on_error='skip')", b"bad\n", 1),
        ("transform_batch(f, on_error='skip')", b"a\nbad\nb\n\x17c\n\x17", 3),
        ("transform_batch(g, on_error='skip')", b"a\nbad\nb\n\x17c\n\x17", 3),
    ],
)
def test_skipped_messages_are_counted(
    start: Start, status: Status, call: str, asked: bytes, skipped: int
) -> None:
    """Otherwise they would count as messages without output (issue 10)."""
    stage = start(
        f"""
        def f(asked):
            if b"bad" in asked:
                raise ValueError("no such thing")
            return [b"fine"]
        def g(asked):
            return [b"not\\0fine" if b"bad" in asked else b"fine"]
        worker.{call}
        """,
        env=status.env,
    )
    stage.write(asked)
    _, exited = stage.finish()
    assert exited == 0
    lines = [json.loads(line) for line in status.rest() if line]
    assert {line["metric"] for line in lines} == {"skipped"}
    assert sum(line["add"] for line in lines) == skipped


def test_count_for_which_there_is_no_room_is_reported_later(status: Status) -> None:
    """The supervisor may be busy; the count must not be lost."""
    told = StatusOfWorker(os.open(status.path, os.O_WRONLY | os.O_NONBLOCK))
    while told.count("skipped", 1):
        pass
    status.drain()
    told.wait_for_room()
    assert told.count("skipped", 7) == 7
    told.close()
    assert status.rest() == ['{"metric": "skipped", "add": 7}']


def test_function_counts_and_reports_how_far_it_is(
    start: Start, status: Status
) -> None:
    """Counts and progress are lines of JSON (issue 11)."""
    stage = start(
        """
        def slow(message):
            worker.progress(0.25)
            worker.count("rows", 3)
            worker.count("rows")
            return [message]
        worker.transform(slow)
        """,
        env=status.env,
    )
    stage.ask(b"a\n", b"a\n\0")
    stage.finish()
    assert [json.loads(line) for line in status.rest() if line] == [
        {"progress": 0.25},
        {"metric": "rows", "add": 3},
        {"metric": "rows", "add": 1},
    ]


@pytest.mark.parametrize(
    ("name", "add"),
    [("a-b", 1), ("", 1), ("skipped", 1), ("a", 0), ("a", 2.9), ("a", "1")],
)
def test_what_can_not_be_counted(name: str, add: Any) -> None:  # noqa: ANN401
    """A wrong count is an error even without a supervisor (issue 22)."""
    with pytest.raises(ValueError, match=f"can't count {add!r}"):
        worker.count(name, add)


@pytest.mark.parametrize("share", [-1, 1.01, float("nan")])
def test_progress_that_is_no_share(share: float) -> None:
    """Progress is a share; a percentage would be more than all."""
    with pytest.raises(ValueError, match="from 0 to 1"):
        worker.progress(share)
