"""What a stage promises about its replies, and the check of replies against it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from itertools import chain
from json import JSONDecoder
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, NamedTuple, TypeAlias

from etlstage.errors import ConfigError
from etlstage.messages import Groups, counted
from etlstage.settings.definition import Definition
from etlstage.settings.kind import FOLDER, Kind, Schema, Text
from etlstage.settings.problem import refused, unexpected
from etlstage.settings.units import CountOrZero, Duration
from etlstage.stage.where import condition

__all__ = ("PROMISES", "Broken", "Checker", "ReplyContract", "is_json")

PROMISES: Final = ("outputs", "json", "schema", "where", "max_seconds")
"""The promises that are checked for each reply, in this order; counted by name."""

_NOT_JSON: Final = object()


class _JsonSchema(Kind):
    """A JSON Schema, or the path of its file."""

    def read(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, str | Path):
            return FOLDER.read(value)
        raise unexpected("the path of a JSON Schema, or the schema", value)

    def written(self, value: Any) -> object:
        return str(value) if isinstance(value, Path) else value

    def schema(self) -> Schema:
        return {"type": ["string", "object"]}


class _Condition(Text):
    """Text that is a condition."""

    def read(self, value: Any) -> str:
        text = super().read(value)
        try:
            condition(text)
        except ValueError as error:
            raise refused(str(error)) from None
        return text


JsonSchema = Annotated[Mapping[str, Any] | Path, _JsonSchema()]
"""A JSON Schema, or the path of its file."""
Where = Annotated[str, _Condition()]
"""A condition, see :mod:`etlstage.stage.where`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyContract(Definition):
    """What a stage promises of its replies; a reply that breaks it is a mismatch."""

    label: ClassVar[tuple[str, ...]] = ("expect",)
    outputs: CountOrZero | None = None
    """Number of outputs of each message."""
    json: bool = False
    """Whether each output is a JSON document."""
    schema: JsonSchema | None = None
    """JSON Schema of each output, or the path of its file."""
    where: Where | None = None
    """Condition that each output, a JSON object, must meet, as in ``total >= 0``. Names
    are its members; there are comparisons, and, or, not, arithmetic, in [...], null."""
    max_seconds: Duration | None = None
    """Maximum time for a reply, once its turn has come; for a worker's first reply this
    includes its start, unless the worker reports when it is ready."""
    stateless: bool = False
    """Whether the outputs of a message do not depend on earlier messages; only checked
    in tests."""
    order_free: bool = False
    """Whether the outputs of messages do not depend on their order; only checked in
    tests."""

    @property
    def given(self) -> bool:
        """Whether there is anything to check in a run."""
        return bool(self.promised)

    @property
    def promised(self) -> tuple[str, ...]:
        """The :data:`PROMISES` that the stage makes."""
        made = ((name, getattr(self, name)) for name in PROMISES)
        return tuple(n for n, value in made if value is not None and value is not False)

    @property
    def empty(self) -> bool:
        """Whether nothing is promised at all."""
        return not (self.promised or self.stateless or self.order_free)


class Broken(NamedTuple):
    """The promise that a reply breaks."""

    promise: str
    """One of :data:`PROMISES`."""
    text: str
    """The reason, without the reply's content."""

    def __str__(self) -> str:
        return f"breaks expect.{self.promise}: {self.text}"


_Check: TypeAlias = Callable[[Any], str]
"""Returns what is wrong with a document; an empty text if nothing is."""


