from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.settings.definition import settings_of
from etlstage.stage import ReplyContract, Stage
from etlstage.stage.contract import Checker


@pytest.mark.parametrize(
    ("contract", "outputs", "flaw"),
    [
        (ReplyContract(), [b"x", b"y"], ""),
        (ReplyContract(outputs=1), [b"x"], ""),
        (ReplyContract(outputs=0), [], ""),
        (ReplyContract(outputs=1), [], "breaks expect.outputs: 0 outputs, not 1"),
        (
            ReplyContract(outputs=2, json=True),
            [b"x"],
            "breaks expect.outputs: 1 output, not 2",
        ),
        (ReplyContract(json=True), [], ""),
        (ReplyContract(json=True), [b'{"a": [1, null]}', b" 1"], ""),
        (
            ReplyContract(json=True),
            [b"1", b"{"],
            "breaks expect.json: output 2 is not a JSON document",
        ),
        *(
            (
                ReplyContract(json=True),
                [text],
                "breaks expect.json: output 1 is not a JSON document",
            )
            for text in (b"", b"NaN", b"[Infinity]", b"\xff", b"1 2", b"[" * 10**5)
        ),
    ],
)
def test_flaw(contract: ReplyContract, outputs: list[bytes], flaw: str) -> None:
    """The text names the broken promise, and quotes nothing of the reply (issue 26)."""
    found = Checker(contract)(outputs)
    assert ("" if found is None else str(found)) == flaw
    assert contract.given == (contract != ReplyContract())


SCHEMA = {
    "properties": {"n": {"$ref": "#/$defs/count"}},
    "$defs": {"count": {"minimum": 0}},
}


@pytest.mark.parametrize(
    ("contract", "outputs", "flaw"),
    [
        (ReplyContract(where="n >= 0"), [b'{"n": 0}'], ""),
        (
            ReplyContract(where="n >= 0"),
            [b'{"n": 0}', b"{}"],
            "breaks expect.where: output 2 does not meet n >= 0",
        ),
        (
            ReplyContract(where="n >= 0"),
            [b"n"],
            "breaks expect.where: output 1 is not a JSON document",
        ),
        (
            ReplyContract(where="n >= 0", json=True),
            [b"n"],
            "breaks expect.json: output 1 is not a JSON document",
        ),
        (ReplyContract(schema=SCHEMA), [b'{"n": 1}', b"[]"], ""),
        (
            ReplyContract(schema=SCHEMA, where="n > 0"),
            [b'{"n": -1}'],
            "breaks expect.schema: output 1 does not meet minimum at /n",
        ),
        (
            ReplyContract(schema={"type": "object"}),
            [b"[]"],
            "breaks expect.schema: output 1 does not meet type",
        ),
        (
            ReplyContract(schema={"type": "object"}),
            [b"-"],
            "breaks expect.schema: output 1 is not a JSON document",
        ),
    ],
)
def test_flaw_of_the_content_of_an_output(
    contract: ReplyContract, outputs: list[bytes], flaw: str
) -> None:
    """Each output must meet the schema and the condition (issue 26)."""
    found = Checker(contract)(outputs)
    assert ("" if found is None else str(found)) == flaw


def test_type_that_is_a_schema() -> None:
    """Draft 3 allows that in a list of types (issue 26)."""
    schema = {"$schema": DRAFT_3, "type": ["string", {"type": "object"}]}
    checker = Checker(ReplyContract(schema=schema))
    assert checker([b"{}", b'""']) is None
    assert str(checker([b"1"])) == "breaks expect.schema: output 1 does not meet type"


def test_output_too_deep_to_be_checked() -> None:
    """Such an output breaks the promise; the run goes on (issue 26)."""
    checker = Checker(ReplyContract(schema={"items": {"$ref": "#"}}))
    assert str(checker([b"[" * 500 + b"]" * 500])) == (
        "breaks expect.schema: output 1 is nested too deeply to be checked"
    )


