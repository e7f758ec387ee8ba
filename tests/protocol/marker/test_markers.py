from __future__ import annotations

import codecs
from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.errors import ConfigError
from etlstage.messages import Run
from etlstage.protocol.marker import (
    MARKER_NAMES,
    Markers,
    Mode,
    escape,
    unescape,
)
from etlstage.testing.strategies import sendable
from tests.protocol.pair import ConnectionPair, S, W
from tests.protocol.strategies import moderate
from tests.protocol.words import Answers, BatchEnd, Messages, More


def problem(**markers: bytes) -> str:
    """Return why a combination is refused."""
    with pytest.raises(ConfigError) as caught:
        Markers(**markers)
    assert len(caught.value.problems) == 1
    return str(caught.value)


def test_defaults_are_those_of_the_real_stages() -> None:
    """The specification names none; LF and NUL are pyDKB's, ETB its branch's."""
    assert Markers() == (b"\n", b"\0", b"\x17", b"\x05", b"\x15")
    assert Markers()._asdict() == {
        "eom": b"\n",
        "eop": b"\0",
        "eob": b"\x17",
        "bnc": b"\x05",
        "err": b"\x15",
    }


def test_names_are_in_the_order_of_the_fields() -> None:
    """Names and markers are zipped in several places."""
    assert Markers._fields == MARKER_NAMES == ("eom", "eop", "eob", "bnc", "err")


def test_environment_carries_escaped_markers() -> None:
    """NUL can't be in an environment variable; its escape can."""
    assert Markers().environment() == {
        "ETLSTAGE_EOM": r"\012",
        "ETLSTAGE_EOP": r"\000",
        "ETLSTAGE_EOB": r"\027",
        "ETLSTAGE_BNC": r"\005",
        "ETLSTAGE_ERR": r"\025",
    }


def test_worker_that_may_not_refuse_is_given_no_err() -> None:
    """Nor is ERR in its command line."""
    markers = Markers(err=None)
    assert "ETLSTAGE_ERR" not in markers.environment()
    assert markers.to_text()["err"] is None
    assert Markers.from_text(**markers.to_text()) == markers


def test_words_are_written_as_they_are() -> None:
    """Printable markers need no escapes."""
    names = ["EOM", "EOP", "EOB", "BNC", "ERR"]
    markers = Markers(*(name.encode() for name in names))
    assert list(markers.environment().values()) == names


def test_markers_are_read_from_escaped_texts() -> None:
    """As in YAML: a marker that is not named has its default."""
    markers = Markers.from_text(eom=r"\x1e", eop="END")
    assert markers == (b"\x1e", b"END", b"\x17", b"\x05", b"\x15")
    assert Markers.from_text() == Markers()


def test_texts_that_stand_for_a_refused_combination_are_refused() -> None:
    """Escapes are compared by their values: both are the line feed."""
    with pytest.raises(ConfigError, match=r"markers eom and eob are both '\\012'"):
        Markers.from_text(eom=r"\n", eob=r"\x0a")


def test_environment_is_read_back() -> None:
    """The worker gets the supervisor's markers."""
    markers = Markers(b"\xff\0", b"\\", b"e o b", b"\x7f~")
    texts = {
        name.removeprefix("ETLSTAGE_").lower(): text
        for name, text in markers.environment().items()
    }
    assert Markers.from_text(**texts) == markers


@pytest.mark.parametrize("name", MARKER_NAMES)
def test_empty_marker_is_refused(name: str) -> None:
    """An empty string can't be found; pyDKB's empty EOP leaves a supervisor waiting."""
    text = problem(**{name: b""})
    assert text == f"marker {name} is empty, expected at least one byte"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("eom", "eob"),
        ("eom", "bnc"),
        ("eop", "eob"),
        ("eop", "bnc"),
        ("eob", "bnc"),
        ("eom", "err"),
        ("eop", "err"),
        ("eob", "err"),
        ("bnc", "err"),
    ],
)
def test_equal_markers_are_refused(first: str, second: str) -> None:
    """Each marker means one thing."""
    text = problem(**{first: b"\x1e", second: b"\x1e"})
    equal = rf"markers {first} and {second} are both '\036'"
    assert text == f"{equal}, expected them to differ"


def test_eop_may_be_eom() -> None:
    """The Java processor's setting: exactly one output for each input."""
    assert Markers(eop=b"\n") == (b"\n", b"\n", b"\x17", b"\x05", b"\x15")


