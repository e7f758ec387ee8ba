from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.stage.where import condition

ORDER = {
    "total": 3,
    "rate": 0.5,
    "currency": "EUR",
    "paid": True,
    "note": None,
    "lines": [{"sku": "a"}, {"sku": "b"}],
    "to": {"city": "Bern", "zip code": "3000"},
}


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("total >= 0", True),
        (" total > 3 ", False),
        ("0 < total <= 3", True),
        ("0 < total < 3", False),
        ("total == 3 and currency == 'EUR'", True),
        ("total < 0 or paid", True),
        ("total < 0 or rate > 1", False),
        ("not paid", False),
        ("not (total < 0)", True),
        ("note == null", True),
        ("note is null and missing is null and total is not null", True),
        ("total != 3", False),
        ("paid == true", True),
        ("paid == 1", False),
        ("paid == false", False),
        ("currency in ['EUR', 'USD']", True),
        ("currency not in ('EUR', 'USD')", False),
        ("'UR' in currency", True),
        ("'city' in to", True),
        ("total in lines", False),
        ("total in paid", False),
        ("1 in [true]", False),
        ("to.city == 'Bern'", True),
        ("to.city.street == null", True),
        ("to['zip code'] == '3000'", True),
        ("this['total'] == total", True),
        ("lines[1].sku == 'b'", True),
        ("lines[2] == null", True),
        ("lines['x'] == null", True),
        ("lines == [lines[0], lines[1]] and to == this.to", True),
        ("to == lines[0]", False),
        ("lines == [1]", False),
        ("total + 2 * rate - 1 == 3", True),
        ("total / 2 == 1.5 and total // 2 == 1 and total % 2 == 1", True),
        ("-total == -3", True),
        ("total / 0 == null", True),
        ("total + currency == null", True),
        ("paid + 1 == null", True),
        ("currency < 'F'", True),
        ("currency > 0", False),
        ("note < 1", False),
        ("note >= 0", False),
        ("paid > 0", False),
        ("total", False),
        ("1e308 * 1e308 > 1", True),
        ("true", True),
    ],
)
def test_condition(text: str, met: bool) -> None:
    """Missing members are null, and only ``true`` meets a condition (issue 26)."""
    assert condition(text)(ORDER) is met


@pytest.mark.parametrize(
    "text",
    [
        "\u00b5g == 5",
        "\u00e9 != 1 and this.\u00b5g == 5",
        "(\n  this  .\\\n \u00b5g\n) == 5",
        "(this. # a.b\n \u00b5g) == this['\u00b5g']",
        "\u03bcg == 6",
        "this.\u03bcg == 6",
    ],
)
def test_name_is_looked_up_as_written(text: str) -> None:
    """The micro sign is no Greek letter, though Python takes it for one (issue 26)."""
    assert condition(text)({"\u00b5g": 5, "\u03bcg": 6})


@pytest.mark.parametrize("document", [None, 3, "total", [1], True])
def test_no_object_has_no_members(document: object) -> None:
    """Their members are null; ``this`` is the document itself (issue 26)."""
    assert condition("total == null")(document)
    assert condition("this")(document) is (document is True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not a condition: invalid syntax"),
        ("total >=", "is not a condition: invalid syntax"),
        ("total = 1", "is not a condition: "),
        ("open('x')", "can't contain \"open('x')\""),
        ("total ** 9", "can't contain 'total ** 9'"),
        ("[x for x in this]", "can't contain '[x for x in this]'"),
        ("(x := 1)", "can't contain '(x := 1)'"),
        ("lambda: 1", "can't contain 'lambda: 1'"),
        ("this[total]", "can't contain 'this[total]'"),
        ("f'{total}' == 'x'", "can't contain \"f'{total}'\""),
        ("1j == total", "can't contain '1j'"),
        ("+total == 1", "can't contain '+total'"),
        ("-" * 65 + "1 < 0", "is not a condition: it is nested too deeply"),
        ("(" * 500, "is not a condition: "),
        ("a" * 1001, "is longer than 1,000 characters"),
    ],
)
def test_text_that_is_no_condition(text: str, reason: str) -> None:
    """A condition can't call anything, and none takes long to read (issue 26)."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared
        condition(text)
    assert str(caught.value).startswith(reason)


def test_parser_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of Python raise MemoryError for deep nesting (issue 26)."""

    def parse(text: str, *, mode: str) -> None:
        raise MemoryError

    monkeypatch.setattr("ast.parse", parse)
    with pytest.raises(ValueError, match="nested too deeply"):
        condition("a")


def test_large_numbers_take_no_time() -> None:
    """Beyond 256 bits, whole numbers are computed as floats, or are null (issue 26)."""
    product = "*".join(["a"] * 60)
    for number in (10**40, 10**80, 10**4000):
        assert condition(f"{product} != 1")({"a": number})
    assert condition("a + 1 - a == 1")({"a": 2**200})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from("abc"), inner),
    ),
    st.sampled_from(
        ["a < b", "a + b * c > 1", "a in b", "-a // b == c % a", "a.b[0] == c", "a - b"]
    ),
)
def test_never_fails_for_any_document(document: object, text: str) -> None:
    """A condition is met or not, whatever a worker writes (issue 26)."""
    assert condition(text)(document) in (True, False)
