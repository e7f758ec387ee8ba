"""
A headless Chromium, driven over two pipes by its DevTools protocol.

This needs nothing but the browser: messages are JSON, each followed by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import pytest

__all__ = ("Browser", "browser")

NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
OPTIONS: Final = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars"),
    "--remote-debugging-pipe",
)
# The browser expects its pipes as file descriptors 3 and 4.
START: Final = """\
import fcntl, os, sys
# Either may be one of the two.
pipes = [fcntl.fcntl(int(pipe), fcntl.F_DUPFD, 10) for pipe in sys.argv[1:3]]
for place, pipe in enumerate(pipes, 3):
    os.dup2(pipe, place)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """
    One page of a browser.

    Attributes:
        problems: What the page logged, raised, or was not allowed to do.
        requests: The URLs that the page requested.

    """

    def __init__(self, reading: BinaryIO, writing: BinaryIO) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._in = reading
        self._out = writing
        self._data = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Log", "Runtime", "Network", "Audits"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while (said := self._next()).get("id") != self._number:
            self._note(said)
        assert "error" not in said, said
        result: dict[str, Any] = said["result"]
        return result

    def open(self, path: Path, *, width: int = 1000, dark: bool = False) -> None:
        """Open a file in a window ``width`` pixels wide; wait until it has loaded."""
        self.look(width=width, dark=dark)
        self._loaded = False
        self.call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._note(self._next())

    def look(self, *, width: int = 1000, dark: bool = False, media: str = "") -> None:
        """Change the window's width, the color scheme and the emulated medium."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def value(self, expression: str) -> Any:  # noqa: ANN401 - any JSON
        """Return the value of an expression in JavaScript."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def picture(self) -> bytes:
        """Return the whole page as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._data:
            chunk = os.read(self._in.fileno(), 65536)
            assert chunk, "the browser is gone"
            self._data += chunk
        line, _, self._data = self._data.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            case (
                "Log.entryAdded"
                | "Runtime.consoleAPICalled"
                | "Runtime.exceptionThrown"
                | "Audits.issueAdded"
            ):
                self.problems.append(json.dumps(event["params"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """
    Start a browser; kill it in the end.

    Args:
        folder: For the browser's profile; its log is written beside it.

    """
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.fail(
            "there is no Chromium to look at the page with: install the package"
            " chromium (.ci/run does, as root on Debian)"
        )
    (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
    pipes = their_in, their_out
    arguments = [*OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    with (folder.parent / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, pipes), program, *arguments],
            pass_fds=pipes,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    for pipe in pipes:
        os.close(pipe)
    with process, open(our_in, "rb") as reading, open(our_out, "wb") as writing:
        try:
            yield Browser(reading, writing)
        finally:
            process.kill()
