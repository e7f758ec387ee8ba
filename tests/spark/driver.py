"""A Spark driver in its own process, which runs the code that a test sends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any, Self

from etlstage.spark import Session

LOOP = """
import json, os, sys, threading
from etlstage.spark.errors import explain
from tests.spark.driver import make_session

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

def restart():
    global session, spark
    session = make_session(**json.loads(sys.argv[1]))
    spark = session.start()

def run(number, source):
    names = {**globals(), "__name__": "__main__"}
    try:
        exec(source, names)
        answer = [number, names.get("result"), None]
    except BaseException as error:
        answer = [number, None, explain(error)]
    answers.write(json.dumps(answer) + "\\n")
    answers.flush()

restart()
for line in sys.stdin:
    threading.Thread(target=run, args=json.loads(line), daemon=True).start()
session.stop()
"""


def make_session(**settings: Any) -> Session:  # noqa: ANN401 - those of Session
    """
    Return a session; the server of a Connect session has a free port.

    The client of a server in the same process always connects to port 15002, which
    another run of these tests may use. So the default port of this process is changed,
    and it can have no other client.
    """
    if settings.get("remote") is not None:
        from pyspark.sql.connect.client import DefaultChannelBuilder

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        DefaultChannelBuilder.default_port = lambda: port  # type: ignore[method-assign]
        own = {"spark.connect.grpc.binding.port": port}
        settings["config"] = {**settings.get("config", {}), **own}
    return Session(**settings)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a separate process: ours, adapted, and ``more``."""
    # A Connect session leaves variables there, which would lead to another like it.
    ours = {k: v for k, v in os.environ.items() if not k.startswith("SPARK_")}
    # Without zips: artifacts that a test has shipped are on our path, too.
    path = os.pathsep.join(path for path in sys.path if os.path.isdir(path))
    return {**ours, "PYTHONPATH": path, **more}


class Failed(Exception):
    """The driver's code raised; the text is the explained error."""


class Driver:
    """
    A process with a session, until the context ends.

    Args:
        place: The working directory, which gets a file of its stderr.
        environ: Added to our environment.
        session: Arguments of its :class:`etlstage.spark.Session`.

    """

    def __init__(
        self, place: Path, *, environ: dict[str, str] | None = None, **session: object
    ) -> None:
        with open(place / "stderr", "w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-c", LOOP, json.dumps(session)],
                cwd=place,
                env=environment(**(environ or {})),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self.place = place
        self._numbers = count()
        self._asked: dict[int, Future[Any]] = {}
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, source: str) -> Future[Any]:
        """
        Run ``source`` concurrently; its variable ``result`` becomes the result.

        It sees ``session``, ``spark`` and ``restart()``, which recreates these.
        """
        number = next(self._numbers)
        self._asked[number] = answer = Future[Any]()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([number, textwrap.dedent(source)]) + "\n")
        self._process.stdin.flush()
        return answer

    def run(self, source: str = "") -> Any:  # noqa: ANN401 - whatever JSON can tell
        """Run ``source``; return its variable ``result``."""
        return self.start(source).result(280)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            number, result, error = json.loads(line)
            if error is None:
                self._asked.pop(number).set_result(result)
            else:
                self._asked.pop(number).set_exception(Failed(error))
        for answer in self._asked.values():
            text = (self.place / "stderr").read_text()
            answer.set_exception(Failed(f"the driver has ended: {text[-2000:]}"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            assert self._process.stdout is not None
            self._process.stdout.close()
