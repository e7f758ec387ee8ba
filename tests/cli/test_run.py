from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

import pyarrow.dataset
import pytest

from tests.cli.conftest import (
    PIPELINE,
    UPPER,
    Etlstage,
    Started,
    command,
    left_behind,
    worker,
)
from tests.cli.forked import Forks, environment
from tests.cli.terminal import output_on_terminal

ENDLESS = """\
name: endless
extract: {worker: {command: [sh, -c, "while echo y; do sleep 0.01; done"]}}
load: {worker: {command: [python, slow.py]}}
"""
ENDED_SOON: Final = ENDLESS.replace("slow.py]}", "slow.py]}, timeout: {stop: 100ms}")
"""The same for a worker that does not end by itself, and is killed soon."""
SLOW = """\
    import sys, time
    print("first message is here", file=sys.stderr, flush=True)
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(b"\\0")
        sys.stdout.flush()
    """
STUCK = """\
    import sys, time
    sys.stdin.buffer.readline()
    print("first message is here", file=sys.stderr, flush=True)
    time.sleep(600)
    """


def wait_for(stream: IO[str] | None, text: str) -> str:
    """Read lines until one holds ``text``; return all of them."""
    assert stream is not None
    lines = ""
    for line in stream:
        lines += line
        if text in line:
            return lines
    raise AssertionError(f"no line with {text!r} in {lines!r}")


def test_run_to_the_end(etlstage: Etlstage, pipeline: Path, tmp_path: Path) -> None:
    """Every message is loaded, in order, and the report shows that."""
    result = etlstage("run", pipeline)
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "loaded.txt").read_text() == "A\nB\nC\n"
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0] == ["stage", "in", "out", "dead", "failed", "unprocessed", "seconds"]
    assert [row[:6] for row in rows[1:4]] == [
        ["extract", "-", "3", "0", "0", "0"],
        ["upper", "3", "3", "0", "0", "0"],
        ["load", "3", "3", "0", "0", "0"],
    ]
    assert "\naccounted for: 3 loaded\n" in result.stdout
    assert re.search(r"^letters: done in \d+\.\d s$", result.stdout, re.MULTILINE)
    assert "\x1b" not in result.stdout


def test_report_file(etlstage: Etlstage, pipeline: Path, tmp_path: Path) -> None:
    """It is JSON, and replaces the old file as a whole."""
    (tmp_path / "r.json").write_text("old")
    assert etlstage("run", pipeline, "--report", "r.json").returncode == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["pipeline"], report["status"]) == ("letters", "done")
    assert (tmp_path / "r.json").stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir() if "json" in p.name) == ["r.json"]


def test_first_messages_of_a_run(
    etlstage: Etlstage, pipeline: Path, tmp_path: Path
) -> None:
    """They are loaded, and no more is extracted (issue 23)."""
    result = etlstage("run", pipeline, "--limit", "2")
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "loaded.txt").read_text() == "A\nB\n"
    assert "\naccounted for: 2 loaded\n2 messages loaded; output incomplete\n" in (
        result.stdout
    )


@pytest.mark.parametrize(
    ("until", "more", "printed", "said"),
    [
        ("upper", [], "A\nC\n", "2 printed, 1 dead-lettered"),
        ("upper", ["--limit", "1"], "A\n", "1 printed"),
        ("extract", [], "a\nb\nc\n", "3 printed"),
    ],
)
def test_messages_that_leave_a_stage(
    etlstage: Etlstage,
    pipeline: Path,
    tmp_path: Path,
    until: str,
    more: list[str],
    printed: str,
    said: str,
) -> None:
    """They are printed; nothing is loaded, and nothing is kept (issue 23)."""
    (tmp_path / "upper.py").write_text(
        UPPER.replace('b"\\0"', '(b"\\x15", b"\\0")[line != b"b\\n"]')
    )
    before = sorted(tmp_path.iterdir())
    result = etlstage("run", pipeline, "--until", until, *more)
    assert (result.returncode, result.stdout) == (0, printed)
    assert f"accounted for: {said}\n" in result.stderr
    assert "messages printed; nothing is loaded" in result.stderr.replace(
        "1 message ", "1 messages "
    )
    assert "etlstage dlq" not in result.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("stage", ["load", "uper"])
