from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest

from etlstage.errors import ConfigError, WorkerStartFailed
from etlstage.messages import StageKind
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.protocol.registry import dialect_class
from etlstage.stage import Stage
from etlstage.testing import ScriptedLaunch, ScriptedWorker
from etlstage.testing.check import (
    Subject,
    Verdict,
    assert_conforms,
    check_worker,
)
from tests.testing.check.checked import checked, failures, said


def sh(program: str) -> tuple[str, ...]:
    """Return the command of a worker in shell."""
    return ("sh", "-c", program)


def python(program: str) -> tuple[str, ...]:
    """Return the command of a worker in Python."""
    return (sys.executable, "-c", program)


LOOP = "import sys\nfor line in sys.stdin.buffer:\n "
ANSWER = "sys.stdout.buffer.write(line + b'\\0'); sys.stdout.flush()"

PLANTED = {
    "buffered": (
        sh(r'awk "{ printf \"%s\n%c\", \$0, 0 }"'),
        "answers",
        "replied only when its stdin was closed",
    ),
    "no EOP": (
        python(LOOP + "sys.stdout.buffer.write(line); sys.stdout.flush()"),
        "answers",
        "owes 1 reply",
    ),
    "a greeting": (
        python("print('ready')\n" + LOOP + ANSWER),
        "says nothing unasked",
        "wrote what nobody asked for: ready<EOM>",
    ),
    "no EOP without output": (
        python(LOOP + "if line.strip():\n  " + ANSWER),
        "takes an empty message",
        "owes 1 reply",
    ),
    "text only": (
        python(LOOP + "line.decode(); " + ANSWER),
        "takes bytes that are no text",
        "exited with status 1",
    ),
    "a short buffer": (
        python(
            "import os\nrest = b''\nwhile data := os.read(0, 1 << 20):\n"
            " rest += data\n assert len(rest) < 100000\n"
            " *lines, rest = rest.split(b'\\n')\n"
            " for line in lines: os.write(1, line + b'\\n\\0')"
        ),
        "takes a long message",
        "status 1",
    ),
    "a read is a message": (
        python(
            "import os\nwhile data := os.read(0, 65536):\n"
            " os.write(1, data.rstrip(b'\\n') + b'\\n\\0')"
        ),
        "takes a byte at a time",
        "wrote",
    ),
    "the first line of a read": (
        python(
            "import os\nwhile data := os.read(0, 1 << 20):\n"
            " if data.endswith(b'\\n'):\n"
            "  os.write(1, data.split(b'\\n')[0] + b'\\n\\0')"
        ),
        "takes many at once",
        "replies: it waits for more input",
    ),
    "last first": (
        python(
            "import os\nrest = b''\nwhile data := os.read(0, 1 << 20):\n"
            " *lines, rest = (rest + data).split(b'\\n')\n"
            " for line in reversed(lines): os.write(1, line + b'\\n\\0')"
        ),
        "takes many at once",
        "gave its replies in another order",
    ),
    "dies at the 100th": (
        python("import sys\nn = 0\n" + LOOP + "n += 1; n < 100 or exit(3); " + ANSWER),
        "takes many at once",
        "exited with status 3",
    ),
    "ignores the end": (
        python(LOOP + ANSWER + "\nimport time\ntime.sleep(60)"),
        "ends",
        "did not exit",
    ),
}


@pytest.mark.parametrize(("command", "name", "reason"), PLANTED.values(), ids=PLANTED)
@pytest.mark.timeout(60)
def test_planted_bug_is_found(command: tuple[str, ...], name: str, reason: str) -> None:
    """By the check that is about it, and nothing that it does right fails (issue 12)."""
    hangs = name == "ends" or "stdin was closed" in reason
    findings = checked(command, timeout=2 if hangs else 10)
    assert reason in failures(findings)[name]


