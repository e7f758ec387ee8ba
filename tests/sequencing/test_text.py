"""JSON and CSV framings, compared byte by byte."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.sequencing.framing import (
    ByteWriter,
    FrameBuffer,
    FrameError,
    NotFrameable,
    UnexpectedEnd,
)
from etlstage.sequencing.message import CsvRecord, JsonMessage, Opaque
from etlstage.sequencing.text import CsvFraming, JsonFraming, encode_csv, encode_json
from tests.sequencing.vectors import VECTORS

NO_UUID = "00000000-0000-1000-8000-000000000000"
HTML = "<a>&'\u2028\u00e9\u2603\U0001f600\t\"\\/"


class Whatever:
    """A message that holds any JSON value."""

    value: Any

    def to_json(self) -> object:
        """Return the value."""
        return self.value

    def from_json(self, value: object) -> None:
        """Replace the value."""
        self.value = value


def fed(data: bytes, size: int = 0, *, max_frame: int = 1 << 20) -> FrameBuffer:
    """Return a buffer that was fed a whole journal."""
    buffer = FrameBuffer(max_frame=max_frame)
    buffer.feed(data)
    buffer.feed_end()
    return buffer


@pytest.mark.parametrize(
    ("row", "value"),
    list(
        zip(
            VECTORS["jsonl_marshal"],
            [
                {"b": 1, "a": "x"},
                {"s": HTML},
                [1, 2.5, 1e21, 1e-7, 1e20, None, True],
                "plain",
                {"bad": b"a\xffz".decode(errors="surrogateescape")},
                {},
            ],
            strict=True,
        )
    ),
)
def test_json_is_that_of_the_real_package(row: dict[str, str], value: object) -> None:
    """Escapes, the order of keys, floats, and invalid UTF-8 are the same."""
    written, message = BytesIO(), Whatever()
    message.value = value
    JsonFraming().marshal(message, written)
    assert written.getvalue() == row["bytes"].encode()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "-0"),
        (1.0, "1"),
        (-1.5, "-1.5"),
        (100.0, "100"),
        (123.456, "123.456"),
        (0.001, "0.001"),
        (0.000001, "0.000001"),
        (9.99e-7, "9.99e-7"),
        (1e-7, "1e-7"),
        (-1.5e-300, "-1.5e-300"),
        (1e16, "10000000000000000"),
        (1.5e16, "15000000000000000"),
        (123456789012345680000.0, "123456789012345680000"),
        (1e21, "1e+21"),
        (1.5e300, "1.5e+300"),
        (0.1, "0.1"),
        (5e-324, "5e-324"),
        (10.25, "10.25"),
    ],
)
def test_floats_have_the_fewest_digits(value: float, text: str) -> None:
    """They are plain from 1e-6 to below 1e21, and have an exponent otherwise."""
    assert encode_json(value) == text.encode()
    assert (
        encode_json({"b": [value], "a": "1.5"})
        == f'{{"a":"1.5","b":[{text}]}}'.encode()
    )


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_come_back(value: float) -> None:
    """Every finite float is read back as the same value."""
    assert float(encode_json(value)) == value


JSONABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSONABLE)
def test_json_comes_back(value: object) -> None:
    """Both encoders, with and without floats, write the same JSON for a value."""
    data = encode_json(value)
    assert json.loads(data) == value
    assert encode_json([1.5, value]) == b"[1.5," + data + b"]"
    assert not {b"<", b">", b"&", b"\n"} & {bytes([byte]) for byte in data}


def test_escapes_of_control_characters() -> None:
    """An escaped backslash before a letter is not taken for an escape."""
    assert encode_json("\b\f\\b\n\x01\x7f") == rb'"\u0008\u000c\\b\n\u0001' + b'\x7f"'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [-float("inf")]])
def test_json_has_no_such_number(value: object) -> None:
    """The real package refuses it, too."""
    with pytest.raises(ValueError, match=r"JSON has no (nan|inf|-inf)"):
        encode_json(value)


def test_keys_are_text() -> None:
    """A key of another type is refused; ``json`` itself would make it text."""
    with pytest.raises(TypeError, match="expected keys of type str, got int"):
        encode_json({1: 1.5})


def test_keys_may_stand_as_they_were_set() -> None:
    """Keys keep the order of a struct's fields with ``sort_keys=False``."""
    assert encode_json({"b": 1, "a": 2}, sort_keys=False) == b'{"b":1,"a":2}'
    assert encode_json({"b": 1.5, "a": 2}, sort_keys=False) == b'{"b":1.5,"a":2}'


