from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

import pytest

from etlstage.cli.subject import Options, program_of
from tests.cli.conftest import KEEP, PIPELINE, UPPER, Etlstage

# It omits the reply to an empty message, EOP included.
SILENT: Final = UPPER.replace(
    "    sys.stdout.buffer", "    if line.strip(): sys.stdout.buffer"
)


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    (tmp_path / "upper.py").write_text(UPPER)
    (tmp_path / "silent.py").write_text(SILENT)
    (tmp_path / "keep.py").write_text(KEEP)
    (tmp_path / "pipeline.yaml").write_text(PIPELINE)


def test_sound_worker_is_0(etlstage: Etlstage, tmp_path: Path) -> None:
    """A line for each check is printed, and a summary (issue 12)."""
    done = etlstage("check", "--junit", "out.xml", "--", "python", "upper.py")
    assert (done.returncode, done.stderr) == (0, "")
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("ok     answers (")
    assert last.startswith("23 checks: 15 passed, 2 advice, 6 not applicable")
    suite = ET.fromstring((tmp_path / "out.xml").read_text())  # noqa: S314
    assert suite.attrib["name"].endswith("upper.py")
    assert (suite.attrib["tests"], suite.attrib["failures"]) == ("23", "0")
    assert suite.attrib["skipped"] == "6"


def test_all_checks_are_listed(etlstage: Etlstage) -> None:
    """They are grouped by kind of worker, with their demands; none runs (issue 26)."""
    done = etlstage("check", "--list")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "workers that are given messages:",
        "workers that extract:",
        *("dialect marker:", "dialect cocaine:", "dialect kcl:"),
    ]
    at = lines.index("  accepts an empty message")
    assert lines[at + 1] == (
        "      A message may be empty; like any other, it is answered or refused."
    )
    assert "  initializes" in lines


def test_breach_is_1(etlstage: Etlstage, tmp_path: Path) -> None:
    """The JSON has the reason and the transcript, and JUnit a failure (issue 12)."""
    arguments = ("--timeout", "6", "--", "python", "silent.py")
    done = etlstage("check", "--json", "--junit", "out.xml", *arguments, code=1)
    found = json.loads(done.stdout)
    assert not found["passed"]
    (failed,) = (each for each in found["checks"] if each["verdict"] == "failed")
    assert failed["name"] == "accepts an empty message"
    assert "it waits for more input" in failed["reason"]
    assert failed["transcript"][1].endswith("stdin   <EOM>")
    suite = ET.fromstring((tmp_path / "out.xml").read_text())  # noqa: S314
    (case,) = suite.findall("testcase[failure]")
    assert case.attrib["name"] == "accepts an empty message"


