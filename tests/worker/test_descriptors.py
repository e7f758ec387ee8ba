"""Which descriptors the rest of a worker's program can reach."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.conftest import ENVIRONMENT, Start

ECHO = "from etlstage import worker\nworker.transform(lambda message: [message])"


def test_what_is_printed_goes_to_stderr(start: Start) -> None:
    """``print()``, descriptor 1, and the stdout of libraries all lead to stderr."""
    stage = start("""
        import os, sys
        def f(message):
            print("printed")
            sys.stdout.buffer.write(b"buffered\\n")
            sys.stdout.flush()
            os.write(1, b"written\\n")
            return [message]
        worker.transform(f)
    """)
    stage.ask(b"a\n", b"a\n\0")
    assert stage.stderr == "printed\nbuffered\nwritten\n"
    assert stage.finish() == (b"", 0)


def test_what_was_printed_before_the_call_goes_to_stderr(start: Start) -> None:
    """Such output is still in the buffer at the time of the call."""
    stage = start("""
        print("starting")
        worker.transform(lambda message: [message])
        print("ended")
    """)
    stage.ask(b"a\n", b"a\n\0")
    assert stage.stderr == "starting\n"
    assert stage.finish() == (b"", 0)
    assert stage.stderr == "starting\nended\n"


def test_stdout_that_the_worker_has_replaced_is_left_alone(start: Start) -> None:
    """It belongs to the worker; if it writes to descriptor 1, that leads to stderr."""
    stage = start("""
        import io, sys
        sys.stdout = io.StringIO()
        def f(message):
            print("printed", end="")
            return [sys.stdout.getvalue().encode()]
        worker.transform(f)
    """)
    stage.ask(b"a\n", b"printed\n\0")
    assert stage.finish() == (b"", 0)
    assert stage.stderr == ""


def test_what_child_processes_print_goes_to_stderr(start: Start) -> None:
    """They inherit descriptors 0 and 1, neither of which leads to the supervisor."""
    stage = start("""
        import os, subprocess
        def f(message):
            subprocess.run(["cat"])  # would eat our input
            subprocess.run(["echo", "printed"])
            os.system("echo printed too")
            return [message]
        worker.transform(f)
    """)
    stage.ask(b"a\nb\n", b"a\n\0b\n\0")
    assert stage.stderr == "printed\nprinted too\n" * 2
    assert stage.finish() == (b"", 0)


def test_stdin_reads_nothing(start: Start) -> None:
    """A function that reads stdin can't consume messages."""
    stage = start("""
        import os, sys
        def f(message):
            return [repr((os.read(0, 9), sys.stdin.read())).encode()]
        worker.transform(f)
    """)
    stage.ask(b"a\nb\n", b"(b'', '')\n\0" * 2)
    assert stage.finish() == (b"", 0)


def test_programs_inherit_nothing_of_the_protocol(start: Start) -> None:
    """A daemon that a worker starts does not hold the supervisor's pipes."""
    stage = start("""
        import subprocess
        def f(message):
            command = ["readlink", "/proc/self/fd/0", "/proc/self/fd/1"]
            where = subprocess.run(command, stdout=subprocess.PIPE).stdout.split()
            opened = subprocess.run(
                ["ls", "/proc/self/fd"], stdout=subprocess.PIPE, close_fds=False
            ).stdout.split()
            return [where[0], b" ".join(opened)]
        worker.transform(f)
    """)
    # ls itself has the folder open.
    stage.ask(b"a\n", b"/dev/null\n0 1 2 3\n\0")
    assert stage.finish() == (b"", 0)


def test_flags_of_shared_stdin_are_left_alone() -> None:
    """Another process may read that stdin later, and not expect ``O_NONBLOCK``."""
    reading, writing = os.pipe()
    before = fcntl.fcntl(reading, fcntl.F_GETFL)
    os.write(writing, b"a\n")
    os.close(writing)
    answer = subprocess.run(
        [sys.executable, "-c", ECHO],
        stdin=reading,
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        check=True,
    ).stdout
    assert answer == b"a\n\0"
    assert fcntl.fcntl(reading, fcntl.F_GETFL) == before
    os.close(reading)


