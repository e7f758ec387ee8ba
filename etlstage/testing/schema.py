"""
Documents as a JSON Schema describes them, drawn by Hypothesis.

The keywords of types, members, items, bounds and choices are built in; what others ask,
such as ``not`` or ``dependentRequired``, the documents that are drawn are sifted for.
hypothesis-jsonschema knows more, but not the versions of Hypothesis of today.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, Final

from hypothesis import strategies as st

from etlstage.errors import ConfigError
from etlstage.stage import ReplyContract
from etlstage.stage.contract import Checker

__all__ = ("documents",)

_TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
_MOST: Final = 4  # items or members more than there must be
_TEXT: Final = st.text(st.characters(codec="utf-8"), max_size=8)
_ANY: Final[st.SearchStrategy[Any]] = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3)
    ),
    max_leaves=5,
)


def documents(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """
    Draw documents that a JSON Schema allows.

    Raises:
        ConfigError: If it is none, refers to what is not in it, or can't be checked.

    """
    checker = Checker(ReplyContract(schema=schema))
    drawn = _Described(schema).by(schema)
    return drawn.filter(checker.allows)


class _Described:
    """What draws by the parts of one schema."""

    def __init__(self, whole: Mapping[str, Any]) -> None:
        self._whole = whole
        self._known: dict[str, st.SearchStrategy[Any]] = {}

    def by(self, schema: Any) -> st.SearchStrategy[Any]:  # noqa: ANN401 - any JSON
        """Return what draws by a part of it."""
        if not isinstance(schema, Mapping):
            return _ANY if schema else st.nothing()
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if "$ref" in schema:
            return self._referred(schema["$ref"])
        for key in ("anyOf", "oneOf"):
            if key in schema:
                rest = {k: value for k, value in schema.items() if k != key}
                return st.one_of([self.by(_merged(rest, one)) for one in schema[key]])
        if "allOf" in schema:
            rest = {k: value for k, value in schema.items() if k != "allOf"}
            return self.by(reduce(_merged, schema["allOf"], rest))
        types = schema.get("type", _guessed(schema))
        names = [types] if isinstance(types, str) else types
        return st.one_of([getattr(self, f"_{name}")(schema) for name in names])

    def _referred(self, ref: str) -> st.SearchStrategy[Any]:
        if ref not in self._known:
            at: Any = self._whole
            try:
                assert ref[:1] == "#"
                for step in filter(None, ref[1:].split("/")):
                    at = at[step.replace("~1", "/").replace("~0", "~")]
            except (AssertionError, KeyError, TypeError):
                raise ConfigError(
                    f"the schema refers to {ref}, which is not in it"
                ) from None
            # A schema may hold itself.
            self._known[ref] = st.deferred(lambda: self.by(at))
        return self._known[ref]

    def _null(self, _: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        return st.none()

    def _boolean(self, _: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        return st.booleans()

    def _integer(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        step = schema.get("multipleOf", 1)
        return st.integers(*_bounds(schema, step, int)).map(lambda n: n * step)

    def _number(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        if "multipleOf" in schema:
            return self._integer(schema)
        low, high = _bounds(schema, 1, float)
        return st.floats(low, high, allow_nan=False, allow_infinity=False)

    def _string(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        if "pattern" in schema:
            return st.from_regex(schema["pattern"])
        least = schema.get("minLength", 0)
        most = schema.get("maxLength", least + 8)
        return st.text(st.characters(codec="utf-8"), min_size=least, max_size=most)

    def _array(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        first = [self.by(item) for item in schema.get("prefixItems", ())]
        least = max(0, schema.get("minItems", 0) - len(first))
        most = schema.get("maxItems", len(first) + least + _MOST) - len(first)
        rest = st.lists(
            self.by(schema.get("items", True)), min_size=least, max_size=most
        )
        return st.tuples(st.tuples(*first), rest).map(lambda two: [*two[0], *two[1]])

    def _object(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        named = {n: self.by(one) for n, one in schema.get("properties", {}).items()}
        required = set(schema.get("required", ()))
        others = self.by(schema.get("additionalProperties", True))
        must = {name: named.get(name, others) for name in sorted(required)}
        may = {name: one for name, one in named.items() if name not in required}
        fixed = st.fixed_dictionaries(must, optional=may)
        least = max(0, schema.get("minProperties", 0) - len(must))
        more = st.dictionaries(_TEXT, others, min_size=0, max_size=least + 2)
        if schema.get("additionalProperties", True) is False:
            return fixed
        return st.tuples(more, fixed).map(lambda two: {**two[0], **two[1]})


def _guessed(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types that keywords are about, or all."""
    if {"properties", "required", "additionalProperties"} & schema.keys():
        return ("object",)
    if {"items", "prefixItems"} & schema.keys():
        return ("array",)
    return _TYPES


def _merged(first: Any, second: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return what two schemas ask together, as far as that is expressed by their keys."""
    if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
        return second if first is True or isinstance(first, Mapping) else first
    made = {**first, **second}
    if "properties" in first and "properties" in second:
        made["properties"] = {**first["properties"], **second["properties"]}
    if "required" in first and "required" in second:
        made["required"] = [*first["required"], *second["required"]]
    return made


def _bounds(
    schema: Mapping[str, Any], step: float, kind: type[int | float]
) -> tuple[Any, Any]:
    """Return the least and the greatest multiple of a step, None where there is none."""
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    found = [None if bound is None else bound / step for bound in (low, high)]
    if kind is float:
        return found[0], found[1]
    # Rounded inwards; an exclusive bound is sifted out.
    low, high = found
    return (
        None if low is None else -int(-low // 1),
        None if high is None else int(high // 1),
    )
