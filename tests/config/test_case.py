from __future__ import annotations

from pathlib import Path

import pytest

from etlstage.config.case import CaseKeys, MessageText
from etlstage.config.loader import cases_of, load
from etlstage.errors import ConfigError

PIPELINE = """\
name: p
extract: {worker: {command: [seq, "3"]}}
transform: [{name: clean, worker: {command: [cat]}}]
load: {worker: {command: [cat]}}
"""


@pytest.mark.parametrize(
    ("wanted", "message", "same"),
    [
        (MessageText("text", "\u00e9"), "\u00e9".encode(), True),
        (MessageText("text", "a"), b"a ", False),
        (MessageText("json", '{"a": 1, "b": [1, 2]}'), b'{"b":[1,2],"a":1.0}', True),
        (MessageText("json", '{"a": [1, 2]}'), b'{"a": [2, 1]}', False),
        (MessageText("json", "1"), b"one", False),
        (MessageText("json", "1"), b"\xff", False),
        (MessageText("regex", "a.*c"), b"a\nbc", True),
        (MessageText("regex", "b"), b"abc", False),
        (MessageText("base64", "AP8="), b"\x00\xff", True),
        (MessageText("base64", "AP8="), b"\x00", False),
    ],
)
def test_what_a_message_is_to_be(
    wanted: MessageText, message: bytes, same: bool
) -> None:
    """Text is compared byte for byte, JSON by value; a pattern must match it all."""
    assert wanted.matches(message) is same


@pytest.mark.parametrize(
    ("wanted", "message", "same"),
    [
        ("true", b"1", False),
        ("0", b"false", False),
        ('{"a": true}', b'{"a": 1}', False),
        ('{"a": [{"b": 0.0}]}', b'{"a": [{"b": false}]}', False),
        ('{"a": [true, 1]}', b'{"a": [true, 1.0]}', True),
        ("[1, 2]", b"[1, 2, 3]", False),
        ('{"a": 1}', b'{"b": 1}', False),
        ("null", b"false", False),
    ],
)
def test_true_is_not_one(wanted: str, message: bytes, *, same: bool) -> None:
    """Booleans differ from numbers at any depth, and 1 is 1.0 (issue 26)."""
    assert MessageText("json", wanted).matches(message) is same


def test_json_that_is_nested_too_deeply() -> None:
    """It differs from anything that is expected (issue 26)."""
    assert not MessageText("json", "[]").matches(b"[" * 10**5)


def test_tests_in_the_file_and_beside_it(tmp_path: Path) -> None:
    """Each test knows its file, line and column."""
    path = tmp_path / "p.yaml"
    path.write_text(f"{PIPELINE}tests:\n  - {{name: one, output: []}}\n")
    beside = tmp_path / "p.test.yaml"
    beside.write_text("tests:\n  - name: two\n    output:\n      - a\n")
    one, two = cases_of(*load(path))
    assert (one.keys.name, one.where()) == ("one", f"{path}:6:5")
    assert (two.keys.name, two.where("output")) == ("two", f"{beside}:4:7")
    assert two.where("files") == f"{beside}:2:5"


def test_name_of_the_file_beside_it_is_too_long(tmp_path: Path) -> None:
    """There can be no such file, and so no more tests (issue 24)."""
    path = tmp_path / f"{'p' * 250}.yaml"
    path.write_text(PIPELINE)
    assert cases_of(*load(path)) == []