def test_stage_that_no_messages_leave(
    etlstage: Etlstage, pipeline: Path, stage: str
) -> None:
    """The load stage is the last, and a name may be misspelt (issue 23)."""
    result = etlstage("run", pipeline, "--until", stage)
    expected = {
        "load": ", expected one of extract, upper",
        "uper": " (did you mean 'upper'?)",
    }
    assert (result.returncode, result.stderr) == (
        2,
        (
            f"etlstage: error: --until: no messages leave a stage '{stage}'"
            f"{expected[stage]}\n"
        ),
    )


def test_dry_run_whose_stdout_is_closed_is_wrong_usage(pipeline: Path) -> None:
    """No messages are written to another file that was opened since (issue 26)."""
    words = shlex.join(command(["run", pipeline, "--until", "upper"]))
    done = subprocess.run(
        ["/bin/sh", "-c", f"{words} >&-"],
        cwd=pipeline.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    expected = "etlstage: error: stdout is closed; redirect it, as in >/dev/null\n"
    assert (done.returncode, done.stderr) == (2, expected)


def test_part_of_a_load_that_counts_as_a_whole(
    etlstage: Etlstage, tmp_path: Path
) -> None:
    """Exactly-once delivery covers a whole input, which a limit cuts (issue 23)."""
    (tmp_path / "in").write_text("a\nb\n")
    (tmp_path / "p.yaml").write_text(
        "name: p\nstate: state\ndelivery: exactly-once\n"
        "extract: {files: {path: in, format: text}}\n"
        "load: {files: {path: out, format: text}}\n"
    )
    result = etlstage("run", "p.yaml", "--limit", "1")
    assert (result.returncode, result.stderr) == (
        2,
        (
            "etlstage: error: p.yaml:3:11: delivery exactly-once needs the whole input,"
            " which --limit cuts; add --set delivery=at-least-once, or --until to load"
            " nothing\n"
        ),
    )
    changed = "--set", "delivery=at-least-once"
    assert etlstage("run", "p.yaml", "--limit", "1", *changed).returncode == 0
    (part,) = (tmp_path / "out").glob("part-*")
    assert part.read_text() == "a\n"
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    printed = etlstage("run", "p.yaml", "--limit", "1", "--until", "extract", "-q")
    assert (printed.stdout, printed.stderr) == ("a\n", "")


def test_report_that_can_not_be_written_at_the_end(
    etlstage: Etlstage, pipeline: Path, tmp_path: Path
) -> None:
    """One line warns of it, after the run's own error if it failed (issue 10)."""
    (folder := tmp_path / "reports").mkdir()
    (tmp_path / "upper.py").write_text(
        f"import shutil; shutil.rmtree('reports', True)\n{UPPER}"
    )
    line = (
        f"etlstage: warning: report {folder / 'r.json'} can't be written:"
        " no such file or directory"
    )
    result = etlstage("run", pipeline, "--report", "reports/r.json")
    assert (result.returncode, result.stderr) == (0, line + "\n")
    assert (tmp_path / "loaded.txt").read_text() == "A\nB\nC\n"

    folder.mkdir()
    (tmp_path / "upper.py").write_text(
        "import shutil, sys; shutil.rmtree('reports', True); sys.exit(3)"
    )
    result = etlstage("run", pipeline, "--report", "reports/r.json", code=1)
    (why,) = re.findall("^etlstage: error: .*", result.stderr, re.MULTILINE)
    assert why.startswith("etlstage: error: stage upper: all workers failed")
    assert result.stderr.splitlines()[-1] == line


HIDING = """\
name: secret
extract: {worker: {command: [sh, -c, "echo a"]}}
load:
  worker:
    command: COMMAND
    env: {PASSWORD: plain-word, BOTH: "Bearer ${TOKEN}"}
  restart: {max: 0}
  on_error: {retries: 0, then: fail}
"""


def no_program(path: Path) -> None:
    """Write a file that looks like a program, and can't be started."""
    path.write_bytes(b"\0")
    path.chmod(0o755)


@pytest.mark.parametrize(
    "command",
    [
        '["./${TOKEN}", x]',
        '[sh, -c, "echo $$BOTH $$PASSWORD >&2; exit 3", "it\'s ${TOKEN}"]',
    ],
)
@pytest.mark.parametrize("debug", [(), ("--debug",)])
def test_secrets_are_shown_nowhere(
    etlstage: Etlstage, tmp_path: Path, command: str, debug: tuple[str, ...]
) -> None:
    """Neither on the terminal, nor in the log, nor in the report (issue 10)."""
    path = tmp_path / "pipeline.yaml"
    path.write_text(HIDING.replace("COMMAND", command))
    no_program(tmp_path / "hunter 2's")
    result = etlstage(
        *("run", path, "--report", "r.json", "--report-html", "r.html", *debug),
        env={"TOKEN": "hunter 2's"},
        code=1,
    )
    report = (tmp_path / "r.json").read_text()
    page = (tmp_path / "r.html").read_text()
    for text in (result.stdout, result.stderr, report, page):
        assert "hunter" not in text
        assert "plain-word" not in text
    assert "${TOKEN}" in result.stderr
    told = json.loads(report)
    assert "${TOKEN}" in "\n".join([told["error"], *told["story"]])


def test_no_part_of_a_report_is_there_while_a_run_lasts(
    etlstage: Etlstage, pipeline: Path, tmp_path: Path
) -> None:
    """So a run that is killed leaves none (issue 26)."""
    (tmp_path / "reports").mkdir()
    (tmp_path / "upper.py").write_text(
        f"import os; open('seen.txt', 'w').write(f'{{os.listdir(\"reports\")}}')\n{UPPER}"
    )
    assert etlstage("run", pipeline, "--report", "reports/r.json").returncode == 0
    assert (tmp_path / "seen.txt").read_text() == "[]"
    assert [path.name for path in (tmp_path / "reports").iterdir()] == ["r.json"]


def test_report_on_a_loop_of_links(
    etlstage: Etlstage, pipeline: Path, tmp_path: Path
) -> None:
    """It is reported before anything runs (issue 10)."""
    (tmp_path / "r.json").symlink_to("r.json")
    result = etlstage("run", pipeline, "--report", "r.json", code=2)
    assert result.stderr == (
        "etlstage: error: report r.json can't be written: too many levels of symbolic"
        " links\n"
    )
    assert not (tmp_path / "loaded.txt").exists()


def test_worker_that_cant_be_started(
    etlstage: Etlstage, pipeline: Path, tmp_path: Path
) -> None:
    """The error is one clear line without a traceback; the report is still written."""
    no_program(tmp_path / "nope")
    pipeline.write_text(pipeline.read_text().replace("python, upper.py", "./nope"))
    result = etlstage("run", pipeline, "--report", "r.json", code=1)
    *_, line = result.stderr.splitlines()
    assert line.startswith("etlstage: error: stage upper: can't start worker")
    assert "/nope has no #! line that names its interpreter" in line
    assert "accounted for: 0 loaded" in result.stdout
    assert re.search(r"^letters: failed in ", result.stdout, re.MULTILINE)
    assert json.loads((tmp_path / "r.json").read_text())["status"] == "failed"
    debug = etlstage("run", pipeline, "--debug", code=1)
    assert "Traceback (most recent call last)" in debug.stderr
    assert line in debug.stderr


def test_worker_that_exits_at_once(etlstage: Etlstage, pipeline: Path) -> None:
    """Its last line is in the log, in the error and in the error's story."""
    command = "[sh, -c, 'echo no licence >&2; exit 3']"
    pipeline.write_text(pipeline.read_text().replace("[python, upper.py]", command))
    result = etlstage("run", pipeline, code=1)
    log, _, rest = result.stderr.partition("etlstage: error: ")
    logged = [json.loads(event) for event in log.splitlines()]
    assert any(e.get("line") == "no licence" for e in logged)
    error, *story = rest.splitlines()
    assert error.startswith("stage upper: no licence; ")
    assert "  stderr: no licence" in story
    assert "Traceback" not in result.stderr


def test_second_run_with_one_state_is_refused(
    start: Started, etlstage: Etlstage, pipeline: Path, tmp_path: Path
) -> None:
    """The error names the holder; once that has died, the state is free (issue 10)."""
    pipeline.write_text(f"state: state\n{ENDLESS}")
    worker(tmp_path / "slow.py", SLOW)
    process = start("run", pipeline)
    wait_for(process.stderr, "first message is here")
    refused = etlstage("run", pipeline, "--report", "r.json", code=1)
    assert re.fullmatch(
        rf"etlstage: error: another run uses the state directory {tmp_path}/state \(pid"
        rf" {process.pid} on \S+, since \S+\): wait until it has ended, shut"
        r" it out with 'etlstage state take-over', or set another state\n",
        refused.stderr,
    )
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["status"] == "failed"
    assert process.poll() is None
    process.kill()
    process.wait()
    pipeline.write_text(f"state: state\n{PIPELINE}")
    assert etlstage("run", pipeline).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_drains(
    start: Started, pipeline: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Extraction ends, messages under way are finished, and the exit code is 4."""
    pipeline.write_text(ENDLESS)
    worker(tmp_path / "slow.py", SLOW)
    process = start("run", pipeline, "--report", "r.json")
    wait_for(process.stderr, "first message is here")
    os.killpg(process.pid, number)
    out, err = process.communicate()
    assert process.returncode == 4
    assert "press Ctrl-C again to stop at once" in err
    ending = r"^endless: drained in \S+ s; run it again for the rest$"
    assert re.search(ending, out, re.MULTILINE)
    assert re.search(r"^accounted for: \d+ loaded$", out, re.MULTILINE)
    assert "Traceback" not in err
    assert json.loads((tmp_path / "r.json").read_text())["status"] == "drained"
    assert left_behind(tmp_path) == []


def test_two_signals_stop_at_once(
    start: Started, pipeline: Path, tmp_path: Path
) -> None:
    """A worker that never answers is stopped, and the exit code is 5."""
    pipeline.write_text(ENDED_SOON)
    worker(tmp_path / "slow.py", STUCK)
    process = start("run", pipeline, "--report", "r.json")
    wait_for(process.stderr, "first message is here")
    assert len(left_behind(tmp_path)) >= 3
    os.killpg(process.pid, signal.SIGINT)
    wait_for(process.stderr, "press Ctrl-C again to stop at once")
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 5
    assert "endless: stopped by force" in out
    assert "Traceback" not in err
    assert json.loads((tmp_path / "r.json").read_text())["status"] == "forced"
    assert left_behind(tmp_path) == []


PATIENT: Final = """\
name: patient
delivery: exactly-once
state: state
drain: 100ms
extract: {files: {path: in.txt, format: text}}
transform: [{name: clean, worker: {command: [python, slow.py]}}]
load: {files: {path: out, format: parquet, mode: append}}
"""


def test_signal_leaves_what_only_waits_to_the_next_run(
    start: Started, etlstage: Etlstage, pipeline: Path, tmp_path: Path
) -> None:
    """Messages read ahead could take hours; they are loaded once all the same."""
    lines = [f"line {n}" for n in range(20_000)]
    (tmp_path / "in.txt").write_text("\n".join(lines))
    pipeline.write_text(PATIENT)
    # Each message takes longer than the run may drain.
    reply = 'sys.stdout.write(line + "\\0"); sys.stdout.flush()'
    said = 'print("first message is here", file=sys.stderr, flush=True)'
    slow = f"for line in sys.stdin: {said}; {reply}; time.sleep(0.3)"
    worker(tmp_path / "slow.py", f"import sys, time\n{slow}\n")
    process = start("run", pipeline, "--report", "r.json")
    wait_for(process.stderr, "first message is here")
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 4, err
    assert re.search(r"draining: [\d,]+ messages in progress, those that", err)
    report = json.loads((tmp_path / "r.json").read_text())
    _, clean, load = report["stages"]
    assert (report["status"], load["done"]) == ("drained", 0)
    assert clean["unprocessed"] > 9_000
    assert "ledger not balanced" not in out
    assert left_behind(tmp_path) == []

    worker(tmp_path / "slow.py", f"import sys\nfor line in sys.stdin: {reply}\n")
    result = etlstage("run", pipeline)
    assert (result.returncode, result.stderr) == (0, result.stderr)
    rows = pyarrow.dataset.dataset(tmp_path / "out", ignore_prefixes=["_", "."])
    assert sorted(rows.to_table()["value"].to_pylist()) == sorted(lines)


def test_more_signals_do_nothing(
    start: Started, pipeline: Path, tmp_path: Path
) -> None:
    """The run ends with its ledger and report, and leaves no process (issue 10)."""
    pipeline.write_text(ENDED_SOON)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    worker(tmp_path / "slow.py", deaf + textwrap.dedent(STUCK))
    process = start("run", pipeline, "--report", "r.json")
    wait_for(process.stderr, "first message is here")
    os.killpg(process.pid, signal.SIGTERM)
    wait_for(process.stderr, "draining")
    os.killpg(process.pid, signal.SIGTERM)
    wait_for(process.stderr, "stopping")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) * 9:
        os.killpg(process.pid, number)
    out, err = process.communicate()
    assert process.returncode == 5
    assert "endless: stopped by force" in out
    assert "accounted for: " in out
    # The worker was given up when the run was to drain.
    assert {json.loads(line)["event"] for line in err.splitlines()} <= {"worker failed"}
    assert json.loads((tmp_path / "r.json").read_text())["status"] == "forced"
    assert left_behind(tmp_path) == []


OnTerminal = Callable[..., tuple[int, str]]


@pytest.fixture
def on_terminal(pipeline: Path, forks: Forks) -> OnTerminal:
    """Run a pipeline on a terminal; return its exit code and the screen."""

    def run(**env: str) -> tuple[int, str]:
        plain = environment(**{"TERM": "xterm", "COLUMNS": "80"} | env)
        words = [forks.program, "run", str(pipeline)]
        return output_on_terminal(words, width=80, folder=pipeline.parent, env=plain)

    return run


def test_terminal_gets_a_live_table(pipeline: Path, on_terminal: OnTerminal) -> None:
    """It is gone at the end, the closing report stays, and no JSON is shown."""
    pipeline.write_text(
        pipeline.read_text().replace(
            "[python, upper.py]", "[sh, -c, 'echo look >&2; exec python3 upper.py']"
        )
    )
    code, screen = on_terminal()
    assert code == 0
    assert "per second" in screen
    assert "\x1b[?25l" in screen
    assert screen.rfind("\x1b[?25h") > screen.rfind("\x1b[?25l")
    assert re.search(r"upper-?\d* \(\d+\) .*look", screen)
    assert '"event"' not in screen
    assert "letters: done in" in screen


def test_error_takes_three_lines_of_a_terminal(
    pipeline: Path, on_terminal: OnTerminal
) -> None:
    """It begins with what matters, and names ``--debug`` for the rest (issue 11)."""
    code = "import sys, json; json.loads(sys.stdin.readline())"
    (pipeline.parent / "upper.py").write_text(code + "  # " + "x" * 300)
    code_, screen = on_terminal(NO_COLOR="1")
    assert code_ == 1
    lines = screen.splitlines()
    at = max(n for n, line in enumerate(lines) if line.startswith("etlstage: error: "))
    shown = lines[at:]
    assert shown[0].startswith("etlstage: error: stage upper: 2 of 3 messages could")
    assert "json.decoder.JSONDecodeError: Expecting value" in " ".join(shown)
    assert len(shown) == 3
    assert shown[-1].endswith(" ... (--debug shows all)")
    assert all(len(line) <= 80 for line in shown)


def test_colours_can_be_switched_off(on_terminal: OnTerminal) -> None:
    """See no-color.org."""
    _, screen = on_terminal(NO_COLOR="1")
    assert not re.search(r"\x1b\[[\d;]*3\dm", screen)


def test_dumb_terminal_gets_lines(on_terminal: OnTerminal) -> None:
    """A terminal that can't move its cursor is like a file."""
    code, screen = on_terminal(TERM="dumb")
    assert code == 0
    assert "\x1b" not in screen
    assert "letters: done in" in screen


DEBUGGING: Final = """\
import sys
for line in sys.stdin.buffer:
    if line == b"b\\n":
        sys.stdout.buffer.write(b"debug: here\\n")
    sys.stdout.buffer.write(b'"%s"\\n\\0' % line.strip())
    sys.stdout.buffer.flush()
"""


@pytest.mark.parametrize("expect", ["outputs: 1", "json: true"])
def test_reply_that_is_not_as_expected(
    etlstage: Etlstage, pipeline: Path, tmp_path: Path, expect: str
) -> None:
    """Output for debugging is not loaded: its message is dead-lettered (issue 26)."""
    (tmp_path / "upper.py").write_text(DEBUGGING)
    text = pipeline.read_text()
    stage = "worker: {command: [python, upper.py]}"
    assert etlstage("run", pipeline).returncode == 0
    loaded = tmp_path / "loaded.txt"
    assert loaded.read_text() == '"a"\ndebug: here\n"b"\n"c"\n'
    loaded.unlink()
    pipeline.write_text(text.replace(stage, f"{stage}\n    expect: {{{expect}}}"))
    result = etlstage("run", pipeline)
    assert (result.returncode, loaded.read_text()) == (0, '"a"\n"c"\n')
    assert "accounted for: 2 loaded, 1 dead-lettered\n" in result.stdout
    listed = etlstage("dlq", "ls", pipeline, "--json").stdout
    letter = json.loads(listed)
    assert letter["kind"] == "ContractBroken"
    assert letter["error"].startswith(
        f"stage upper: the reply breaks expect.{expect[:4]}"
    )
    more = ("--set", "transform.upper.on_error.then=fail")
    result = etlstage("run", pipeline, *more, code=1)
    assert "stage upper: the reply breaks expect." in result.stderr


def test_mismatches_by_name(etlstage: Etlstage, pipeline: Path, tmp_path: Path) -> None:
    """They are counted, or end the run; a schema may be in a file (issue 26)."""
    (tmp_path / "upper.py").write_text(DEBUGGING)
    (tmp_path / "out.json").write_text('{"enum": ["a", "b"]}')
    stage = "worker: {command: [python, upper.py]}"
    promises = "{outputs: 1, schema: out.json}, on_mismatch: count"
    text = pipeline.read_text().replace(stage, f"{stage}\n    expect: {promises}")
    pipeline.write_text(text.replace(", on_mis", "\n    on_mis"))
    result = etlstage("run", pipeline, "--report", "r.json", code=0)
    assert (
        "upper: replies not as expected: 1 by outputs, 1 by schema\n" in result.stdout
    )
    assert result.stdout.splitlines()[0].split()[6] == "mismatched"
    report = json.loads((tmp_path / "r.json").read_text())
    found = [stage["mismatches"] for stage in report["stages"]]
    assert found == [{}, {"outputs": 1, "schema": 1}, {}]
    result = etlstage(
        "run", pipeline, "--set", "transform.upper.on_mismatch=fail", code=1
    )
    assert "upper: the reply breaks expect.outputs: 2 outputs, not 1" in result.stderr
    (tmp_path / "out.json").unlink()
    result = etlstage("validate", pipeline, code=2)
    assert "transform[0].expect.schema: there is no file" in result.stderr
