from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from etlstage.errors import ConfigError, SourceFailed, WorkerLost
from etlstage.messages import Position, Run
from etlstage.pipeline import Pipeline, WorkerSource
from etlstage.stage import OffsetPolicy, RestartPolicy, Stage
from etlstage.testing import MemorySink, ScriptedLaunch, ScriptedWorker
from etlstage.testing.scripted import Script
from tests.supervisor.acts import LAUNCHES, script_of
from tests.supervisor.workers import QUICK, collect, cyclic, plain

pytestmark = [pytest.mark.core, pytest.mark.virtual]

Played = list[bytes | Position]


async def play(source: WorkerSource, *, until: int | None = None) -> Played:
    """Return a source's messages and positions; ``until``: at least that many."""
    seen: Played = []
    with anyio.fail_after(10):
        async with aclosing(source.runs()) as items:
            async for item in items:
                assert item != []
                seen += [item] if isinstance(item, Position) else item
                if until is not None and len(seen) >= until:
                    break
    await source.aclose()
    return seen


def acting(stage: Stage, script: Script | None = None, **settings: Any) -> WorkerSource:  # noqa: ANN401
    """Return a source whose worker is scripted."""
    launch = ScriptedLaunch(script or script_of(stage))
    LAUNCHES.append(launch)
    return WorkerSource(stage, launch=launch, **settings)


def numbers(start: int, end: int) -> Run:
    """Return the messages of the ``ranges`` worker."""
    return [b"%d" % n for n in range(start, end)]


# --- plain ---------------------------------------------------------------------------


async def test_plain_source_runs_once() -> None:
    """It has no positions, as a run of the program can't be resumed."""
    assert await play(acting(plain("extract", "a", "b"))) == [b"a", b"b"]


async def test_plain_source_can_be_repeated() -> None:
    """With ``every`` it is run again, forever."""
    source = acting(plain("extract", "a", "b"), every=0.01)

    assert await play(source, until=6) == [b"a", b"b"] * 3


async def test_empty_plain_source_is_repeated_too() -> None:
    """There may be messages next time; a drain ends it between two runs."""
    source = acting(plain("extract"), every=0.01)
    with anyio.move_on_after(0.2) as scope:
        await play(source)
    assert scope.cancelled_caught
    assert source.drain() is False

    assert await play(source) == []


async def test_plain_source_that_fails() -> None:
    """Messages before the failure are passed on."""
    seen: list[Run | Position] = []
    source = acting(plain("extract_tail", 1, "", "a"))
    with pytest.raises(WorkerLost, match="exited with status 1"):
        await collect(seen, source.runs())

    assert seen == [[b"a"]]


# --- cyclic, offsets at the worker ---------------------------------------------------


async def test_worker_with_offsets_is_asked_until_there_is_nothing_new() -> None:
    """An empty round is the end of the input."""
    source = acting(cyclic("rounds", "a b", "c", "", "d"))

    assert await play(source) == [b"a", b"b", b"c"]


async def test_worker_with_offsets_can_be_asked_for_ever() -> None:
    """With ``every``, an empty round does not end the input."""
    source = acting(cyclic("rounds", "a b", "", "c"), every=0.01)

    assert await play(source, until=3) == [b"a", b"b", b"c"]


async def test_no_pause_while_the_worker_has_more() -> None:
    """``every`` is for when all was read (issue 10)."""
    source = acting(cyclic("rounds", "a", "b", "c"), every=3600)

    assert await play(source, until=3) == [b"a", b"b", b"c"]


async def test_drained_source_ends_behind_its_round() -> None:
    """The drain can wait for it, as each round of the worker ends."""
    source = acting(cyclic("rounds", "a", "b", "c"), every=3600)
    seen: list[object] = []
    with anyio.fail_after(10):
        async with aclosing(source.runs()) as items:
            async for item in items:
                seen.append(item)
                assert source.drain() is True

    assert seen == [[b"a"]]


# --- cyclic, offsets at the supervisor -----------------------------------------------


async def test_rounds_advance_by_a_step_up_to_the_end() -> None:
    """A position follows each; the last is shorter; empty rounds are not the end."""
    offsets = OffsetPolicy(by="supervisor", start=2, step=4, end=11)
    source = acting(cyclic("ranges", 8), offsets=offsets)

    assert await play(source) == [
        *numbers(2, 6),
        Position(6),
        *numbers(6, 8),
        Position(10),
        Position(11),
    ]


