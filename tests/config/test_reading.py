from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from etlstage.config.document import FilePlace
from etlstage.config.reading import MAX_BYTES, Changes, read
from etlstage.errors import ConfigError, Excerpt
from etlstage.settings.problem import dotted, shortened


def error_of(path: Path, content: bytes | str) -> str:
    """Return what is reported about a file with this content, without its folder."""
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        read(path).check()
    return str(caught.value).replace(f"{path.parent}/", "")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Name a pipeline file."""
    return tmp_path / "pipeline.yaml"


def test_scalars_stay_as_written(path: Path) -> None:
    """Text that looks like something else is not turned into it and back."""
    path.write_text("a: [yes, 1.10, 0o17, 2020-01-01, 12:30, '~', ~, null]\n")
    assert read(path).data == {
        "a": ["yes", "1.10", "0o17", "2020-01-01", "12:30", "~", None, None]
    }


def schema_of(path: Path, schema: str, *values: str) -> Any:  # noqa: ANN401 - what YAML holds
    """Return the inline schema of a stage, below which ``schema`` is written."""
    path.write_text(f"transform: [{{expect: {{schema: {schema}}}}}]\n")
    document = read(path, Changes(values=values))
    document.check()
    return document.data["transform"][0]["expect"]["schema"]  # type: ignore[index,call-overload]


def test_scalars_of_an_inline_schema_have_types(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain numbers, booleans and nulls are those of JSON; others stay text (issue 26)."""
    made = schema_of(
        path, "{enum: [1, -2.5e3, true, null, yes, 2020-01-01, '1', !!str 1]}"
    )
    assert made == {"enum": [1, -2500.0, True, None, "yes", "2020-01-01", "1", "1"]}
    assert [type(item) for item in made["enum"][:3]] == [int, float, bool]
    monkeypatch.setenv("LEAST", "3")
    monkeypatch.setenv("EMPTY", "")
    path.write_text(
        "transform:\n- expect:\n    schema:\n      minimum: ${LEAST}\n"
        "      const: '${LEAST}'\n      default: ${EMPTY}\n"
    )
    data: Any = read(path).data
    assert data["transform"][0]["expect"]["schema"] == {
        "minimum": 3,
        "const": "3",
        "default": "",
    }


def test_value_set_in_an_inline_schema_has_a_type(path: Path) -> None:
    """A single value is as if it had been written there, plain or quoted (issue 26)."""
    place = "transform[0].expect.schema"
    made = schema_of(path, "{}", f"{place}.minimum=3", f"{place}.const='3'")
    assert made == {"minimum": 3, "const": "3"}
    assert schema_of(path, "s.json", f"{place}=3") == "3"


@pytest.mark.parametrize("value", [".inf", ".nan", "1" * 5000, "!!int x", "!!bool x"])
def test_scalar_of_an_inline_schema_that_json_lacks(path: Path, value: str) -> None:
    """The place of the value is reported (issue 26)."""
    with pytest.raises(ConfigError) as caught:
        schema_of(path, f"{{maximum: {value}}}")
    assert str(caught.value).removeprefix(f"{path.parent}/") == (
        "pipeline.yaml:1:41: transform[0].expect.schema.maximum: is not a value of JSON;"
        " quote it if it is text"
    )


def test_long_texts(path: Path) -> None:
    """Folded and literal texts hold what YAML gives them, and nothing else."""
    path.write_text("a: >-\n  id long,\n  title string\nb: |\n  x\n  y\n")
    assert read(path).data == {"a": "id long, title string", "b": "x\ny\n"}


def test_places_count_from_one(path: Path) -> None:
    """Keys, list items and values each have a place."""
    path.write_text("a:\n  - b: c\n    d: [e]\n")
    document = read(path)
    assert document.keys[("a",)] == FilePlace(1, 1)
    assert document.keys[("a", 0)] == FilePlace(2, 5)
    assert document.keys[("a", 0, "d")] == FilePlace(3, 5)
    assert document.values[("a", 0, "d", 0)] == FilePlace(3, 9)


