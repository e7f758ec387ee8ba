from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.cli.conftest import Etlstage, worker

REFUSING = """\
    from etlstage import worker

    def upper(message):
        if message == b"die":
            raise SystemExit(3)
        if message == b"no":
            raise worker.Refuse("no date")
        yield message.upper()

    worker.transform(upper)
    """
PAIRS = """\
    from etlstage import worker

    worker.transform_batch(lambda messages: [b" ".join(messages)])
    """
PIPELINE = """\
name: letters
extract: {worker: {command: [printf, 'a\\nb\\n']}}
transform:
  - name: upper
    worker: {command: [python, upper.py]}
    workers: 2
    restart: {delay: 1h, max_delay: 1h}
    on_error: {then: fail}
  - name: pairs
    worker: {command: [python, pairs.py]}
    batch: {size: 2}
load: {worker: {command: [sh, -c, 'while read x; do echo "$$x" >>"$$OUT"; printf "\\0"; done']}}
"""
TESTS = """\
tests:
  - {name: one stage, stage: upper, input: [one, {base64: dHdv}], output: [ONE, TWO]}
  - {name: forms, stage: upper, input: ['{"a": 1}'], output: [{json: '{ "A":1 }'}]}
  - {name: patterns, stage: upper, input: [ab, cd], output: [{regex: 'A.'}, CD]}
  - name: refused
    stage: upper
    input: [no, yes, no]
    output: [YES]
    dead_letters: [{message: no, reason: no d.te}, {reason: refused}]
  - name: lost
    stage: upper
    input: [die, x, die]
    output: [X]
    dead_letters: [{message: die}, {message: die, reason: status 3}]
  - {name: batches, stage: pairs, input: [[a, b, c], [d]], output: [[a b c], [d]]}
  - {name: full batches, stage: pairs, input: [a, b, c], output: [a b, c]}
  - {name: extract, stage: extract, output: [a, b]}
  - {name: whole, output: [A B]}
  - {name: part, input: [x], output: [X]}
  - {name: load, env: {OUT: "{folder}/out"}, files: {out: "A B\\n"}, output: [A B]}
"""


@pytest.fixture
def tested(tmp_path: Path) -> Path:
    """Write a pipeline with tests that all pass."""
    worker(tmp_path / "upper.py", REFUSING)
    worker(tmp_path / "pairs.py", PAIRS)
    path = tmp_path / "p.yaml"
    path.write_text(PIPELINE + TESTS)
    return path


def without_times(text: str) -> list[str]:
    """Return the lines without times and pids."""
    return re.sub(r" \((\d+\.\d\d s|pid \d+)\)", "", text).splitlines()


def test_all_that_a_test_can_expect(etlstage: Etlstage, tested: Path) -> None:
    """Tests of a stage or of all pass without Spark, and leave no files behind."""
    result = etlstage("test", "p.yaml")
    assert result.stderr == ""
    *lines, total = without_times(result.stdout)
    assert lines == [
        f"ok   {name}" for name in re.findall(r"name: ([\w ]+),", TESTS)[:3]
    ] + [
        "ok   refused",
        "ok   lost",
        "ok   batches",
        "ok   full batches",
        "ok   extract",
        "ok   whole",
        "ok   part",
        "ok   load",
    ]
    assert (total, result.returncode) == ("11 tests: 11 passed", 0)
    assert {path.name for path in tested.parent.iterdir()} == {
        "p.yaml",
        "upper.py",
        "pairs.py",
    }


FAILING = """\
tests:
  - name: differs
    stage: upper
    input: [a, b, c, <]
    output: [A, {regex: C}, x]
  - {name: refused, stage: upper, input: [no], output: []}
  - {name: not refused, stage: upper, input: [a], dead_letters: [{message: a}]}
  - {name: batches, stage: pairs, input: [[a], [b]], output: [[a], [c]]}
  - {name: no file, input: [a], files: {out: a}, env: {OUT: /dev/null}}
  - {name: file, input: [a], files: {out: B}, env: {OUT: "{folder}/out"}}
  - {name: late, stage: upper, input: [a], env: {PATH: /}, timeout: 1ms}
"""


