"""What is drawn may be used as it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from etlstage.pipeline import Pipeline
from etlstage.pipeline.offsets import steps
from etlstage.protocol.marker import Markers
from etlstage.stage import Order
from etlstage.testing import FaultPlan, MemorySink, hostile_worker
from etlstage.testing.strategies import (
    MARKER_SETS,
    batches,
    chunkings,
    json_messages,
    messages,
    offsets,
    pipelines,
    sendable,
    stages,
)

echoing = stages(
    lambda mode: hostile_worker(FaultPlan.of(), mode=mode, batch=4),
    speaking=st.sampled_from(MARKER_SETS[2:4]),
    order=Order.TOTAL,
)


@given(st.data(), st.sampled_from(MARKER_SETS))
def test_messages_may_be_sent(data: st.DataObject, markers: Markers) -> None:
    """Any, and those that are JSON."""
    for message in data.draw(batches(markers)):
        assert sendable(message, markers)
    document = data.draw(json_messages(markers))
    json.loads(document)
    assert sendable(document, markers)


@given(st.data(), st.binary(max_size=20))
def test_reads_are_the_whole_stream(data: st.DataObject, stream: bytes) -> None:
    """However they are cut, and none of them is empty."""
    reads = data.draw(chunkings(stream))
    assert b"".join(reads) == stream
    assert all(reads)


def test_what_is_drawn_shrinks_to_what_is_simple() -> None:
    """So that a failure shows nothing that does not matter."""
    assert find(messages(), lambda message: True) == b""
    assert find(messages(), bool) == b"x"
    assert find(messages(), lambda message: max(message, default=0) > 127) == b"\x80"
    assert find(chunkings(b"abc"), lambda reads: True) == [b"abc"]
    assert find(chunkings(b"abc"), lambda reads: len(reads) > 1) == [b"a", b"bc"]


@given(offsets(), st.integers(1, 300))
def test_ranges_of_requests_leave_no_gap(ends: tuple[int, int], step: int) -> None:
    """They cover the offsets from the start to the end, each once."""
    asked = [n for first, last in steps(*ends, step) for n in range(first, last)]
    assert asked == [*range(*ends)]


@pytest.mark.process
@settings(max_examples=6, deadline=None, derandomize=True)
@given(pipelines(echoing, echoing))
async def test_pipelines_can_be_run(
    drawn: tuple[Pipeline, list[bytes], MemorySink],
) -> None:
    """All that goes in comes out, in order."""
    pipeline, given, sink = drawn
    await pipeline.run()
    assert sink.messages == given
