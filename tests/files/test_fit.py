from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.files.fit import Fitting, Rows
from tests.contract import DDL, FITS, NOT_NULL, UNFIT


def rows_of(fitting: Fitting, *messages: bytes) -> Rows:
    """Return what becomes of messages."""
    return fitting.rows(pa.chunked_array([pa.array(messages, pa.binary())]))


def lenient(ddl: str) -> Fitting:
    """Return what takes a message in which columns are missing."""
    return Fitting(ddl, missing="null")


def test_what_fits_a_dataframe_fits() -> None:
    """The same messages, and for the others the same texts (issue 23)."""
    messages = [text.encode() for text in (*FITS, *UNFIT)]
    found = rows_of(lenient(DDL), *messages, b"\xff", b'{"title":"\xff"}')
    assert [place for place, _, _ in found.unfit] == list(
        range(len(FITS), len(messages) + 2)
    )
    for (_, _, why), wanted in zip(found.unfit, UNFIT.values(), strict=False):
        assert why.startswith(wanted)
    assert len(found.table) == len(FITS)


@pytest.mark.parametrize("text", [*FITS, *UNFIT])
def test_what_is_read_at_once_is_judged_alike(text: str) -> None:
    """Beside messages that need no closer look (issue 23)."""
    ddl = "id long, t timestamp, f double, i int, bt byte, title string, l array<int>"
    fitting, message = lenient(ddl), text.encode()
    sure = b'{"id":1,"title":"x"}'
    at_once = rows_of(fitting, sure, message, sure)
    one_by_one = fitting._read_each(pa.array([sure, message, sure], pa.binary()))
    assert at_once.unfit == one_by_one.unfit
    assert at_once.table.to_pylist() == one_by_one.table.to_pylist()


@pytest.mark.parametrize(
    "text",
    [
        *('{"d":1e999999999}', '{"d":"1e999999999"}', '{"d":-1e-999999999}'),
        *('{"d":1e99999999999999999999}', '{"d":"1e-99999999999999999999"}'),
    ],
)
def test_number_that_no_decimal_has(text: str) -> None:
    """It is one message that does not fit, and the run goes on (issue 23)."""
    found = rows_of(Fitting("d decimal(38,18)"), b'{"d":1}', text.encode())
    assert [place for place, _, _ in found.unfit] == [1]
    assert found.table.to_pylist() == [{"d": Decimal("1.000000000000000000")}]


@pytest.mark.parametrize(
    ("ddl", "value"),
    [
        ("a date", '"0000-01-01"'),
        ("a timestamp", '"0000-06-01T00:00:00Z"'),
        ("a timestamp_ntz", '"0000-01-01T00:00:00"'),
        ("a float", "3.4028235677973366e38"),
    ],
)
def test_value_that_only_arrow_takes(ddl: str, value: str) -> None:
    """It does not fit, whatever else comes with it (issue 23)."""
    fitting, message = Fitting(ddl), f'{{"a":{value}}}'.encode()
    for beside in ([], [b'{"a":[]}']):
        found = rows_of(fitting, message, *beside)
        assert [place for place, _, _ in found.unfit] == [*range(1 + len(beside))]


def test_field_without_a_column_is_any_number() -> None:
    """Beside a decimal, for which numbers are read as they are written (issue 23)."""
    text = b'{"d":0.1234567890123456789,"x":1e99999999999999999999,"f":1.5}'
    found = rows_of(Fitting("d decimal(20,19), f double"), text)
    assert found.table.to_pylist() == [
        {"d": Decimal("0.1234567890123456789"), "f": 1.5}
    ]


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ("NaN", False),
        ("-Infinity", False),
        ("[Infinity]", False),
        ("Inf", False),
        ('{"y":[-Inf]}', False),
        ('"NaN is no number, and Infinity neither"', True),
        ("9" * 4300, True),
        ("9" * 4301, False),
        (f"0.{'9' * 5000}", True),
        ("[" * 200_000 + "]" * 200_000, False),
        ('{"a":' * 2000 + "1" + "}" * 2000, False),
        (f"[{', '.join(['{}'] * 2000)}]", True),
    ],
    ids=lambda value: str(value)[:9],
)
def test_field_without_a_column_is_json(value: str, *, fits: bool) -> None:
    """Whether it is depends on no other message of the epoch (issue 23)."""
    fitting = Fitting("id int")
    message = f'{{"id":1,"x":{value}}}'.encode()
    for beside in ([], [b'{"id":2}'], [b'{"id":"x"}']):
        found = rows_of(fitting, message, *beside)
        assert (0 not in [place for place, _, _ in found.unfit]) == fits
        one_by_one = fitting._read_each(pa.array([message, *beside], pa.binary()))
        assert found == one_by_one


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("16777217.0000000001", 16777218.0),
        ("16777216.9999999999", 16777216.0),
        ("-16777217.0000000001", -16777218.0),
        ("16777218.9999999999", 16777218.0),
        ("16777217.0", 16777216.0),
        ("9007199791611904", 9007199254740992.0),
        ("9007199791611905", 9007200328482816.0),
        ("0.1", 0.10000000149011612),
        ("1e-50", 0.0),
        ("0e-99999999999999999999", 0.0),
    ],
)
def test_float_is_rounded_once(value: str, wanted: float) -> None:
    """A number is the nearest of 32 bits, beside any other message (issue 23)."""
    fitting = Fitting("f float, a array<float>")
    message = f'{{"f":{value},"a":[{value}]}}'.encode()
    for beside in ([], [b"[]"]):
        found = rows_of(fitting, message, *beside)
        assert found.table.to_pylist() == [{"f": wanted, "a": [wanted]}]