def test_what_a_failure_shows(etlstage: Etlstage, tested: Path) -> None:
    """It shows its place in the file and the difference, in JUnit's file, too."""
    tested.write_text(PIPELINE)
    (tested.parent / "p.test.yaml").write_text(FAILING)
    result = etlstage("test", "p.yaml", "--junit", "j.xml")
    assert (result.returncode, result.stderr) == (1, "")
    assert without_times(result.stdout) == [
        "FAIL differs",
        "     p.test.yaml:5:13: output differs",
        "         A",
        "       - regex C",
        "       - x",
        "       + B",
        "       + C",
        "       + <",
        "FAIL refused",
        "     p.test.yaml:6:5: dead letters differ",
        "       + no: stage upper: worker upper-1 refused the message: no date",
        "FAIL not refused",
        "     p.test.yaml:7:65: dead letters differ",
        "       - a: (any)",
        "FAIL batches",
        "     p.test.yaml:8:62: output of batch 2 differs",
        "       - c",
        "       + b",
        "FAIL no file",
        "     p.test.yaml:9:40: file out: no such file or directory",
        "FAIL file",
        "     p.test.yaml:10:37: file out differs",
        "       - B",
        "       + A",
        "FAIL late",
        "     p.test.yaml:11:5: took more than 0.001 s",
        "7 tests: 0 passed, 7 failed",
    ]
    suite = ET.parse(tested.parent / "j.xml").getroot()  # noqa: S314 - our own
    assert {k: suite.get(k) for k in ("name", "tests", "failures")} == {
        "name": "p.yaml",
        "tests": "7",
        "failures": "7",
    }
    first = suite[0]
    assert (first.get("name"), first[0].get("message")) == ("differs", "output differs")
    assert str(first[0].text).endswith("\n+ <")


def test_stage_that_cant_run(etlstage: Etlstage, tested: Path) -> None:
    """The reason is shown in place of a difference, without secrets."""
    text = PIPELINE.replace("upper.py", '"${TOKEN}.py"')
    tested.write_text(f"{text}tests: [{{name: a, stage: upper, input: [a]}}]\n")
    result = etlstage("test", "p.yaml", env={"TOKEN": "hunter2"})
    assert (result.returncode, result.stderr) == (1, "")
    assert "p.yaml:13:9: " in result.stdout
    assert "${TOKEN}.py" in result.stdout
    assert "hunter2" not in result.stdout
    debug = etlstage("test", "p.yaml", "--debug", env={"TOKEN": "hunter2"})
    assert "hunter2" not in debug.stdout + debug.stderr


SHOWING = """\
name: letters
extract: {worker: {command: [printf, 'a\\n']}}
transform:
  - name: show
    worker: {command: [sh, -c, 'while read x; do echo "$$x $$KEY"; printf "\\0"; done']}
load: {worker: {command: [cat]}}
"""
SECRETS = """\
tests:
  - {name: a, input: ["${TOKEN}"], env: {KEY: "{folder}/hunter3"}, output: [x]}
"""


@pytest.mark.parametrize("beside", [False, True])
def test_secrets_of_a_test(etlstage: Etlstage, tested: Path, *, beside: bool) -> None:
    """Inserted values and variables of tests are not shown anywhere (issue 26)."""
    tested.write_text(SHOWING + ("" if beside else SECRETS))
    (tested.parent / "p.test.yaml").write_text(SECRETS if beside else "tests: []")
    result = etlstage(
        "test", "p.yaml", "--debug", "--junit", "j.xml", env={"TOKEN": "hunter2"}
    )
    assert result.returncode == 1
    assert "       + ${TOKEN} $KEY\n" in result.stdout
    shown = result.stdout + result.stderr + (tested.parent / "j.xml").read_text()
    assert "hunter" not in shown


def test_reply_too_many(etlstage: Etlstage, tested: Path) -> None:
    """A run would fail because of it, though the output is as expected."""
    more = r"while read x; do printf '$$x\\n\\0'; done; printf 'x\\n\\0'"
    text = PIPELINE.replace("python, pairs.py", f'sh, -c, "{more}"')
    text = text.replace("    batch: {size: 2}\n", "")
    case = "{name: a, stage: pairs, input: [a], output: [a]}"
    tested.write_text(f"{text}tests: [{case}]\n")
    result = etlstage("test", "p.yaml")
    assert (result.returncode, result.stderr) == (1, "")
    assert "stage pairs: results of 1 message may be mismatched" in result.stdout


