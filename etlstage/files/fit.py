"""
Make Arrow rows of the messages that fit a schema, by the rules of Spark's ends.

Arrow parses all messages of an epoch at once where that can't hide a flaw: if every
message begins and ends with a brace and none has a line break, each row is one object.
Messages with a suspicious null or infinity, or with what only Arrow may take for JSON,
are then checked one by one; if Arrow rejects anything, all messages are.
:meth:`Fitting._judged` makes this check, and alone decides which messages fit; the fast
path only must not be more lenient.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal, InvalidOperation
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as pt

from etlstage.columns import array_of, content, one_of, strings_of
from etlstage.pipeline.invalid import (
    LINE_BREAK,
    Fraction,
    TextLines,
    WantedColumn,
    loaded,
    reason,
)
from etlstage.settings.ddl import DeclaredColumn, Type, columns_of

__all__ = ("Fitting", "Read", "Rows", "arrow_type", "has_bits", "is_kept", "reader_of")

_SIMPLE: Final = {
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_OFFSET: Final = r"(Z|[+-](0\d|1[0-7])(:?[0-5]\d(:?[0-5]\d)?)?|[+-]18(:?00(:?00)?)?)"
_TIME: Final = re.compile(
    rf"{_DATE.pattern}([T ]\d\d:\d\d(:\d\d(\.\d{{1,6}})?{_OFFSET}?)?)?", re.ASCII
)
_ZONE: Final = re.compile(rf":\d\d(\.\d+)?{_OFFSET}$", re.ASCII)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NUMBER: Final = re.compile(
    r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII
)
_DIGITS: Final = 38  # most digits of a decimal
_WIDE: Final = Context(prec=_DIGITS + 1)  # one more, for rounding up
_LARGEST: Final = float.fromhex("0x1.fffffep+127")  # of float32
_BLOCK: Final = 1 << 20
_MOST: Final = (1 << 31) - 1  # most bytes that Arrow reads as one block
_WORDS: Final = (b"NaN", b"Inf")  # begin what only Arrow takes for numbers
# Python parses no deeper than its stack is, and no integers longer than its limit, which
# can't be lower than 640 digits.
_DEEP: Final = 500
_STEP: Final = 64  # a longer integer has a digit at ten of these places in a row
_STEPS_OF_DIGITS: Final = re.compile(rb"[0-9]{10}")
_LONG: Final = re.compile(rb"(?<![0-9])[0-9]{641}")

Read = Callable[[Any], Any]


class _Unmade(Exception):
    """A value can't be converted."""


class _Flawed(Exception):
    """A value can be converted, but the result would differ from it."""


class Rows(NamedTuple):
    """The outcome of :meth:`Fitting.rows`."""

    table: pa.Table
    """Rows of the messages that fit."""
    unfit: list[tuple[int, bytes, str]]
    """The other messages: index, message, and why it does not fit."""


def arrow_type(kind: Type) -> pa.DataType:
    """
    Return the Arrow type of a schema's type.

    Raises:
        ValueError: If files can't have the type.

    """
    if kind.name in _SIMPLE:
        return _SIMPLE[kind.name]
    if kind.name == "decimal":
        return pa.decimal128(*kind.sizes)
    inner = [arrow_type(column.type) for column in kind.inner]
    if kind.name == "array":
        return pa.list_(inner[0])
    if kind.name == "map" and kind.inner[0].type.name == "string":
        return pa.map_(*inner)
    if kind.name == "struct" and kind.inner:
        return pa.struct([(c.name, t) for c, t in zip(kind.inner, inner, strict=True)])
    simple = ", ".join(_SIMPLE)
    raise ValueError(
        f"type {kind} is supported with Spark only: expected one of {simple}, decimal,"
        " array, struct, or map<string,...>"
    )