def test_byte_order_mark_is_skipped(path: Path) -> None:
    """Editors on Windows write one."""
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read(path).data == {"a": "1"}


def test_aliases_repeat_what_they_name(path: Path) -> None:
    """Anchors save writing the same thing twice."""
    path.write_text("a: &t {stop: 5s}\nb: *t\n")
    assert read(path).data == {"a": {"stop": "5s"}, "b": {"stop": "5s"}}


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("", "pipeline.yaml: is empty, expected a pipeline"),
        ("# only this\n", "pipeline.yaml: is empty, expected a pipeline"),
        (
            "- a\n- b\n",
            (
                "pipeline.yaml:1:1: expected a mapping of keys such as name, extract and"
                " load, got a list"
            ),
        ),
        (
            "hello\n",
            (
                "pipeline.yaml:1:1: expected a mapping of keys such as name, extract and"
                " load, got a single value"
            ),
        ),
        (
            "a: 1\nb: c: d\n",
            "pipeline.yaml:2:5: is not YAML: mapping values are not allowed here",
        ),
        (
            "a: [1\n",
            (
                "pipeline.yaml:2:1: is not YAML: while parsing a flow sequence,"
                " expected ',' or ']', but got '<stream end>'"
            ),
        ),
        (
            "a: {b: ${C}}\n",
            (
                "pipeline.yaml:1:9: is not YAML: while parsing a flow mapping,"
                " expected ',' or '}', but got '{'"
                " (inside [] and {}, ${...} needs quotes around it)"
            ),
        ),
        (
            "a: 1\n--- \nb: 1\n",
            (
                "pipeline.yaml:2:1: is not YAML: expected a single document in the"
                " stream, but found another document"
            ),
        ),
        (b"a: \xff\n", "pipeline.yaml: is not UTF-8 text at byte 3"),
        (
            b"a: \x00\n",
            (
                "pipeline.yaml:1:4: is not YAML: unacceptable character #x0000: special"
                " characters are not allowed"
            ),
        ),
        (
            "\u00e9: 1\r\nb: a\fc\n",
            (
                "pipeline.yaml:2:5: is not YAML: unacceptable character #x000c: special"
                " characters are not allowed"
            ),
        ),
        (
            b"a" * (MAX_BYTES + 1),
            (
                "pipeline.yaml: is too big for a pipeline file, expected no more than"
                " 262144 bytes"
            ),
        ),
        (
            "a: 1\na: 2\n",
            "pipeline.yaml:2:1: a: duplicate key, first written on line 1",
        ),
        ("a: !x 1\n", "pipeline.yaml:1:4: a: tag !x is not supported"),
        ("? [1]\n: 2\n", "pipeline.yaml:1:3: a key can't be a list"),
        ("a:\nb: 1\n", "pipeline.yaml:1:1: a: has no value"),
        ("b:\n  - \n  - 1\n", "pipeline.yaml:2:4: b[0]: has no value"),
        (
            "a: &a [*a]\n",
            (
                "pipeline.yaml: holds more than 50000 keys and values, 1048576"
                " characters or 50 levels, once its aliases are written out"
            ),
        ),
    ],
)
def test_file_that_is_no_pipeline(path: Path, content: bytes, error: str) -> None:
    """One clear line each, with a place where there is one."""
    assert error_of(path, content) == error


def test_line_with_a_control_character_is_shown(path: Path) -> None:
    """The error has the line, and where the character is in it (issue 23)."""
    path.write_text("a: 1\nb: a\x07c\n")
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert caught.value.excerpts == (Excerpt("b: a\x07c", 2, 5),)


def test_aliases_of_aliases_are_bounded(path: Path) -> None:
    """A few hundred bytes can stand for gigabytes."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    assert "holds more than 50000 keys and values" in error_of(path, "\n".join(lines))


def test_deep_nesting_is_refused(path: Path) -> None:
    """Such nesting would exhaust the parser's stack."""
    assert error_of(path, "[" * 1000) == "pipeline.yaml: is nested too deeply"


