from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import jsonschema

from etlstage.settings.definition import Definition, Section, Setting
from etlstage.settings.kind import Flag, ListOf, Maybe, Schema
from etlstage.settings.schema import documentation, json_schema
from etlstage.settings.units import (
    Count,
    Duration,
    Location,
    Mask,
    Share,
    Size,
    SizeOrZero,
    Variables,
    Window,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lid(Definition):
    """Something small, which has a short form."""

    size: Count = 3
    """How large
    it is."""

    @classmethod
    def unfold(cls, value: Any) -> Any:  # noqa: ANN401 - whatever was written
        """Return a number as the size."""
        return {"size": value} if isinstance(value, int) else value

    @classmethod
    def short_forms(cls) -> list[Schema]:
        """Describe the number."""
        return [{"type": "integer"}]

    def __str__(self) -> str:
        return str(self.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pot(Definition):
    """Something with settings."""

    more: ClassVar = {"minProperties": 1}
    name: str
    """As it is called."""
    lid: Lid = field(default_factory=Lid)
    """On top."""
    lids: Annotated[tuple[Lid, ...], ListOf(Section.of(Lid))] = ()
    """On top, too."""
    spare: Annotated[Lid | None, Maybe(Section.of(Lid))] = None
    """In the cupboard."""
    boil: Duration = 90.0
    """In ``seconds``."""


SCHEMA = json_schema(Section.of(Pot))


def test_keys_have_words_and_defaults() -> None:
    """Defaults are shown as people write them; a required key has none."""
    keys = SCHEMA["properties"]
    assert [key["description"] for key in keys.values()] == [
        "As it is called.",
        "On top.",
        "On top, too.",
        "In the cupboard.",
        "In seconds.",
    ]
    assert {name: key.get("default", "-") for name, key in keys.items()} == {
        "name": "-",
        "lid": "3",
        "lids": [],
        "spare": None,
        "boil": "90s",
    }
    assert SCHEMA["required"] == ["name"]
    assert SCHEMA["additionalProperties"] is False
    assert SCHEMA["minProperties"] == 1


def test_mappings_are_described_wherever_they_stand() -> None:
    """In lists, as optional values, and with their short forms."""
    valid = jsonschema.Draft202012Validator(SCHEMA).is_valid
    assert valid({"name": "x", "lid": 3, "lids": [{"size": 1}], "spare": None})
    assert not valid({"name": "x", "lid": {"sise": 1}})
    assert not valid({"name": "x", "lids": {"size": 1}})
    assert not valid({"name": "x", "spare": 1.5})


def test_words_may_be_given_beside_a_class() -> None:
    """A setting outside of a class has its text in ``doc``."""
    setting = Setting("x", Flag(), default=True, doc="Whether.")
    made = json_schema(Section({"x": setting}))["properties"]["x"]
    assert (made["description"], made["default"]) == ("Whether.", True)


def test_field_without_documentation_has_no_words() -> None:
    """A missing docstring is not an error."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Silent(Definition):
        x: int = 1

    (setting,) = Section.of(Silent).keys.values()
    assert documentation(setting) == ""


def test_numbers_and_texts_are_both_described() -> None:
    """The schema allows what the kind reads, and references to later values."""
    kinds: list[tuple[Any, list[object], list[object]]] = [
        (Duration, ["5m", 5, 0.5, "${T}"], ["5 days", 0, None]),
        (Size, ["1MiB", 5, ".5kB"], ["1mib", 0, True]),
        (SizeOrZero, ["0", 0], [-1]),
        (Share, ["1%"], [0.01, "1"]),
        (Mask, ["022", 22, "0o77"], ["888", 0.5]),
        (Window, ["auto", 3], ["lots", 0]),
        (Variables, [{"A": "b", "C": 1.1, "D": True}], [{"A": None}, []]),
        (Location, ["a/b", 1, "${P}"], [""]),
        (Count, [1, "1"], [0, "x", 1.5]),
    ]
    for kind, right, wrong in kinds:
        (reader,) = (note for note in kind.__metadata__ if hasattr(note, "schema"))
        valid = jsonschema.Draft202012Validator(reader.schema()).is_valid
        assert all(map(valid, right)), kind
        assert not any(map(valid, wrong)), kind
