"""
The published Python framework, in an environment of its own.

It is installed once, into the cache folder of the user, with the versions that are
known to work: its codec has changed its defaults since.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.cache import cached

__all__ = ("WORKER", "installed")

PINS: Final = ("cocaine==0.12.14.5", "msgpack==0.6.2", "tornado==4.5.3", "six==1.17.0")
WORKER: Final = """\
# What newer Pythons have moved, or removed.
import collections, collections.abc, ssl, sys
collections.MutableMapping = collections.abc.MutableMapping
ssl.match_hostname = getattr(ssl, "match_hostname", None) or (lambda *_: None)

from cocaine.exceptions import ChokeEvent
from cocaine.services import Service
from cocaine.worker import Worker
from cocaine.worker.request import RequestError
from tornado import gen


def echo(request, response):
    try:
        while True:
            response.write((yield request.read()))
    except ChokeEvent:
        response.close()
    except RequestError as error:
        print("cancelled", error.category, error.code, error.reason, flush=True)


def boom(request, response):
    yield request.read()
    raise ValueError("handler raised")


def no(request, response):
    yield request.read()
    response.error(-13, "explicit failure")


def slow(request, response):
    response.write(b"begun")
    yield gen.sleep(0.3)
    response.write(b"done")
    response.close()


def leave(request, response):
    yield request.read()
    response.write(b"bye")
    response.close()
    worker.terminate(1, "worker decided to exit")


def resolve(request, response):
    name = (yield request.read()).decode()
    try:
        yield Service(name).connect()
        response.write(b"found")
    except Exception as error:
        response.write(str(error).encode())
    response.close()


beats = float(sys.argv[1])
worker = Worker(heartbeat_timeout=beats, disown_timeout=min(beats, 5))
worker.run({
    "echo": echo, "transform": echo, "boom": boom, "no": no, "slow": slow,
    "leave": leave, "resolve": resolve,
})
"""
"""A worker; its argument is the interval of its heartbeats, in seconds."""


def installed() -> str:
    """Return the Python that has the framework; install it, if need be."""
    pins = hashlib.sha256(" ".join((*PINS, sys.version)).encode()).hexdigest()[:12]
    return os.fspath(cached(f"cocaine-{pins}", _install) / "bin" / "python")


def _install(folder: Path) -> None:
    python = [sys.executable, "-m", "venv", "--clear", os.fspath(folder)]
    subprocess.run(python, check=True)
    pip = [os.fspath(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
    # The framework asks for an older six, which newer Pythons can't import.
    subprocess.run([*pip, "--no-deps", *PINS], check=True)