def changed(path: Path, base: str, *overlays: str, values: Sequence[str] = ()) -> Any:  # noqa: ANN401 - what YAML holds
    """Return the data of a file with overlays and single values laid over it."""
    path.write_text(base)
    files = []
    for i, text in enumerate(overlays):
        files.append(path.with_name(f"over{i}.yaml"))
        files[-1].write_text(text)
    document = read(path, Changes(files, values))
    document.check()
    return document.data


def problems_of(path: Path, *layers: str, values: Sequence[str] = ()) -> list[str]:
    """Return the problems of a file with others over it, without its folder."""
    with pytest.raises(ConfigError) as caught:
        changed(path, *layers, values=values)
    return [p.replace(f"{path.parent}/", "") for p in caught.value.problems]


@pytest.mark.parametrize(
    ("content", "data"),
    [
        ("x-a: &a {b: 1, c: 2}\nd: {<<: *a, c: 3}\n", {"b": "1", "c": "3"}),
        ("x-a: &a {b: 1}\nd: {c: 3, <<: *a}\n", {"b": "1", "c": "3"}),
        (
            "x-a: &a {b: 1}\nx-e: &e {b: 2, f: 3}\nd: {<<: [*a, *e]}\n",
            {"b": "1", "f": "3"},
        ),
        ("x-a: &a {b: 1}\nx-e: &e {<<: *a, f: 3}\nd: {<<: *e}\n", {"b": "1", "f": "3"}),
        ("d: {'<<': {b: 1}}\n", {"<<": {"b": "1"}}),
    ],
)
def test_merge_keys(path: Path, content: str, data: object) -> None:
    """Keys beside a merge win over merged ones; of several merges the first wins."""
    assert changed(path, content)["d"] == data


def test_what_is_merged_has_its_place(path: Path) -> None:
    """A merged key has the place where it was written, not where it is merged."""
    path.write_text("x-a: &a\n  b: 1\nc:\n  <<: *a\n")
    assert read(path).keys[("c", "b")] == FilePlace(2, 3)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("a: {<<: b}\n", "1:9: a: << takes a mapping, as in *name, or a list of them"),
        ("a: {<<: [b]}\n", "1:10: a: << takes a mapping, as in *name, or a list of"),
        ("a: {<<: {b: 1}, <<: {c: 1}}\n", "1:17: a['<<']: duplicate key, first"),
        ("a: &a {<<: *a}\n", " holds more than 50000 keys and values, 1048576 "),
    ],
)
def test_merge_key_that_is_wrong(path: Path, content: str, problem: str) -> None:
    """A merge needs mappings, and must not contain itself."""
    (said,) = problems_of(path, content)
    assert said.startswith(f"pipeline.yaml:{problem}")


def test_own_keys_are_nobodys_business(path: Path) -> None:
    """``x-`` keys at the top are ignored; their content counts where it is used."""
    base = "x-a: &a {b: '${ETLSTAGE_NOPE}'}\nc: {x-d: 1}\n"
    assert changed(path, base) == {"c": {"x-d": "1"}}
    (said,) = problems_of(path, base + "e: *a\n")
    assert said.startswith("pipeline.yaml:1:13: e.b: environment variable")


def test_overlays(path: Path) -> None:
    """Mappings are merged; of anything else the last one wins."""
    base = "a: {b: 1, c: {d: 2}}\ne: [1, 2]\nf: 1\n"
    over = "a: {c: {d: 3, g: 4}}\ne: [3]\nf: {h: 1}\n"
    assert changed(path, base, over, "f: 2\n") == {
        "a": {"b": "1", "c": {"d": "3", "g": "4"}},
        "e": ["3"],
        "f": "2",
    }


