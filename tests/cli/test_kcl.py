from __future__ import annotations

import signal
from pathlib import Path

from etlstage.config.loader import load
from tests.cli.conftest import Etlstage, Started
from tests.cli.test_run import wait_for


def test_properties_become_a_stage(etlstage: Etlstage, tmp_path: Path) -> None:
    """The output is a pipeline file, except for its name (issue 25)."""
    (tmp_path / "d.properties").write_text(
        "executableName = /bin/cat\nstreamName = clicks\nmaxRecords = 5\n"
    )
    result = etlstage("kcl", "import", "d.properties")

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        '# From "d.properties".\n'
        "state: state\n"
        "extract:\n"
        "  kinesis:\n"
        '    stream: "clicks"\n'
        '    from: "latest"\n'
        "load:\n"
        "  worker:\n"
        '    command: ["/bin/cat"]\n'
        "  dialect:\n"
        '    name: "kcl"\n'
        "  batch:\n"
        "    size: 5\n"
    )
    (tmp_path / "pipeline.yaml").write_text("name: p\n" + result.stdout)
    validated = etlstage("validate", "pipeline.yaml")
    assert (validated.returncode, validated.stderr) == (0, "")


def test_dollars_stay(etlstage: Etlstage, tmp_path: Path) -> None:
    """A pipeline file would take them for references (issue 26)."""
    (tmp_path / "d.properties").write_text(
        "executableName = /bin/cat 5$$ ${NOT_SET} $1\n"
    )
    result = etlstage("kcl", "import", "d.properties")
    assert '["/bin/cat", "5$$$$", "$${NOT_SET}", "$$1"]' in result.stdout
    path = tmp_path / "pipeline.yaml"
    path.write_text(f"name: p\nextract: {{worker: [seq, '3']}}\n{result.stdout}")
    keys, _ = load(path)
    assert keys.load.stage is not None
    command = keys.load.stage.program.command
    assert command == ("/bin/cat", "5$$", "${NOT_SET}", "$1")


def test_file_that_is_not_there(etlstage: Etlstage) -> None:
    """The error is one line; the exit code is that of a wrong file."""
    result = etlstage("kcl", "import", "none.properties", code=2)
    assert "none.properties: no such file or directory" in result.stderr


ENDLESS = """\
name: endless
extract:
  worker: {command: [sh, -c, "seq 5; sleep 600"]}
  dialect: {mode: plain}
load: {worker: {command: [python, processor.py]}, dialect: kcl}
"""
RETRIED = """\
name: retried
state: state
extract: {worker: {command: [seq, "9"]}}
load:
  worker: {command: [python, processor.py]}
  dialect: {name: kcl, max_uncommitted: 4}
  restart: {max: 30, delay: 10ms}
  on_error: {retries: 0, then: dead_letter, budget: 100}
"""
# It commits the first record, and may never leave.
PARTIAL = """\
import sys, time
from pathlib import Path
from etlstage.worker import kcl

class Partial(kcl.Processor):
    given = 0

    def process_records(self, records, checkpointer):
        if not self.given:
            checkpointer.checkpoint(records[0])
        self.given += len(records)
        if self.given == 5:
            print("all are given", file=sys.stderr)

    def lease_lost(self):
        if Path("stuck").exists():
            print("its lease is lost", file=sys.stderr)
            time.sleep(600)

kcl.run(Partial())
"""


def drained(start: Started, *words: str) -> str:
    """Send a command a signal when its processor has what it takes; return its stdout."""
    process = start(*words)
    wait_for(process.stderr, "all are given")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 4, err
    return out


def test_signal_leaves_what_is_not_committed(start: Started, tmp_path: Path) -> None:
    """The load is drained, and the next run delivers the rest again (issue 25)."""
    (tmp_path / "endless.yaml").write_text(ENDLESS)
    (tmp_path / "processor.py").write_text(PARTIAL)
    out = drained(start, "run", "endless.yaml")
    assert "accounted for: 1 loaded, 4 unprocessed" in out
    assert "endless: drained in " in out


def test_signal_ends_a_wait_for_the_last_commit(start: Started, tmp_path: Path) -> None:
    """The input has ended, but not all of it is given to the processor (issue 25)."""
    text = ENDLESS.replace('"seq 5; sleep 600"', '"seq 9"')
    kcl = "dialect: {name: kcl, max_uncommitted: 4}"
    (tmp_path / "ended.yaml").write_text(text.replace("dialect: kcl", kcl))
    (tmp_path / "processor.py").write_text(PARTIAL)
    out = drained(start, "run", "ended.yaml")
    assert "accounted for: 1 loaded, 8 unprocessed" in out
    assert "endless: drained in " in out


def test_signal_leaves_letters_that_are_not_committed(
    start: Started, tmp_path: Path
) -> None:
    """A retry that is drained keeps those that it may not have loaded (issue 25)."""
    (tmp_path / "letters.yaml").write_text(RETRIED)
    failing = PARTIAL.replace("        if not", "        sys.exit(7)\n        if not")
    (tmp_path / "processor.py").write_text(failing)
    start("run", "letters.yaml").communicate()
    (tmp_path / "processor.py").write_text(PARTIAL)
    out = drained(start, "dlq", "retry", "letters.yaml")
    assert out.startswith("0 dead letters passed\n")
    out, _ = start("dlq", "ls", "letters.yaml").communicate()
    assert out.endswith("\n9 dead letters\n")
