"""
A process that has imported the command line, and forks each that a test asks for.

Hundreds of tests run ``etlstage``, and most of what such a process takes is to import
it. What is forked has a directory, an environment, standard streams and an end of its
own, as any process. What a test asserts of the start itself it asserts of a real one.
"""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Final, Self

__all__ = ("Forks", "environment")

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
    "pydantic",  # by typer, where it is installed, as here by FastAPI
)
"""What commands import when they need it."""

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
"""A program for shells, in place of the command line: it has one forked."""


def environment(**more: str) -> dict[str, str]:
    """Return a plain environment in which etlstage is found."""
    names = ("PATH", "HOME", "JAVA_HOME", "JDK_JAVA_OPTIONS")
    kept = {n: os.environ[n] for n in names if n in os.environ}
    found = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
    return kept | {"PYTHONPATH": found, "LANG": "C.UTF-8"} | more


class Forks:
    """The process; one serves all tests of a run."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self._path = f"{self._folder.name}/socket"
        # It ends with its stdin, and so with us.
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
        """Where the program ``etlstage`` is that has a command forked."""
        return Path(self._folder.name, "bin")

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


def _feed(end: int, given: str) -> None:
    # A command that reads no further has left.
    with suppress(BrokenPipeError), open(end, "w") as file:
        file.write(given)


def _read(end: int, found: dict[int, str]) -> None:
    with open(end) as file:
        found[end] = file.read()


def _serve(path: str) -> list[str]:
    """Fork for each request; return, in the fork, what its arguments are."""
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
    """Become what was asked for; a process in between shows how it has ended."""
    _, streams, _, _ = socket.recv_fds(asked, 1, 3)
    about = json.loads(b"".join(iter(lambda: asked.recv(65536), b"")))
    if child := os.fork():
        for stream in (0, 1, *streams):
            os.close(stream)
        _, status = os.waitpid(child, 0)
        asked.sendall(b"%d" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(about["cwd"])
    os.environ.clear()
    os.environ.update(about["env"])
    return ["etlstage", *about["arguments"]]


if __name__ == "__main__":
    from etlstage.cli import main
    from etlstage.cli.app import COMMANDS, MODULES

    for command in (name for group in COMMANDS.values() for name in group):
        import_module(f"etlstage.cli.{MODULES.get(command, command)}")
    for module in LATER:
        import_module(module)
    gc.freeze()
    sys.argv[:] = _serve(sys.argv[1])
    main()