def test_number_too_large_to_be_checked() -> None:
    """Such an output breaks the promise; the run goes on (issue 26)."""
    checker = Checker(ReplyContract(schema={"multipleOf": 0.1}))
    assert str(checker([b"1" + b"0" * 400])) == (
        "breaks expect.schema: output 1 has a number too large to be checked"
    )
    assert not checker.allows(10**400)


def test_document_too_deep_to_be_checked() -> None:
    """It does not meet the condition (issue 26)."""
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    assert not Checker(ReplyContract(where="this == [this]")).allows(deep)


def test_document_that_is_allowed() -> None:
    """A document that is already parsed can be checked without its text (issue 26)."""
    checker = Checker(ReplyContract(schema=SCHEMA, where="n < 9"))
    allowed = [checker.allows({"n": n}) for n in (-1, 0, 9)]
    assert allowed == [False, True, False]


def test_slow_reply() -> None:
    """Slowness is reported last: the content of a reply matters more (issue 26)."""
    checker = Checker(ReplyContract(outputs=1, max_seconds=0.5))
    assert checker([b""], 0.5) is None
    said = "breaks expect.max_seconds: took 2 s, expected no more than 0.5 s"
    assert str(checker([b""], 2)) == said
    found = checker([], 2)
    assert found is not None
    assert found.promise == "outputs"
    assert not Checker(ReplyContract(outputs=1)).is_slow(9)


@pytest.mark.parametrize("installed", [True, False])
def test_replies_that_pass_at_once(
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,
) -> None:
    """Text that the faster parser refuses is checked once more (issue 26)."""

    def loads(text: bytes) -> object:
        if text != b"{}":
            raise ValueError
        return {}

    found = SimpleNamespace(loads=loads) if installed else None
    monkeypatch.setitem(sys.modules, "orjson", found)
    checker = Checker(ReplyContract(json=True, outputs=1))
    surrogate = b'"\\ud800"'
    assert checker.passes([(b"{}",), (b"{}",)])
    assert checker.passes([(surrogate,)]) is not installed
    assert checker([surrogate]) is None
    for wrong in (b"-", b"[" * 10**5):
        assert not checker.passes([(b"{}",), (wrong,)])
        assert checker([wrong]) is not None
    assert not checker.passes([(b"{}", b"{}")])
    assert Checker(ReplyContract(outputs=1)).passes([(b"-",)])
    assert not Checker(ReplyContract(where="true")).passes([(b"{}",)])


