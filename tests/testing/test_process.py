from __future__ import annotations

import anyio
import pytest

from etlstage.messages import StageKind
from etlstage.stage import Stage
from etlstage.testing import process as process_module
from etlstage.testing.process import Process
from etlstage.transport import launch_worker
from tests.patience import HANG


class Heard(Process):
    """A process that may write anything."""

    def take(self, data: bytes) -> bool:
        """Accept the data."""
        return True


async def test_what_comes_between_two_looks_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes after the wait, and before the process is looked at (issue 12)."""
    stage = Stage(name="p", kind=StageKind.TRANSFORM, worker=("cat",))
    process = Heard(stage, launch_worker)

    def late(_pid: int) -> bool:
        process.wake()
        return True

    await process.start()
    try:
        with anyio.fail_after(HANG):
            while not await process.idles():
                pass
            monkeypatch.setattr(process_module, "waits_for_stdin", late)
            assert not await process.idles()
    finally:
        await process.kill()