def read(framing: Any, message: Any, data: bytes, found: Any) -> list[object]:  # noqa: ANN401
    """Return what ``found`` returns for each message, the errors, and a final EOF."""
    buffer = fed(data)
    unmarshal = framing.unmarshaller(buffer)
    results: list[object] = []
    while True:
        try:
            assert unmarshal(message)
        except EOFError:
            return [*results, EOFError]
        except FrameError as error:
            results.append(error)
        else:
            results.append(found(message))


def check(results: list[object], expected: list[Any]) -> None:
    """Compare with the real package; of most errors only that there is one."""
    if expected[-1] == "ERR unexpected EOF":
        assert isinstance(results[-2], UnexpectedEnd)
        expected = [*expected, "ERR EOF"]
    assert len(results) == len(expected)
    for result, one in zip(results, expected, strict=True):
        if one == "ERR EOF":
            assert result is EOFError
        elif isinstance(one, str):
            assert isinstance(result, FrameError)
            if "UUID" in one:
                assert result.reason == one.removeprefix("ERR ")
        else:
            assert result == one


@pytest.mark.parametrize(
    "row", VECTORS["jsonl_unmarshal"], ids=lambda row: row["bytes"]
)
def test_json_is_read_as_the_real_package_does(row: dict[str, Any]) -> None:
    """An error concerns only its line."""
    results = read(JsonFraming(), Whatever(), row["bytes"].encode(), lambda m: m.value)
    check(results, row["results"])


@pytest.mark.parametrize(
    "line", [b"NaN", b"[Infinity]", b"[" * 100_000, b'"\xff"x', b"1" * 5000]
)
def test_lines_that_are_no_json(line: bytes) -> None:
    """They include lines that Python's parser would accept, or fail on otherwise."""
    results = read(JsonFraming(), Whatever(), line + b"\n1\n", lambda m: m.value)
    assert isinstance(results[0], FrameError)
    assert results[1:] == [1, EOFError]


def test_bytes_that_are_no_text() -> None:
    """Invalid UTF-8 is replaced, as in Go."""
    results = read(JsonFraming(), Whatever(), b'"a\xffz"\n', lambda m: m.value)
    assert results == ["a\ufffdz", EOFError]


def test_json_waits_for_its_line() -> None:
    """Nothing is read before the line is complete."""
    buffer, message = FrameBuffer(), Whatever()
    unmarshal = JsonFraming().unmarshaller(buffer)
    buffer.feed(b"[1")
    assert not unmarshal(message)
    buffer.feed(b"]\n")
    assert unmarshal(message)
    assert message.value == [1]


def test_message_may_write_its_own_line() -> None:
    """A message with ``marshal_json_to`` writes its own line."""

    class Own(Whatever):
        def marshal_json_to(self, writer: ByteWriter) -> None:
            writer.write(b"{ }\n")

    written = BytesIO()
    JsonFraming().marshal(Own(), written)
    assert written.getvalue() == b"{ }\n"


@pytest.mark.parametrize(
    ("framing", "protocol"),
    [(JsonFraming(), "JsonFrameable"), (CsvFraming(), "CsvFrameable")],
)
def test_message_that_lacks_what_text_asks(framing: Any, protocol: str) -> None:  # noqa: ANN401
    """The error names the message's type and the framing."""
    expected = (
        f"^Opaque can't be framed as {framing.content_type}: it is not a {protocol}"
    )
    with pytest.raises(NotFrameable, match=expected):
        framing.marshal(Opaque(), BytesIO())
    with pytest.raises(NotFrameable, match=expected):
        framing.unmarshaller(fed(b"a\n"))(Opaque())


def test_json_message_needs_an_object() -> None:
    """The line must be an object, and its UUID, if any, valid."""
    results = read(
        JsonFraming(),
        JsonMessage(),
        b'[1]\n{"_meta":{"uuid":"x"}}\n{"a":1}\n',
        lambda m: m.value,
    )
    assert [getattr(one, "reason", one) for one in results] == [
        "expected an object, got list",
        "invalid UUID length: 1",
        {"a": 1},
        EOFError,
    ]


@pytest.mark.parametrize("row", VECTORS["csv_marshal"], ids=lambda row: row["bytes"])
def test_csv_is_that_of_the_real_package(row: dict[str, Any]) -> None:
    """The same fields are quoted."""
    written = BytesIO()
    CsvFraming().marshal(CsvRecord(row["record"]), written)
    assert written.getvalue() == row["bytes"].encode()


