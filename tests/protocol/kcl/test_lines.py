"""Lines as they are written, byte for byte, and which lines are understood."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.errors import PayloadTooBig
from etlstage.messages import AnnotatedRun
from etlstage.protocol.kcl.checkpoint import SHARD_END, ShardPosition
from etlstage.protocol.kcl.lines import (
    ROWS,
    Ask,
    Lines,
    Row,
    StatusReply,
    Version,
    answer_line,
    ask_line,
    hashed_key,
    initialize_line,
    read_object,
    read_reply,
    records_line,
    requested_line,
    status_line,
)

LEGACY, DOCUMENT, V1, V2 = (ROWS[version] for version in Version)
NUMBER = "sequenceNumber"
MEOW = AnnotatedRun(
    [b"meow"],
    sequence=["456"],
    partition=["cat"],
    arrival=[1476889707000],
    behind=[1234],
)
PLACE = [(456.0, 0)]


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (LEGACY, b'{"action":"initialize","shardId":"s-1"}\n'),
        (DOCUMENT, b'{"action":"initialize","shardId":"s-1"}\n'),
        (
            V1,
            (
                b'{"action":"initialize","shardId":"s-1","sequenceNumber":"5",'
                b'"subSequenceNumber":1}\n'
            ),
        ),
        (
            V2,
            (
                b'{"action":"initialize","shardId":"s-1","sequenceNumber":"5",'
                b'"subSequenceNumber":1}\n'
            ),
        ),
    ],
)
def test_initialize(row: Row, line: bytes) -> None:
    """Since 1.7.2 it includes the position to begin at."""
    assert initialize_line(row, "s-1", ShardPosition("5", 1)) == line


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (
            LEGACY,
            (
                b'{"action":"processRecords","records":[{"data":"bWVvdw==",'
                b'"partitionKey":"cat","sequenceNumber":"456"}]}\n'
            ),
        ),
        (
            V1,
            (
                b'{"action":"processRecords","records":[{"data":"bWVvdw==",'
                b'"partitionKey":"cat","sequenceNumber":"456",'
                b'"approximateArrivalTimestamp":1476889707000,"subSequenceNumber":null,'
                b'"action":"record"}],"millisBehindLatest":1234}\n'
            ),
        ),
        (
            V2,
            (
                b'{"action":"processRecords","records":[{"data":"bWVvdw==",'
                b'"partitionKey":"cat","sequenceNumber":"456",'
                b'"approximateArrivalTimestamp":1476889707000,"subSequenceNumber":0,'
                b'"action":"record"}],"millisBehindLatest":1234}\n'
            ),
        ),
    ],
)
def test_records(row: Row, line: bytes) -> None:
    """With the members in the daemon's order, and without spaces."""
    assert records_line(row, MEOW, PLACE) == line


def test_document_has_the_records_of_2014() -> None:
    """The document was never brought up to date."""
    assert records_line(DOCUMENT, MEOW, PLACE) == records_line(LEGACY, MEOW, PLACE)


def test_empty_lists() -> None:
    """For processors that act by time."""
    begin = b'{"action":"processRecords","records":[]'
    assert records_line(V2, [], []) == begin + b',"millisBehindLatest":null}\n'
    assert records_line(LEGACY, [], []) == begin + b"}\n"


def test_columns_of_null() -> None:
    """Null is sent, as daemons do; with a sub-sequence number in both versions."""
    run = AnnotatedRun(
        [b"", b""], sequence=[7, 7], sub=[None, 3], arrival=[None, 1], partition="ab"
    )
    line = json.loads(records_line(V1, run, []))

    assert [list(record.values()) for record in line["records"]] == [
        ["", "a", "7", None, None, "record"],
        ["", "b", "7", 1, 3, "record"],
    ]


def test_messages_without_columns() -> None:
    """They are numbered; keys are hashes, times are 0, as null kills a client."""
    (record,) = json.loads(records_line(V2, [b"one"], [(9, 0)]))["records"]

    assert record["sequenceNumber"] == "9"
    assert record["partitionKey"] == hashed_key(b"one") == "7a6c86f1"
    assert record["approximateArrivalTimestamp"] == 0


def test_text_is_escaped_to_ascii() -> None:
    """UTF-8 kills a child that runs under an ASCII locale."""
    run = AnnotatedRun([b"\xff" * 200], partition=['k\u00e4"\u2028'])
    line = records_line(V2, run, [(1, 0)])

    assert line.isascii()
    assert line.count(b"\n") == 1
    assert rb'"k\u00e4\"\u2028"' in line