async def test_no_range_reaches_beyond_the_latest_offset() -> None:
    """Otherwise later messages would be taken for read (issue 10)."""
    offsets = OffsetPolicy(by="supervisor", step=5)
    source = acting(cyclic("ranges", 7), offsets=offsets)

    assert await play(source) == [
        *numbers(0, 5),
        Position(5),
        *numbers(5, 7),
        Position(7),
    ]


async def test_gap_as_long_as_a_step_is_not_the_end() -> None:
    """An empty range has a position, and reading continues after it (issue 10)."""
    offsets = OffsetPolicy(by="supervisor", step=2)
    source = acting(cyclic("gap", 5, 6), offsets=offsets)

    assert await play(source) == [Position(2), Position(4), b"5", Position(6)]


async def test_first_offset_may_be_asked_for() -> None:
    """But a recorded position takes precedence."""
    offsets = OffsetPolicy(by="supervisor", start="initial")
    stage = cyclic("log", 5)
    first = acting(stage, offsets=offsets)
    assert await play(first) == [*numbers(3, 5), Position(5)]

    second = acting(stage, offsets=offsets)
    second.resume(4)
    assert await play(second) == [b"4", Position(5)]


async def test_no_pause_between_the_ranges_of_a_backlog() -> None:
    """``every`` is for when all was read (issue 10)."""
    offsets = OffsetPolicy(by="supervisor", step=1)
    source = acting(cyclic("ranges", 3), offsets=offsets, every=3600)

    played = await play(source, until=6)
    assert played == [b"0", Position(1), b"1", Position(2), b"2", Position(3)]


async def test_latest_offset_is_asked_for_again() -> None:
    """With ``every``, as messages may still come."""
    offsets = OffsetPolicy(by="supervisor", start=5, step=5)
    source = acting(cyclic("log", 5, 5, 9), offsets=offsets, every=0.01)

    assert await play(source, until=5) == [*numbers(5, 9), Position(9)]


async def test_latest_offset_that_falls_back_in_a_run() -> None:
    """It is an error: a truncated file would not be read any more."""
    offsets = OffsetPolicy(by="supervisor")
    source = acting(cyclic("log", 9, 5), offsets=offsets, every=0.01)
    with pytest.raises(SourceFailed, match="latest offset is 5, but 9 was reached"):
        await play(source)


async def test_worker_that_is_behind_what_it_gave() -> None:
    """A worker that has lost messages, or was replaced, is an error."""
    offsets = OffsetPolicy(by="supervisor")
    source = acting(cyclic("ranges", 7), offsets=offsets)
    source.resume(8)

    with pytest.raises(
        SourceFailed,
        match="stage e: the latest offset is 7, but 8 was reached before: use 'etlstage"
        " state reset' to read from the beginning",
    ):
        await play(source)


@pytest.mark.parametrize(
    ("behaviour", "found"),
    [
        (("rounds", ""), "with 0 messages, expected one"),
        (("rounds", "5 6"), "with 2 messages, expected one"),
        (("rounds", "five"), "with no number, expected one"),
        (("rounds", "5_0"), "with no number, expected one"),
        (("rounds", "+5"), "with no number, expected one"),
        (("exits", 3), "exited with status 3"),
    ],
)
async def test_worker_that_can_not_report_the_latest_offset(
    behaviour: tuple[str, ...], found: str
) -> None:
    """It needs ``end``; no offset is made up (issue 10)."""
    stage = cyclic(*behaviour, restart=RestartPolicy(max=0))
    source = acting(stage, offsets=OffsetPolicy(by="supervisor"))
    with pytest.raises(SourceFailed) as caught:
        await play(source)

    assert found in str(caught.value)
    assert 'request {"offsets": "latest"}' in str(caught.value)
    assert "set end, or have the worker answer this request" in str(caught.value)


async def test_source_may_be_left_in_the_middle_of_a_round() -> None:
    """The worker is stopped."""
    offsets = OffsetPolicy(by="supervisor", step=1_000_000)
    source = acting(cyclic("ranges"), offsets=offsets)

    assert (await play(source, until=1))[:2] == [b"0", b"1"]


async def test_end_before_which_nothing_is_left() -> None:
    """The worker gets no request."""
    offsets = OffsetPolicy(by="supervisor", start=5, end=5)

    assert await play(acting(cyclic("ranges"), offsets=offsets)) == []


async def test_template_of_the_request() -> None:
    """It replaces the JSON object."""
    offsets = OffsetPolicy(
        by="supervisor", step=3, end=3, template="from {start} to {end}"
    )
    seen = await play(acting(cyclic("requests"), offsets=offsets))

    assert seen[0] == b"<from 0 to 3>"