def test_what_lies_below_is_forgotten(path: Path) -> None:
    """Mistakes and secrets of replaced values don't count any more."""
    base = "a: ${ETLSTAGE_NOPE}\nb:\n  c: [1, !x 2]\nd: 1\nd: 2\n"
    assert changed(path, base, "a: 1\nb: {c: 2}\nd: 3\n")["b"] == {"c": "2"}
    path.write_text("a: ${HOME}\n")
    document = read(path, Changes(values=["a=b"]))
    assert not document.secret(("a",))
    assert document.data == {"a": "b"}


def test_problems_of_layers(path: Path) -> None:
    """Each problem names its own file, in the order of the layers."""
    layers = "a: !x 1\nb: !x 1\n", "b: !y 1\n\nc: {d: !y 1}\n"
    values = ["c.e=${ETLSTAGE_NOPE}", "c.d.f=1", "hunter2"]
    assert problems_of(path, *layers, values=values) == [
        "pipeline.yaml:1:4: a: tag !x is not supported",
        "over0.yaml:1:4: b: tag !y is not supported",
        "over0.yaml:3:8: c.d: tag !y is not supported",
        (
            "--set c.e: environment variable ETLSTAGE_NOPE is not set; set it or write"
            " ${ETLSTAGE_NOPE:-default}"
        ),
        "--set c.d.f: c.d is a single value",
        # It may be a password (issue 23).
        "--set: expected a place and a value such as transform[0].workers=4",
    ]


@pytest.mark.parametrize(
    ("value", "data"),
    [
        ("a=4", {"a": "4", "b": [{"c": "1"}]}),
        ("b[0].c=4=5", {"b": [{"c": "4=5"}]}),
        ("b[0]=4", {"b": ["4"]}),
        ("b[0].d.e=4", {"b": [{"c": "1", "d": {"e": "4"}}]}),
        ("d['x.y']=", {"b": [{"c": "1"}], "d": {"x.y": ""}}),
        ('d["x.y"].z=', {"b": [{"c": "1"}], "d": {"x.y": {"z": ""}}}),
        ("d[x.y]=~", {"b": [{"c": "1"}], "d": {"x.y": "~"}}),
        ("b=null", {"b": None}),
        ("b=[1, {c: 2}]", {"b": ["1", {"c": "2"}]}),
        ("b='[x'", {"b": "[x"}),
        ("b=c: d, e", {"b": "c: d, e"}),
    ],
)
def test_single_values(path: Path, value: str, data: object) -> None:
    """A value is read as text, or as YAML if it looks like YAML."""
    assert changed(path, "b: [{c: 1}]\n", values=[value]) == data


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("=1", ": expected a place and a value such as transform[0].workers=4"),
        ("a..b=1", "a..b: expected a place and a value"),
        ("a[b=1", "a[b: expected a place and a value"),
        ("[0]=1", "[0]: the file is a mapping"),
        ("b.c=1", "b.c: b has no item named 'c'; write b[0]"),
        ("d[0].e=1", "d[0].e: there is no d"),
        ("ba[0].e=1", "ba[0].e: there is no ba (did you mean 'b'?)"),
        ("b[1].c=1", "b[1].c: b has 1 item, counted from 0"),
        ("b[0].c.d=1", "b[0].c.d: b[0].c is a single value"),
        ("b[0][0]=1", "b[0][0]: b[0] is a mapping"),
        ("b=[", "b: the value:1:2: is not YAML: while parsing a flow node"),
        ("b={a: !x 1}", "b: b.a: tag !x is not supported"),
    ],
)
def test_single_value_that_is_wrong(path: Path, value: str, problem: str) -> None:
    """The error repeats the place as it was given."""
    (said,) = problems_of(path, "b: [{c: 1}]\n", values=[value])
    assert said.startswith(f"--set {problem}")


