from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from etlstage.settings import kind
from etlstage.settings.kind import Invalid, Kind


def of(annotation: object) -> Kind:
    """Return what reads values of an annotated type."""
    found = get_args(annotation)[1]
    assert isinstance(found, Kind)
    return found


def wrong(annotation: object, value: object) -> str:
    """Return what is said of a value."""
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
        ("10", 10.0),
        (".5", 0.5),
        ("2 s", 2.0),
        (3, 3.0),
        (0.25, 0.25),
    ],
)
def test_duration(written: object, seconds: float) -> None:
    """A number alone is seconds."""
    assert of(kind.Duration).read(written) == seconds


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("1MiB", 1048576),
        ("512KiB", 524288),
        ("10MB", 10_000_000),
        ("1.5kB", 1500),
        ("2GiB", 2147483648),
        ("7B", 7),
        ("0.1", 1),
        (100, 100),
    ],
)
def test_size(written: object, size: int) -> None:
    """A number alone is bytes, whole ones, and not none."""
    assert of(kind.Size).read(written) == size


@pytest.mark.parametrize("text", ["", "s", "-1s", "1 week", "1e3", "inf", "nan", "1_0"])
def test_what_is_no_duration(text: str) -> None:
    """Nothing is guessed."""
    assert wrong(kind.Duration, text) == (
        f"expected a duration such as 500ms, 30s or 2m, got {text!r}"
    )


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1mib", "1TiB", "1 M"])
def test_what_is_no_size(text: str) -> None:
    """Units are case-sensitive: 1 Mb and 1 MB differ by eight elsewhere."""
    assert wrong(kind.Size, text) == (
        f"expected a size such as 512KiB, 1MiB or 10MB, got {text!r}"
    )


@pytest.mark.parametrize("nothing", ["0", "0s", 0, -1, float("nan")])
def test_nothing_is_no_quantity(nothing: object) -> None:
    """Neither a time nor a size of zero is of use."""
    assert "expected more than 0" in wrong(kind.Duration, nothing)


def test_nothing_may_be_a_size_where_that_is_a_bound() -> None:
    """No core dump is what most people want."""
    assert of(kind.SizeOrZero).read("0") == of(kind.SizeOrZero).read(0) == 0
    assert "more than 0" in wrong(kind.SizeOrZero, -1)


def test_window() -> None:
    """A window is a number of messages, or left to the supervisor."""
    window = of(kind.Window)
    assert (window.read("8"), window.read("auto"), window.read(None)) == (8, None, None)
    for value in ("0", "-1", "1.5", "many", "", 0, True):
        assert "from 1 up, or auto" in wrong(kind.Window, value)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (kind.Duration, True),
        (kind.Duration, None),
        (kind.Size, [1]),
        (kind.Share, "0.1"),
        (kind.Share, 1.01),
        (kind.Share, True),
        (kind.ShareBelowOne, "100%"),
        (kind.Mask, "888"),
        (kind.Mask, 512),
        (kind.Mask, True),
        (kind.Count, True),
        (kind.Count, 1.0),
        (kind.Count, "1_0"),
        (kind.Pointer, "id"),
        (kind.Name, "../etc"),
        (kind.Name, 5),
        (kind.Argument, "a\0"),
        (kind.Folder, 5),
        (kind.Command, "cat x"),
        (kind.Command, ("", "x")),
        (kind.Command, (5,)),
        (kind.Variables, {"A=": "x"}),
        (kind.Variables, {"A": 5}),
        (kind.Variables, []),
    ],
)
def test_what_is_refused(annotation: object, value: object) -> None:
    """Each kind knows its own."""
    assert wrong(annotation, value)


