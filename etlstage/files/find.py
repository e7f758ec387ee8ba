"""
Find the files of an input, as Spark does.

A path is a file, a folder, or a pattern of these, with ``*``, ``?``, ``[ab]``, ``[^ab]``
and ``{ab,cd}``. Only here, not with Spark, are ``[{]`` and ``[}]`` braces. In a folder,
subfolders with ``=`` in their names are partitions, whose columns are not in the files;
other subfolders are not searched. Names that begin with a dot, or with an underscore and
have no ``=``, are not data. Files come in the order of their names.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote

from etlstage.settings.ddl import DeclaredColumn, Type
from etlstage.settings.units import is_hidden

__all__ = (
    "LONGEST",
    "NOWHERE",
    "NO_TEXT",
    "ODD",
    "InputFile",
    "PartitionsInvalid",
    "digests_of",
    "find",
    "folder_flaw",
    "folder_name",
    "is_changed",
    "matching",
    "partition_columns",
    "text_column",
)

NOWHERE: Final = "__HIVE_DEFAULT_PARTITION__"
"""Value in a folder's name that stands for null in a partition."""
NO_TEXT: Final = (
    "format text needs a single column, string or binary, besides those of partition"
    " folders: declare one, or omit the schema, which names it value"
)
LONGEST: Final = 255
"""Bytes of a folder's name, at most, by the limit of file systems."""
ODD: Final = re.compile(r"""[\x00-\x1f\x7f"#%'*/:=?\\{\[\]^]""")
"""Characters that a folder's name has as ``%`` and two digits."""
_BRACE: Final = r"\[[{}]\]"
_BRACES: Final = re.compile(rf"{_BRACE}|\{{((?:{_BRACE}|[^{{}}])*+)\}}")
"""A brace that is itself, or innermost alternatives."""
_WHOLE: Final = re.compile(r"-?(0|[1-9][0-9]{0,18})")
_DAY: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


class PartitionsInvalid(ValueError):
    """Files are partitioned by different columns, or by a column more than once."""


class InputFile(NamedTuple):
    """A file of the input."""

    path: Path
    size: int
    modified: int
    """Nanoseconds since the epoch."""
    partition: tuple[tuple[str, str | None], ...] = ()
    """Columns that are only in the names of folders, with the value of each."""


def find(path: str, folder: str = "") -> list[InputFile]:
    """
    Return the files of an input; blocks.

    Args:
        path: A file, a folder, or a pattern.
        folder: What a relative path is relative to; no part of the pattern.

    Raises:
        PartitionsInvalid: If the files are not all partitioned by the same columns, or
            a column repeats, in any case.
        OSError: If a folder can't be read, or what would be read is a pipe, a device,
            or a link to nothing, or has a path that is not UTF-8.

    """
    place = os.path.join(folder, path)
    places = [place] if os.path.exists(place) else matching(path, folder)
    found = [file for place in places for file in _below(Path(place))]
    kinds = {tuple(name for name, _ in file.partition): file for file in found}
    if len(kinds) > 1:
        texts = (f"{f.path} by {', '.join(k) or 'nothing'}" for k, f in kinds.items())
        raise PartitionsInvalid(f"partition columns differ: {'; '.join(texts)}")
    for names, file in kinds.items():
        _check_repeated(names, file)
    # A pattern may match a folder and also what is in it, perhaps by another path.
    once: dict[object, InputFile] = {}
    for file, place in zip(found, _places(found), strict=True):
        once.setdefault((place, file.partition), file)
    return list(once.values())


def matching(pattern: str, folder: str = "") -> list[str]:
    """Return the paths in a folder that match a Hadoop pattern without escapes; blocks."""
    braces = (found for found in _BRACES.finditer(pattern) if found[1] is not None)
    if (found := next(braces, None)) is not None:
        before, after = pattern[: found.start()], pattern[found.end() :]
        inner = (
            matching(f"{before}{one}{after}", folder) for one in found[1].split(",")
        )
        return sorted({path for paths in inner for path in paths})
    inside = glob.glob(pattern.replace("[^", "[!"), root_dir=folder)
    return sorted(os.path.join(folder, path) for path in inside)


def _places(files: Sequence[InputFile]) -> list[str]:
    """Return where files are, whatever links lead there; a link to a file is a file."""
    real = cache(os.path.realpath)
    return [os.path.join(real(file.path.parent), file.path.name) for file in files]


def _check_repeated(names: Sequence[str], file: InputFile) -> None:
    seen: dict[str, str] = {}
    for name in names:
        if (first := seen.get(name.lower())) is not None:
            raise PartitionsInvalid(
                f"{file.path.parent}: partition column {name!r} repeats {first!r},"
                " expected each name once in any case: rename one of the folders"
            )
        seen[name.lower()] = name


