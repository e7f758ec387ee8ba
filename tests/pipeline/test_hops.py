"""How many modules of the package one message passes, from source to sink."""

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
"""Modules; each is a file that someone has to open who follows a message."""


class Profile:
    """Notes which modules of the package are called, while it is on."""

    def __init__(self) -> None:
        self.modules: set[str] = set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:  # noqa: ANN401
        """Take what the interpreter reports."""
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE):
            self.modules.add(path.removeprefix(PACKAGE))


class Two(Source):
    """Two messages; how the second passes is noted."""

    def __init__(self, profile: Profile, loaded: list[anyio.Event]) -> None:
        super().__init__("two")
        self._profile, self._loaded = profile, loaded

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield each when the one before has passed."""
        yield Column(pa.array([b"0"], pa.binary()))
        await self._loaded[0].wait()
        sys.setprofile(self._profile)
        yield Column(pa.array([b"1"], pa.binary()))
        await self._loaded[1].wait()


class Noting(Sink):
    """Ends the profile with the second message."""

    def __init__(self, loaded: list[anyio.Event]) -> None:
        super().__init__("noting")
        self._loaded = loaded

    async def write(self, run: Run) -> None:
        """Take a message."""
        sys.setprofile(None)
        self._loaded[self.account.received].set()
        self.account.received += len(run)
        self.account.done += len(run)

    def landed(self) -> str:
        """Return nothing."""
        return ""


@pytest.mark.skipif(speedups.compiled is None, reason="nothing is compiled here")
async def test_a_message_passes_few_modules() -> None:
    """Between a source's yield and the sink's write, in lock-step (issue 22)."""
    profile, loaded = Profile(), [anyio.Event(), anyio.Event()]
    pipeline = Pipeline(
        name="p",
        source=Two(profile, loaded),
        stages=[Stage(name="upper", worker=[sys.executable, "-c", UPPER])],
        sink=Noting(loaded),
    )
    try:
        report = await pipeline.run()
    finally:
        sys.setprofile(None)

    assert report.status == "done"
    assert 10 < len(profile.modules) <= MOST, sorted(profile.modules)
