from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import pytest

from etlstage.errors import ConfigError
from etlstage.settings.definition import (
    UNREAD,
    Definition,
    Place,
    Section,
    Setting,
    broken,
    judged,
    settings_of,
)
from etlstage.settings.kind import Noun, Whole
from etlstage.settings.problem import Invalid, Problem
from etlstage.settings.units import Count, Duration


@dataclass(frozen=True, kw_only=True, slots=True)
class Oven(Definition):
    """Something with settings."""

    label: ClassVar = ("oven",)
    heat: Count = 180
    """In degrees."""
    time: Duration | None = 60.0
    """How long."""
    fan: Annotated[bool, Place.READ] = False
    """Whether it blows."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Yield a problem if a heat is given with a fan."""
        if given.get("fan") is True and "heat" in given:
            yield broken(("heat",), "not with a fan")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kitchen(Definition):
    """Something with something with settings."""

    cook: str
    """Who cooks."""
    oven: Annotated[Oven, Place.READ | Place.WRITE] = field(default_factory=Oven)
    """What with."""
    style: Annotated[Literal["plain", "fine"], Noun("cuisine")] = "plain"
    """How."""
    from_: str | None = None
    """Since when."""


def test_fields_are_settings() -> None:
    """Settings have the names, defaults and places of the fields."""
    settings = settings_of(Kitchen)
    assert list(settings) == ["cook", "oven", "style", "from_"]
    assert settings["cook"].required
    assert settings["oven"].default == Oven()
    assert settings["oven"].place == Place.OPTION
    assert settings["style"].place == Place.ALL


def test_constructor_takes_what_people_write() -> None:
    """Text, numbers and mappings are read as in a file."""
    kitchen = Kitchen(cook="x", oven={"time": "5m", "heat": "200"})  # type: ignore[arg-type]
    assert kitchen.oven == Oven(time=300.0, heat=200)
    assert Oven(time=None).time is None


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"cook": 5}, "cook: expected text, got 5"),
        (
            {"cook": "x", "oven": 5},
            "oven: expected Oven, or a mapping of heat, time, fan, got 5",
        ),
        ({"cook": "x", "oven": {"heet": 1}}, "unknown key (did you mean 'heat'?)"),
        ({"cook": "x", "oven": {"heat": 0}}, "oven.heat: expected 1 or more, got 0"),
        ({"cook": "x", "style": "no"}, "style: unknown cuisine 'no', expected 'plain'"),
    ],
)
def test_constructor_names_what_it_wants(settings: dict[str, Any], text: str) -> None:
    """The error names the key, the value and what was expected."""
    with pytest.raises(ConfigError) as caught:
        Kitchen(**settings)
    assert text in str(caught.value)


def test_constructor_reports_all_that_is_wrong() -> None:
    """Rules are checked even if values are wrong; True is not a number."""
    with pytest.raises(ConfigError) as caught:
        Oven(heat=True, time=-1, fan=True)
    assert caught.value.problems == (
        "oven.heat: expected a whole number, got True",
        "oven.time: expected more than 0, got -1",
        "oven.heat: not with a fan",
    )


def problems_of(section: Section, value: object) -> list[tuple[str, str]]:
    """Return the place and the text of each problem."""
    with pytest.raises(Invalid) as caught:
        section.read(value)
    return [(".".join(map(str, p.loc)), p.shown()) for p in caught.value.problems]


def test_mapping_is_read_as_its_class() -> None:
    """A key in a file lacks the underscore at the end of its field's name."""
    section = Section.of(Kitchen)
    made = section.read({"cook": "x", "oven": {"fan": "true"}, "from": "now"})
    assert made == Kitchen(cook="x", oven=Oven(fan=True), from_="now")
    assert section.read(made) is made


def test_all_that_is_wrong_in_a_mapping_is_reported() -> None:
    """Missing and unknown keys are reported, too, with the place they belong to."""
    found = problems_of(Section.of(Kitchen), {"heat": 1, "oven": {"time": "x"}})
    assert found == [
        ("heat", "unknown key (did you mean 'oven.heat'?)"),
        ("oven.time", "expected a duration such as 500ms, 30s or 2m, got 'x'"),
        ("cook", "required key is missing"),
    ]
    assert problems_of(Section.of(Oven), []) == [
        ("", "expected a mapping, got an empty list")
    ]


