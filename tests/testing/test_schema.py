"""Documents as a JSON Schema describes them."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, find, given, settings

from etlstage.errors import ConfigError
from etlstage.testing.strategies import documents, schema_messages

TREE = {"type": "object", "properties": {"left": {"$ref": "#"}}, "required": ["n"]}
SCHEMAS: list[dict[str, Any]] = [
    {},
    {"const": 3},
    {"enum": ["a", None]},
    {"type": ["integer", "null"], "minimum": 3, "exclusiveMaximum": 9},
    {"type": "integer", "multipleOf": 5, "maximum": 12},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "multipleOf": 0.5, "minimum": 0.6},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "pattern": "^[a-c]+$"},
    {"type": "boolean"},
    {"prefixItems": [{"const": 1}], "items": {"type": "null"}, "minItems": 2},
    {"type": "array", "maxItems": 2, "items": {"type": "integer"}},
    {"properties": {"a": False, "b": {"type": "null"}}, "required": ["c"]},
    {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1},
    {"type": "object", "properties": {"x": {}}, "additionalProperties": False},
    TREE,
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}},
    {"anyOf": [{"minimum": 0}, {"maximum": -5}], "type": "integer"},
    {"oneOf": [True, {"const": 1}], "type": "string"},
    {
        "allOf": [
            {"properties": {"a": {"const": 1}}, "required": ["a"]},
            {"properties": {"b": {"const": 2}}, "required": ["b"]},
            True,
        ]
    },
    {"not": {"type": "string"}},
    {"type": "array", "prefixItems": [{"type": "null"}, {}], "items": False},
    {"type": "array", "prefixItems": [{}, {}], "maxItems": 1},
    {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 0}, {"const": 2}]},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_documents_are_as_their_schema_has_it(schema: dict[str, Any]) -> None:
    """Some are drawn, and all of them are valid (issue 26)."""

    @settings(
        max_examples=15,
        deadline=None,
        database=None,
        suppress_health_check=[*HealthCheck],
    )
    @given(documents(schema))
    def allowed(document: object) -> None:
        jsonschema.validate(document, schema)

    allowed()


def test_schema_that_holds_itself() -> None:
    """Its documents are nested to some depth (issue 26)."""
    tree = find(documents(TREE), lambda found: "left" in found)
    assert "n" in tree["left"]


def test_schema_that_refers_to_another() -> None:
    """It is refused, and nothing is fetched (issue 26)."""
    for ref in ("other.json", "#/$defs/none"):
        with pytest.raises(ConfigError, match="which is not a schema in it"):
            documents({"properties": {"a": {"$ref": ref}}})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 1, "maximum": 0},
        {"type": "number", "minimum": 1, "maximum": 0},
        {"type": "string", "minLength": 2, "maxLength": 1},
        {"type": "array", "minItems": 2, "maxItems": 1},
        {"type": "array", "minItems": 1, "items": False},
    ],
    ids=str,
)
def test_schema_that_allows_nothing(schema: dict[str, Any]) -> None:
    """It is refused before anything is drawn (issue 26)."""
    with pytest.raises(ConfigError, match="the schema allows no document"):
        documents(schema)


def test_lone_surrogate_is_escaped() -> None:
    """UTF-8 has no bytes for it (issue 26)."""
    schema = {"type": "string", "const": "\ud800"}
    assert find(schema_messages(schema), lambda _: True) == b'"\\ud800"'
