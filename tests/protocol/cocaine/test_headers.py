"""Headers of frames."""

from __future__ import annotations

import pytest

from etlstage.errors import RemoteProtocolError
from etlstage.protocol.cocaine.headers import HeaderTable

ZEROS = bytes(8)


def test_frame_of_a_runtime_refers_to_what_it_has_stored() -> None:
    """As a Python worker 0.12.14.5 reads it, too."""
    table = HeaderTable()

    assert table.read((80, (True, b"PING", b"A"))) == (
        (b"trace_id", ZEROS),
        (b"PING", b"A"),
    )
    assert table.read(((False, 83, b"B"),)) == ((b"PING", b"B"),)
    assert table.read((83,)) == ((b"PING", b"A"),)
    assert table.read(()) == ()


def test_entries_are_those_of_hpack() -> None:
    """RFC 7541, appendix A, and three for tracing."""
    entries = HeaderTable().read((1, 2, 16, 32, 58, 61, 79, 81, 82))

    assert [name for name, _ in entries] == [
        *(b":authority", b":method", b"accept-encoding", b"cookie", b"user-agent"),
        *(b"www-authenticate", b"", b"span_id", b"parent_id"),
    ]


def test_what_is_stored_last_comes_first() -> None:
    """Those before move up."""
    table = HeaderTable()
    table.read(((True, b"a", b"1"), (True, b"b", b"2")))

    assert table.read((83, 84)) == ((b"b", b"2"), (b"a", b"1"))


def test_table_forgets_the_oldest() -> None:
    """An entry costs 32 bytes beside its own; there are 4096."""
    table = HeaderTable()
    table.read(tuple((True, b"%04d" % n, bytes(28)) for n in range(65)))

    assert table.read((83, 83 + 63))[1][0] == b"0001"
    with pytest.raises(RemoteProtocolError, match="there is no header 147"):
        table.read((83 + 64,))


def test_entry_that_is_too_large_empties_the_table() -> None:
    """It is understood all the same."""
    table = HeaderTable()

    assert table.read(((True, b"a", b"1"), (True, b"b", bytes(5000))))[1][0] == b"b"
    with pytest.raises(RemoteProtocolError, match="there is no header 83"):
        table.read((83,))


@pytest.mark.parametrize(
    "headers",
    [
        b"x",
        None,
        (0,),
        (-1,),
        (True,),
        (b"x",),
        ((True, b"a"),),
        ((1, b"a", b"b"),),
        ((True, None, b"b"),),
        ((True, b"a", None),),
        ((True, 83, b"b"),),
    ],
)
def test_what_is_no_header_is_a_fault(headers: object) -> None:
    """Of the peer."""
    with pytest.raises(RemoteProtocolError, match="header"):
        HeaderTable().read(headers)
