r"""
Framings of text: lines of JSON, and records of CSV, as Go's encoders write them.

The output is the same byte for byte, as journals are shared with programs in Go.
Python's modules differ: ``json`` in floats, in the order of keys and in what it
escapes; ``csv`` in what it quotes, in blank lines, in newlines within quotes, and in
what it accepts.
"""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import Any, Final, NoReturn, Protocol

from etlstage.sequencing.framing import (
    ByteWriter,
    FrameBuffer,
    FrameError,
    Unmarshaller,
    asked,
    located,
    register_framing,
    unpack_line,
)
from etlstage.sequencing.message import JsonMessage

__all__ = (
    "CsvFrameable",
    "CsvFraming",
    "JsonFrameable",
    "JsonFraming",
    "JsonMarshaller",
    "encode_csv",
    "encode_json",
)


class JsonFrameable(Protocol):
    """A message that can be written as a line of JSON."""

    def to_json(self) -> object:
        """Return a value that ``json`` can encode."""

    def from_json(self, value: Any) -> None:  # noqa: ANN401
        """Set the content to a decoded value; raises ValueError if it can't."""


class JsonMarshaller(Protocol):
    """A message that writes its own line; it is read as a :class:`JsonFrameable`."""

    def marshal_json_to(self, writer: ByteWriter) -> object:
        """Write the message as JSON, and a newline."""


class CsvFrameable(Protocol):
    """A message that can be written as a CSV record."""

    def marshal_csv(self) -> list[str]:
        """Return the fields."""

    def unmarshal_csv(self, fields: list[str]) -> None:
        """Set the fields; raises ValueError if it can't."""


# --- JSON -------------------------------------------------------------------------

_MAYBE_FLOAT: Final = re.compile(r"\d[.eE]|NaN|Infinity")
_SHORT: Final = re.compile(r"\\(.)")
_HTML: Final = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
# Go writes short escapes for these two since version 1.22; readers know both forms.
_LONG: Final = {"b": "\\u0008", "f": "\\u000c"}


def encode_json(value: object, *, sort_keys: bool = True) -> bytes:
    """
    Return a value as Go's encoder writes it, without the newline.

    Args:
        value: A value that ``json`` can encode.
        sort_keys: Whether to sort keys, like those of Go's maps; otherwise they keep
            their order, like the fields of Go's structs.

    Raises:
        ValueError: If it contains NaN or infinity, which JSON does not have.
        TypeError: If it contains something that ``json`` can't encode.

    """
    text = json.dumps(
        value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys
    )
    if _MAYBE_FLOAT.search(text):
        text = _encode(value, sort_keys)
    text = text.translate(_HTML)
    if "\\b" in text or "\\f" in text:
        text = _SHORT.sub(lambda found: _LONG.get(found[1], found[0]), text)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub(r"\\ufffd", text).encode()


def _encode(value: object, sort_keys: bool) -> str:
    """Encode like ``json.dumps``, which has no option for the format of floats."""
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, dict):
        # Keys that are not text make sorted() or _key() fail.
        keys = sorted(value) if sort_keys else list(value)
        members = (f"{_key(key)}:{_encode(value[key], sort_keys)}" for key in keys)
        return f"{{{','.join(members)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_encode(one, sort_keys) for one in value)}]"
    return json.dumps(value, ensure_ascii=False)


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"expected keys of type str, got {type(key).__name__}")
    return json.dumps(key, ensure_ascii=False)


def _float(value: float) -> str:
    """Return a float with the fewest digits, in JavaScript's format."""
    if not isfinite(value):
        raise ValueError(f"JSON has no {value}")
    if value == 0:
        return "-0" if str(value) == "-0.0" else "0"
    sign = "-" if value < 0 else ""
    mantissa, _, exponent = f"{abs(value)!r}".partition("e")
    whole, _, fraction = mantissa.partition(".")
    fraction = "" if fraction == "0" else fraction
    # The value is 0.DIGITS times ten to the power of point.
    digits = (whole + fraction).lstrip("0")
    point = len(whole) + int(exponent or 0)
    point -= len(whole + fraction) - len(digits)
    digits = digits.rstrip("0")
    if 1e-6 <= abs(value) < 1e21:
        if point <= 0:
            return f"{sign}0.{'0' * -point}{digits}"
        if len(digits) <= point:
            return f"{sign}{digits}{'0' * (point - len(digits))}"
        return f"{sign}{digits[:point]}.{digits[point:]}"
    tail = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{tail}e{point - 1:+d}"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