def test_single_value_by_name(path: Path) -> None:
    """A name may stand for an index, and stays right as stages are added (issue 23)."""
    base = "t: [{c: 0}, {name: a, c: 1}, {name: b c, c: 2}]\n"
    assert changed(path, base, values=["t.a.c=3", "t['b c'].d.e=4"]) == {
        "t": [
            {"c": "0"},
            {"name": "a", "c": "3"},
            {"name": "b c", "c": "2", "d": {"e": "4"}},
        ]
    }
    assert problems_of(path, "t: [{name: clean}, {}, x]\n", values=["t.claen.c=3"]) == [
        "--set t.claen.c: t has no item named 'claen' (did you mean 'clean'?)"
    ]


def test_items_with_names_become_one(path: Path) -> None:
    """Items of an overlay are merged into those of the same name (issue 23)."""
    base = "t: [{name: a, c: {d: 1}}, {name: b}, {e: 1}]\n"
    over = "t: [{name: new}, {name: a, c: {f: 2}}]\n"
    assert changed(path, base, over) == {
        "t": [
            {"name": "a", "c": {"d": "1", "f": "2"}},
            {"name": "b"},
            {"e": "1"},
            {"name": "new"},
        ]
    }


@pytest.mark.parametrize(
    ("base", "over"),
    [
        ("a", "${ETLSTAGE_ST}"),
        ("${ETLSTAGE_ST}", "a"),
        ("${ETLSTAGE_ST}", "${ETLSTAGE_NOPE:-a}"),
        ("$${a}", "$${a}"),
    ],
)
def test_items_with_inserted_names_become_one(
    path: Path, monkeypatch: pytest.MonkeyPatch, base: str, over: str
) -> None:
    """Names are compared after their references are replaced (issue 23)."""
    monkeypatch.setenv("ETLSTAGE_ST", "a")
    layers = (
        f"t: [{{name: b}}, {{name: '{base}'}}]\n",
        f"t: [{{name: '{over}', c: 1}}]\n",
    )
    (other, merged) = changed(path, *layers)["t"]
    assert other == {"name": "b"}
    assert merged == {"name": "${a}" if base == over else "a", "c": "1"}