def test_eop_that_is_eom_is_no_excuse_for_bnc() -> None:
    """One pair may be equal, not three markers."""
    text = problem(eop=b"\n", bnc=b"\n")
    assert text == r"markers eom and bnc are both '\012', expected them to differ"


ONE_WAY = [
    ("eom", "eop"),
    ("eop", "eom"),
    ("eom", "eob"),
    ("eob", "eom"),
    ("eom", "bnc"),
    ("bnc", "eom"),
    ("eop", "bnc"),
    ("bnc", "eop"),
    ("eom", "err"),
    ("err", "eop"),
    ("bnc", "err"),
]
"""Pairs of markers that can occur in the same stream."""


@pytest.mark.parametrize(("inner", "outer"), ONE_WAY)
@pytest.mark.parametrize("whole", [b"x12", b"1x2", b"12x"])
def test_marker_in_a_marker_is_refused(inner: str, outer: str, whole: bytes) -> None:
    """A reader can't tell the short one from a part of the long one."""
    text = problem(**{inner: b"x", outer: whole})
    assert text == (
        f"marker {inner} 'x' is a part of {outer} '{whole.decode()}':"
        " a boundary could be read in two ways"
    )


@pytest.mark.parametrize(("first", "second"), ONE_WAY)
def test_marker_that_ends_as_another_begins_is_refused(first: str, second: str) -> None:
    """``12345`` contains ``123`` or ``345``, but not both."""
    text = problem(**{first: b"123", second: b"345"})
    assert text == (
        f"marker {first} '123' ends as {second} '345' begins:"
        " a boundary could be read in two ways"
    )


def test_overlap_of_all_but_one_byte_is_refused() -> None:
    """However long the common part is."""
    text = problem(eom=b"1234", eop=b"2345")
    assert text.startswith("marker eom '1234' ends as eop '2345' begins")


@pytest.mark.parametrize("first", ["eop", "bnc", "err"])
def test_markers_of_two_directions_may_overlap(first: str) -> None:
    """EOB goes to the worker; EOP, BNC and ERR come from it: they never meet."""
    assert Markers(**{first: b"123", "eob": b"345"}).eob == b"345"
    assert Markers(**{first: b"12", "eob": b"123"}).eob == b"123"


@pytest.mark.parametrize("marker", [b"\n\n", b"aba", b"\xff\xff\xff", b"EOMEOM"])
def test_marker_may_overlap_itself(marker: bytes) -> None:
    """Searched from left to right, it can be read in one way only."""
    assert Markers(eom=marker).eom == marker


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"", ""),
        (b"EOM", "EOM"),
        (b" ~", " ~"),
        (b"\x1f\x7f", r"\037\177"),
        (b"\\", r"\134"),
        (b"\0" + b"1", r"\0001"),
        (b"\xc3\xa9\xff", r"\303\251\377"),
        (b"'\"", "'\""),
    ],
)
def test_escaped_text_is_printable_ascii(value: bytes, text: str) -> None:
    """Other bytes are octal, always of three digits, as a digit may follow."""
    assert escape(value) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", b""),
        ("EOM", b"EOM"),
        (r"\n\r\t\a\b\f\v", b"\n\r\t\a\b\f\v"),
        (r"\\n", b"\\n"),
        (r"\0", b"\0"),
        (r"\08", b"\0" + b"8"),
        (r"\12x", b"\nx"),
        (r"\0123", b"\n3"),
        (r"\377", b"\xff"),
        (r"\x1e", b"\x1e"),
        (r"\xFFf", b"\xfff"),
        (r"\u0006", b"\x06"),
        (r"\u00e9", b"\xc3\xa9"),
        (r"\u20aCx", b"\xe2\x82\xacx"),
        ("é", b"\xc3\xa9"),
        ("\udcff", b"\xff"),
    ],
)
def test_escapes_are_read(text: str, value: bytes) -> None:
    """Escapes that users of pyDKB write today keep working."""
    assert unescape(text) == value


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\\", "\\"),
        ("ab\\", "\\"),
        (r"\q", r"\q"),
        (r"\qf", r"\qf"),
        (r"\8", r"\8"),
        (r"x\400y", r"\400"),
        (r"\x", r"\x"),
        (r"\x1", r"\x1"),
        (r"\xg0", r"\xg0"),
        (r"\x+f", r"\x+f"),
        (r"\x f", r"\x f"),
        (r"\u12", r"\u12"),
        (r"\u1_00", r"\u1_"),
        (r"\ud800", r"\ud8"),
        ("\ud800", "\ud800"),
        ("\\x\u0661\u0661", "\\x\u0661\u0661"),
    ],
)
def test_escape_that_is_none_is_refused(text: str, shown: str) -> None:
    """A typing error must not become a marker that never occurs."""
    with pytest.raises(ConfigError) as caught:
        unescape(text)
    assert str(caught.value) == (
        f"can't read the escape {shown!r} of {text!r},"
        r" expected \n, \r, \t, \\, \0 to \377, \xHH or \uHHHH"
    )