def _below(place: Path) -> Iterator[InputFile]:
    if place.is_dir():
        yield from _within(place, ())
    elif not is_hidden(place.name):
        yield _file(place, ())


def _file(place: Path, partition: tuple[tuple[str, str | None], ...]) -> InputFile:
    found = place.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(
            errno.ESPIPE,
            "it is not a regular file, which can be read from any place: copy it to"
            " one, or have 'etlstage pipe' read stdin",
            str(place),
        )
    try:
        str(place).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(place).decode(errors="backslashreplace")
        raise OSError(
            errno.EILSEQ, "its path is not UTF-8: rename the file or folder", shown
        ) from None
    return InputFile(place, *_stamp(found), partition)


def _within(
    folder: Path, partition: tuple[tuple[str, str | None], ...]
) -> Iterator[InputFile]:
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        if is_hidden(entry.name):
            continue
        if not entry.is_dir():
            yield _file(Path(entry.path), partition)
        elif "=" in entry.name:
            name, _, value = entry.name.partition("=")
            read = None if value == NOWHERE else unquote(value)
            yield from _within(Path(entry.path), (*partition, (unquote(name), read)))


def _stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


def is_changed(file: InputFile) -> bool:
    """Return whether a file is not as it was found; raises OSError if it is gone."""
    return _stamp(file.path.stat()) != (file.size, file.modified)


def folder_name(name: str, value: str | None) -> str:
    """Return the name of a partition's folder; an empty value is null."""
    text = ODD.sub(_percent, value) if value else NOWHERE
    return f"{ODD.sub(_percent, name)}={text}"


def folder_flaw(name: str, value: str | None, *, nullable: bool = True) -> str | None:
    """
    Return why a value of a partition can't be a folder; None: it can.

    Args:
        name: The column.
        value: The value as text; None: null, which has a folder.
        nullable: Whether an empty text may come back as null.

    """
    remedy = f"or take {name} out of partition_by"
    if value is not None and "\0" in value:
        return (
            f"field {name!r} has a NUL at offset {value.index(chr(0))}, which no folder"
            f" can have in its name: replace it, {remedy}"
        )
    if value == NOWHERE:
        return (
            f"field {name!r} has the text that is null in a folder's name: replace it,"
            f" {remedy}"
        )
    if value == "" and not nullable:
        return (
            f"field {name!r} is NOT NULL, and empty, which is null in a folder's name:"
            f" replace it, {remedy}"
        )
    size = len(folder_name(name, value).encode())
    if size <= LONGEST:
        return None
    return (
        f"field {name!r} makes a folder name of {size:,} bytes, expected no more than"
        f" {LONGEST}: shorten it, {remedy}"
    )


def _percent(found: re.Match[str]) -> str:
    return f"%{ord(found[0]):02X}"


def digests_of(files: Sequence[InputFile]) -> list[str]:
    """
    Return digests of the files' paths, sizes and modification times.

    The first is of the paths as they are, the second of where they lead. Files are the
    same if one of the two is.
    """
    return [
        _digest(
            f"{p}\0{f.size}\0{f.modified}" for p, f in zip(paths, files, strict=True)
        )
        for paths in ([file.path for file in files], _places(files))
    ]


def _digest(lines: Iterable[str]) -> str:
    return sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:16]


def partition_columns(
    files: Sequence[InputFile], declared: Sequence[DeclaredColumn]
) -> list[DeclaredColumn]:
    """
    Return the columns of partitions, in the order of the folders.

    Names match declared columns in any case, as with Spark. A column that is not
    declared has the type that fits all its values.
    """
    known = {column.name.lower(): column for column in declared}
    found = []
    for n, (name, _) in enumerate(files[0].partition if files else ()):
        values = [v for v in (file.partition[n][1] for file in files) if v is not None]
        inferred = DeclaredColumn(name, None, Type(_inferred(values)))
        found.append(known.get(name.lower(), inferred))
    return found


def text_column(
    files: Sequence[InputFile], declared: Sequence[DeclaredColumn]
) -> str | None:
    """Return the name of the column that has the lines of text; None: see NO_TEXT."""
    by = partition_columns(files, declared)
    match [column for column in declared if column not in by]:
        case [DeclaredColumn(name, _, Type("string" | "binary"))]:
            return name
    return None


def _inferred(values: Sequence[str]) -> str:
    if values and all(map(_WHOLE.fullmatch, values)):
        # A type has one more negative value than positive ones: ~n is -n - 1.
        most = max(max(n, ~n) for n in map(int, values))
        return "int" if most < 1 << 31 else "bigint" if most < 1 << 63 else "string"
    return "date" if values and all(map(_is_day, values)) else "string"


def _is_day(value: str) -> bool:
    try:
        return bool(_DAY.fullmatch(value) and date.fromisoformat(value))
    except ValueError:
        return False