def test_no_test(etlstage: Etlstage, tested: Path) -> None:
    """A file without tests must not pass."""
    tested.write_text(PIPELINE)
    result = etlstage("test", "p.yaml")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "etlstage: error: p.yaml: has no tests; write them under the key tests\n"
    )


def test_outcomes_that_cant_be_written(etlstage: Etlstage, tested: Path) -> None:
    """They are printed all the same."""
    tested.write_text(
        f"{PIPELINE}tests: [{{name: a, stage: extract, output: [a, b]}}]\n"
    )
    result = etlstage("test", "p.yaml", "--junit", "nowhere/j.xml", code=2)
    assert "1 test: 1 passed" in result.stdout
    assert result.stderr == (
        "etlstage: error: nowhere/j.xml can't be written: no such file or directory\n"
    )


OVERLAPPING = """\
name: rows
extract: {files: {path: in.json, format: json}}
load: {files: {path: out, format: json, schema: "id long"}}
tests:
  - name: one pattern
    input: ['{"id": 1}', '{"id": 2}']
    output_rows: [{regex: .*}, {json: '{"id": 1}'}]
  - name: three patterns
    input: ['{"id": 12}', '{"id": 2}', '{"id": 3}']
    output_rows: [{regex: '.*2}'}, {regex: '.*[23]}'}, {regex: '.*12}'}]
  - name: other row
    input: ['{"id": 1}', '{"id": 3}', '{"id": 3}']
    output_rows: [{regex: .*}, {json: '{"id": 1}'}, {regex: '.*2}'}]
  - name: missing rows
    input: ['{"id": 1}', '{"id": 3}']
    output_rows: ['{"id": 1}', '{"id":  1}', '{"id":   1}', {regex: .*}]
"""


def test_row_that_several_expectations_match(etlstage: Etlstage, tested: Path) -> None:
    """A pattern does not take a row that another expectation needs (issue 26)."""
    tested.write_text(OVERLAPPING)
    result = etlstage("test", "p.yaml")
    assert result.stderr == ""
    assert without_times(result.stdout) == [
        "ok   one pattern",
        "ok   three patterns",
        "FAIL other row",
        "     p.yaml:13:18: rows differ",
        "       - regex .*2}",
        '       + {"id":3}',
        "FAIL missing rows",
        "     p.yaml:16:18: rows differ",
        '       - {"id":  1}',
        '       - {"id":   1}',
        "4 tests: 2 passed, 2 failed",
    ]


ROWS = """\
name: frames
extract: {spark: {format: csv, path: nowhere, message: "concat(id, ' ', title)"}}
load: {spark: {path: /nowhere/out, schema: "ID int, TITLE string", mode: append}}
tests:
  - name: in
    stage: extract
    timeout: 2m
    input_rows: ['{"id": 1, "title": "x"}', '{"id": 2, "title": "y"}']
    output: [1 x, 2 y]
  - name: out
    timeout: 2m
    stage: load
    input: ['{"ID": 1, "TITLE": "x"}', nonsense]
    output_rows: [{json: '{"TITLE": "x", "ID": 1}'}]
    dead_letters: [{message: nonsense, reason: JSON}]
  - name: other
    timeout: 2m
    input_rows: ['{"id": 1, "title": "x"}']
    output_rows: ['{}']
    dead_letters: [{message: 1 x}]
"""


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_rows(
    etlstage: Etlstage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark reads and writes them, in whatever folder, not the file's own data."""
    (tmp_path / "t[m]p").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t[m]p"))
    (tmp_path / "p.yaml").write_text(ROWS)
    result = etlstage("test", "p.yaml")
    assert without_times(result.stdout) == [
        "ok   in",
        "ok   out",
        "FAIL other",
        "     p.yaml:19:18: rows differ",
        "       - {}",
        "3 tests: 2 passed, 1 failed",
    ]