def test_descriptors_that_do_not_block_are_waited_for() -> None:
    """A flag set by another process does not make us lose data."""
    reading, writing = os.pipe()
    back, forth = os.pipe()
    for descriptor in reading, forth:
        os.set_blocking(descriptor, False)
    with subprocess.Popen(
        [sys.executable, "-c", ECHO], stdin=reading, stdout=forth, env=ENVIRONMENT
    ) as stage:
        os.close(reading)
        os.close(forth)
        message = b"x" * 999_999 + b"\n"
        for _ in range(3):
            rest, got = memoryview(message), 0
            while got < len(message) + 1:
                ready = select.select([back], [writing] if rest else [], [], 15)
                assert any(ready)
                if ready[1]:
                    rest = rest[os.write(writing, rest[:4096]) :]
                if ready[0]:
                    got += len(os.read(back, 4096))
        os.close(writing)
        assert os.read(back, 1) == b""
    os.close(back)
    assert stage.returncode == 0


def test_socket_that_the_supervisor_leaves() -> None:
    """Stdin and stdout may be one socket; its reset is not reported as an error."""
    ours, theirs = socket.socketpair()
    with subprocess.Popen(
        [sys.executable, "-c", ECHO],
        stdin=theirs.fileno(),
        stdout=theirs.fileno(),
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as stage:
        theirs.close()
        ours.send(b"a\n")
        assert select.select([ours], [], [], 15)[0]
        ours.close()  # with the reply unread
        assert stage.stderr
        assert stage.stderr.read() == b""
    assert stage.returncode == 1


@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1)])
def test_closed_descriptors_are_reported(closed: tuple[int, ...]) -> None:
    """Without both of them the worker can't reach a supervisor."""
    redirections = " ".join(f"{descriptor}>&-" for descriptor in closed)
    result = subprocess.run(
        ["/bin/sh", "-c", f'"$0" "$@" {redirections}', sys.executable, "-c", ECHO],
        input=b"",
        capture_output=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert result.returncode == 2
    assert result.stdout == b""
    assert b"stdin or stdout is closed (Bad file descriptor)\n" in result.stderr


def test_worker_without_stderr() -> None:
    """What is printed is lost: it ends up neither in the protocol nor in a file."""
    loud = """
from etlstage import worker
import subprocess
def f(message):
    print("loud")
    command = ["ls", "/proc/self/fd"]
    return subprocess.run(command, stdout=subprocess.PIPE).stdout.split()
worker.transform(f)
"""
    result = subprocess.run(
        ["/bin/sh", "-c", '"$0" "$@" 2>&-', sys.executable, "-c", loud],
        input=b"a\nb",
        capture_output=True,
        env=ENVIRONMENT,
        check=False,
    )
    # ls itself has the folder open.
    assert (result.returncode, result.stdout) == (0, b"0\n1\n2\n3\n\0")


def test_worker_without_stderr_that_has_to_complain() -> None:
    """The exit status alone reports the error."""
    result = subprocess.run(
        ["/bin/sh", "-c", '"$0" "$@" 2>&-', sys.executable, "-c", ECHO, "-e", ""],
        input=b"",
        capture_output=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, b"")


def test_worker_on_a_terminal_explains_itself(tmp_path: Path) -> None:
    """A user who starts it by hand learns what it waits for, and may type."""
    ours, theirs = pty.openpty()
    complaints = tmp_path / "stderr"
    with (
        complaints.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", ECHO],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=ENVIRONMENT,
        ) as stage,
    ):
        os.close(theirs)
        assert stage.stdout
        os.write(ours, b"typed\n")
        assert os.read(stage.stdout.fileno(), 99) == b"typed\n\0"
        os.write(ours, b"\4")
        assert stage.stdout.read() == b""
    os.close(ours)
    assert stage.returncode == 0
    assert complaints.read_text() == (
        "etlstage.worker: stdin is a terminal; normally a supervisor starts this"
        " program, see `etlstage run`. Type messages, each ended by \\012; Ctrl-D"
        " ends the input\n"
    )
