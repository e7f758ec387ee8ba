"""
A damaged stream is never read like the sound one.

A sound stream is written as a list of tokens: contents of messages and markers.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from etlstage.protocol.base import SEND_EOF, Side
from etlstage.protocol.events import Failed
from etlstage.protocol.marker import MarkerProtocol, Markers, MarkerState, Mode
from etlstage.testing.strategies import MARKER_SETS, messages
from tests.protocol.pair import S, Typed, W, receive
from tests.protocol.strategies import moderate, reasons
from tests.protocol.words import Answers, BatchEnd, Messages, Word, tell


@dataclass
class Sound:
    """A stream that one side reads, with what happened before."""

    side: Side
    mode: Mode
    markers: Markers
    before: list[Word]
    tokens: list[bytes]

    def read(self, stream: bytes) -> tuple[list[Typed], MarkerState, int]:
        """Return what ``stream`` means, and the session's state after it."""
        protocol = MarkerProtocol(self.side, self.mode, self.markers)
        for event in self.before:
            tell(protocol, event)
        events = receive(protocol, *([stream] if stream else []), SEND_EOF)
        return events, protocol.state, protocol.owed

    def meaning(self) -> tuple[list[Typed], MarkerState, int]:
        """Return what the sound stream means."""
        events, state, owed = self.read(b"".join(self.tokens))
        assert events[-1] == ("Eof", b"")
        return events, state, owed

    def without(self, marker: bytes) -> st.SearchStrategy[list[bytes]]:
        """Draw the tokens with one ``marker`` removed."""
        places = [n for n, token in enumerate(self.tokens) if token == marker]
        return st.sampled_from(places).map(
            lambda n: self.tokens[:n] + self.tokens[n + 1 :]
        )


def failed(events: list[Typed]) -> bool:
    """Return whether the reader noticed a fault."""
    return events[-1][0] == Failed.__name__


@st.composite
def replies(draw: st.DrawFn, *, one_to_one: bool = True) -> Sound:
    """Draw a sound stream of at least one reply, read by the supervisor."""
    asking = [Mode.SINGLE, Mode.CYCLIC, Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER]
    mode = draw(st.sampled_from(asking))
    sets = [m for m in MARKER_SETS if one_to_one or m.eop != m.eom]
    markers = draw(st.sampled_from(sets))
    count = 1 if mode is Mode.BATCH_WORKER else draw(st.integers(1, 4))
    before: list[Word] = [Messages([b"q"] * count)]
    if mode is Mode.BATCH_SUPERVISOR:
        before = [BatchEnd()] * count
    tokens = [markers.bnc] if mode is Mode.BATCH_WORKER and draw(st.booleans()) else []
    for number in range(count):
        if markers.err and number < count - 1 and draw(st.booleans()):
            tokens += [draw(reasons(markers)).encode(), markers.err]
        elif markers.eop == markers.eom:
            tokens += [draw(messages(markers)), markers.eom]
        else:
            for message in draw(st.lists(messages(markers), max_size=3)):
                tokens += [message, markers.eom]
            tokens.append(markers.eop)
    return Sound(S, mode, markers, before, tokens)


@st.composite
def requests(draw: st.DrawFn) -> Sound:
    """Draw a sound stream of at least one message or EOB, read by the worker."""
    mode = draw(st.sampled_from([Mode.SINGLE, Mode.CYCLIC, Mode.BATCH_SUPERVISOR]))
    markers = draw(st.sampled_from(MARKER_SETS))
    tokens = []
    for _ in range(draw(st.integers(1, 3))):
        least = 0 if mode.batches else 1
        for message in draw(st.lists(messages(markers), min_size=least, max_size=3)):
            tokens += [message, markers.eom]
        if mode.batches:
            tokens.append(markers.eob)
    return Sound(W, mode, markers, [], tokens)


def asked_for_nothing(sound: Sound) -> int:
    """
    Return the length of a BNC before a reply.

    The reply ends the batch with or without it, so that request for one message more
    changes nothing.
    """
    bnc = sound.side is S and sound.tokens[0] == sound.markers.bnc
    return len(sound.markers.bnc) if bnc else 0