@given(st.binary())
@moderate
def test_escaping_loses_nothing(value: bytes) -> None:
    """Any bytes survive the way through an environment variable."""
    text = escape(value)
    assert text.isascii()
    assert text.isprintable()
    assert unescape(text) == value


@given(st.binary())
@moderate
def test_pydkb_reads_escaped_markers(value: bytes) -> None:
    """Its workers decode ``-e`` and ``-E`` with ``unicode_escape``."""
    assert codecs.decode(escape(value), "unicode_escape").encode("latin-1") == value


@given(st.text())
@moderate
def test_any_text_is_read_or_refused(text: str) -> None:
    """Whatever a user writes, the only exception is ``ConfigError``."""
    try:
        value = unescape(text)
    except ConfigError:
        return
    assert unescape(escape(value)) == value


def accepted() -> list[Markers]:
    """Return every accepted combination of short markers."""
    found = []
    for alphabet, longest in (("ab", 3), ("abc", 2)):
        words = [
            "".join(letters).encode()
            for length in range(1, longest + 1)
            for letters in product(alphabet, repeat=length)
        ]
        for four in product(words, repeat=4):
            with suppress(ConfigError):
                found.append(Markers(*four))
    return found


runs = st.lists(
    st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=4).map(b"".join),
    max_size=5,
)


@given(st.deferred(lambda: st.sampled_from(accepted())), runs, runs)
@moderate
def test_accepted_markers_can_be_read_in_one_way(
    markers: Markers, batch: Run, outputs: Run
) -> None:
    """With any accepted markers, anything that may be sent is read as it was meant."""
    batch = [message for message in batch if sendable(message, markers)]
    outputs = [message for message in outputs if sendable(message, markers)]
    groups: list[tuple[bytes, ...]] = [(message,) for message in outputs]
    if markers.eop != markers.eom:
        groups = [(), tuple(outputs), *groups]
    pair = ConnectionPair(Mode.BATCH_SUPERVISOR, markers)
    for _ in groups:
        pair.send(S, *([Messages(batch)] if batch else []), BatchEnd())
    pair.send(W, Answers(groups))
    pair = ConnectionPair(Mode.BATCH_WORKER, markers)
    for group in groups:
        for message in batch:
            pair.send(S, Messages([message]))
            pair.send(W, More())
        pair.send(S, BatchEnd())
        pair.send(W, Answers([group]))


def test_bytes_are_shown_with_the_markers_by_name() -> None:
    """Of two that begin alike, the longer one is shown."""
    markers = Markers(eom=b"\n", eop=b"\n", eob=b"ab", bnc=b"abc")
    assert markers.shown(b"x\n\xffabcab") == r"x<EOM>\377<BNC><EOB>"
    assert Markers().without_err().shown(b"\x15\0") == r"\025<EOP>"


@pytest.mark.parametrize(
    ("markers", "data", "text"),
    [
        (Markers(), b"a\n\0", "wrote 1 reply too many: a<EOM><EOP>"),
        (Markers(), b"\0no\x15", "wrote 2 replies too many: <EOP>no<ERR>"),
        (Markers().without_err(), b"\x15", r"wrote unsolicited output: \025; diag"),
        (Markers(), b"hi\n", "wrote unsolicited output: hi<EOM>; diagnostics"),
    ],
)
def test_what_is_unsolicited_is_reported(
    markers: Markers, data: bytes, text: str
) -> None:
    """Complete replies are counted; anything else is unsolicited output."""
    assert markers.unsolicited(data).startswith(text)
