"""
A process that has imported the command line, and forks for each command of a test.

Hundreds of tests run ``etlstage``, and such a process spends most of its time on
imports and other work that is done only once. A forked command has a directory, an
environment, standard streams and an exit code of its own, as any process has. Tests of
the startup itself run a real process.
"""

from __future__ import annotations

import gc
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import IO, Final, Self

__all__ = ("PLAIN", "Forked", "Forks", "environment")

LATER: Final = (
    "anyio._backends._asyncio",
    "etlstage.config.build",
    "etlstage.config.ends.files",
    "etlstage.config.ends.kinesis",
    "etlstage.config.ends.worker",
    "etlstage.testing.check.extracting",
    "etlstage.testing.check.marker",
    "etlstage.testing.dialect.marker",
    "etlstage.testing.fuzzing.bench",
    "etlstage.testing.fuzzing.fuzz",
    "etlstage.cli.metrics",
    "etlstage.cli.trial",
    "rich._emoji_codes",
)
"""What commands import when they need it."""

SMALL: Final = """\
name: small
extract: {files: {path: small.yaml}}
transform: [{worker: {command: [cat]}}]
load: {files: {path: out.txt}}
"""
"""A pipeline that is validated once, so that forks inherit what typer imports."""

PLAIN: Final = "ETLSTAGE_TESTS_PLAIN"
"""Environment variable; a command for which it is set runs ``tests.cli.plain``."""

CLIENT: Final = """\
#!%s -IS
import json, os, socket, sys

with socket.socket(socket.AF_UNIX) as asked:
    asked.connect(%r)
    socket.send_fds(asked, [b"+"], [0, 1, 2])
    about = {"arguments": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}
    asked.sendall(json.dumps(about).encode())
    asked.shutdown(socket.SHUT_WR)
    code = int(asked.recv(16))
sys.exit(code if code >= 0 else 128 - code)
"""
"""A program for shells that asks for a fork of the command line."""


def environment(**more: str) -> dict[str, str]:
    """Return a plain environment in which etlstage is found."""
    names = ("PATH", "HOME", "JAVA_HOME", "JDK_JAVA_OPTIONS")
    kept = {n: os.environ[n] for n in names if n in os.environ}
    found = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
    return kept | {"PYTHONPATH": found, "LANG": "C.UTF-8"} | more


class Forks:
    """The process that forks; one serves all tests of a run."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self._path = f"{self._folder.name}/socket"
        # It exits when its stdin is closed, so it ends with this process.
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, self._path],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.read() == b""  # closed once it listens
        self.folder.mkdir()
        program = self.folder / "etlstage"
        program.write_text(CLIENT % (sys.executable, self._path))
        program.chmod(0o700)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._folder.cleanup()

    @property
    def folder(self) -> Path:
        """The folder of the program ``etlstage`` that has a command forked."""
        return Path(self._folder.name, "bin")

    @property
    def program(self) -> str:
        """
        The path of that program, for tests that start it on streams of their own.

        A signal ends this program and not the command.
        """
        return str(self.folder / "etlstage")

    def run(
        self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], given: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the command line with ``given`` for its stdin; wait for its end."""
        pipes = [os.pipe() for _ in range(3)]
        (stdin, feed), (out, stdout), (err, stderr) = pipes
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect(self._path)
            socket.send_fds(asked, [b"+"], [stdin, stdout, stderr])
            for end in (stdin, stdout, stderr):
                os.close(end)
            about = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(env)}
            asked.sendall(json.dumps(about).encode())
            asked.shutdown(socket.SHUT_WR)
            found: dict[int, str] = {}
            threads = [
                Thread(target=_feed, args=(feed, given)),
                *(Thread(target=_read, args=(end, found)) for end in (out, err)),
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            code = int(asked.recv(16))
        return subprocess.CompletedProcess(arguments, code, found[out], found[err])

    def start(
        self,
        arguments: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        out: IO[bytes],
    ) -> Forked:
        """Start the command line in a session of its own; ``out`` takes its output."""
        asked = socket.socket(socket.AF_UNIX)
        asked.connect(self._path)
        with open(os.devnull) as nothing:
            streams = [nothing.fileno(), out.fileno(), out.fileno()]
            socket.send_fds(asked, [b"+"], streams)
        about = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(env)}
        asked.sendall(json.dumps(about | {"apart": True}).encode())
        asked.shutdown(socket.SHUT_WR)
        return Forked(asked)


class Forked:
    """A running command, with the part of Popen's interface that tests of kills use."""

    def __init__(self, asked: socket.socket) -> None:
        self._end = asked.makefile("rb")
        asked.close()
        self.pid = int(self._end.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the command runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise TimeoutExpired after ``timeout`` seconds."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("etlstage", timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send the command a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the command."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], timeout)[0]:
            self.returncode = int(self._end.readline())
            self._end.close()
        return self.returncode


def _feed(end: int, given: str) -> None:
    # A command that reads no further has closed its stdin.
    with suppress(BrokenPipeError), open(end, "w") as file:
        file.write(given)


def _read(end: int, found: dict[int, str]) -> None:
    with open(end) as file:
        found[end] = file.read()


def _serve(path: str) -> list[str]:
    """Fork for each request; return the request's arguments in the fork."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        os.dup2(2, 1)
        while True:
            ready, _, _ = select.select([listener.fileno(), 0], [], [])
            if 0 in ready:
                sys.exit()
            asked, _ = listener.accept()
            with asked:
                arguments = None if os.fork() else _begin(asked)
            if arguments is not None:
                return arguments
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _begin(asked: socket.socket) -> list[str]:
    """Become the requested command; a process in between reports its exit code."""
    _, streams, _, _ = socket.recv_fds(asked, 1, 3)
    about = json.loads(b"".join(iter(lambda: asked.recv(65536), b"")))
    apart = about.get("apart", False)
    if child := os.fork():
        for stream in (0, 1, *streams):
            os.close(stream)
        if apart:
            asked.sendall(b"%d\n" % child)
        _, status = os.waitpid(child, 0)
        asked.sendall(b"%d" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if apart:
        os.setsid()
    os.chdir(about["cwd"])
    os.environ.clear()
    os.environ.update(about["env"])
    tempfile.tempdir = None  # the warm-up has cached the folder of another TMPDIR
    return ["etlstage", *about["arguments"]]


def _warm_up(run_command: Callable[[], int]) -> None:
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()) as out:
        path = Path(folder, "small.yaml")
        path.write_text(SMALL)
        sys.argv[:] = ["etlstage", "validate", str(path)]
        assert run_command() == 0, out.getvalue()


if __name__ == "__main__":
    from etlstage.cli import main
    from etlstage.cli.app import COMMANDS, MODULES, run_command

    for command in (name for group in COMMANDS.values() for name in group):
        import_module(f"etlstage.cli.{MODULES.get(command, command)}")
    for module in LATER:
        import_module(module)
    address = sys.argv[1]
    _warm_up(run_command)
    gc.freeze()
    sys.argv[:] = _serve(address)
    if os.environ.pop(PLAIN, None):
        from tests.cli import plain

        plain.main()
    else:
        main()