class Fitting:
    """
    Converts messages to rows.

    Args:
        ddl: The columns; None: each message is the string ``value``.
        missing: What happens to a message that lacks a column not declared ``NULL``:
            ``dead_letter``, or ``null``, as if the column were null.
        extra: What happens to a message with a field that is not a column:
            ``dead_letter``, or ``ignore``.
        strict: Whether a ``timestamp`` must have a zone; the reason why a message does
            not fit is then more exact than Spark's.
        line: The column that is written as lines of text, if any.

    Attributes:
        schema: Schema of the rows.
        names: Columns that are read from JSON.

    Raises:
        ValueError: If ``ddl`` is not valid, or has types that files can't have.

    """

    def __init__(
        self,
        ddl: str | None,
        *,
        missing: str = "dead_letter",
        extra: str = "ignore",
        strict: bool = False,
        line: str | None = None,
    ) -> None:
        self._ddl = ddl
        self._strict = strict
        self._columns = columns_of(ddl or "value string")
        types = [arrow_type(column.type) for column in self._columns]
        names = [column.name for column in self._columns]
        self.schema: pa.Schema = pa.schema(zip(names, types, strict=True))
        self._raw = ddl is not None and types == [pa.binary()]
        self.names: list[str] = [] if ddl is None or self._raw else names
        self._lines: TextLines | None = None
        if line is not None:
            self._lines = TextLines(line if self.names else None)
        self._demanded = [
            column.name
            for column in self._columns
            if missing == "dead_letter" and not column.nullable
        ]
        self._closed = extra == "dead_letter"
        scalars = _STRICT if strict else _SCALARS
        self._readers = [reader_of(column.type, scalars) for column in self._columns]
        self._quick = _quick_schema(self._columns)
        # These have a number as it is written.
        self._exact = any(
            kind in str(column.type)
            for column in self._columns
            for kind in ("decimal", "float")
        )

    def rows(self, messages: pa.ChunkedArray) -> Rows:
        """Return the rows of messages, and why the others do not fit."""
        column: pa.BinaryArray = pa.concat_arrays(
            [array_of([], pa.binary()), *messages.chunks]
        )
        if self._raw or self._ddl is None:
            values = column if self._raw else strings_of(column)
            flawed = pc.is_null(values)
            if self._lines is not None:
                flawed = pc.or_(flawed, _broken(values))
            places = _places(flawed)
            unfit = [(n, m, self._why(m, {})) for n, m in _at(column, places)]
            kept = _without(values, places.to_pylist()) if unfit else values
            return Rows(pa.table([kept], self.schema), unfit)
        data = content(column)
        table = self._read_at_once(column, data) if data else None
        if table is None:
            return self._read_each(column)
        suspects = _places(self._suspicious(table))
        # An unexpected field has been rejected if the schema has all fields.
        if not self._closed and (others := _unlike_json(column, data)):
            both = sorted({*suspects.to_pylist(), *others})
            suspects = array_of(both, pa.int64())
        if not len(suspects):
            return Rows(table, [])
        found = self._read_each(column.take(suspects))
        wrong = [(suspects[n].as_py(), message, why) for n, message, why in found.unfit]
        if wrong:
            table = _without(table, [n for n, _, _ in wrong])
        return Rows(table, wrong)

    # --- at once --------------------------------------------------------------------

    def _read_at_once(self, column: pa.BinaryArray, data: bytes) -> pa.Table | None:
        """Return the rows of all messages, or None if they need a closer look."""
        if self._quick is None:
            return None
        braces = pc.and_(pc.starts_with(column, b"{"), pc.ends_with(column, b"}"))
        longest = pc.max(pc.binary_length(column)).as_py()
        if not pc.all(braces).as_py() or b"\n" in data or 2 * longest > _MOST:
            return None
        from pyarrow import json as reading

        try:
            data.decode()  # Arrow does not validate UTF-8
            lines = pc.binary_join_element_wise(column, one_of(b"\n"), one_of(b""))
            table = reading.read_json(
                pa.py_buffer(content(lines)),
                reading.ReadOptions(block_size=max(_BLOCK, 2 * longest)),
                reading.ParseOptions(
                    explicit_schema=self._quick,
                    unexpected_field_behavior="error" if self._closed else "ignore",
                ),
            )
            if table.num_rows != len(column):
                return None
            return self._with_times(table)
        except (pa.ArrowException, UnicodeDecodeError):
            return None

    def _with_times(self, table: pa.Table) -> pa.Table | None:
        """Return the table with dates and times parsed; None if one may be invalid."""
        columns = []
        for field, column in zip(self.schema, table.columns, strict=True):
            if column.type == field.type:
                columns.append(column)
                continue
            zone = (
                "" if not pt.is_timestamp(field.type) else "Z" if field.type.tz else ""
            )
            wanted = r"^\d{4}-\d\d-\d\d$"
            if pt.is_timestamp(field.type):
                wanted = rf"^\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{{1,6}})?{zone}$"
            sound = pc.and_(
                pc.match_substring_regex(column, wanted),
                pc.invert(pc.starts_with(column, "0000")),  # there is no such year
            )
            if pc.all(sound).as_py() not in (True, None):
                return None
            columns.append(column.cast(field.type))
        return pa.table(columns, self.schema)

    def _suspicious(self, table: pa.Table) -> pa.Array:
        """Return a mask of rows for which Spark's rules are stricter than Arrow's."""
        nothing, some = None, None
        for column, values in zip(self._columns, table.columns, strict=True):
            void = pc.is_null(values)
            nothing = void if nothing is None else pc.and_(nothing, void)
            if self._lines is not None and column.name == self._lines.column:
                broken = _broken(values)
                some = broken if some is None else pc.or_(some, broken)
            doubt = (
                [void]
                if column.name in self._demanded or column.nullable is False
                else []
            )
            if pt.is_floating(values.type):
                # Arrow rounds down to the largest float32 what is not below infinity.
                most = _LARGEST if pt.is_float32(values.type) else math.inf
                below = pc.less(pc.abs(values), pa.scalar(most, values.type))
                doubt.append(pc.and_kleene(pc.is_valid(values), pc.invert(below)))
            for other in doubt:
                some = other if some is None else pc.or_(some, other)
        return nothing if some is None else pc.or_(nothing, some)

    # --- one by one -----------------------------------------------------------------

    def _read_each(self, column: pa.BinaryArray) -> Rows:
        rows, unfit = [], []
        for place, message in enumerate(column.to_pylist()):
            made: dict[str, Any] = {}
            if self._judged(message, made):
                rows.append(made)
            else:
                unfit.append((place, message, self._why(message, made)))
        names = self.schema.names
        columns = [
            array_of([row.get(name) for row in rows], field.type)
            for name, field in zip(names, self.schema, strict=True)
        ]
        return Rows(pa.table(columns, self.schema), unfit)

    def _judged(self, message: bytes, made: dict[str, Any]) -> bool:
        """Return whether a message fits; fill ``made`` with the values converted."""
        try:
            document = loaded(message.decode(), literal=self._exact)
        except (ValueError, RecursionError):
            return False
        if not isinstance(document, dict):
            return False
        fits = True
        for column, read in zip(self._columns, self._readers, strict=True):
            name = column.name
            value = document.get(name)
            if value is None:
                absent = name in self._demanded and name not in document
                fits = fits and column.nullable is not False and not absent
                continue
            try:
                made[name] = read(value)
            except _Flawed:
                fits = False
                if not self._strict:
                    made[name] = None
            except _Unmade:
                fits = False
        names = self.schema.names
        if document.keys().isdisjoint(names) or (
            self._closed and document.keys() - set(names)
        ):
            return False
        return fits and not self._split(message, made)

    def _split(self, message: bytes, made: Mapping[str, Any]) -> str | None:
        """Return why a row that has to be a line of text is not one, else None."""
        if self._lines is None:
            return None
        column = self._lines.column
        return self._lines.flaw(made.get(column) if column is not None else message)

    def _why(self, message: bytes, made: Mapping[str, Any]) -> str:
        wanted = []
        if self._ddl is not None:
            wanted = [
                WantedColumn(c.name, c.nullable is not False, str(c.type))
                for c in self._columns
            ]
        demanded = self._demanded if self._ddl is not None else ()
        why = reason(message, made, wanted, demanded=demanded, closed=self._closed)
        return self._split(message, made) or why


