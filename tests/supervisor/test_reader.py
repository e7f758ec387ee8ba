"""What is read in the event loop's callback, and what is left to the task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest

from etlstage.stage import Stage
from etlstage.supervisor.link import Link
from etlstage.supervisor.observers import Observers
from etlstage.supervisor.pool import WorkerPool
from etlstage.transport import Wire

pytestmark = pytest.mark.core

PART = 65536


class Scene:
    """A wire, its worker and its consumer, with a record of what was done."""

    failed = exited = stalled = False
    errors = Mock()

    def __init__(self, *parts: bytes) -> None:
        self.parts = [*parts]
        self.taken: list[bytes] = []
        self.going_on: list[bool] = []
        self.sizes: list[int] = []

    def read(self, size: int, /) -> bytes | None:
        """Return the next part, or None."""
        self.sizes.append(size)
        return self.parts.pop(0) if self.parts else None

    async def readable(self) -> None:
        """Fail: the wire has ``pull``, so it is never waited for."""
        raise AssertionError("nobody waits for it")

    async def pull(self, take: Callable[[], bool], /) -> None:
        """Call ``take`` once, as the loop does; then the stream ends."""
        self.parts += self.later
        self.going_on.append(take())
        self.left = [*self.parts]
        self.parts = [b""]
        self.stalled = False

    async def run(self, *later: bytes, stalled: bool = False) -> None:
        """Read to the end; ``later`` arrives only when the loop calls."""
        self.later, self.stops = later, stalled
        stage = Stage(name="t", worker=("x",))
        pool = WorkerPool(stage, Observers(stage, None), None)
        link = Link(pool, cast("Any", self), cast("Wire", self))
        with (
            patch.object(link, "dispatch", self),
            patch.object(link, "_take", self.receive),
        ):
            await link._read_all()

    def receive(self, data: bytes) -> None:
        """Take what was read; the consumer may be stalled from then on."""
        self.taken.append(data)
        self.stalled = self.stops


async def test_what_the_worker_writes_at_once_is_taken() -> None:
    """Until nothing is left; then the loop calls again (issue 13)."""
    scene = Scene(b"0")
    await scene.run(b"1", b"2")
    assert (scene.taken, scene.going_on) == ([b"0", b"1", b"2"], [True])


async def test_nothing_is_taken_while_the_consumer_has_too_much() -> None:
    """The rest stays in the pipe, and the task waits (issue 13)."""
    scene = Scene()
    await scene.run(b"1", b"2", stalled=True)
    assert (scene.taken, scene.left, scene.going_on) == ([b"1"], [b"2"], [False])


async def test_the_end_is_left_to_the_task() -> None:
    """The loop's callback does not handle it (issue 13)."""
    scene = Scene()
    await scene.run(b"")
    assert scene.going_on == [False]


async def test_much_at_once_is_read_in_larger_pieces() -> None:
    """As long as that much arrives (issue 13)."""
    scene = Scene()
    await scene.run(b"x" * PART, b"2")
    assert scene.sizes[1:4] == [PART, 8 * PART, PART]


async def test_others_get_their_turns() -> None:
    """However fast a worker is (issue 13)."""
    scene = Scene()
    await scene.run(*[b"1"] * 20)
    assert (len(scene.taken), scene.going_on) == (16, [True])