class Checker:
    """
    Compares replies with a contract.

    Args:
        contract: The contract; its schema must be a mapping, not a path.

    Raises:
        ConfigError: If the schema is invalid, or its validator is not installed.

    """

    def __init__(self, contract: ReplyContract) -> None:
        self._outputs = contract.outputs
        self._seconds = contract.max_seconds
        self._is_json = contract.json
        self._loads = _loader()
        self._checks: list[tuple[str, _Check]] = []
        if contract.schema is not None:
            assert isinstance(contract.schema, Mapping), "a path is read before"
            self._checks.append(("schema", _schema_check(contract.schema)))
        if contract.where is not None:
            self._checks.append(("where", _where_check(contract.where)))
        self._of_json = "json" if contract.json else ""
        self.found: Counter[str] = Counter()
        """How many replies broke each promise, since this was last emptied."""

    def __call__(self, outputs: Sequence[bytes], seconds: float = 0.0) -> Broken | None:
        """Return the first promise that the reply to a message breaks, or None."""
        found, expected = len(outputs), self._outputs
        if expected is not None and found != expected:
            return Broken("outputs", f"{counted(found, 'output')}, not {expected}")
        if self._checks:
            for number, output in enumerate(outputs, 1):
                if (flaw := self._flaw(output)) is not None:
                    promise, text = flaw
                    return Broken(promise, f"output {number} {text}")
        elif self._is_json:
            for number, output in enumerate(outputs, 1):
                if not is_json(output):
                    return Broken("json", f"output {number} is not a JSON document")
        if self.is_slow(seconds):
            return Broken(
                "max_seconds",
                f"took {seconds:.3g} s, expected no more than {self._seconds:g} s",
            )
        return None

    def passes(self, groups: Groups) -> bool:
        """
        Return whether no reply breaks a promise other than ``max_seconds``.

        It may return False although all replies are right: then check each of them.
        Checking all at once takes a third of the time.
        """
        if self._checks:
            return False
        if self._outputs is not None and set(map(len, groups)) != {self._outputs}:
            return False
        if not self._is_json:
            return True
        try:
            deque(map(self._loads, chain.from_iterable(groups)), maxlen=0)
        except (ValueError, RecursionError):
            return False
        return True

    def allows(self, document: object) -> bool:
        """Return whether a document meets the schema and the condition."""
        return not any(_found(check, document) for _, check in self._checks)

    def is_slow(self, seconds: float) -> bool:
        """Return whether a reply took longer than it may."""
        return self._seconds is not None and seconds > self._seconds

    def _flaw(self, output: bytes) -> tuple[str, str] | None:
        """Return the promise that the value of an output breaks, and how, or None."""
        document = _parsed(output)
        if document is _NOT_JSON:
            return self._of_json or self._checks[0][0], "is not a JSON document"
        for promise, check in self._checks:
            if text := _found(check, document):
                return promise, text
        return None


def _found(check: _Check, document: Any) -> str:
    try:
        return check(document)
    except RecursionError:
        return "is nested too deeply to be checked"
    except OverflowError:
        return "has a number too large to be checked"


def _where_check(text: str) -> _Check:
    meets = condition(text)
    return lambda document: "" if meets(document) else f"does not meet {text}"


def _schema_check(schema: Mapping[str, Any]) -> _Check:
    try:
        jsonschema = import_module("jsonschema")
        # Nothing is fetched: references resolve within the schema, or to standard ones.
        registry = import_module("jsonschema_specifications").REGISTRY
    except ImportError:
        raise ConfigError(
            "expect.schema needs the package jsonschema, which is not installed: pip"
            " install 'etlstage[contract]'"
        ) from None
    kind = jsonschema.validators.validator_for(
        schema, default=jsonschema.Draft202012Validator
    )
    _examine(kind, schema)
    unresolvable = import_module("referencing.exceptions").Unresolvable
    _examine_references(kind, schema, registry)
    validator = kind(schema, registry=registry)
    # A type of draft 3 may be a schema, which best_match() can't compare.
    is_draft_3 = kind is jsonschema.Draft3Validator
    best = next if is_draft_3 else jsonschema.exceptions.best_match

    def check(document: Any) -> str:
        try:
            if validator.is_valid(document):
                return ""
            error = best(validator.iter_errors(document))
        except unresolvable as missing:
            return (
                f"can't be checked: the schema refers to {missing.ref!r}, which is not"
                " a schema in it"
            )
        where = "".join(f"/{part}" for part in error.absolute_path)
        return f"does not meet {error.validator}{' at ' if where else ''}{where}"

    return check


def _examine(kind: Any, schema: Any) -> None:
    """Raise ConfigError if a schema is invalid; its references are not followed."""
    try:
        kind.check_schema(schema)
    except import_module("jsonschema").SchemaError as error:
        raise ConfigError(
            f"expect.schema is not a JSON Schema: {_brief(error)}"
        ) from None