def test_schema_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error shows how to install the package (issue 26)."""
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ConfigError, match=r"pip install 'etlstage\[contract\]'"):
        Checker(ReplyContract(schema={}))


def test_schema_that_is_none() -> None:
    """The error names the place that is wrong (issue 26)."""
    with pytest.raises(
        ConfigError, match="schema is not a JSON Schema: type: 'text' is"
    ):
        Checker(ReplyContract(schema={"type": "text"}))


DRAFT_3 = "http://json-schema.org/draft-03/schema#"
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize(
    ("schema", "reference"),
    [
        ({"$ref": "other.json"}, "other.json"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {}}, "#/$defs/b"),
        ({"allOf": [{"$ref": "#nowhere"}]}, "#nowhere"),
        ({"not": {"$dynamicRef": "#nowhere"}}, "#nowhere"),
        ({"allOf": [True], "not": {"$ref": "#/allOf/x"}}, "#/allOf/x"),
        ({"allOf": [True], "not": {"$ref": "#/allOf/0/x"}}, "#/allOf/0/x"),
        ({"title": "a", "not": {"$ref": "#/title"}}, "#/title"),
        ({"x": {"a": {"$ref": "y"}}, "$ref": "#/x/a"}, "y"),
        ({"$id": "http://a/b", "$ref": "c"}, "c"),
        ({"$schema": DRAFT_7, "items": [{"$ref": "#/1"}]}, "#/1"),
        ({"if": True, "then": {"$ref": "#/1"}}, "#/1"),
        (
            {"$schema": DRAFT_4, "dependencies": {"a": ["b"], "c": {"$ref": "#/1"}}},
            "#/1",
        ),
        ({"$schema": DRAFT_3, "extends": {"$ref": "#/1"}}, "#/1"),
        ({"$schema": DRAFT_3, "type": ["string", {"$ref": "#/1"}]}, "#/1"),
        (
            {
                "$schema": DRAFT_7,
                "dependencies": {"a": {}, "b": ["c"]},
                "not": {"$ref": "#x"},
            },
            "#x",
        ),
    ],
)
def test_reference_that_leads_nowhere(schema: object, reference: str) -> None:
    """It is found before the first reply (issue 26)."""
    with pytest.raises(ConfigError) as caught:
        Checker(ReplyContract(schema=schema))  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"expect.schema refers to {reference!r}, which is not a schema in it; other"
        " documents are not read"
    )


@pytest.mark.parametrize(
    ("schema", "output"),
    [
        ({"enum": [{"$ref": "x"}]}, b'{"$ref": "x"}'),
        ({"properties": {"$ref": {"const": "x"}}}, b'{"$ref": "x"}'),
        ({"$ref": DRAFT_7}, b'{"type": "object"}'),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, b"{}"),
        ({"$schema": DRAFT_7, "$dynamicRef": "x"}, b"1"),
        ({"$ref": "#/allOf/0", "allOf": [True]}, b"1"),
        ({"$defs": {"a": {"$ref": "http://a/b"}}}, b"1"),
        ({"then": {"$ref": "#/1"}}, b"1"),
        ({"dependentRequired": {"properties": ["a"]}}, b"1"),
        (
            {
                "$schema": DRAFT_7,
                "definitions": {"a": {}},
                "not": {
                    "not": {"$ref": "#/definitions/a", "not": {"$ref": "#/1"}},
                },
            },
            b"1",
        ),
        (
            {"$schema": DRAFT_7, "dependencies": {"a": {"type": "object"}, "b": ["c"]}},
            b'{"a": 1}',
        ),
        ({"$schema": DRAFT_3, "extends": {"type": "object"}}, b"{}"),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#"}]}, b"1"),
        ({"allOf": [{"items": {"$ref": "#"}}]}, b"[[]]"),
        ({"allOf": [{"$ref": "#/$defs/a"}] * 2, "$defs": {"a": {}}}, b"1"),
        ({"$schema": DRAFT_7, "$ref": DRAFT_7, "allOf": [{"$ref": "#"}]}, b"{}"),
        ({"$schema": DRAFT_3, "dependencies": {"a": {}, "b": "c"}}, b"{}"),
        (
            {
                "$id": "http://a/b",
                "$ref": "c#d",
                "$defs": {
                    "c": {"$id": "c", "not": False, "$defs": {"d": {"$anchor": "d"}}}
                },
            },
            b"1",
        ),
    ],
)
def test_reference_that_can_be_resolved(schema: object, output: bytes) -> None:
    """Standard schemas are known, and not all that looks like one is one (issue 26)."""
    assert Checker(ReplyContract(schema=schema))([output]) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schema", "reference"),
    [
        ({"$ref": "#"}, "#"),
        ({"type": "object", "not": {"$ref": "#/not"}}, "#/not"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            },
            "#/$defs/a",
        ),
        ({"allOf": [{"$ref": "#"}]}, "#"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"allOf": [True, {"$ref": "#/$defs/a"}]}},
            },
            "#/$defs/a",
        ),
        ({"not": {"oneOf": [{"if": {"$ref": "#"}}]}}, "#"),
        ({"$schema": DRAFT_3, "extends": {"extends": [{"$ref": "#"}]}}, "#"),
    ],
)
def test_references_without_end(schema: object, reference: str) -> None:
    """No document could be checked against such a schema (issue 26)."""
    with pytest.raises(ConfigError) as caught:
        Checker(ReplyContract(schema=schema))  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"expect.schema refers to {reference!r}, which leads back to this reference"
        " without end; refer to another schema"
    )


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"$ref": "#/x", "x": {"type": "text"}}, "type: 'text' is"),
        (
            {
                "$schema": DRAFT_4,
                "not": {"$schema": DRAFT_2020, "dependentSchemas": 5},
            },
            "dependentSchemas: 5 is",
        ),
    ],
)
def test_part_that_is_no_schema(schema: object, text: str) -> None:
    """Unknown keywords and other dialects within a schema are examined (issue 26)."""
    with pytest.raises(ConfigError, match=f"schema is not a JSON Schema: {text}"):
        Checker(ReplyContract(schema=schema))  # type: ignore[arg-type]


def test_reference_that_is_missed_at_first() -> None:
    """Where dialects are mixed, it is the output that can't be checked (issue 26)."""
    part = {"$schema": DRAFT_7, "$ref": "#/$defs/a", "items": {"$ref": "#/1"}}
    checker = Checker(ReplyContract(schema={"allOf": [part], "$defs": {"a": {}}}))
    assert checker([b"[]"]) is None
    assert str(checker([b"[1]"])) == (
        "breaks expect.schema: output 1 can't be checked: the schema refers to '/1',"
        " which is not a schema in it"
    )


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("where", "total >", "expect.where: is not a condition: invalid syntax"),
        ("where", "f(x)", "expect.where: can't contain 'f(x)'"),
        (
            "schema",
            3,
            "expect.schema: expected the path of a JSON Schema, or the schema",
        ),
        ("max_seconds", 0, "expect.max_seconds: expected more than 0, got 0"),
    ],
)
def test_wrong_promise(key: str, value: object, text: str) -> None:
    """A wrong promise is refused when the contract is made (issue 26)."""
    with pytest.raises(ConfigError) as caught:
        ReplyContract(**{key: value})  # type: ignore[arg-type]
    assert text in str(caught.value)