@pytest.mark.parametrize(
    ("annotation", "read", "written"),
    [
        (kind.Duration, 300.0, "5m"),
        (kind.Duration, 90.0, "90s"),
        (kind.Duration, 0.5, "500ms"),
        (kind.Duration, 1.5, "1500ms"),
        (kind.Duration, 7200.0, "2h"),
        (kind.Size, 64 << 20, "64MiB"),
        (kind.Size, 1000, "1kB"),
        (kind.Size, 1001, "1001B"),
        (kind.Share, 0.01, "1%"),
        (kind.Share, 0.125, "12.5%"),
        (kind.Mask, 0o22, "022"),
        (kind.Window, None, "auto"),
        (kind.Window, 3, 3),
        (kind.Folder, Path("a/b"), "a/b"),
        (kind.Command, ("a", "b"), ["a", "b"]),
        (kind.Variables, {"A": "b"}, {"A": "b"}),
    ],
)
def test_what_was_read_is_written_as_people_do(
    annotation: object, read: object, written: object
) -> None:
    """And read again, it is the same; so is what was read already."""
    reader = of(annotation)
    assert reader.written(read) == written
    assert reader.read(written) == read
    assert reader.read(read) == read


def test_words_are_guessed() -> None:
    """A word of a later version is no slip."""
    choice = kind.Choice("fruit", {"apple": 1, "pear": 2}, later=("plum",))
    assert choice.read("apple") == choice.read(1) == 1
    assert choice.written(2) == "pear"
    problems = []
    for value in ("aple", "kiwi", "plum", 5):
        with pytest.raises(Invalid) as caught:
            choice.read(value)
        problems.append(str(caught.value))
    assert problems == [
        "unknown fruit 'aple' (did you mean 'apple'?)",
        "unknown fruit 'kiwi', expected 'apple' or 'pear'",
        "'plum' is not in this version, expected 'apple' or 'pear'",
        "unknown fruit 5, expected 'apple' or 'pear'",
    ]


def test_all_items_are_told_at_once() -> None:
    """Each with its place."""
    numbers = kind.ListOf(kind.Whole(0, 9))
    with pytest.raises(Invalid) as caught:
        numbers.read(["1", "x", 10])
    assert [(p.loc, p.say()) for p in caught.value.problems] == [
        ((1,), "expected a whole number, got 'x'"),
        ((2,), "expected 9 or less, got 10"),
    ]
    assert kind.ListOf(kind.Whole(), frozenset).read([2, "1"]) == {1, 2}


def test_value_need_not_be_shown() -> None:
    """It may be a secret, and so may be what was guessed from it."""
    with pytest.raises(Invalid) as caught:
        kind.Choice("fruit", {"apple": 1}).read("aple")
    (problem,) = caught.value.problems
    assert problem.say(instead="hidden") == "unknown fruit, expected 'apple'"
    with pytest.raises(Invalid) as caught:
        kind.Flag().read("maybe")
    (problem,) = caught.value.problems
    assert problem.say(instead="hidden") == "expected true or false, got hidden"


def test_null_is_a_value_where_there_may_be_none() -> None:
    """Of any kind."""
    maybe = kind.Maybe(kind.Flag())
    assert (maybe.read(None), maybe.read("TRUE"), maybe.read(False)) == (
        None,
        True,
        False,
    )
    assert (maybe.written(None), maybe.written(True)) == (None, True)


def test_object_of_a_class_can_not_be_written() -> None:
    """It is read as it is, and any schema fits it."""
    objects = kind.Instance(Kind)
    assert objects.read(objects) is objects
    assert objects.schema() == {}
    with pytest.raises(Invalid, match="expected an instance of Kind, got 5"):
        objects.read(5)


def test_size_without_end_is_none() -> None:
    """A duration may have no end, in Python."""
    assert of(kind.Duration).read(float("inf")) == float("inf")
    assert "expected a size" in wrong(kind.Size, float("inf"))


@pytest.mark.parametrize(
    ("loc", "text"),
    [
        ((), ""),
        (("a", 0, "b-c"), "a[0].b-c"),
        (("env", "A="), "env['A=']"),
        (("x" * 61 + "=",), "['" + "x" * 30 + "..." + "x" * 14 + "=']"),
    ],
)
def test_location_as_users_read_it(loc: kind.Loc, text: str) -> None:
    """What is no name is quoted, and cut if it is long."""
    assert kind.dotted(loc) == text