def test_inserted_names_that_are_equal(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list in which two items get the same name is not merged (issue 23)."""
    monkeypatch.setenv("ETLSTAGE_ST", "a")
    layers = "t: [{name: a}, {name: b}]\n", "t: [{name: a}, {name: '${ETLSTAGE_ST}'}]\n"
    assert changed(path, *layers) == {"t": [{"name": "a"}, {"name": "a"}]}


@pytest.mark.parametrize("others", ["", ", {name: a, c: 1}"])
def test_inserted_name_that_is_not_set(path: Path, others: str) -> None:
    """It has its own error, whether the list is merged or replaced (issue 23)."""
    over = f"t: [{{name: '${{ETLSTAGE_NOPE}}'}}{others}]\n"
    (problem,) = problems_of(path, "t: [{name: a}, {name: b}]\n", over)
    assert problem == (
        f"over0.yaml:1:12: t[{2 if others else 0}].name: environment variable"
        " ETLSTAGE_NOPE is not set; set it or write ${ETLSTAGE_NOPE:-default}"
    )


@pytest.mark.parametrize(
    ("over", "dropped"),
    [
        ("t: [{c: 2}]\n", "a, an item without a name"),
        ("t: [{name: a}, {name: a}]\n", "an item without a name"),
        ("t: [{name: d}]\n", "a, an item without a name"),
        ("t: [b]\n", "a, an item without a name"),
    ],
)
def test_what_an_overlay_drops_is_reported(path: Path, over: str, dropped: str) -> None:
    """A list that shares no name with the one below replaces it (issue 23)."""
    warnings: list[str] = []
    path.write_text("t: [{name: a}, {c: 1}, x]\nw: [1]\n")
    (path.parent / "o.yaml").write_text(f"w: [2]\n{over}")
    read(path, Changes([path.parent / "o.yaml"], warn=warnings.append))
    (warning,) = warnings
    assert warning.replace(f"{path.parent}/", "") == (
        f"o.yaml:2:4: t: replaces the whole list, dropping {dropped}; lists are"
        " merged by name if all items have names and at least one of the names exists"
        " already"
    )


def test_half_of_a_character(path: Path) -> None:
    """A lone surrogate can't be part of a name, or be printed (issue 23)."""
    assert problems_of(path, '"\\ud800": 1\nb: "\\ud800"\n') == [
        "pipeline.yaml:1:1: a key contains a lone surrogate",
        "pipeline.yaml:2:4: b: is not text: it contains a lone surrogate",
    ]


def test_character_that_is_escaped_as_in_json(path: Path) -> None:
    """Both halves are one character, in keys, too; others are lone (issue 23)."""
    data = {"a": {"\U0001f600": "1"}, "b": "a\U0001f600\U0001d11e"}
    path.write_text(json.dumps(data))
    assert read(path).data == data
    assert problems_of(
        path, '{"a": "\\ude00\\ud83d", "b": "\\ud83d\\ud83d\\ude00"}'
    ) == [
        f"pipeline.yaml:1:{at}: {key}: is not text: it contains a lone surrogate"
        for key, at in (("a", 7), ("b", 28))
    ]


def test_file_over_it_that_is_none(path: Path) -> None:
    """An invalid overlay is reported as an invalid pipeline is."""
    assert problems_of(path, "a: 1\n", "") == [
        "over0.yaml: is empty, expected a pipeline"
    ]
    (said,) = problems_of(path, "a: !x 1\n", "- 1\n")
    assert said.startswith("over0.yaml:1:1: expected a mapping of keys such as name")


def test_missing_file(path: Path) -> None:
    """The path is shown as the user wrote it."""
    with pytest.raises(ConfigError, match=r"^nowhere/p\.yaml: no such file$"):
        read(Path("nowhere/p.yaml"))


def test_file_of_another_name(path: Path) -> None:
    """A file of a similar name is suggested (issue 11)."""
    path.write_text("")
    close = rf"no such file \(did you mean '{path.name}'\?\)$"
    with pytest.raises(ConfigError, match=close):
        read(path.with_suffix(".yml"))


def test_directory(path: Path) -> None:
    """Naming the folder instead of the file is a common slip."""
    with pytest.raises(ConfigError) as caught:
        read(path.parent)
    assert str(caught.value) == (
        f"{path.parent}: is a directory, expected a pipeline file"
    )
    path.write_text("a: 1\n")
    with pytest.raises(ConfigError) as caught:
        read(path.parent)
    assert str(caught.value).endswith(f"(did you mean {path}?)")


def test_unreadable_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, for whom no file is unreadable."""

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(caught.value) == f"{path}: can't be read: permission denied"


def test_pipe_is_read(tmp_path: Path) -> None:
    """``etlstage run <(make-pipeline)`` hands over a pipe."""
    reading, writing = os.pipe()
    os.write(writing, b"a: 1\n")
    os.close(writing)
    try:
        assert read(Path(f"/dev/fd/{reading}")).data == {"a": "1"}
    finally:
        os.close(reading)


def test_named_pipe_is_refused(path: Path) -> None:
    """No process may ever write to it (issue 10)."""
    os.mkfifo(path)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(caught.value) == f"{path}: can't be read: it is not a regular file"


def test_repr_hides_the_data(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret must not reach a log through a debugging aid."""
    monkeypatch.setenv("TOKEN", "s3cret")
    path.write_text("a: ${TOKEN}\n")
    assert "s3cret" not in repr(read(path))


def test_location_reads_as_users_write_it() -> None:
    """Keys that are no plain words are quoted."""
    loc = ("spark", "config", "spark.sql.x", 0, "partition-by")
    assert dotted(loc) == "spark.config['spark.sql.x'][0].partition-by"


def test_long_value_is_shortened() -> None:
    """A whole program pasted as a value does not flood the terminal."""
    assert shortened("a" * 61) == repr("a" * 30 + "..." + "a" * 15)
    assert shortened("a\nb") == "'a\\nb'"
