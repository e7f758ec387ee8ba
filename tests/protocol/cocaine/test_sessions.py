"""Sessions keep apart however their frames are interleaved."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etlstage.protocol.cocaine import CocaineSession, CocaineVersion
from etlstage.protocol.events import (
    Added,
    Ended,
    Event,
    Opened,
)
from tests.protocol.cocaine.interleaving import Interleaving
from tests.protocol.cocaine.pair import sent, supervisor, worker

VERSIONS = [CocaineVersion.ZERO, CocaineVersion.ONE]
Talk = list[tuple[int, bytes | int | None]]


@st.composite
def talks(draw: st.DrawFn) -> Talk:
    """Draw what a worker sends in several exchanges: outputs, and an end for each."""
    count = draw(st.integers(1, 4))
    said: dict[int, list[bytes | int | None]] = {
        id_: draw(st.lists(st.binary(max_size=80), max_size=3))
        for id_ in range(1, count + 1)
    }
    for parts in said.values():
        parts.append(draw(st.sampled_from([None, -13, 2**40])))
    turns = draw(st.permutations([id_ for id_, parts in said.items() for _ in parts]))
    return [(id_, said[id_].pop(0)) for id_ in turns]


def say(session: CocaineSession, talk: Talk) -> bytes:
    """Return the bytes that a worker sends."""
    for id_, said in talk:
        if isinstance(said, bytes):
            session.send(Added(id_, [said]))
        elif said is None:
            session.send(Ended(id_, [()]))
        else:
            session.send(Ended.refused(id_, said, "no"))
    return b"".join(session.data_to_send())


def outcomes(events: list[Event]) -> dict[int, list[object]]:
    """Return the outcome of each exchange: its outputs, and how it ended."""
    found: dict[int, list[object]] = {}
    for event in events:
        match event:
            case Added(id_, messages):
                found.setdefault(id_, []).extend(messages)
            case Ended(id_, _, [refusal]):
                found.setdefault(id_, []).append(refusal.code)
            case Ended(first, groups):
                for id_, group in enumerate(groups, first):
                    found.setdefault(id_, []).extend([*group, None])
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(talks(), st.sampled_from(VERSIONS), st.data())
def test_sessions_are_the_same_however_frames_mix_and_are_cut(
    talk: Talk, version: CocaineVersion, data: st.DataObject
) -> None:
    """An exchange's outcome depends neither on the others, nor on where reads end."""
    ours, theirs = supervisor(version), worker(version)
    opened = [Opened(id_, [], each=False, event="x") for id_ in range(1, 5)]
    theirs.receive_data(sent(ours, *opened), 0.0)
    wire = say(theirs, talk)
    cuts = data.draw(st.lists(st.integers(0, len(wire)), max_size=8).map(sorted))

    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        ours.receive_data(wire[start:end], 0.0)

    wanted: dict[int, list[object]] = {}
    for id_, said in talk:
        wanted.setdefault(id_, []).append(said)
    assert outcomes(ours.events_received()) == wanted


def test_sessions_are_the_same_bytewise() -> None:
    """With one byte per read."""
    ours, theirs = supervisor(), worker()
    theirs.receive_data(sent(ours, Opened(1, [], each=False, event="x")), 0.0)
    wire = say(theirs, [(1, b"a" * 300), (1, b""), (1, None)])

    for byte in wire:
        ours.receive_data(bytes([byte]), 0.0)

    assert outcomes(ours.events_received()) == {1: [b"a" * 300, b"", None]}


@pytest.mark.parametrize("seed", range(5))
def test_no_late_frame_hits_another_session(seed: int) -> None:
    """With cancellations at any time; every exchange ends exactly once."""
    for part in range(20):
        Interleaving(seed * 1000 + part).run(80)


@pytest.mark.slow
def test_no_late_frame_hits_another_session_in_ten_thousand() -> None:
    """As above, in ten thousand conversations."""
    for seed in range(10_000):
        Interleaving(100_000 + seed).run(30)