def _unlike_json(column: pa.BinaryArray, data: bytes) -> set[int]:
    """Return the places of messages that Arrow may take, and :func:`loaded` does not."""
    found = set[int]()
    for word in _WORDS:
        if word in data:
            found.update(_places(pc.match_substring(column, word)).to_pylist())
    large = pc.greater_equal(pc.binary_length(column), one_of(_DEEP))
    for n in _places(large).to_pylist():
        message = column[n].as_py()
        if _is_deep(message) or _is_long(message):
            found.add(n)
    return found


def _is_deep(message: bytes) -> bool:
    """Return whether a message may be nested deeper than Python parses."""
    # Unlike count(), replace() skips to the next bracket without a look at each byte.
    rest = message.replace(b"[", b"").replace(b"{", b"")
    return len(message) - len(rest) >= _DEEP


def _is_long(message: bytes) -> bool:
    """Return whether a message may have an integer with more digits than Python reads."""
    steps = message[::_STEP]
    return bool(_STEPS_OF_DIGITS.search(steps) and _LONG.search(message))


def _places(mask: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return the indices at which a mask is true."""
    found = pc.indices_nonzero(mask)
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


def _broken(values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return a mask of the values that contain a line break; null does not."""
    return pc.and_kleene(
        pc.is_valid(values), pc.match_substring_regex(values, LINE_BREAK)
    )


def _without(values: Any, places: Sequence[int]) -> Any:  # noqa: ANN401 - an array, or a table
    mask = bytearray(b"\1" * len(values))
    for n in places:
        mask[n] = 0
    kept = pa.Array.from_buffers(pa.uint8(), len(mask), [None, pa.py_buffer(mask)])
    return values.filter(kept.cast(pa.bool_()))


def _at(column: pa.BinaryArray, places: pa.Array) -> Iterator[tuple[int, bytes]]:
    return zip(places.to_pylist(), column.take(places).to_pylist(), strict=True)


def _quick_schema(columns: Sequence[DeclaredColumn]) -> pa.Schema | None:
    """Return the schema for Arrow's fast path, or None if a column rules it out."""
    fields = []
    for column in columns:
        kind = column.type
        if kind.name in ("date", "timestamp", "timestamp_ntz"):
            fields.append((column.name, pa.string()))
        elif _is_quick(kind):
            fields.append((column.name, arrow_type(kind)))
        else:
            return None
    return pa.schema(fields)


def _is_quick(kind: Type) -> bool:
    if kind.inner:
        # Nulls and infinities inside a value are not looked for.
        return kind.name != "map" and all(
            column.nullable is not False
            and column.type.name not in ("float", "double")
            and _is_quick(column.type)
            for column in kind.inner
        )
    others = ("binary", "date", "timestamp", "timestamp_ntz", "decimal")
    return kind.name not in others


# --- a value ------------------------------------------------------------------------


def reader_of(kind: Type, scalars: Mapping[str, Read] | None = None) -> Read:
    """Return a function that converts values of JSON to a type."""
    scalars = scalars or _SCALARS
    if kind.name == "array":
        read = _inner(kind.inner[0], scalars)
        return lambda value: [read(item) for item in _of(list, value)]
    if kind.name == "map":
        read = _inner(kind.inner[1], scalars)
        return lambda value: [
            (_string(k), read(v)) for k, v in _of(dict, value).items()
        ]
    if kind.name == "struct":
        fields = [(column.name, _inner(column, scalars)) for column in kind.inner]
        return lambda value: {
            name: read(found.get(name))
            for found in [_of(dict, value)]
            for name, read in fields
        }
    if kind.name in _WHOLE:
        bits = _WHOLE[kind.name]
        return lambda value: _whole(value, bits)
    if kind.name == "decimal":
        precision, scale = kind.sizes
        return lambda value: _decimal(value, precision, scale)
    return scalars[kind.name]


def is_kept(value: int, kind: Type) -> bool:
    """
    Return whether a float or double has an integer as it is written.

    That is its exact value, or the shortest text that is read as this float, which is
    how other programs write large floats.
    """
    if abs(value) <= _ALL_WHOLE[kind.name]:
        return True
    try:
        made = pa.scalar(float(value), arrow_type(kind))
    except OverflowError:
        return False
    return value in (made.as_py(), Decimal(made.cast(pa.string()).as_py()))


_ALL_WHOLE: Final = {"float": 1 << 24, "double": 1 << 53}
"""Up to these, a type has all integers."""


def _inner(column: DeclaredColumn, scalars: Mapping[str, Read]) -> Read:
    """Return a reader for values inside another value; it also handles nulls."""
    read, nullable = reader_of(column.type, scalars), column.nullable is not False

    def within(value: Any) -> Any:  # noqa: ANN401 - any JSON
        if value is None and nullable:
            return None
        try:
            if value is not None:
                return read(value)
        except _Unmade:
            pass
        raise _Flawed

    return within


def _of(kind: type, value: Any) -> Any:  # noqa: ANN401 - any JSON
    if not isinstance(value, kind):
        raise _Unmade
    return value


_WHOLE: Final = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


def has_bits(value: int, bits: int) -> bool:
    """Return whether a signed integer of that many bits can have a value."""
    return value.bit_length() < bits + (value == -(1 << bits - 1))


def _whole(value: object, bits: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Unmade
    if not has_bits(value, bits):
        raise _Unmade
    return value


def _decimal(value: object, precision: int, scale: int) -> Decimal:
    if isinstance(value, Fraction):
        value = value.literal
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _Unmade
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        raise _Unmade
    try:
        number = Decimal(value)
    except InvalidOperation:
        raise _Unmade from None
    if not number.is_finite() or (number and number.adjusted() >= precision - scale):
        raise _Unmade
    made = number.quantize(Decimal((0, (1,), -scale)), context=_WIDE)
    if made != number:
        raise _Flawed
    return made


def _double(value: object, limit: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Unmade
    try:
        number = float(value)
    except OverflowError:
        raise _Flawed from None
    if not math.isfinite(number) or abs(number) >= limit:
        raise _Flawed
    return number


def _single(value: object) -> float:
    """Return a number whose rounding to 32 bits is that of the number as written."""
    number = _double(value, _FLOAT)
    exact = Decimal(value.literal) if isinstance(value, Fraction) and number else value
    # Rounded to odd, as one that is halfway between two floats has lost its direction.
    if exact != number and math.ldexp(math.frexp(number)[0], 53) % 2 == 0:
        assert isinstance(exact, int | Decimal)
        return math.nextafter(number, math.inf if exact > number else -math.inf)
    return number


def _string(value: object) -> str:
    text: str = _of(str, value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _Flawed from None
    return text


def _day(value: object) -> date:
    try:
        if _DATE.fullmatch(_of(str, value)):
            return date.fromisoformat(str(value))
    except ValueError:
        pass
    raise _Unmade


def _moment(value: object) -> datetime:
    """Return a time in UTC; the default zone is this machine's."""
    try:
        if _TIME.fullmatch(_of(str, value)):
            return _instant(datetime.fromisoformat(str(value)))
    except (ValueError, OverflowError):
        pass
    raise _Unmade


def _instant(time: datetime) -> datetime:
    """Return a time in UTC, as Java does: one that a clock skips is moved forward."""
    if time.tzinfo is not None:
        return time.astimezone(UTC)
    # A time that is skipped has the offset before the gap, which astimezone() ignores.
    seconds = int(time.replace(microsecond=0).timestamp())
    return _EPOCH + timedelta(seconds=seconds, microseconds=time.microsecond)


def _local(value: object) -> datetime:
    """Return a time without a zone, for ``timestamp_ntz``."""
    try:
        if _TIME.fullmatch(_of(str, value)) and not _ZONE.search(str(value)):
            return datetime.fromisoformat(str(value))
    except ValueError:
        pass
    raise _Unmade


def _with_zone(value: object) -> datetime:
    if not isinstance(value, str) or not _ZONE.search(value):
        raise _Unmade
    return _moment(value)


def _binary(value: object) -> bytes:
    try:
        return base64.b64decode(_of(str, value), validate=True)
    except ValueError:
        raise _Unmade from None


# The least number that a 32-bit float rounds to infinity.
_FLOAT: Final = 3.4028235677973366e38
_SCALARS: Final[Mapping[str, Read]] = {
    "float": _single,
    "double": _double,
    "boolean": lambda value: _of(bool, value),
    "string": _string,
    "binary": _binary,
    "date": _day,
    "timestamp": _moment,
    "timestamp_ntz": _local,
}
_STRICT: Final[Mapping[str, Read]] = {**_SCALARS, "timestamp": _with_zone}
