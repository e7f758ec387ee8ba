from __future__ import annotations

import re

import pytest

from etlstage.settings import kind
from etlstage.settings.kind import Kind
from etlstage.settings.problem import Invalid


def test_words_are_guessed() -> None:
    """A similar word is suggested; a word of a later version is named as such."""
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
        "'plum' is not supported by this version, expected 'apple' or 'pear'",
        "unknown fruit 5, expected 'apple' or 'pear'",
    ]


def test_word_of_digits_may_be_written_as_a_number() -> None:
    """YAML reads such a word as a number; False and 0.0 are refused (issue 15)."""
    choice = kind.Choice("version", {"0": "old", "auto": "any"})
    assert choice.read(0) == choice.read("0") == "old"
    (words, _) = choice.schema()["anyOf"]
    assert words == {"enum": ["0", "auto", 0]}
    for value in (False, 0.0, 1):
        with pytest.raises(Invalid, match="unknown version"):
            choice.read(value)


def test_all_items_are_reported_at_once() -> None:
    """Each problem has the index of its item."""
    numbers = kind.ListOf(kind.Whole(0, 9))
    with pytest.raises(Invalid) as caught:
        numbers.read(["1", "x", 10])
    assert [(p.loc, p.shown()) for p in caught.value.problems] == [
        ((1,), "expected a whole number, got 'x'"),
        ((2,), "expected 9 or less, got 10"),
    ]
    assert kind.ListOf(kind.Whole(), frozenset).read([2, "1"]) == {1, 2}


def test_null_is_a_value_where_there_may_be_none() -> None:
    """``Maybe`` allows null for any kind."""
    maybe = kind.Maybe(kind.Flag())
    assert (maybe.read(None), maybe.read("TRUE"), maybe.read(False)) == (
        None,
        True,
        False,
    )
    assert (maybe.written(None), maybe.written(True)) == (None, True)


def test_object_of_a_class_can_not_be_written() -> None:
    """An object is read as it is, and its schema allows anything."""
    objects = kind.Instance(Kind)
    assert objects.read(objects) is objects
    assert objects.schema() == {}
    with pytest.raises(Invalid, match="expected an instance of Kind, got 5"):
        objects.read(5)


def test_number_may_be_what_the_worker_reports() -> None:
    """A word stands for a number that the worker reports."""
    end = kind.WholeOr("latest")
    assert [end.read(value) for value in ("latest", "7", -1)] == ["latest", 7, -1]
    with pytest.raises(Invalid, match="a whole number, or latest to ask the worker"):
        end.read("last")
    pattern = end.schema()["pattern"]
    assert isinstance(pattern, str)
    assert re.match(pattern, "latest")
    assert not re.match(pattern, "last")


def test_what_could_be_read_is_kept() -> None:
    """Rules can then judge the rest, so that all is reported at once (issue 23)."""
    numbers = kind.ListOf(kind.Whole())
    with pytest.raises(Invalid) as caught:
        numbers.read(["1", "x", "3"])
    assert caught.value.rest is None
    with pytest.raises(Invalid) as caught:
        kind.MapOf(kind.Whole()).read({"a": "1", "b": "x"})
    assert caught.value.rest == {"a": 1}
    assert str(caught.value) == "expected a whole number, got 'x'"


def test_number_has_no_more_digits_than_python_reads() -> None:
    """The time to read a number grows with the square of its digits (issue 23)."""
    longest = "9" * kind.MAX_DIGITS
    assert kind.Whole().read(longest) == int(longest)
    for whole in kind.Whole(), kind.WholeOr("latest"):
        with pytest.raises(Invalid, match="expected a number of up to 1000 digits"):
            whole.read(longest + "9")
