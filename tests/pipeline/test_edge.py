from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.messages import Position
from etlstage.pipeline.edge import Edge, Item


async def blocks(call: Callable[[], Awaitable[object]]) -> bool:
    """Return whether a call waits for somebody else."""
    with anyio.move_on_after(0) as scope:
        await call()
    return scope.cancelled_caught


async def test_items_come_out_in_order() -> None:
    """Runs and positions, until the end."""
    edge = Edge()
    items: list[Item] = [[b"1", b"2"], Position(2), [b"3"], Position({"at": 3})]
    for item in items:
        await edge.put(item)
    edge.close()

    assert [item async for item in edge] == items
    assert await edge.get() is None
    assert await edge.get() is None


async def test_full_edge_makes_its_producer_wait() -> None:
    """By messages; a place is free when one was taken out."""
    edge = Edge(max_messages=3)
    await edge.put([b"1", b"2"])
    assert not edge.full
    await edge.put([b"3", b"4"])
    assert edge.full
    assert (edge.messages, edge.bytes) == (4, 4)
    assert await blocks(lambda: edge.put([b"5"]))
    await edge.get()

    assert not await blocks(lambda: edge.put([b"5"]))


async def test_bytes_fill_an_edge_too() -> None:
    """A run that is longer than the bound is let in alone."""
    edge = Edge(max_bytes=10)
    await edge.put([b"x" * 100])
    assert await blocks(lambda: edge.put([b"y"]))
    await edge.get()

    assert edge.bytes == 0
    await edge.put([b"y"])


async def test_positions_take_no_place() -> None:
    """They have neither messages nor bytes."""
    edge = Edge(max_messages=1)
    for n in range(100):
        await edge.put(Position(n))

    assert (edge.messages, edge.bytes) == (0, 0)
    assert not edge.full


async def test_empty_edge_makes_its_consumer_wait() -> None:
    """Until something comes, or the end."""
    edge = Edge()
    seen: list[Item | None] = []

    async def consume() -> None:
        seen.append(await edge.get())
        seen.append(await edge.get())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        await anyio.wait_all_tasks_blocked()
        await edge.put([b"1"])
        await anyio.wait_all_tasks_blocked()
        edge.close()

    assert seen == [[b"1"], None]


async def test_cancelled_consumer_loses_nothing() -> None:
    """What it waited for is there for the next."""
    edge = Edge()
    assert await blocks(edge.get)
    await edge.put([b"1"])

    assert await edge.get() == [b"1"]


async def test_two_who_wait_are_both_woken() -> None:
    """A position may be put in by another task than the messages."""
    edge = Edge(max_messages=1)
    await edge.put([b"1"])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(edge.put, Position(1))
        tasks.start_soon(edge.put, [b"2"])
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(10):
            seen = [await edge.get() for _ in range(3)]

    assert seen[0] == [b"1"]
    assert Position(1) in seen
    assert [b"2"] in seen


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.lists(st.binary(max_size=4), max_size=4)),
    st.integers(1, 6),
    st.integers(1, 9),
)
def test_bounds_are_kept(
    backend: str, runs: list[list[bytes]], most: int, most_bytes: int
) -> None:
    """Whatever passes: order, counts, and never more than one run beyond a bound."""

    async def main() -> None:
        edge = Edge(max_messages=most, max_bytes=most_bytes)

        async def produce() -> None:
            for run in runs:
                await edge.put(run)
                assert edge.messages < most + len(run) + 1
                assert edge.bytes < most_bytes + sum(map(len, run)) + 1
            edge.close()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(produce)
            seen = [item async for item in edge]
        assert seen == runs
        assert (edge.messages, edge.bytes) == (0, 0)

    anyio.run(main, backend=backend)