class JsonFraming:
    """Messages as JSON, one per line."""

    content_type: Final = "application/x-ndjson"

    def marshal(self, message: Any, writer: ByteWriter) -> None:  # noqa: ANN401
        """Write a :class:`JsonFrameable` or :class:`JsonMarshaller`."""
        if (own := getattr(message, "marshal_json_to", None)) is not None:
            own(writer)
            return
        value = asked(
            message, JsonFrameable, self.content_type, "to_json", "from_json"
        )()
        writer.write(encode_json(value) + b"\n")

    def unmarshaller(self, buffer: FrameBuffer) -> Unmarshaller:
        """Return a function that reads a :class:`JsonFrameable`."""

        def unmarshal(message: Any) -> bool:  # noqa: ANN401
            take = asked(message, JsonFrameable, self.content_type, "from_json")
            line = unpack_line(buffer)
            if line is not None:
                text = line.decode(errors="replace")
                take(json.loads(text, parse_constant=_no_constant))
                if isinstance(message, JsonMessage):
                    message.line = line.rstrip()
            return line is not None

        return located(unmarshal, buffer, self.content_type)


# --- CSV --------------------------------------------------------------------------

_SPACES: Final = (
    "\t\v\f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008"
    "\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)
"""Characters that make a field quoted if it begins with one, besides line ends."""
_QUOTED: Final = re.compile(rf'[,"\r\n]|\A[{_SPACES}]|\A\\\.\Z')


def encode_csv(fields: list[str]) -> bytes:
    """Return a record with its newline."""
    return (",".join(map(_field, fields)) + "\n").encode(errors="surrogateescape")


def _field(field: str) -> str:
    if not _QUOTED.search(field):
        return field
    return '"' + field.replace('"', '""') + '"'


class _CsvReader:
    """Reads records, which all must have as many fields as the first."""

    def __init__(self, buffer: FrameBuffer) -> None:
        self._buffer = buffer
        self._width = 0

    def record(self) -> list[str] | None:
        """Return the fields of the next record, or None if more bytes are needed."""
        buffer = self._buffer
        while True:
            if buffer.dropping:
                return None
            size, fields, error = self._parse()
            if size is None:
                return None
            buffer.take(size)
            if error:
                raise FrameError(error)
            if fields:
                break
            if not len(buffer) and buffer.ended:
                raise EOFError
        if not self._width:
            self._width = len(fields)
        if len(fields) != self._width:
            raise FrameError(
                f"wrong number of fields: {len(fields)}, expected {self._width} as in"
                " the first record"
            )
        return fields

    def _parse(self) -> tuple[int | None, list[str], str]:
        """Return a record's size in bytes (None: incomplete), its fields, an error."""
        fields: list[str] = []
        size, line = self._line(0)
        if size is None or line == "\n" or not line:
            return size, [], ""
        while True:
            if not line.startswith('"'):
                field, comma, line = line.partition(",")
                if '"' in field:
                    return size, [], f'bare " in non-quoted field {len(fields) + 1}'
                fields.append(field.removesuffix("\n"))
                if not comma:
                    return size, fields, ""
                continue
            text = ""
            line = line[1:]
            while True:
                part, quote, line = line.partition('"')
                text += part
                if not quote:
                    more, line = self._line(size)
                    if more is None:
                        return None, [], ""
                    if more == size:
                        return size, [], f'no closing " of field {len(fields) + 1}'
                    size = more
                elif line.startswith('"'):
                    text, line = text + '"', line[1:]
                elif line.startswith(","):
                    fields.append(text)
                    line = line[1:]
                    break
                elif line in {"\n", ""}:
                    return size, [*fields, text], ""
                else:
                    place = len(fields) + 1
                    return size, [], f'text after the closing " of field {place}'

    def _line(self, start: int) -> tuple[int | None, str]:
        r"""Return the end of the line at ``start``, and the line, with ``\n``."""
        buffer = self._buffer
        end = buffer.find(b"\n", start) + 1
        if not end:
            if len(buffer) > buffer.max_frame:
                buffer.drop_line()
                raise buffer.too_big("more than ", buffer.max_frame)
            if not buffer.ended:
                return None, ""
            end = len(buffer)
        data = buffer.peek(end)[start:]
        text = data.decode(errors="surrogateescape")
        if text.endswith("\r\n"):
            return end, text[:-2] + "\n"
        return end, text.removesuffix("\r")


class CsvFraming:
    """Messages as records of CSV, with the UUID in one of the fields."""

    content_type: Final = "text/csv"

    def marshal(self, message: Any, writer: ByteWriter) -> None:  # noqa: ANN401
        """Write a :class:`CsvFrameable`."""
        fields = asked(
            message, CsvFrameable, self.content_type, "marshal_csv", "unmarshal_csv"
        )()
        writer.write(encode_csv(fields))

    def unmarshaller(self, buffer: FrameBuffer) -> Unmarshaller:
        """Return a function that reads a :class:`CsvFrameable`."""
        reader = _CsvReader(buffer)

        def unmarshal(message: Any) -> bool:  # noqa: ANN401
            take = asked(message, CsvFrameable, self.content_type, "unmarshal_csv")
            fields = reader.record()
            if fields is not None:
                take(fields)
            return fields is not None

        return located(unmarshal, buffer, self.content_type)


register_framing(JsonFraming())
register_framing(CsvFraming())