def test_stage_of_a_pipeline_is_checked(etlstage: Etlstage) -> None:
    """The stage has its settings from the file (issue 12)."""
    done = etlstage("check", "pipeline.yaml", "--stage", "extract", code=0)
    assert done.stdout.startswith("ok     writes all and exits")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batch", "wrker", "--", "x"), "--batch: unknown driver 'wrker'"),
        (("--batch", "worker:x", "--", "x"), "--batch: expected DRIVER[:SIZE]"),
        (("--kind", "lod", "--", "x"), "--kind: unknown kind 'lod' (did you mean"),
        (("--markers", "eom", "--", "x"), "--markers: expected NAME=TEXT,..."),
        (("--markers", "eom=", "--", "x"), "--markers"),
        (("--markers", "xx=1", "--", "x"), "--markers.xx: unknown key"),
        (("--mode", "cyclic", "--", "x"), "--mode: "),
        (("--sample", "no", "--", "x"), "no can't be read: no such file"),
        (("--stage", "uper", "pipeline.yaml"), "unknown stage 'uper' (did you mean"),
        (("--stage", "upper", "a", "b"), "--stage needs one FILE"),
        (
            ("--stage", "upper", "--kind", "load", "pipeline.yaml"),
            "--kind can't be used with --stage",
        ),
    ],
)
def test_wrong_usage_is_2(
    etlstage: Etlstage, arguments: tuple[str, ...], said: str
) -> None:
    """The error names the option (issue 12)."""
    done = etlstage("check", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_what_was_not_tried_is_one_line(etlstage: Etlstage) -> None:
    """A worker that never answers fails one check, not twenty (issue 12)."""
    done = etlstage("check", "--", "true", code=1)
    first, *_, others, last = done.stdout.splitlines()
    assert first.startswith("FAIL   answers: the worker ")
    assert others == "-      22 others not run: 'answers' has failed"
    assert last == "23 checks: 1 failed, 22 not applicable"


def test_program_that_does_not_start_is_1(etlstage: Etlstage) -> None:
    """The error states why (issue 12)."""
    done = etlstage("check", "--", "no-such-program", code=1)
    assert "there is no program 'no-such-program'" in done.stderr


# --- etlstage try ---------------------------------------------------------------------


def test_a_few_messages_of_stdin(etlstage: Etlstage) -> None:
    """Each is printed with its reply, the markers by name (issue 12)."""
    done = etlstage("try", "--", "python", "upper.py", given="one\n\ntwo\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "stdin   one<EOM>",
        "stdout  ONE<EOM><EOP>",
        "        1 output",
        "stdin   <EOM>",
        "stdout  <EOM><EOP>",
        "        1 output",
        "stdin   two<EOM>",
        "stdout  TWO<EOM><EOP>",
        "        1 output",
    ]


def test_messages_of_the_pipeline(etlstage: Etlstage) -> None:
    """They have passed through the stages before that one (issue 12)."""
    done = etlstage("try", "pipeline.yaml", "--stage", "load", "--limit", "2")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("stdin")] == [
        "stdin   A<EOM>",
        "stdin   B<EOM>",
    ]


def test_worker_that_does_not_answer_is_shown_as_far_as_it_came(
    etlstage: Etlstage,
) -> None:
    """The error names the missing marker, and its output is printed (issue 12)."""
    done = etlstage("try", "--timeout", "1", "--", "cat", given="one\n", code=1)
    assert "without the marker eop '\\000' after its reply" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("stdout  one<EOM>")


def test_messages_of_a_file_in_a_batch(etlstage: Etlstage, tmp_path: Path) -> None:
    """The batch has as many messages as the limit allows (issue 12)."""
    (tmp_path / "sample").write_text("a\nb\nc")
    program = "import sys; sys.stdin.read(); print('x\\n', end='\\0')"
    done = etlstage(
        *("try", "--batch", "supervisor", "--sample", "sample", "--limit", "2"),
        *("--timeout", "2", "--", sys.executable, "-c", program),
    )
    assert "stdin   a<EOM>b<EOM><EOB>" in done.stdout
    assert "replied only when its stdin was closed: flush" in done.stdout


def test_extraction_is_shown(etlstage: Etlstage) -> None:
    """An extract worker is given no messages; its output is printed (issue 12)."""
    done = etlstage("try", "--kind", "extract", "--", "printf", "a\\nb\\n")
    assert (done.returncode, done.stdout) == (0, "output  a\noutput  b\n")


def test_no_message_is_2(etlstage: Etlstage) -> None:
    """Empty input is wrong usage (issue 12)."""
    done = etlstage("try", "--", "cat", given="", code=2)
    assert "there is no message to try" in done.stderr


def test_worker_with_sessions_is_asked_for_ranges() -> None:
    """Its dialect has no mode that would have to be set as well (issue 15)."""
    options = Options(
        kind="extract", offsets="supervisor", dialect="cocaine:event=read"
    )
    program = program_of(["./worker"], options)
    assert program.ranges
    assert (program.stage.kind.value, program.stage.dialect.name) == (
        "extract",
        "cocaine",
    )


def test_processor_that_commits_has_no_replies(etlstage: Etlstage) -> None:
    """The error names the commands that work for it (issue 25)."""
    done = etlstage("try", "--dialect", "kcl", "--", "cat", code=2)
    assert "see etlstage check --dialect kcl, and etlstage kcl simulate" in done.stderr
