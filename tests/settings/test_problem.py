from __future__ import annotations

import pytest

from etlstage.settings import kind
from etlstage.settings.problem import Invalid, Loc, dotted


def test_value_need_not_be_shown() -> None:
    """The value may be a secret, and a suggestion would reveal it."""
    with pytest.raises(Invalid) as caught:
        kind.Choice("fruit", {"apple": 1}).read("aple")
    (problem,) = caught.value.problems
    assert problem.shown(instead="hidden") == "unknown fruit, expected 'apple'"
    with pytest.raises(Invalid) as caught:
        kind.Flag().read("maybe")
    (problem,) = caught.value.problems
    assert problem.shown(instead="hidden") == "expected true or false, got hidden"


@pytest.mark.parametrize(
    ("loc", "text"),
    [
        ((), ""),
        (("a", 0, "b-c"), "a[0].b-c"),
        (("env", "A="), "env['A=']"),
        (("x" * 61 + "=",), "['" + "x" * 30 + "..." + "x" * 14 + "=']"),
    ],
)
def test_location_as_users_read_it(loc: Loc, text: str) -> None:
    """Keys that are not plain names are quoted, and cut if they are long."""
    assert dotted(loc) == text
