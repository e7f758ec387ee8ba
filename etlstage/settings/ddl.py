"""
Columns as DDL, such as ``id long not null, title string null``.

Spark reads the same text once there is a session, which may be a minute later; here
errors are found before anything is started. Beyond Spark's own language a column may be
declared ``NULL``: it may then be missing in a message. Types are checked by name and
shape, and decimals by their bounds; other bounds are left to Spark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from etlstage.errors import guess
from etlstage.settings.kind import Text
from etlstage.settings.problem import Invalid, refused, shortened

__all__ = ("DDL", "DeclaredColumn", "Type", "columns_of", "spark_ddl")

_TYPES: Final = (
    *("tinyint", "byte", "smallint", "short", "int", "integer", "bigint", "long"),
    *("float", "real", "double", "decimal", "dec", "numeric", "boolean", "string"),
    *("char", "character", "varchar", "binary", "date", "time", "timestamp"),
    *("timestamp_ntz", "timestamp_ltz", "interval", "variant", "void"),
    *("array", "map", "struct", "geometry", "geography"),
)
_INNER: Final = {"array": ("element",), "map": ("key", "value")}
"""The roles of the types in the angle brackets of a type."""
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<quoted>`(?:[^`]|``)+`)|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<word>\w+)|(?P<sign>[<>(),:]))",
    re.DOTALL,
)
_DEPTH: Final = 64  # of types within types
_DIGITS: Final = 38  # most digits of a decimal


_NAMES: Final = {
    "byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint",
    "real": "float", "dec": "decimal", "numeric": "decimal", "character": "char",
    "timestamp_ltz": "timestamp",
}  # fmt: skip
"""Aliases of types, and the names that Spark prints for them."""


class Type(NamedTuple):
    """A type of values."""

    name: str
    """The name that Spark prints."""
    sizes: tuple[int, ...] = ()
    """The numbers in its round brackets, such as a decimal's precision and scale."""
    inner: tuple[DeclaredColumn, ...] = ()
    """What is in its angle brackets: fields, or ``element``, or ``key``, ``value``."""

    def __str__(self) -> str:
        """Return the type as Spark prints it."""
        if self.name == "struct":
            fields = ",".join(f"{field.name}:{field.type}" for field in self.inner)
            return f"struct<{fields}>"
        if self.inner:
            return f"{self.name}<{','.join(str(item.type) for item in self.inner)}>"
        sizes = ",".join(map(str, self.sizes))
        return f"{self.name}({sizes})" if sizes else self.name


class DeclaredColumn(NamedTuple):
    """One column, or a field within one."""

    name: str
    nullable: bool | None
    """What is written: ``NULL``, ``NOT NULL``, or neither."""
    type: Type


class _Token(NamedTuple):
    kind: str | None
    text: str
    at: int
    """Offset in the text."""


def columns_of(ddl: str) -> list[DeclaredColumn]:
    """
    Return the columns.

    Raises:
        ValueError: If the text is not DDL; the error names the place.

    """
    return _DdlReader(ddl).columns


def spark_ddl(ddl: str) -> str:
    """Return the same columns as Spark reads them; raises as :func:`columns_of`."""
    text = ddl
    for start, end in reversed(_DdlReader(ddl).nulls):
        text = text[:start] + text[end:]
    return text