@pytest.mark.parametrize(
    ("row", "requested", "lost", "ended"),
    [
        (
            LEGACY,
            None,
            b'{"action":"shutdown","reason":"ZOMBIE"}\n',
            b'{"action":"shutdown","reason":"TERMINATE"}\n',
        ),
        (
            DOCUMENT,
            b'{"action":"shutdownRequested","checkpoint":"5"}\n',
            b'{"action":"leaseLost"}\n',
            b'{"action":"shardEnded","checkpoint":"SHARD_END"}\n',
        ),
        (
            V1,
            b'{"action":"shutdownRequested"}\n',
            b'{"action":"shutdown","reason":"ZOMBIE"}\n',
            b'{"action":"shutdown","reason":"TERMINATE"}\n',
        ),
        (
            V2,
            b'{"action":"shutdownRequested"}\n',
            b'{"action":"leaseLost"}\n',
            b'{"action":"shardEnded"}\n',
        ),
    ],
)
def test_ends_of_a_life(
    row: Row, requested: bytes | None, lost: bytes, ended: bytes
) -> None:
    """The lines that differ most between versions."""
    assert requested_line(row, ShardPosition("5")) == requested
    assert (row.lost[1], row.ended[1]) == (lost, ended)
    for name, line in (row.lost, row.ended):
        assert json.loads(line)["action"] == name


@pytest.mark.parametrize(
    ("ask", "error", "line"),
    [
        (
            Ask(NUMBER, "456", 0),
            None,
            (
                b'{"action":"checkpoint","sequenceNumber":"456","subSequenceNumber":0,'
                b'"error":null}\n'
            ),
        ),
        (
            Ask(NUMBER, None, 2),
            "ThrottlingException",
            (
                b'{"action":"checkpoint","sequenceNumber":null,"subSequenceNumber":2,'
                b'"error":"ThrottlingException"}\n'
            ),
        ),
        (
            Ask("checkpoint", "456"),
            None,
            b'{"action":"checkpoint","checkpoint":"456","error":null}\n',
        ),
        (
            Ask("checkpoint", None),
            "RuntimeException",
            b'{"action":"checkpoint","checkpoint":null,"error":"RuntimeException"}\n',
        ),
    ],
)
def test_answers_to_checkpoints(ask: Ask, error: str | None, line: bytes) -> None:
    """With the members that the request used, and their values."""
    assert answer_line(ask, error) == line


def test_lines_of_a_worker() -> None:
    """Each begins with a line end, so that text printed before it does no harm."""
    assert status_line("initialize") == (
        b'\n{"action":"status","responseFor":"initialize"}\n'
    )
    assert ask_line(NUMBER, "5", 1) == (
        b'\n{"action":"checkpoint","sequenceNumber":"5","subSequenceNumber":1}\n'
    )
    assert ask_line("checkpoint", None, 1) == (
        b'\n{"action":"checkpoint","checkpoint":null}\n'
    )


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        (b'{"action":"status","responseFor":"x"}', StatusReply("x")),
        (b' { "responseFor" : "x" , "action" : "status" } ', StatusReply("x")),
        (b'{"action":"status","responseFor":"x"} trailing', StatusReply("x")),
        (b'{"action":"status","responseFor":"x"}{"action":"y"}', StatusReply("x")),
        (b'{"action":"status","responseFor":"x","extra":[1]}', StatusReply("x")),
        (b'{"action":"y","action":"status","responseFor":"x"}', StatusReply("x")),
        (b'{"action":"status"}', StatusReply(None)),
        (b'{"action":"status","responseFor":null}', StatusReply(None)),
        (b'{"action":"status","responseFor":5}', StatusReply("5")),
        (b'{"action":"status","responseFor":true}', StatusReply("true")),
        (b'{"action":"status","responseFor":"\xff"}', StatusReply("\ufffd")),
        (b'{"action":"checkpoint"}', Ask("", None)),
        (b'{"action":"checkpoint","sequenceNumber":"5"}', Ask(NUMBER, "5")),
        (b'{"action":"checkpoint","sequenceNumber":5}', Ask(NUMBER, "5")),
        (b'{"action":"checkpoint","sequenceNumber":false}', Ask(NUMBER, "false")),
        (b'{"action":"checkpoint","checkpoint":null}', Ask("checkpoint", None)),
        (
            b'{"action":"checkpoint","checkpoint":"4","sequenceNumber":"5"}',
            Ask(NUMBER, "5"),
        ),
        (
            b'{"action":"checkpoint","sequenceNumber":"5","subSequenceNumber":"7"}',
            Ask(NUMBER, "5", 7),
        ),
        (
            b'{"action":"checkpoint","sequenceNumber":"5","subSequenceNumber":1.9}',
            Ask(NUMBER, "5", 1),
        ),
        (
            b'{"action":"checkpoint","sequenceNumber":"5","subSequenceNumber":-2}',
            Ask(NUMBER, "5", -2),
        ),
        (
            b'{"action":"checkpoint","sequenceNumber":"5","subSequenceNumber":"x"}',
            Ask(NUMBER, "5", legal=False),
        ),
        (
            b'{"action":"checkpoint","sequenceNumber":"5","subSequenceNumber":[]}',
            Ask(NUMBER, "5", legal=False),
        ),
        (
            b'{"action":"checkpoint","sequenceNumber":"5","subSequenceNumber":1e400}',
            Ask(NUMBER, "5", legal=False),
        ),
        (
            b'{"action":"checkpoint","sequenceNumber":"5","subSequenceNumber":1e300}',
            Ask(NUMBER, "5", legal=False),
        ),
        (
            b'{"action":"checkpoint","sequenceNumber":"5","subSequenceNumber":9223372036854775808}',
            Ask(NUMBER, "5", legal=False),
        ),
        (
            b'{"action":"checkpoint","sequenceNumber":"5","subSequenceNumber":9223372036854775807}',
            Ask(NUMBER, "5", 2**63 - 1),
        ),
        (
            b'{"action":"checkpoint","sequenceNumber":{"a":1}}',
            Ask(NUMBER, None, legal=False),
        ),
        (
            b'{"action":"checkpoint","sequenceNumber":%b}' % (b"1" * 5000),
            Ask(NUMBER, "1" * 5000),
        ),
    ],
)
def test_replies_are_taken_leniently(line: bytes, reply: StatusReply | Ask) -> None:
    """As daemons do, and better where daemons skip a line for an extra member."""
    assert read_reply(line) == reply


