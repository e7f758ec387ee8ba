from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from etlstage.settings import units
from etlstage.settings.kind import Kind
from etlstage.settings.problem import Invalid


def of(annotation: object) -> Kind:
    """Return the kind that reads values of an annotated type."""
    found = get_args(annotation)[1]
    assert isinstance(found, Kind)
    return found


def wrong(annotation: object, value: object) -> str:
    """Return the error about a value."""
    with pytest.raises(Invalid) as caught:
        of(annotation).read(value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("30s", 30.0),
        ("500ms", 0.5),
        ("2m", 120.0),
        ("1.5h", 5400.0),
        ("7d", 604800.0),
        ("10", 10.0),
        (".5", 0.5),
        ("2 s", 2.0),
        (3, 3.0),
        (0.25, 0.25),
    ],
)
def test_duration(written: object, seconds: float) -> None:
    """A number alone is seconds."""
    assert of(units.Duration).read(written) == seconds


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("1MiB", 1048576),
        ("512KiB", 524288),
        ("10MB", 10_000_000),
        ("1.5kB", 1500),
        ("2GiB", 2147483648),
        ("2TiB", 2199023255552),
        ("7B", 7),
        ("0.1", 1),
        (100, 100),
    ],
)
def test_size(written: object, size: int) -> None:
    """A number alone is bytes, at least one."""
    assert of(units.Size).read(written) == size


@pytest.mark.parametrize("text", ["", "s", "-1s", "1 week", "1e3", "inf", "nan", "1_0"])
def test_what_is_no_duration(text: str) -> None:
    """Unknown units and forms are refused."""
    assert wrong(units.Duration, text) == (
        f"expected a duration such as 500ms, 30s or 2m, got {text!r}"
    )


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1mib", "1PiB", "1 M"])
def test_what_is_no_size(text: str) -> None:
    """Units are case-sensitive: 1 Mb and 1 MB differ by eight elsewhere."""
    assert wrong(units.Size, text) == (
        f"expected a size such as 512KiB, 1MiB or 10MB, got {text!r}"
    )


@pytest.mark.parametrize("nothing", ["0", "0s", 0, -1, float("nan")])
def test_nothing_is_no_quantity(nothing: object) -> None:
    """A duration must be longer than zero."""
    assert "expected more than 0" in wrong(units.Duration, nothing)


def test_nothing_may_be_a_size_where_that_is_a_bound() -> None:
    """Zero disables core dumps, which is what most people want."""
    assert of(units.SizeOrZero).read("0") == of(units.SizeOrZero).read(0) == 0
    assert "more than 0" in wrong(units.SizeOrZero, -1)


def test_window() -> None:
    """A window is a number of messages, or left to the supervisor."""
    window = of(units.Window)
    assert (window.read("8"), window.read("auto"), window.read(None)) == (8, None, None)
    for value in ("0", "-1", "1.5", "many", "", 0, True):
        assert "from 1 up, or auto" in wrong(units.Window, value)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (units.Duration, True),
        (units.Duration, None),
        (units.Size, [1]),
        (units.Share, "0.1"),
        (units.Share, 1.01),
        (units.Share, True),
        (units.ShareBelowOne, "100%"),
        (units.Mask, "888"),
        (units.Mask, 512),
        (units.Mask, True),
        (units.Count, True),
        (units.Count, 1.0),
        (units.Count, "1_0"),
        (units.Pointer, "id"),
        (units.Name, "../etc"),
        (units.Name, 5),
        (units.Argument, "a\0"),
        (units.Folder, 5),
        (units.Location, ""),
        (units.Location, "a\0"),
        (units.Command, "cat x"),
        (units.Command, ("", "x")),
        (units.Command, (5,)),
        (units.Variables, {"A=": "x"}),
        (units.Variables, {"A": 5}),
        (units.Variables, []),
    ],
)
def test_what_is_refused(annotation: object, value: object) -> None:
    """Each kind refuses values that are not its own."""
    assert wrong(annotation, value)