@pytest.mark.parametrize("row", VECTORS["csv_unmarshal"], ids=lambda row: row["bytes"])
def test_csv_is_read_as_the_real_package_does(row: dict[str, Any]) -> None:
    """An error concerns only its record."""
    results = read(CsvFraming(), CsvRecord(), row["bytes"].encode(), lambda m: m.fields)
    check(results, row["results"])


class Fields:
    """A message that holds any fields."""

    fields: list[str]

    def marshal_csv(self) -> list[str]:
        """Return the fields."""
        return self.fields

    def unmarshal_csv(self, fields: list[str]) -> None:
        """Replace the fields."""
        self.fields = fields


@pytest.mark.parametrize(
    ("data", "results"),
    [
        (b'a,"b\nc",d\n1,2,3\n', [["a", "b\nc", "d"], ["1", "2", "3"]]),
        (b'"a\n\n"\n', [["a\n\n"]]),
        (b'"a""b"\n', [['a"b']]),
        (b'"a","b"', [["a", "b"]]),
        (b'"",\n', [["", ""]]),
        (b"a\r", [["a"]]),
        (b"a\rb\n", [["a\rb"]]),
        (b"\r\na\n", [["a"]]),
        (b'x,a"b\ny\n', ['bare " in non-quoted field 2', ["y"]]),
        (b'x,"a"b\ny\n', ['text after the closing " of field 2', ["y"]]),
        (b'x,"a\nb\n', ['no closing " of field 2']),
        (b'"a\nb"c\ny\n', ['text after the closing " of field 1', ["y"]]),
        (b"a,b\nc\nd,e\n",
         [["a", "b"], "wrong number of fields: 1, expected 2 as in the first record",
          ["d", "e"]]),
        (b"a,b\nc,d,e\n",
         [["a", "b"], "wrong number of fields: 3, expected 2 as in the first record"]),
        (b"\xff,a\n", [["\udcff", "a"]]),
    ],
)  # fmt: skip
def test_records(data: bytes, results: list[object]) -> None:
    """Valid records are read; an error tells what is wrong with another."""
    found = read(CsvFraming(), Fields(), data, lambda m: m.fields)
    assert [getattr(one, "reason", one) for one in found] == [*results, EOFError]


TEXT = st.text(st.characters(exclude_characters="\r", exclude_categories=["Cs"]))


@given(
    st.integers(2, 4).flatmap(
        lambda n: st.lists(st.lists(TEXT, min_size=n, max_size=n), max_size=4)
    ),
    st.lists(st.integers(1, 20)),
)
def test_records_come_back(records: list[list[str]], sizes: list[int]) -> None:
    """They are read correctly however the bytes are split."""
    data = b"".join(map(encode_csv, records))
    buffer, message, found = FrameBuffer(), Fields(), list[list[str]]()
    unmarshal = CsvFraming().unmarshaller(buffer)
    pieces = iter([*sizes, *[9] * len(data)])
    while True:
        try:
            if unmarshal(message):
                found.append(message.fields)
            elif data:
                size = next(pieces)
                buffer.feed(data[:size])
                data = data[size:]
            else:
                buffer.feed_end()
        except EOFError:
            break
    assert found == records


def test_record_is_awaited_inside_a_quoted_field() -> None:
    """A line feed inside a quoted field doesn't end the record."""
    buffer, message = FrameBuffer(), Fields()
    unmarshal = CsvFraming().unmarshaller(buffer)
    buffer.feed(b'x,"a\n')
    assert not unmarshal(message)
    buffer.feed(b'b"\n')
    assert unmarshal(message)
    assert message.fields == ["x", "a\nb"]


def test_record_beyond_the_limit_is_dropped() -> None:
    """Only that line is dropped, and the next record is read."""
    buffer, message = FrameBuffer(max_frame=9), Fields()
    unmarshal = CsvFraming().unmarshaller(buffer)
    buffer.feed(b"x,y\n" + b"a" * 10)
    assert unmarshal(message)
    with pytest.raises(FrameError, match="more than 9 bytes long"):
        unmarshal(message)
    buffer.feed(b"a" * 20)
    assert not unmarshal(message)
    buffer.feed(b"a\nb,c\n")
    assert unmarshal(message)
    assert message.fields == ["b", "c"]
