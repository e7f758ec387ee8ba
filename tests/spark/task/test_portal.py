"""The bridge between Spark's thread and an event loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext

import anyio
import pytest

from etlstage.messages import Run
from etlstage.spark.task import portal as module
from etlstage.spark.task.portal import Bridge, bridged


async def echo(bridge: Bridge[Run]) -> None:
    """Pass each run on unchanged."""
    async for run in bridge.runs():
        await bridge.put(run, len(run))


def numbers(count: int) -> list[Run]:
    """Return runs that can be distinguished."""
    return [[b"%d" % number] for number in range(count)]


def test_items_pass_in_order_to_the_end() -> None:
    """Even if there are none."""
    for count in (0, 1, 100):
        with bridged(echo) as bridge:
            assert list(bridge.cross(numbers(count))) == numbers(count)


def test_runs_pass_though_nothing_comes_of_them() -> None:
    """Only a few more runs are read from Spark than were taken."""
    read: list[int] = []
    left: list[int] = []

    def runs() -> Iterator[Run]:
        for number in range(50):
            read.append(number)
            yield [b"x"]

    async def swallow(bridge: Bridge[Run]) -> None:
        left.extend([len(read) async for _ in bridge.runs()])

    with bridged(swallow) as bridge:
        assert list(bridge.cross(runs())) == []
    assert len(left) == 50
    # A few of the runs that were read wait, and one is being read.
    assert all(seen <= taken + 6 for taken, seen in enumerate(left))


def test_error_is_raised_where_it_is_waited_for() -> None:
    """Even before all runs were read."""

    async def fail(bridge: Bridge[Run]) -> None:
        async for _ in bridge.runs():
            raise ValueError("broken")

    for count in (1, 100):
        with bridged(fail) as bridge, pytest.raises(ValueError, match="broken"):
            list(bridge.cross(numbers(count)))


def test_early_end_is_reported() -> None:
    """The output ends, and the remaining runs are not read."""

    async def first(bridge: Bridge[Run]) -> None:
        async for run in bridge.runs():
            await bridge.put(run)
            return

    runs = iter(numbers(100))
    with bridged(first) as bridge:
        assert list(bridge.cross(runs)) == [[b"0"]]
    assert len(list(runs)) > 80


@pytest.mark.parametrize("error", [None, GeneratorExit])
def test_leaving_early_cancels_what_runs(error: type[BaseException] | None) -> None:
    """Whatever the function waits for, and whatever the reason."""
    ended = threading.Event()

    async def wait(bridge: Bridge[Run]) -> None:
        await bridge.put([b"started"])
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    def leave() -> None:
        with bridged(wait) as bridge:
            for _ in bridge.cross(numbers(1)):
                if error is not None:
                    raise error
                break

    with pytest.raises(error) if error is not None else nullcontext():
        leave()
    assert ended.is_set()


def test_what_is_not_taken_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes: putting more waits until some were taken."""
    monkeypatch.setattr(module, "_UNREAD", 10)
    monkeypatch.setattr(module, "_ITEM", 0)
    put: list[int] = []

    async def many(bridge: Bridge[Run]) -> None:
        for number in range(20):
            await bridge.put([b"x"], 4)
            put.append(number)

    with bridged(many) as bridge:
        for taken, _ in enumerate(bridge.cross([]), 1):
            assert len(put) <= taken + 3
    assert put == list(range(20))
