from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Etlstage, environment

pytestmark = [pytest.mark.process, pytest.mark.timeout(100)]

READS = """\
import os
while chunk := os.read(0, 65536):
    for message in chunk.removesuffix(b"\\n").split(b"\\n"):
        os.write(1, message.{how}() + b"\\n\\0")
"""
"""Takes a read for a whole number of messages."""
LINES = """\
import sys
for line in sys.stdin.buffer:
    sys.stdout.buffer.write(line.upper() + b"\\0")
    sys.stdout.flush()
"""


def test_failure_is_shown_kept_and_dropped(etlstage: Etlstage, tmp_path: Path) -> None:
    """As messages, as a recording, as a program; until it is mended (issue 12)."""
    worker = tmp_path / "worker.py"
    worker.write_text(READS.format(how="upper"))
    fuzz = ("fuzz", "--seed", "1", "--", sys.executable, "-S", "worker.py")

    found = etlstage(*fuzz)

    assert (found.returncode, found.stderr) == (1, "")
    assert found.stdout.startswith("FAILED the worker ")
    assert "  1. x | <EOM>\n  2. the end of the input\n" in found.stdout
    assert "more to make it short (seed 1)\n" in found.stdout
    program = found.stdout.partition("in Python:\n")[2].partition("found after")[0]
    said = subprocess.run(
        [sys.executable, "-c", program.replace("\n  ", "\n").strip()],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "CaseFailed: the worker " in said.stderr

    again = etlstage(*fuzz)
    assert again.returncode == 1
    assert again.stdout.startswith("what was found before still fails:\nFAILED ")
    played = etlstage("replay")
    assert (played.returncode, played.stderr) == (1, "")
    assert played.stdout.startswith("FAILED the worker ")
    (recording,) = (tmp_path / ".etlstage" / "failures").glob("*.rec")
    assert etlstage("replay", recording).returncode == 0

    worker.write_text(LINES)
    played = etlstage("replay")
    assert played.returncode == 0
    assert played.stdout.startswith("FIXED  it ")
    assert played.stdout.endswith("1 case: 1 fixed, 0 failed\n")
    mended = etlstage("fuzz", "--max-examples", "20", *fuzz[1:])
    assert mended.returncode == 0
    first, last = mended.stdout.splitlines()
    assert first.startswith("fixed: it ")
    assert last.startswith("passed: 20 cases, ")
    assert etlstage("replay").stdout == "no case in .etlstage/failures\n"


def test_model_is_found_beside_the_worker(etlstage: Etlstage, tmp_path: Path) -> None:
    """In the working directory; what differs is said (issue 12)."""
    (tmp_path / "worker.py").write_text(LINES)
    (tmp_path / "model.py").write_text(
        "def same(message):\n    return [message]\n"
        "def upper(message):\n    return [message.upper()]\n"
    )
    command = ("--", sys.executable, "-S", "worker.py")
    options = ("--seed", "1", "--max-examples", "25", "--model")
    passed = etlstage("fuzz", *options, "model:upper", *command)
    assert (passed.returncode, passed.stderr) == (0, "")
    failed = etlstage("fuzz", *options, "model:same", *command)
    assert failed.returncode == 1
    assert failed.stdout.startswith(
        "FAILED it does not do as the model does: gave [b'X'] for b'x',"
        " but [b'x'] in the model\n"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch", "me"], "--batch: unknown driver 'me'"),
        (["--markers", "eom=,eop=x"], "marker eom is empty"),
        (["--model", "f"], "model is 'f', expected module:function"),
        (["--model", "json:nothing"], "model json:nothing: module 'json' has no"),
        ([], "no such program"),
    ],
)
def test_what_is_wrong_is_said(
    options: list[str], said: str, etlstage: Etlstage
) -> None:
    """Before anything is tried (issue 12)."""
    result = etlstage("fuzz", *options, "--", "./no-such-worker")
    assert result.returncode == (2 if options else 1)
    assert options == [] or said in result.stderr