def _examine_references(kind: Any, schema: Any, registry: Any) -> None:
    """Raise ConfigError if a reference that a document may reach leads nowhere."""
    kind_of = import_module("jsonschema.validators").validator_for
    resolver = registry.resolver_with_root(_resource(kind, schema))
    left, seen = [(resolver, kind, schema)], {id(schema)}
    leads: dict[int, list[int]] = {}  # to schemas that every document must meet, too
    named: dict[int, str] = {}
    while left:
        resolver, kind, schema = left.pop()
        parts = [*_parts(kind, schema)]
        found = [
            (resolver.in_subresource(_resource(kind, part)), part) for _, part in parts
        ]
        leads[id(schema)] = [id(part) for key, part in parts if key in _ALWAYS]
        for key, reference in _references(kind, schema):
            to = _target(resolver, reference)
            if id(to.contents) not in seen:
                # It may be below an unknown keyword, where nothing was examined.
                _examine(kind_of(to.contents, default=kind), to.contents)
            if isinstance(to.contents, Mapping):
                found.append((to.resolver, to.contents))
            if key == "$ref":
                leads[id(schema)].append(id(to.contents))
                named[id(schema)] = reference
        for resolver, part in found:
            if id(part) not in seen:
                seen.add(id(part))
                if (its := kind_of(part, default=kind)) is not kind:
                    _examine(its, part)
                left.append((resolver, its, part))
    try:
        TopologicalSorter(leads).prepare()
    except CycleError as error:
        _, circle = error.args
        *_, reference = (named[at] for at in named if at in circle)
        raise ConfigError(
            f"expect.schema refers to {reference!r}, which leads back to this reference"
            " without end; refer to another schema"
        ) from None


def _target(resolver: Any, reference: str) -> Any:
    """Return what a reference resolves to, a schema; raise ConfigError if it can't."""
    # The library fails with errors of many types where a schema is not as it expects.
    with suppress(Exception):
        to = resolver.lookup(reference)
        if isinstance(to.contents, Mapping | bool):
            return to
    raise ConfigError(
        f"expect.schema refers to {reference!r}, which is not a schema in it;"
        " other documents are not read"
    )


def _resource(kind: Any, schema: Any) -> Any:
    dialects = import_module("referencing.jsonschema")
    dialect = dialects.specification_with(kind.ID_OF(kind.META_SCHEMA))
    return dialect.create_resource(schema)


_OF_MEMBERS: Final = {
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "patternProperties",
    "properties",
}
"""Keywords whose value has a schema, or something else, for each of its members."""


_ALWAYS: Final = {"allOf", "extends", "if", "not", "oneOf"}
"""Keywords whose schemas are all checked against any document that the schema allows."""


def _parts(
    kind: Any, schema: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """
    Yield the schemas in a schema that apply with it, without those below them.

    Each has its keyword with it.
    """
    # Until draft 7, a reference replaces all that is beside it.
    if "$ref" in schema and "dependentSchemas" not in kind.VALIDATORS:
        return
    applied = kind.VALIDATORS.keys() - {"const", "enum"}
    if "if" in applied & schema.keys():
        applied |= {"then", "else"}
    for key, value in schema.items():
        if key not in applied:
            continue
        if key in _OF_MEMBERS:
            value = list(value.values())
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Mapping):
                yield key, part


def _references(kind: Any, schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the references of a schema with their keywords, without those below it."""
    for key in ("$ref", "$dynamicRef"):
        if key in kind.VALIDATORS and key in schema:
            yield key, schema[key]


def _brief(error: Any) -> str:
    where = "/".join(map(str, error.absolute_path)) or "top level"
    return f"{where}: {error.message}"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not in JSON")


# Python also reads NaN and Infinity, which are not JSON.
_JSON: Final = JSONDecoder(parse_constant=_refuse)


def _parsed(output: bytes) -> Any:
    try:
        return _load(output)
    except (ValueError, RecursionError):
        return _NOT_JSON


def is_json(output: bytes) -> bool:
    """Return whether an output is a JSON document."""
    return _parsed(output) is not _NOT_JSON


def _load(output: bytes) -> Any:
    return _JSON.decode(bytes(output).decode())


def _loader() -> Callable[[bytes], Any]:
    """Return a parser that accepts nothing but JSON, though perhaps not all of it."""
    try:
        return import_module("orjson").loads  # type: ignore[no-any-return]
    except ImportError:
        return _load