@pytest.mark.parametrize(
    ("test", "error"),
    [
        (
            "stage: claen, input: []",
            "stage: unknown stage 'claen' (did you mean 'clean'?)",
        ),
        ("stage: clean", "needs the key input"),
        ("stage: extract, input: [a]", "input: an extract stage takes no messages"),
        (
            "input_rows: ['{}']",
            "input_rows: needs an extract stage that reads a DataFrame or files",
        ),
        (
            "output_rows: ['{}']",
            "output_rows: needs a load stage that writes a DataFrame or files",
        ),
        (
            "input: [{regex: a}]",
            "input[0].regex: unknown key, expected one of text, json,",
        ),
        (
            "output: [{json: '{'}]",
            "output[0].json: is not valid json: Expecting property name",
        ),
        (
            "output: [{regex: '('}]",
            "output[0].regex: is not valid regex: missing ), unterminated",
        ),
        ("output: [{base64: '?'}]", "output[0].base64: is not valid base64: "),
        ("output: [{text: [a]}]", "output[0].text: expected text, got a list"),
        (
            "output: [{text: a, json: b}]",
            "output[0]: expected text, or a mapping with one",
        ),
        (r'files: {"a\0b": x}', r"files['a\x00b']: can't contain a NUL byte"),
        ("output: a", "output: expected a list, got 'a'"),
        (
            "input: [[a]], output: [a]",
            "input: needs a stage: batches are for one stage",
        ),
        ("output: [[a]]", "output: needs an input with as many batches"),
        (
            "stage: clean, input: [[a]], output: [[a], [b]]",
            "output: expected as many batches as the input has (1), got 2",
        ),
        (
            "dead_letters: [{reason: '('}]",
            "dead_letters[0].reason: is not a regular expr",
        ),
        ("timeout: soon", "timeout: expected a duration such as"),
    ],
)
def test_wrong_test(tmp_path: Path, test: str, error: str) -> None:
    """A mistake is reported at its place, in the file or in the one beside it."""
    path = tmp_path / "p.yaml"
    path.write_text(f"{PIPELINE}tests: [{{name: t, {test}}}]\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    (said,) = caught.value.problems
    assert f"tests[0].{error}" in said or f"tests[0]: {error}" in said
    path.write_text(PIPELINE)
    (tmp_path / "p.test.yaml").write_text(f"tests: [{{name: t, {test}}}]\n")
    with pytest.raises(ConfigError) as caught:
        cases_of(*load(path))
    assert caught.value.problems[0].startswith(f"{tmp_path}/p.test.yaml:1:")


def test_frames_need_rows(tmp_path: Path) -> None:
    """A test that gives no messages needs rows for a DataFrame source."""
    path = tmp_path / "p.yaml"
    frame = PIPELINE.replace('worker: {command: [seq, "3"]}', "spark: {path: x}")
    path.write_text(
        f"{frame}tests: [{{name: a, output: []}}, {{name: b, input: []}}]\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert [p.split(": ", 1)[1] for p in caught.value.problems] == [
        (
            "tests[0]: needs the key input_rows: the extract stage reads a DataFrame or"
            " files"
        )
    ]


@pytest.mark.parametrize(
    ("test", "error"),
    [
        (
            "output: []",
            "tests[0]: needs the key input: the extract stage has no worker",
        ),
        ("stage: extract", "tests[0].stage: has no worker that could be tested"),
        ("stage: load, input: []", "tests[0].stage: has no worker that could be"),
        (
            "input: [], files: {out: x}",
            "tests[0].files: needs a load stage that has a worker, or writes a DataFrame",
        ),
    ],
)
def test_ends_without_workers(tmp_path: Path, test: str, error: str) -> None:
    """What tests can't run is refused: an end that has neither rows nor a worker (issue 26)."""
    path = tmp_path / "p.yaml"
    path.write_text(
        "name: p\nstate: s\n"
        "extract: {journal: {path: j, reader: r}}\n"
        "transform: [{name: clean, worker: [cat]}]\n"
        "load: {journal: {path: k}}\n"
        "tests:\n"
        f"  - {{name: t, {test}}}\n"
        "  - {name: part, input: [a], output: [a]}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(path)
    (problem,) = caught.value.problems
    assert error in problem


def test_from_python() -> None:
    """Values that were already read are accepted unchanged."""
    output = [[MessageText("text", "x")]]
    case = CaseKeys(name="a", output=output, input=[["x"]], stage="s")  # type: ignore[list-item]
    assert case.output == ((MessageText("text", "x"),),)