@pytest.mark.parametrize(
    ("value", "keys"),
    [({"cok": "I"}, ["cok"]), ({"ovne": {}}, ["ovne", "cook"]), ({}, ["cook"])],
)
def test_misspelt_key_is_one_mistake(value: dict[str, Any], keys: list[str]) -> None:
    """The key that was meant is not reported as missing as well (issue 11)."""
    with pytest.raises(Invalid) as caught:
        Section.of(Kitchen).read(value)
    assert [problem.loc for problem in caught.value.problems] == [(k,) for k in keys]


def test_place_decides_which_keys_there_are() -> None:
    """The keys of an inner mapping depend on the place, too."""
    assert list(Section.of(Oven, Place.WRITE).keys) == ["heat", "time"]
    found = problems_of(
        Section.of(Kitchen, Place.WRITE), {"cook": "x", "oven": {"fan": "true"}}
    )
    assert found == [("oven.fan", "unknown key, expected one of heat, time")]


def test_rules_know_that_a_value_could_not_be_read() -> None:
    """Rules are given ``UNREAD`` as such a value."""
    seen: list[object] = []

    def rules(given: Mapping[str, Any]) -> Iterable[Problem]:
        seen.append(given["heat"])
        return ()

    problems_of(Section(settings_of(Oven), rules=rules), {"heat": "x"})
    assert seen == [UNREAD]


def test_errors_of_what_a_mapping_stands_for_are_its_own() -> None:
    """They may quote a value that must not be shown, so they can be hidden."""

    def make(given: dict[str, Any]) -> object:
        raise ConfigError(["no", "never"])

    with pytest.raises(Invalid) as caught:
        Section(settings_of(Oven), make).read({})
    assert [p.shown() for p in caught.value.problems] == ["no", "never"]
    assert "not shown" in caught.value.problems[0].shown(instead="hidden")


@pytest.mark.parametrize(
    ("count", "text"),
    [(21, "unknown key"), (22, "unknown key, and 1 more"), (1000, "and 979 more")],
)
def test_many_unknown_keys_are_reported_in_one_line(count: int, text: str) -> None:
    """Looking for a suggestion for each key would take too long (issue 23)."""
    section = Section({})
    with pytest.raises(Invalid) as caught:
        section.read({f"key{i}": 1 for i in range(count)})
    assert len(caught.value.problems) == 21
    assert caught.value.problems[-1].text.endswith(text)


def test_key_that_has_moved() -> None:
    """Its new place is reported (issue 23)."""
    section = Section({}, moved={"old": "is now new.{key}"})
    with pytest.raises(Invalid) as caught:
        section.read({"old": 1})
    assert [problem.text for problem in caught.value.problems] == ["is now new.old"]


def test_rest_of_a_mapping_that_stands_for_something() -> None:
    """The object is made despite unknown keys, but not without a value (issue 23)."""
    keys = {name: Setting(name, Whole(), 0) for name in "ab"}

    def make(given: dict[str, Any]) -> int:
        return int(given["b"])

    with pytest.raises(Invalid) as caught:
        Section(keys, make).read({"a": "1", "b": "2", "c": "3"})
    assert caught.value.rest == 2
    for broken_ in ({"a": "x", "b": "2"}, {"a": "1", "c": "2"}):
        with pytest.raises(Invalid) as caught:
            Section(keys, make).read(broken_)
        assert caught.value.rest is None


def test_rule_ends_where_a_value_could_not_be_read() -> None:
    """Problems found before are kept; a misspelt attribute is still a bug."""
    with pytest.raises(Invalid) as caught:
        Section.of(Oven).read({"heat": "much", "time": "5s", "tiem": 1})
    oven: Any = caught.value.rest

    def rule(names: str) -> Iterator[Problem]:
        yield broken((), f"{oven.time:g}")
        yield broken((), str([getattr(oven, name) for name in names.split()]))

    assert [problem.text for problem in judged(rule("time fan"))] == [
        "5",
        "[5.0, False]",
    ]
    assert [problem.text for problem in judged(rule("time heat"))] == ["5"]
    with pytest.raises(AttributeError, match="'Oven' object has no attribute 'tiem'"):
        list(judged(rule("tiem")))


def test_settings_as_they_are_written() -> None:
    """``plain()`` has all of them as JSON, ``shown()`` has one in a line."""
    oven = Oven(heat=200, time=None)
    assert oven.plain() == {"heat": 200, "time": None, "fan": False}
    assert Oven().shown("time") == "1m"
    assert oven.shown("time") == "never"