@pytest.mark.parametrize(
    ("annotation", "read", "written"),
    [
        (units.Duration, 300.0, "5m"),
        (units.Duration, 90.0, "90s"),
        (units.Duration, 0.5, "500ms"),
        (units.Duration, 1.5, "1500ms"),
        (units.Duration, 7200.0, "2h"),
        (units.Size, 64 << 20, "64MiB"),
        (units.Size, 1000, "1kB"),
        (units.Size, 1001, "1001B"),
        (units.Share, 0.01, "1%"),
        (units.Share, 0.125, "12.5%"),
        (units.Mask, 0o22, "022"),
        (units.Window, None, "auto"),
        (units.Window, 3, 3),
        (units.Folder, Path("a/b"), "a/b"),
        (units.Location, "a/b", "a/b"),
        (units.Command, ("a", "b"), ["a", "b"]),
        (units.Variables, {"A": "b"}, {"A": "b"}),
    ],
)
def test_what_was_read_is_written_as_people_do(
    annotation: object, read: object, written: object
) -> None:
    """Written values are read back unchanged, and so are values already read."""
    reader = of(annotation)
    assert reader.written(read) == written
    assert reader.read(written) == read
    assert reader.read(read) == read


def test_size_without_end_is_none() -> None:
    """A duration may be infinite in Python, but a size may not."""
    assert of(units.Duration).read(float("inf")) == float("inf")
    assert "expected a size" in wrong(units.Size, float("inf"))


@pytest.mark.parametrize("name", ["Duration", "Seconds", "Size", "Positive"])
def test_quantity_has_an_end(name: str) -> None:
    """A number with too many digits does not become infinity (issue 23)."""
    kind = next(
        one for one in getattr(units, name).__metadata__ if isinstance(one, Kind)
    )
    with pytest.raises(Invalid):
        kind.read("9" * 5000)


@pytest.mark.parametrize("name", ["r", "7", "a-b_c.d", "é" * 100])
def test_name_of_a_reader(name: str) -> None:
    """It has a letter or a digit, and may be a part of a file's name (issue 24)."""
    assert units.is_reader_name(name)


@pytest.mark.parametrize("name", ["-", "", " ", "0%", "/r", ".r", "é" * 100 + "r"])
def test_name_that_no_reader_has(name: str) -> None:
    """Hidden files are not looked at, and the system limits names (issue 24)."""
    assert not units.is_reader_name(name)


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(60.0, "60s"), (2.5, "2.5s"), (1e6, 1e6), (1e-5, 1e-5), (12345.678, 12345.678)],
)
def test_duration_is_written_exactly(seconds: float, written: object) -> None:
    """With a unit, unless that would need an exponent or be rounded (issue 25)."""
    assert units.as_duration(seconds) == written
    assert units.DURATION.read(units.as_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("written", "local"),
    [
        ("out", "out"),
        ("/data/a:b/out", "/data/a:b/out"),
        ("in/10:30.txt", "in/10:30.txt"),
        ("file:///data/a:b", "/data/a:b"),
        ("file:/data", "/data"),
        ("s3a://bucket/a:b", None),
        ("dbfs:/data", None),
    ],
)
def test_path_of_this_machine(written: str, local: str | None) -> None:
    """A colon ends a scheme only before the first slash (issue 23)."""
    assert units.local_path(written) == (None if local is None else Path(local))


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("/a/v,1^-", "/a/v,1^-"),
        ("[1]/{a,b}*?\\", r"\[1\]/\{a,b\}\*\?\\"),
        ("hdfs://[::1]:8020/v[1]", r"hdfs://[::1]:8020/v\[1\]"),
        ("[x]://y", r"\[x\]://y"),
    ],
)
def test_path_that_is_no_pattern(path: str, pattern: str) -> None:
    """What Hadoop has for patterns is escaped in a path, not in a host (issue 23)."""
    assert units.literal(path) == pattern
