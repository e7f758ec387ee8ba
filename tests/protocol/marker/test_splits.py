"""A stream means the same however it is cut into reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.errors import PayloadTooBig
from etlstage.protocol.base import SEND_EOF, Limits, Side
from etlstage.protocol.events import Failed
from etlstage.protocol.marker import MarkerProtocol, Markers, Mode
from etlstage.testing.strategies import MARKER_SETS, chunkings
from tests.protocol.pair import S, Typed, receive, without_dump
from tests.protocol.strategies import garbage, unmeasured
from tests.protocol.words import BatchEnd, Messages, Word, tell

MESSAGES = Messages([b"q"] * 3)
BEFORE: dict[Mode, list[list[Word]]] = {
    Mode.PLAIN: [[]],
    Mode.CYCLIC: [[], [MESSAGES]],
    Mode.SINGLE: [[], [MESSAGES]],
    Mode.BATCH_WORKER: [[], [Messages([b"q"])], [BatchEnd()]],
    Mode.BATCH_SUPERVISOR: [
        [],
        [MESSAGES],
        [MESSAGES, BatchEnd(), BatchEnd()],
        [BatchEnd(), BatchEnd(), MESSAGES],
    ],
}
"""The events that a supervisor may have sent before it reads, by mode."""

roomy = st.just(Limits(6000, 20000))
tight = st.builds(Limits, st.integers(1, 8), st.integers(1, 14))


def heard(protocol: MarkerProtocol, chunks: list[bytes]) -> list[Typed]:
    """Return the events of chunks and end; of errors, the parts that no cut changes."""
    events = []
    for event in receive(protocol, *chunks, SEND_EOF):
        if event[0] != Failed.__name__:
            events.append(event)
        elif event[1] == PayloadTooBig.__name__:
            # A fault found earlier knows less: which message, how many bytes.
            events.append(("Failed",))
        else:
            events.append(("Failed", without_dump(str(event[2]))))
    return events


def check(
    data: st.DataObject, side: Side, mode: Mode, markers: Markers, limits: Limits
) -> tuple[list[Typed], list[Typed]]:
    """Return the events of one stream in one read and in many; check the states."""
    echo = data.draw(st.booleans(), label="eob_then_eom")
    answered = data.draw(st.booleans(), label="bnc_after_eob")
    before = data.draw(st.sampled_from(BEFORE[mode])) if side is S else []
    stream = data.draw(garbage(markers), label="stream")
    chunks = data.draw(chunkings(stream), label="reads")
    outcomes, states = [], []
    for reads in ([stream] if stream else [], chunks):
        protocol = MarkerProtocol(
            side,
            mode,
            markers,
            limits=limits,
            eob_then_eom=echo,
            bnc_after_eob=answered,
        )
        for event in before:
            tell(protocol, event)
        outcomes.append(heard(protocol, reads))
        states.append((protocol.state, protocol.owed))
    assert states[0] == states[1]
    return outcomes[0], outcomes[1]


@given(
    st.data(),
    st.sampled_from(Side),
    st.sampled_from(Mode),
    st.sampled_from(MARKER_SETS),
    roomy,
)
@unmeasured
def test_any_split_means_the_same(
    data: st.DataObject, side: Side, mode: Mode, markers: Markers, limits: Limits
) -> None:
    """Sound or not: the same events, the same fault at the same offset."""
    whole, pieces = check(data, side, mode, markers, limits)
    assert whole == pieces


@given(
    st.data(),
    st.sampled_from(Side),
    st.sampled_from(Mode),
    st.sampled_from(MARKER_SETS),
    tight,
)
@unmeasured
def test_any_split_means_the_same_within_limits(
    data: st.DataObject, side: Side, mode: Mode, markers: Markers, limits: Limits
) -> None:
    """The same sound events, then a fault in both or in neither, maybe different."""
    whole, pieces = check(data, side, mode, markers, limits)
    sized = ("Failed",)
    if sized in (whole[-1], pieces[-1]):
        whole[-1], pieces[-1] = whole[-1][:1], pieces[-1][:1]
    assert whole == pieces


@pytest.mark.parametrize("before", [b"", b"-", b".", b"=", b"a"])
@pytest.mark.parametrize("given", BEFORE[Mode.BATCH_SUPERVISOR])
@pytest.mark.parametrize("mode", [Mode.BATCH_WORKER, Mode.BATCH_SUPERVISOR])
def test_eob_from_a_worker_means_the_same_in_pieces(
    mode: Mode, given: list[Word], before: bytes
) -> None:
    """Also where it is cut, after the beginning of another marker (issue 22)."""
    if mode is Mode.BATCH_WORKER and given:
        given = [Messages([b"q"])]
    markers = Markers(eom=b"\n\n", eop=b"--", eob=b"==", bnc=b"..", err=b"!!")
    stream = before + markers.eob
    outcomes = []
    for reads in ([stream], [stream[at : at + 1] for at in range(len(stream))]):
        protocol = MarkerProtocol(S, mode, markers)
        for event in given:
            tell(protocol, event)
        outcomes.append(heard(protocol, reads))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][-1][0] == "Failed"