def test_schema_is_a_mapping_or_a_path() -> None:
    """Both forms are kept and written as they were given (issue 26)."""
    for schema in ({"type": "object"}, Path("out.json")):
        contract = ReplyContract(schema=schema)
        assert contract.schema == schema
        written = "out.json" if isinstance(schema, Path) else schema
        assert contract.plain()["schema"] == written
    assert ReplyContract(schema="out.json").schema == Path("out.json")  # type: ignore[arg-type]


def test_what_only_tests_ask_is_nothing_to_check() -> None:
    """Batches may make such promises, too (issue 26)."""
    contract = ReplyContract(stateless=True, order_free=True)
    assert not contract.given
    assert not contract.empty
    batches = MarkerDialect(mode=Mode.BATCH_SUPERVISOR)
    assert Stage(name="s", worker=("a",), expect=contract, dialect=batches)
    with pytest.raises(ConfigError, match="on_mismatch: needs expect, with what a"):
        Stage(name="s", worker=("a",), expect=contract, on_mismatch="count")


def test_only_where_each_message_has_a_reply() -> None:
    """A batch is answered as a whole, and a load worker has no outputs (issue 26)."""
    batches = MarkerDialect(mode=Mode.BATCH_SUPERVISOR)
    with pytest.raises(ConfigError, match="expect: is not for workers that answer a"):
        Stage(name="s", worker=("a",), expect=ReplyContract(outputs=1), dialect=batches)
    with pytest.raises(ConfigError, match="expect: is not for a load stage"):
        Stage(
            name="s",
            worker=("a",),
            expect=ReplyContract(json=True),
            kind=StageKind.LOAD,
        )
    assert Stage(name="s", worker=("a",), dialect=batches).expect == ReplyContract()
    single = Stage(name="s", worker=("a",), expect=ReplyContract(outputs=1))
    assert single.expect.outputs == 1


def test_how_promises_are_described() -> None:
    """An editor's schema allows both forms (issue 26)."""
    keys = settings_of(ReplyContract)
    assert keys["schema"].kind.schema()["anyOf"][0] == {"type": ["string", "object"]}
