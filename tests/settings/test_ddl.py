from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.settings.ddl import DDL, DeclaredColumn, Type, columns_of, spark_ddl
from etlstage.settings.problem import Invalid

WHOLE = (
    "id LONG not null, `a.``b` array<map<string, struct<x: int not null comment 'no',"
    " `y z` decimal(5, 2)>>> null comment 'a, b: \\' (', e: struct<>, v varchar(3),"
    " s string collate UTF8_LCASE NOT NULL, i interval year to month null"
)
DECIMAL = "expected a precision of 1 to 38, and a scale no larger than the precision"


def test_columns_show_whether_they_may_be_null() -> None:
    """Columns that declare nothing about null have None."""
    assert [(c.name, c.nullable) for c in columns_of(WHOLE)] == [
        ("id", False),
        ("a.`b", True),
        ("e", None),
        ("v", None),
        ("s", False),
        ("i", True),
    ]


def test_types_are_called_as_spark_calls_them() -> None:
    """Spark's names are used, for inner types as well (issue 23)."""
    names = "id byte, d dec, n numeric(5), " + WHOLE.replace("id LONG", "l LONG")
    assert [str(column.type) for column in columns_of(names)] == [
        "tinyint",
        "decimal(10,0)",
        "decimal(5,0)",
        "bigint",
        "array<map<string,struct<x:int,y z:decimal(5,2)>>>",
        "struct<>",
        "varchar(3)",
        "string",
        "interval",
    ]
    inner = columns_of("a array<struct<x: int not null>>")[0].type.inner
    assert inner == (
        DeclaredColumn(
            "element",
            None,
            Type("struct", (), (DeclaredColumn("x", False, Type("int")),)),
        ),
    )


def test_spark_gets_what_it_knows() -> None:
    """``null`` is removed, as Spark's parser refuses it; nothing else is changed."""
    assert spark_ddl("a int null, b long not null, c int") == (
        "a int , b long not null, c int"
    )
    assert spark_ddl("`null` int null comment 'null'") == "`null` int  comment 'null'"


LONG = "x" * 10_000


@pytest.mark.parametrize(
    "ddl",
    [
        *(LONG, f"a {LONG}", f"a int {LONG}", f"{LONG} int, {LONG} int"),
        *(f"{LONG} int, {LONG.upper()} int", f"a decimal(1{',1' * 5000})"),
    ],
    ids=range(6),
)
def test_long_text_is_shortened_in_errors(ddl: str) -> None:
    """An error has the ends of a long name or type (issue 23)."""
    with pytest.raises(ValueError, match=r"\.\.\.") as caught:
        columns_of(ddl)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("ddl", "text"),
    [
        ("order_id lng", "unknown type 'lng' at character 10 (did you mean 'long'?)"),
        ("a array<strng>", "unknown type 'strng' at character 9 (did you mean 'st"),
        ("long", "'long' has no type, expected columns such as 'id long, title"),
        ("a int, b", "'b' has no type"),
        ("a, b int", "'a' has no type"),
        ("", "expected the name of a column, got the end at character 1"),
        ("a int,", "expected the name of a column, got the end at character 7"),
        ("a int b", "expected a comma or the end after a column, got 'b' at char"),
        ("a int not", "expected null after not, got the end at character 10"),
        ("a int comment b", "expected a comment in quotes, got 'b' at character 15"),
        ("a array int", "expected < after array, got 'int' at character 9"),
        ("a map<int>", "expected a comma and the type of the values, got '>'"),
        ("a array<int", "expected > at the end of array, got the end"),
        ("a int, b dec(39)", f"{DECIMAL}, got decimal(39,0) at character 10"),
        ("a struct<x:decimal(5,6)>", f"{DECIMAL}, got decimal(5,6) at character 12"),
        ("a numeric(0,0)", f"{DECIMAL}, got decimal(0,0) at character 3"),
        ("a decimal(5,2,1)", f"{DECIMAL}, got decimal(5,2,1) at character 3"),
        ("a decimal(5", "expected ) at the end of decimal, got the end"),
        ("a struct<x int y int>", "expected a comma or > after a field of struct"),
        ("a struct<x: int null>", "expected a comma or > after a field of struct"),
        ("struct<a:int>", "'struct' has no type, expected columns such as"),
        ("a map<<", "expected a type, got '<' at character 7"),
        ("a int, A long", "column 'a' appears twice, also as 'A'"),
        ("a int, b int, a long", "column 'a' appears twice"),
        ("s struct<a:int,a:int>", "field 'a' appears twice in the struct at char"),
        (
            "s array<struct<b:int,a:struct<a:int>,A:int>>",
            "field 'a' appears twice, also as 'A' in the struct at character 9",
        ),
        ("a int;", "unexpected ';' at character 6"),
        ("a int, ;", "unexpected ';' at character 8"),
        ("a " + "array<" * 99, "types are nested more than 64 deep at character 393"),
    ],
)
def test_what_is_wrong_is_reported_with_its_place(ddl: str, text: str) -> None:
    """Each error has its place, without Spark being started (issue 23)."""
    with pytest.raises(Invalid) as caught:
        DDL.read(ddl)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("sizes", ["", "(1)", "(38)", "(1,1)", "(38,38)", "(38,0)"])
def test_decimals_within_bounds(sizes: str) -> None:
    """The widest and the narrowest decimals are read (issue 23)."""
    assert DDL.read(f"d decimal{sizes}") == f"d decimal{sizes}"


def test_right_ddl_is_read_as_it_is() -> None:
    """Valid DDL is kept as text; its columns are parsed when they are needed."""
    assert DDL.read(WHOLE) == WHOLE


@given(st.text(st.sampled_from("ab`'\"<>(),: \\int arystuc"), max_size=30))
def test_any_text_is_read_or_refused(ddl: str) -> None:
    """Only ValueError is raised; the text for Spark declares the same columns."""
    try:
        columns = columns_of(ddl)
    except ValueError:
        return
    assert columns_of(spark_ddl(ddl)) == [
        c._replace(nullable=None if c.nullable else c.nullable) for c in columns
    ]