async def test_drained_source_ends_at_a_position() -> None:
    """The next run resumes there."""
    offsets = OffsetPolicy(by="supervisor", step=2)
    source = acting(cyclic("ranges"), offsets=offsets)
    seen: Played = []
    with anyio.fail_after(10):
        async with aclosing(source.runs()) as items:
            async for item in items:
                seen += [item] if isinstance(item, Position) else item
                assert source.drain() is True

    assert seen == [b"0", b"1", Position(2)]


async def test_drained_source_ends_at_a_position_whenever_that_is() -> None:
    """Even if a reply was not yet collected, or a range not yet given to a worker."""

    async def answer(worker: ScriptedWorker) -> int:
        async for request in worker.messages():
            await worker.reply(b"%d" % json.loads(request)["start"])
        return 0

    async def drain(source: WorkerSource, begun: anyio.Event, turns: int) -> None:
        await begun.wait()
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        assert source.drain() is True

    offsets = OffsetPolicy(by="supervisor", step=1, end=10**6)
    for turns in range(30):
        source = acting(cyclic("ranges"), answer, offsets=offsets)
        seen: Played = []
        begun = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drain, source, begun, turns)
            with anyio.fail_after(10):
                async for item in source.runs():
                    seen += [item] if isinstance(item, Position) else item
                    if len(seen) >= 4:
                        begun.set()
        assert isinstance(seen[-1], Position), turns


async def test_drained_source_does_not_wait_for_a_worker_that_is_not_ready() -> None:
    """No worker has the range, and no part of it was passed on (issue 22)."""
    began = anyio.Event()

    async def never_ready(_worker: ScriptedWorker) -> int:
        began.set()
        await anyio.sleep_forever()
        return 0

    source = acting(
        cyclic("ranges", ready=True, timeout=QUICK),
        never_ready,
        offsets=OffsetPolicy(by="supervisor", end=4),
    )
    pipeline = Pipeline(name="p", source=source, sink=MemorySink())
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipeline.run)
            await began.wait()
            pipeline.drain()
    assert pipeline.report("drained").error is None


async def test_worker_that_is_killed_in_the_middle_of_a_range() -> None:
    """Nothing is missing, and nothing comes twice (issue 10)."""
    offsets = OffsetPolicy(by="supervisor", step=6, end=12)
    stage = cyclic("killed_in_range", 4, 5, 7, restart=RestartPolicy(max=1))
    source = acting(stage, offsets=offsets)

    assert await play(source) == [
        *numbers(0, 6),
        Position(6),
        *numbers(6, 12),
        Position(12),
    ]
    assert source.faults.restarts == source.faults.failures == 3
    assert {fault.what for fault in source.faults.last} == {"was killed by SIGKILL"}


async def test_source_reads_on_from_a_position() -> None:
    """Up to the end; at the end there is nothing more."""
    offsets = OffsetPolicy(by="supervisor", start=0, step=3, end=9)
    source = acting(cyclic("ranges"), offsets=offsets)
    source.resume(3)

    assert await play(source) == [
        *numbers(3, 6),
        Position(6),
        *numbers(6, 9),
        Position(9),
    ]
    source.resume(9)
    assert await play(source) == []


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        ("yesterday", "an integer"),
        (True, "an integer"),
        (-4, "-3 or more"),
        (10, "no more than offsets.end, 9"),
    ],
)
async def test_recorded_position_that_can_not_be(
    position: object, expected: str
) -> None:
    """The error has the value (issue 10)."""
    offsets = OffsetPolicy(by="supervisor", start=-3, end=9)

    with pytest.raises(SourceFailed) as caught:
        acting(cyclic("ranges"), offsets=offsets).resume(position)
    assert str(caught.value) == (
        f"stage e: the recorded position is {position!r}, expected {expected};"
        " 'etlstage state reset' starts from the beginning"
    )


@pytest.mark.parametrize("offsets", [None, OffsetPolicy(by="supervisor")])
async def test_plain_source_has_no_positions(offsets: OffsetPolicy | None) -> None:
    """A recorded one belongs to another definition of the source (issue 14)."""
    stage = plain("extract") if offsets else cyclic("ranges")
    with pytest.raises(SourceFailed, match="position is 4, expected none"):
        acting(stage, offsets=offsets).resume(4)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"step": 0}, "offsets.step: expected 1 or more, got 0"),
        ({"start": 5, "end": 4}, "offsets.end is 4, before offsets.start 5"),
    ],
)
def test_offsets_that_lead_nowhere(settings: dict[str, Any], problem: str) -> None:
    """They are refused on creation."""
    with pytest.raises(ConfigError, match=problem):
        OffsetPolicy(by="supervisor", **settings)