@pytest.mark.parametrize(
    "line",
    [
        b"null",
        b"",
        b"progress 10%",
        b'debug: {"action":"status","responseFor":"x"}',
        b'{"action":"leaseLost"}',
        b'{"action":"STATUS","responseFor":"x"}',
        b'{"action":null}',
        b'{"action":["status"]}',
        b'{"actio',
        b"{}",
        b"[1]",
        b"{'action':'status'}",
        b'{"action":"status","responseFor":NaN}',
        b'{"a":' * 200_000,
    ],
)
def test_all_else_is_noise(line: bytes) -> None:
    """Including ``null``, which ends a daemon."""
    assert read_reply(line) is None


def test_numbers_are_text() -> None:
    """A sequence number is compared as it was written."""
    assert read_object(b'{"a":0012}') is None
    assert read_object(b'{"a":12}') == {"a": "12"}


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_line_ends(end: bytes) -> None:
    """Any of them; empty lines are skipped."""
    lines = Lines(100)

    assert lines.feed(end + b"one" + end + end + b"two" + end + b"th") == [
        b"one",
        b"two",
    ]
    assert lines.feed(b"") == []
    assert lines.feed(b"ree" + end) == [b"three"]
    assert lines.rest() == []


def test_last_line_needs_no_end() -> None:
    """As for daemons."""
    lines = Lines(100)
    lines.feed(b"one")

    assert lines.rest() == [b"one"]
    assert lines.rest() == []


@given(st.lists(st.sampled_from([b"\n", b"\r", b"ab", b"c"])), st.data())
def test_any_cut_gives_the_same_lines(parts: list[bytes], data: st.DataObject) -> None:
    """And the offset is that of the last, unfinished line."""
    whole = b"".join(parts)
    lines, found, at = Lines(1000), [], 0
    while at < len(whole):
        step = data.draw(st.integers(1, len(whole) - at))
        found += lines.feed(whole[at : at + step])
        at += step
    begun = whole.replace(b"\r", b"\n").rpartition(b"\n")[2]

    assert lines.offset == len(whole) - len(begun)
    assert found + lines.rest() == [line for line in whole.splitlines() if line]


@pytest.mark.parametrize(
    ("chunks", "offset"),
    [([b"ab\n", b"12345", b"678901"], 3), ([b"ab\nabcde\n12345678901\n"], 9)],
)
def test_line_that_is_too_long(chunks: list[bytes], offset: int) -> None:
    """Ended or not: the error names its offset and the setting."""
    lines, text = Lines(10), f"offset {offset} is longer than 10 bytes; see max_line"
    for chunk in chunks[:-1]:
        lines.feed(chunk)
    with pytest.raises(PayloadTooBig, match=text):
        lines.feed(chunks[-1])


def test_longest_line() -> None:
    """The limit is inclusive, and does not count the line end."""
    assert Lines(10).feed(b"1234567890\r\n") == [b"1234567890"]
    assert SHARD_END.encode() in ROWS[Version.DOCUMENT].ended[1]
