"""Between Spark's thread and an event loop."""

from __future__ import annotations

import threading

import anyio
import pytest

from etlstage.messages import Run
from etlstage.spark.executor import bridge as module
from etlstage.spark.executor.bridge import Bridge, bridged


async def echo(bridge: Bridge[Run]) -> None:
    """Put out what is given."""
    async for run in bridge.inbox:
        await bridge.put(run, len(run))


def test_items_pass_in_order_to_the_end() -> None:
    """And nothing is ready behind the end."""
    with bridged(echo) as bridge:
        for number in range(100):
            bridge.give([b"%d" % number])
        bridge.end()
        assert [bridge.take() for _ in range(100)] == [[b"%d" % n] for n in range(100)]
        assert bridge.take() is None
        assert not bridge.ready


def test_error_is_raised_where_it_is_waited_for() -> None:
    """What is given after it goes nowhere, and does not block."""

    async def fail(bridge: Bridge[Run]) -> None:
        await bridge.inbox.receive()
        raise ValueError("broken")

    with bridged(fail) as bridge:
        bridge.give([b"a"])
        with pytest.raises(ValueError, match="broken"):
            bridge.take()
        bridge.give([b"b"])
        bridge.end()


def test_early_end_is_told() -> None:
    """As the end of all that is put out."""

    async def first(bridge: Bridge[Run]) -> None:
        await bridge.put(await bridge.inbox.receive())

    with bridged(first) as bridge:
        bridge.give([b"a"])
        bridge.give([b"b"])
        assert bridge.take() == [b"a"]
        assert bridge.take() is None


def test_leaving_early_cancels_what_runs() -> None:
    """Whatever it waits for."""
    ended = threading.Event()

    async def wait(bridge: Bridge[Run]) -> None:
        await bridge.put([b"started"])
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    def leave() -> None:
        with bridged(wait) as bridge:
            assert bridge.take() == [b"started"]
            raise GeneratorExit

    with pytest.raises(GeneratorExit):
        leave()
    assert ended.is_set()


def test_what_is_not_taken_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes: who puts more waits until some were taken."""
    monkeypatch.setattr(module, "_UNREAD", 10)
    put: list[int] = []

    async def many(bridge: Bridge[Run]) -> None:
        for number in range(20):
            await bridge.put([b"x"], 4)
            put.append(number)

    with bridged(many) as bridge:
        first = bridge.take()
        assert first is not None
        # The third and the fourth go beyond the bound, by one item at most.
        for taken in range(1, 20):
            assert len(put) <= taken + 3
            assert bridge.take() is not None
        assert bridge.take() is None
    assert put == list(range(20))