class _DdlReader:
    """Reads one text, once."""

    def __init__(self, ddl: str) -> None:
        self.columns: list[DeclaredColumn] = []
        self.nulls: list[tuple[int, int]] = []
        """The ranges of ``NULL`` where Spark does not allow it."""
        self._end = len(ddl)
        self._tokens = list(_tokens(ddl))
        self._at = 0
        while True:
            self.columns.append(self._column())
            if not self._found(","):
                break
        if self._next.kind is not None:
            raise self._unexpected("a comma or the end after a column")
        if twice := _repeat(self.columns):
            raise ValueError(f"column {twice}")

    @property
    def _next(self) -> _Token:
        if self._at < len(self._tokens):
            return self._tokens[self._at]
        return _Token(None, "", self._end)

    def _found(self, text: str) -> bool:
        """Skip the next token if it is ``text``; return whether it was."""
        if self._next.kind in ("word", "sign") and self._next.text.lower() == text:
            self._at += 1
            return True
        return False

    def _expect(self, text: str, wanted: str) -> None:
        if not self._found(text):
            raise self._unexpected(wanted)

    def _column(self) -> DeclaredColumn:
        name = self._name("the name of a column")
        self._found(":")
        if self._next.kind is None or self._next.text in (",", "<"):
            raise ValueError(
                f"{shortened(name)} has no type, expected columns such as 'id long, title string'"
            )
        kind = self._type(0)
        return DeclaredColumn(name, self._nullable(inner=False), kind)

    def _nullable(self, *, inner: bool) -> bool | None:
        """Skip what follows a type; return whether the column may be null."""
        nullable: bool | None = None
        while True:
            token = self._next
            if self._found("not"):
                self._expect("null", "null after not")
                nullable = False
            elif not inner and self._found("null"):
                self.nulls.append((token.at, token.at + len(token.text)))
                nullable = True
            elif self._found("comment"):
                if self._next.kind != "text":
                    raise self._unexpected("a comment in quotes")
                self._at += 1
            else:
                return nullable

    def _type(self, depth: int) -> Type:
        token = self._next
        if token.kind != "word":
            raise self._unexpected("a type")
        name = token.text.lower()
        if name not in _TYPES:
            close = guess(name, _TYPES)
            raise ValueError(
                f"unknown type {shortened(token.text)} at {_place(token)}{close}"
            )
        if depth > _DEPTH:
            raise ValueError(
                f"types are nested more than {_DEPTH} deep at {_place(token)}"
            )
        self._at += 1
        sizes: list[int] = []
        name = _NAMES.get(name, name)
        if name == "struct":
            fields = tuple(self._struct(depth))
            if twice := _repeat(fields):
                raise ValueError(f"field {twice} in the struct at {_place(token)}")
            return Type(name, (), fields)
        if name in _INNER:
            self._expect("<", f"< after {name}")
            inner: list[DeclaredColumn] = []
            for called in _INNER[name]:
                if inner:
                    self._expect(",", "a comma and the type of the values")
                inner.append(DeclaredColumn(called, None, self._type(depth + 1)))
            self._expect(">", f"> at the end of {name}")
            return Type(name, (), tuple(inner))
        if name == "interval":
            while self._next.kind == "word" and self._next.text.lower() not in (
                *("not", "null", "comment"),
            ):
                self._at += 1
        elif self._found("collate"):
            self._name("the name of a collation")
        elif self._found("("):
            while self._next.kind == "word" or self._next.text == ",":
                if self._next.text.isdecimal():
                    sizes.append(int(self._next.text[:9]))
                self._at += 1
            self._expect(")", f") at the end of {name}")
        if name == "decimal":
            sizes = [*sizes, *(10, 0)[len(sizes) :]]
            precision, scale, *more = sizes
            if more or not 0 < precision <= _DIGITS or scale > precision:
                found = shortened(str(Type(name, tuple(sizes)))).strip("'")
                raise ValueError(
                    f"expected a precision of 1 to {_DIGITS}, and a scale no larger"
                    f" than the precision, got {found} at"
                    f" {_place(token)}"
                )
        return Type(name, tuple(sizes))

    def _struct(self, depth: int) -> Iterator[DeclaredColumn]:
        self._expect("<", "< after struct")
        while not self._found(">"):
            name = self._name("the name of a field")
            self._found(":")
            kind = self._type(depth + 1)
            yield DeclaredColumn(name, self._nullable(inner=True), kind)
            if not self._found(","):
                self._expect(">", "a comma or > after a field of struct")
                return

    def _name(self, wanted: str) -> str:
        token = self._next
        if token.kind not in ("word", "quoted"):
            raise self._unexpected(wanted)
        self._at += 1
        if token.kind == "quoted":
            return token.text[1:-1].replace("``", "`")
        return token.text

    def _unexpected(self, wanted: str) -> ValueError:
        token = self._next
        found = shortened(token.text) if token.kind is not None else "the end"
        return ValueError(f"expected {wanted}, got {found} at {_place(token)}")


def _tokens(ddl: str) -> Iterator[_Token]:
    at, end = 0, len(ddl.rstrip())
    while at < end:
        found = _TOKEN.match(ddl, at)
        if found is None:
            at += len(ddl[at:]) - len(ddl[at:].lstrip())
            raise ValueError(f"unexpected {ddl[at]!r} at character {at + 1}")
        kind = str(found.lastgroup)
        yield _Token(kind, found[kind], found.start(kind))
        at = found.end()


def _repeat(columns: Iterable[DeclaredColumn]) -> str | None:
    """Return which name appears twice, in whatever case; None: all differ."""
    names: dict[str, str] = {}
    for name in (column.name for column in columns):
        if (first := names.get(name.lower())) is not None:
            also = f", also as {shortened(name)}" if name != first else ""
            return f"{shortened(first)} appears twice{also}"
        names[name.lower()] = name
    return None


def _place(token: _Token) -> str:
    return f"character {token.at + 1}"


class _Ddl(Text):
    """Columns as DDL."""

    def read(self, value: Any) -> str:
        text = super().read(value)
        try:
            columns_of(text)
        except ValueError as error:
            raise Invalid(
                refused(str(error)).problems[0]._replace(hidden="is not valid DDL")
            ) from None
        return text


DDL: Final = _Ddl()
"""Reads a schema."""
