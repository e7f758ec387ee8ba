"""How many modules of the package a message passes, from source to sink."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import pyarrow as pa
import pytest

import etlstage
from etlstage import Stage, speedups
from etlstage.columns import Column
from etlstage.messages import Position, Run
from etlstage.pipeline import Pipeline
from etlstage.pipeline.interfaces import Sink, Source

UPPER = "from etlstage import worker; worker.transform(lambda m: [m.upper()])"

pytestmark = pytest.mark.process

PACKAGE = str(Path(etlstage.__file__).parent)
MOST = 24
"""Modules: files that someone who follows a message has to open."""


class Profile:
    """Collects the modules of the package that are called while it is active."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.passed: list[set[str]] = []

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:  # noqa: ANN401
        """Handle an event of the interpreter."""
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE):
            self.modules.add(path.removeprefix(PACKAGE))


class Few(Source):
    """Yields messages, and profiles the path of each but the first."""

    def __init__(self, profile: Profile, loaded: list[anyio.Event]) -> None:
        super().__init__("few")
        self._profile, self._loaded = profile, loaded

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield each message when the one before has passed."""
        for number, passed in enumerate(self._loaded):
            if number:
                sys.setprofile(self._profile)
            yield Column(pa.array([b"%d" % number], pa.binary()))
            await passed.wait()


class Noting(Sink):
    """Ends the profile when a message arrives."""

    def __init__(self, profile: Profile, loaded: list[anyio.Event]) -> None:
        super().__init__("noting")
        self._profile, self._loaded = profile, loaded

    async def write(self, run: Run) -> None:
        """Take a message."""
        sys.setprofile(None)
        if self.account.received:
            self._profile.passed.append(self._profile.modules)
        self._profile.modules = set()
        self._loaded[self.account.received].set()
        self.account.received += len(run)
        self.account.done += len(run)

    def landed(self) -> str:
        """Return nothing."""
        return ""


@pytest.mark.skipif(speedups.compiled is None, reason="nothing is compiled here")
async def test_a_message_passes_few_modules() -> None:
    """
    Between a source's yield and the sink's write, in lock-step (issue 22).

    The longest path is left out, as a timer may run during it.
    """
    profile, loaded = Profile(), [anyio.Event() for _ in range(5)]
    pipeline = Pipeline(
        name="p",
        source=Few(profile, loaded),
        stages=[Stage(name="upper", worker=[sys.executable, "-c", UPPER])],
        sink=Noting(profile, loaded),
    )
    try:
        report = await pipeline.run()
    finally:
        sys.setprofile(None)

    assert report.status == "done"
    assert len(profile.passed) == 4
    *most, _ = sorted(profile.passed, key=len)
    assert len(most[0]) > 10
    assert len(most[-1]) <= MOST, sorted(most[-1])