def test_failure_shows_what_went_both_ways_with_the_markers_by_name() -> None:
    """And what a worker should do (issue 12)."""
    command = python(LOOP + "if line.strip():\n  " + ANSWER)
    (finding,) = (
        item
        for item in checked(command, timeout=2)
        if item.check.name == "takes an empty message"
    )
    lines = finding.lines()
    assert lines[0].startswith("FAIL   takes an empty message: the worker owes 1 reply")
    assert lines[1] == f"       {finding.check.meaning}"
    assert lines[2].startswith("         command: ")
    assert lines[3].endswith("stdin   <EOM>")


def test_markers_that_a_worker_does_not_read_are_advice() -> None:
    """It is a worker for the default ones (issue 12)."""
    findings = checked(python(LOOP + ANSWER), timeout=4)
    assert failures(findings) == {}
    advice = said(findings, Verdict.ADVICE)
    name = "takes its markers from the environment"
    assert "other markers than the default ones" in advice[name]
    skipped = said(findings, Verdict.NOT_APPLICABLE)
    assert "takes markers of several bytes" in skipped


def test_marker_that_is_read_in_parts_is_found(tmp_path: Path) -> None:
    """A worker that looks for EOM only in what it has just read (issue 12)."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os\n"
        "def marker(name):\n"
        " return os.environ['ETLSTAGE_' + name].encode().decode('unicode_escape')"
        ".encode('latin-1')\n"
        "EOM, EOP = marker('EOM'), marker('EOP')\n"
        "have = b''\n"
        "while data := os.read(0, 65536):\n"
        " *ends, rest = data.split(EOM)\n"
        " for end in ends:\n"
        "  os.write(1, have + end + EOM + EOP)\n"
        "  have = b''\n"
        " have += rest\n"
    )
    failed = failures(checked((sys.executable, worker), timeout=2))
    assert list(failed) == ["takes markers of several bytes"]


def test_worker_that_there_are_no_checks_of_is_not_tried() -> None:
    """It would be told that it is silent (issue 15)."""
    stage = Stage(name="w", command=("w",), dialect=dialect_class("cocaine")())
    with pytest.raises(ConfigError, match="no checks of workers of dialect 'cocaine'"):
        assert_conforms(stage)


def test_chosen_markers_are_those_of_all_checks() -> None:
    """Then no other are tried (issue 12)."""
    markers = Markers(b"<m>", b"<p>", b"<b>", b"<n>", b"<r>")
    stage = Stage(name="w", command=python(LOOP + ANSWER))
    dialect = MarkerDialect(markers=markers)
    subject = Subject(
        Stage(name="w", command=stage.command, dialect=dialect), timeout=1
    )
    findings = anyio.run(check_worker, subject)
    assert "owes 1 reply" in failures(findings)["answers"]


def test_counting_worker_keeps_to_the_protocol() -> None:
    """What it replies is its own matter; that it counts is told (issue 12)."""
    count = "sys.stdout.write('%d\\n\\0' % n); sys.stdout.flush()"
    findings = checked(python("n = 0\n" + LOOP + "n += 1; " + count))
    assert failures(findings) == {}
    assert "keeps nothing" in said(findings, Verdict.ADVICE)


def test_random_worker_keeps_to_the_protocol() -> None:
    """Nothing that it says again is compared; it is told (issue 12)."""
    program = "import uuid\n" + LOOP + "line = uuid.uuid4().bytes.hex().encode(); "
    findings = checked(python(program + ANSWER.replace("line +", "line + b'\\n' +")))
    assert failures(findings) == {}
    assert "replies the same again" in said(findings, Verdict.ADVICE)


def test_refusing_worker_goes_on() -> None:
    """What it refuses is no failure, and a silent refusal is told (issue 12)."""
    program = (
        LOOP
        + "sys.stdout.buffer.write(b'\\x15' if line == b'\\n' else line + b'\\0'); sys.stdout.flush()"
    )
    findings = checked(python(program))
    assert failures(findings) == {}
    advice = said(findings, Verdict.ADVICE)
    assert advice["goes on after a refusal"] == "it does not say why it refuses"


def test_worker_of_one_language_may_die_of_another() -> None:
    """Where a sample says what it can process, that is advice (issue 12)."""
    program = LOOP + "assert line.startswith(b'{'); " + ANSWER
    sample = [b"{1", b"{2", b"{3"]
    findings = checked(python(program), sample=sample)
    assert failures(findings) == {}
    assert "to refuse" in said(findings, Verdict.ADVICE)["takes an empty message"]
    assert "answers" in failures(checked(python(program)))


def test_batches_are_checked() -> None:
    """A worker that answers none without messages (issue 12)."""
    program = (
        "import os, sys\nbatch = b''\nwhile data := os.read(0, 65536):\n"
        " *batches, batch = (batch + data).split(b'\\x17')\n"
        " for b in batches:\n  if b: os.write(1, b + b'\\0')"
    )
    findings = checked(python(program), mode=Mode.BATCH_SUPERVISOR, timeout=2)
    assert list(failures(findings)) == ["takes an empty batch"]


def test_batch_that_never_fills_is_advice() -> None:
    """A worker that asks forever is closed by the supervisor (issue 12)."""
    program = (
        "import os\nbatch = b''\nwhile data := os.read(0, 65536):\n"
        " batch += data\n"
        " if batch.endswith(b'\\x17'):\n"
        "  os.write(1, batch[:-1] + b'\\0'); batch = b''\n"
        " elif batch.endswith(b'\\n'): os.write(1, b'\\x05')"
    )
    findings = checked(python(program), mode=Mode.BATCH_WORKER)
    assert failures(findings) == {}
    assert (
        "more than 500"
        in said(findings, Verdict.ADVICE)["asks until its batch is full"]
    )


def test_load_worker_with_outputs_is_told() -> None:
    """Nobody reads them (issue 12)."""
    findings = checked(python(LOOP + ANSWER), kind=StageKind.LOAD)
    assert failures(findings) == {}
    assert "load workers give nothing" in said(findings, Verdict.ADVICE)


def test_findings_are_told_in_order_as_they_come() -> None:
    """Whichever is ready first (issue 12)."""
    told: list[str] = []

    async def main() -> list[str]:
        subject = Subject(Stage(name="w", command=python(LOOP + ANSWER)), timeout=10)
        findings = await check_worker(
            subject, found=lambda finding: told.append(finding.check.name)
        )
        return [finding.check.name for finding in findings]

    names = anyio.run(main)
    assert told == names


def test_sample_that_can_not_be_sent_is_refused() -> None:
    """It says which message (issue 12)."""
    with pytest.raises(ConfigError, match=r"message 2 of the sample: .*marker"):
        checked(python(""), sample=[b"a", b"b\0"])
    with pytest.raises(ConfigError, match="for workers that are given messages"):
        checked(python(""), kind=StageKind.EXTRACT, mode=Mode.PLAIN, sample=[b"a"])


def test_program_that_does_not_exist_is_no_finding() -> None:
    """There is no worker to be checked (issue 12)."""
    with pytest.raises(WorkerStartFailed, match="there is no program"):
        checked(["no-such-program"])


def test_scripted_worker_can_be_checked() -> None:
    """Whatever starts it (issue 12)."""

    async def script(worker: ScriptedWorker) -> None:
        async for message in worker.messages():
            await worker.reply(message)

    findings = checked(["nothing"], launch=ScriptedLaunch(script))
    assert failures(findings) == {}


def test_one_call_checks_a_worker_in_a_suite() -> None:
    """It passes, or says all that ``etlstage check`` says (issue 12)."""
    assert_conforms(python(LOOP + ANSWER), timeout=10)
    command = python(LOOP + "exit(7)")
    with pytest.raises(AssertionError) as caught:
        assert_conforms(command)
    text = str(caught.value)
    assert text.startswith("23 checks: 1 failed, 22 not applicable\nFAIL   answers: ")
    assert "exited with status 7" in text
    assert "command: " in text
    stage = Stage(name="w", command=command, dialect=MarkerDialect())
    with pytest.raises(AssertionError, match="status 7"):
        assert_conforms(stage)
