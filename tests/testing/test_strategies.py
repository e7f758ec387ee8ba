"""What the strategies draw can be used as it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis import strategies as st

from etlstage.pipeline import Pipeline
from etlstage.pipeline.offsets import steps
from etlstage.protocol.marker import Markers
from etlstage.stage import Order
from etlstage.testing import FaultPlan, MemorySink, hostile_worker
from etlstage.testing.strategies import (
    LINE_ENDS,
    MARKER_SETS,
    batches,
    chunkings,
    json_messages,
    json_messages_like,
    messages,
    messages_like,
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
    """This holds for JSON documents, too."""
    for message in data.draw(batches(markers)):
        assert sendable(message, markers)
    document = data.draw(json_messages(markers))
    json.loads(document)
    assert sendable(document, markers)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.sampled_from(MARKER_SETS))
def test_messages_like_a_sample_may_be_sent(
    data: st.DataObject, markers: Markers
) -> None:
    """If the sample itself may not be sent, others are drawn (issue 12)."""
    for sample in ([b"EOM", b"a\n\nb"], [b"EOM\n\naab"]):
        assert sendable(data.draw(messages_like(sample, markers)), markers)
    document = data.draw(json_messages_like([b'{"EOM": [1, 2]}'], markers))
    json.loads(document)
    assert sendable(document, markers)


def test_what_readers_of_lines_fall_over_is_drawn() -> None:
    """By default the messages of a short search suffice (issue 26)."""
    drawn = b""

    @seed(1)
    @settings(max_examples=300, phases=(Phase.generate,), database=None)
    @given(messages())
    def draw(message: bytes) -> None:
        nonlocal drawn
        drawn += message + b"|"

    draw()
    # A line feed ends a message here, also after a carriage return.
    wanted = [end for end in LINE_ENDS if b"\n" not in end]
    assert [end for end in wanted if end not in drawn] == []
    assert b"\x80" in drawn
    assert b"\r|" in drawn


def test_messages_like_a_sample_are_near_it() -> None:
    """Some are the sample itself, others have changed bytes or parts (issue 12)."""
    once = settings(
        phases=[Phase.generate], database=None, derandomize=True, max_examples=2000
    )
    drawn = messages_like([b"total;17"])
    assert find(drawn, lambda message: message == b"total;17", settings=once)
    near = find(
        drawn,
        lambda message: message.startswith(b"total;") and message != b"total;17",
        settings=once,
    )
    assert near.startswith(b"total;")
    shorter = find(
        drawn,
        lambda message: message.startswith(b"to") and len(message) < 8,
        settings=once,
    )
    assert len(shorter) < 8
    documents = json_messages_like([b'{"a": [1, 2], "b": 3}'])
    found = find(documents, lambda message: b'"a": [1, null]' in message, settings=once)
    assert json.loads(found) == {"a": [1, None], "b": 3}


@given(st.data(), st.binary(max_size=20))
def test_reads_are_the_whole_stream(data: st.DataObject, stream: bytes) -> None:
    """This holds however it is cut, and no read is empty."""
    reads = data.draw(chunkings(stream))
    assert b"".join(reads) == stream
    assert all(reads)


def test_what_is_drawn_shrinks_to_what_is_simple() -> None:
    """A failure should show nothing that does not matter."""
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
    """All messages are loaded, in order."""
    pipeline, given, sink = drawn
    await pipeline.run()
    assert sink.messages == given