def test_key_of_a_map_that_is_no_text() -> None:
    """A half of a surrogate pair is none, as in a value (issue 23)."""
    message = b'{"m":{"\\ud800":1}}'
    ((_, _, why),) = rows_of(Fitting("m map<string,int>"), message).unfit
    assert why == "a value in it does not fit its type"


@pytest.mark.parametrize(
    ("messages"),
    [
        (b'{"id":1}\n{"id":2}', b""),
        (b'{"id":1} {"id":2}', b" "),
        (b'{"id":', b"1}", b'{"id":2}'),
        (b'{"id":{"a":1}', b'{"id":2}}'),
        (b'{"id":"}', b'{"id":2}'),
        (b'{"id":1}{"id":2}', b"{}"),
    ],
)
def test_message_that_is_no_object_or_two(messages: tuple[bytes, ...]) -> None:
    """However many objects there are in all, each has to have one (issue 23)."""
    fitting = lenient("id long")
    found = rows_of(fitting, *messages)
    assert found == fitting._read_each(pa.array(messages, pa.binary()))
    assert found.unfit


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"s":{"a":1}}', "field 'id' is NOT NULL and has no value"),
        ('{"id":1,"s":{}}', "a value in it does not fit its type"),
        ('{"id":1,"l":[{"x":1},{}]}', "a value in it does not fit its type"),
        ('{"id":1,"m":{"k":{}}}', "a value in it does not fit its type"),
        ('{"id":1,"m":null,"s":null}', ""),
    ],
)
def test_not_null_is_kept(text: str, why: str) -> None:
    """At every depth, and not asked of what is not there."""
    found = rows_of(lenient(NOT_NULL), text.encode())
    assert [said for _, _, said in found.unfit] == ([why] if why else [])


def test_missing_and_extra_fields() -> None:
    """What is missing may be misspelt; what is too much may be refused."""
    messages = [b'{"id":1,"month":"x"}', b'{"id":1,"mnth":null}', b'{"mnth":"x"}']
    found = rows_of(Fitting("id long, mnth string, note string null"), *messages)
    assert [place for place, _, _ in found.unfit] == [0, 2]
    assert "field 'mnth' is missing: it may be misspelt" in found.unfit[0][2]
    found = rows_of(Fitting("id long", extra="dead_letter"), *messages[:2], b'{"id":2}')
    assert [why for _, _, why in found.unfit] == [
        "it has 1 field that the schema does not have"
    ] * 2


def test_values_are_what_was_written() -> None:
    """With the types that were asked for."""
    ddl = (
        "d decimal(5,2), t timestamp, n timestamp_ntz, dt date, b binary, f float,"
        " m map<string,int>, s struct<a: int>"
    )
    message = (
        b'{"d":1.20,"t":"2020-01-01T01:00:00+01:00","n":"2020-01-01T00:00:00",'
        b'"dt":"2020-02-29","b":"YQ==","f":0.1,"m":{"a":1,"b":null},"s":{}}'
    )
    (row,) = rows_of(lenient(ddl), message).table.to_pylist()
    assert row["f"] == pytest.approx(0.1)
    del row["f"]
    assert row == {
        "d": Decimal("1.20"),
        "t": datetime(2020, 1, 1, tzinfo=UTC),
        "n": datetime(2020, 1, 1),
        "dt": date(2020, 2, 29),
        "b": b"a",
        "m": [("a", 1), ("b", None)],
        "s": {"a": None},
    }


def test_messages_without_a_schema() -> None:
    """They are text, or with one column of binary whatever they are."""
    found = rows_of(Fitting(None), b"a", b"\xff")
    assert found.table.to_pydict() == {"value": ["a"]}
    assert found.unfit == [(1, b"\xff", "it is not UTF-8 at offset 0")]
    assert rows_of(Fitting("v binary"), b"\xff").table.to_pydict() == {"v": [b"\xff"]}


@pytest.mark.parametrize(
    ("ddl", "text"),
    [
        ("a variant", "type variant is supported with Spark only"),
        ("a map<int,int>", "type map<int,int> is supported with Spark only"),
        ("a array<interval year to month>", "type interval is supported"),
        ("a decimal(40,2)", "expected a precision of 1 to 38"),
    ],
)
def test_type_that_files_have_not(ddl: str, text: str) -> None:
    """It is named."""
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        Fitting(ddl)


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats()
    | st.sampled_from(
        ["", "x", "2020-01-01", "2020-01-01T00:00:00Z", "1.5", "é\n\0", "0000-01-01"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abcx"), inner, max_size=3)
    ),
    max_leaves=6,
)
SCHEMAS = [
    "a long, b string, c double",
    "a byte not null, b timestamp, c array<int>",
    "a date, b boolean null, c struct<a: int, b: string>",
    "a decimal(5,1), b float, c map<string, long>",
]


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcx"), JSON).map(
            lambda row: json.dumps(row, ensure_ascii=False).encode()
        )
        | st.binary(max_size=6),
        max_size=6,
    ),
    st.sampled_from(SCHEMAS),
    st.sampled_from(["dead_letter", "null"]),
    st.sampled_from(["dead_letter", "ignore"]),
)
def test_the_quick_way_is_never_more_lenient(
    messages: list[bytes], ddl: str, missing: str, extra: str
) -> None:
    """Nor otherwise different, whatever the messages are (issue 23)."""
    fitting = Fitting(ddl, missing=missing, extra=extra)
    column = pa.array(messages, pa.binary())
    found, wanted = rows_of(fitting, *messages), fitting._read_each(column)
    assert found.unfit == wanted.unfit
    assert repr(found.table.to_pylist()) == repr(wanted.table.to_pylist())