@given(replies() | requests(), st.data())
@moderate
def test_no_byte_can_be_lost_unseen(sound: Sound, data: st.DataObject) -> None:
    """Whether of a message or of a marker: the outcome differs."""
    stream = b"".join(sound.tokens)
    at = data.draw(st.integers(asked_for_nothing(sound), len(stream) - 1))
    assert sound.read(stream[:at] + stream[at + 1 :]) != sound.meaning()


@given(replies() | requests(), st.data())
@moderate
def test_no_two_markers_can_change_places_unseen(
    sound: Sound, data: st.DataObject
) -> None:
    """Markers show the order of events."""
    tokens = list(sound.tokens)
    places = [n for n, token in enumerate(tokens) if token in sound.markers]
    i, k = (data.draw(st.sampled_from(places)) for _ in range(2))
    if tokens[i] != tokens[k]:
        tokens[i], tokens[k] = tokens[k], tokens[i]
        assert sound.read(b"".join(tokens)) != sound.meaning()


@given(replies(), st.data())
@moderate
def test_lost_eop_leaves_a_remainder_or_fails(
    sound: Sound, data: st.DataObject
) -> None:
    """A missing EOP is noticed: at once, or because one reply stays owed."""
    tokens = data.draw(sound.without(sound.markers.eop))
    events, _, owed = sound.read(b"".join(tokens))
    # Where EOP is EOM, two contents that join may form an ERR: also noticed.
    more = refusals(events) > refusals(sound.meaning()[0])
    assert failed(events) or owed == 1 or more


@given(replies())
@moderate
def test_one_eop_too_many_fails(sound: Sound) -> None:
    """The extra EOP answers no message, wherever it came from."""
    extra = sound.markers.eop
    if sound.markers.eop == sound.markers.eom:
        extra = b"one more" + extra
    events, state, _ = sound.read(b"".join(sound.tokens) + extra)
    assert failed(events)
    assert state is MarkerState.ERROR


@given(replies(one_to_one=False), st.data())
@moderate
def test_lost_eom_before_eop_fails(sound: Sound, data: st.DataObject) -> None:
    """An unfinished message is never taken for a finished one."""
    eom, eop = sound.markers.eom, sound.markers.eop
    tokens = [*sound.tokens, b""]
    places = [
        n
        for n, token in enumerate(tokens)
        if token == eom
        and tokens[n + 1] == eop
        and tokens[n - 1]
        # In b"---" the EOP b"--" comes first, whatever was meant.
        and (tokens[n - 1] + eop).find(eop) == len(tokens[n - 1])
    ]
    if places:
        del tokens[data.draw(st.sampled_from(places))]
        events, _, _ = sound.read(b"".join(tokens))
        assert failed(events)


def refusals(events: list[Typed]) -> int:
    """Return how many exchanges were refused."""
    replies = [e[1] for e in events if e[0] == Answers.__name__]
    runs = (run for run in replies if isinstance(run, list))
    return sum(isinstance(reply, str) for run in runs for reply in run)


@given(requests(), st.data())
@moderate
def test_lost_eob_leaves_a_batch_open_or_joins_two(
    sound: Sound, data: st.DataObject
) -> None:
    """The worker then owes one EOP less than its supervisor waits for."""
    if sound.mode.batches:
        _, _, owed = sound.meaning()
        tokens = data.draw(sound.without(sound.markers.eob))
        assert sound.read(b"".join(tokens))[2] == owed - 1


@given(replies() | requests(), st.data())
@moderate
def test_stream_that_breaks_off_is_not_whole(sound: Sound, data: st.DataObject) -> None:
    """A tail, something owed, or an open batch shows that more was to come."""
    stream = b"".join(sound.tokens)
    at = data.draw(st.integers(0, len(stream) - 1))
    assert sound.read(stream[:at]) != sound.meaning()
