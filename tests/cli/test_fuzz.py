from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Etlstage, Started
from tests.cli.forked import environment
from tests.cli.test_usage import without_arrow
from tests.patience import HANG

pytestmark = pytest.mark.process

READS = """\
import os
while chunk := os.read(0, 65536):
    for message in chunk.removesuffix(b"\\n").split(b"\\n"):
        os.write(1, message.{how}() + b"\\n\\0")
"""
"""A worker that mistakes the bytes of one read for whole messages."""
LINES = """\
import sys
for line in sys.stdin.buffer:
    sys.stdout.buffer.write(line.upper() + b"\\0")
    sys.stdout.flush()
"""

DIES_WHEN_EMPTY = """\
import os, sys, time
for line in sys.stdin.buffer:
    if line == b"\\n":
        with open("deaths", "ab") as deaths:
            deaths.write(b"+")
            deaths.flush()
            if deaths.tell() == 3:  # by now, the first one has been noted
                with open("shrinking", "wb") as told:
                    told.write(b"!")
        os._exit(3)
    sys.stdout.buffer.write(line + b"\\0")
    sys.stdout.flush()
"""
"""A worker that writes to a pipe when it dies of an empty message the third time."""


def run_program(shown: str, folder: Path) -> str:
    """Run the program that was shown for a failure; return its output."""
    program = shown.partition("in Python:\n")[2].partition("found after")[0]
    done = subprocess.run(
        [sys.executable, "-c", program.replace("\n  ", "\n").strip()],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr


def test_failure_is_shown_kept_and_dropped(etlstage: Etlstage, tmp_path: Path) -> None:
    """It is shown as messages and as a program, until it is mended (issue 12)."""
    worker = tmp_path / "worker.py"
    worker.write_text(READS.format(how="upper"))
    fuzz = ("fuzz", "--seed", "1", "--", sys.executable, "-S", "worker.py")

    found = etlstage(*fuzz)

    assert (found.returncode, found.stderr) == (1, "")
    assert found.stdout.startswith("FAILED the worker ")
    assert "  1. x | <EOM>\n  2. the end of the input\n" in found.stdout
    assert re.search(r", \d+ shrinking steps? \(seed 1\)\n", found.stdout)
    assert "CaseFailed: the worker " in run_program(found.stdout, tmp_path)

    again = etlstage(*fuzz, code=1)
    assert again.stdout.startswith("regression: a saved case still fails:\nFAILED ")
    played = etlstage("replay")
    assert (played.returncode, played.stderr) == (1, "")
    assert played.stdout.startswith("FAILED the worker ")
    (recording,) = (tmp_path / ".etlstage" / "failures").glob("*.rec")
    assert etlstage("replay", recording).returncode == 0

    worker.write_text(LINES)
    played = etlstage("replay", code=0)
    assert played.stdout.startswith("FIXED  it ")
    assert played.stdout.endswith("1 case: 1 fixed, 0 failed\n")
    mended = etlstage("fuzz", "--max-examples", "20", *fuzz[1:], code=0)
    first, passed, last = mended.stdout.splitlines()
    assert first.startswith("fixed: it ")
    assert passed == (
        "passed: answers, protocol. Not checked: outputs, JSON, idempotent, order-free,"
        " stateless, model"
    )
    assert last.startswith("tried 20 cases, ")
    assert etlstage("replay").stdout == "no cases in .etlstage/failures\n"


def test_search_that_draws_no_message_has_not_passed(
    etlstage: Etlstage, tmp_path: Path
) -> None:
    """A schema may allow none in a way that only drawing shows (issue 26)."""
    (tmp_path / "worker.py").write_text(LINES)
    (tmp_path / "none.json").write_text(
        '{"type": "array", "uniqueItems": true, "minItems": 3, "items": {"enum": [1]}}'
    )
    fuzz = ("fuzz", "--seed", "1", "--max-examples", "20", "--json-schema", "none.json")
    done = etlstage(*fuzz, "--", sys.executable, "-S", "worker.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--json-schema none.json: no message was drawn" in done.stderr


def test_replay_goes_on_after_a_program_that_is_gone(
    etlstage: Etlstage, tmp_path: Path
) -> None:
    """Its case counts as failed, and the others are played (issue 26)."""
    for name in ("first", "second", "third"):
        worker = tmp_path / name
        worker.write_text(f"#!{sys.executable} -S\n" + READS.format(how="upper"))
        worker.chmod(0o755)
        assert etlstage("fuzz", "--seed", "1", "--", f"./{name}").returncode == 1
    (tmp_path / "second").unlink()
    played = etlstage("replay")
    assert (played.returncode, played.stderr) == (1, "")
    gone = [line for line in played.stdout.splitlines() if "can't start" in line]
    assert len(gone) == 1
    assert re.fullmatch(r"FAILED stage worker: .* \(.*; \./second\)", gone[0])
    assert played.stdout.endswith("3 cases: 0 fixed, 3 failed\n")


WORKER = sys.executable, "-S", "worker.py"


def keep_fixed_case(etlstage: Etlstage, path: Path) -> tuple[Path, dict[str, Any]]:
    """Keep a case of a worker, mend that; return the folder of cases, and the case."""
    (path / "worker.py").write_text(READS.format(how="upper"))
    etlstage("fuzz", "--seed", "1", "--", *WORKER, code=1)
    (path / "worker.py").write_text(LINES)
    folder = path / ".etlstage" / "failures"
    (kept,) = folder.glob("*.json")
    return folder, json.loads(kept.read_bytes())


def test_replay_goes_on_after_a_case_that_can_not_be_read(
    etlstage: Etlstage, tmp_path: Path
) -> None:
    """It is named, as when its pipeline is gone, and the exit code is 2 (issue 26)."""
    folder, plain = keep_fixed_case(etlstage, tmp_path)
    others = (
        {"file": "gone.yaml", "stage": "upper"},
        plain["worker"] | {"dialect": None},
    )
    for name, other in zip(("aaa", "ddd"), others, strict=True):
        (folder / f"{name}.json").write_text(json.dumps(plain | {"worker": other}))
    (folder / "bbb.json").write_text("{")
    (folder / "ccc.json").write_text("[" * 100_000)
    played = etlstage("replay", code=2)
    fixed, total = played.stdout.splitlines()
    assert fixed.startswith("FIXED  ")
    assert total == "1 case: 1 fixed, 0 failed"
    gone, *rubbish = played.stderr.splitlines()
    assert gone.startswith("etlstage: error: .etlstage/failures/aaa.json: gone.yaml")
    for line, name in zip(rubbish, ("bbb", "ccc", "ddd"), strict=True):
        path = f".etlstage/failures/{name}.json"
        assert line.startswith(f"etlstage: error: {path} is not a kept case: ")


def test_search_goes_on_after_a_case_that_can_not_be_read(
    etlstage: Etlstage, tmp_path: Path
) -> None:
    """It is named and stays; the worker's other cases are played (issue 26)."""
    folder, plain = keep_fixed_case(etlstage, tmp_path)
    (folder / "aaa.json").write_text(json.dumps(plain | {"found": "unknown"}))
    (folder / "bbb.json").write_text("{")
    done = etlstage("fuzz", "--max-examples", "5", "--", *WORKER)
    assert done.returncode == 0
    unknown, rubbish = done.stderr.splitlines()
    for line, name in ((unknown, "aaa"), (rubbish, "bbb")):
        path = f".etlstage/failures/{name}.json"
        assert line.startswith(f"etlstage: warning: {path} is not a kept case: ")
        assert line.endswith(": skipped")
    assert done.stdout.startswith("fixed: ")
    assert sorted(path.name for path in folder.iterdir()) == ["aaa.json", "bbb.json"]


FILLS_BATCHES = """\
import os
rest, batch = b"", []
while data := os.read(0, 65536):
    *messages, rest = (rest + data).split(b"\\n")
    for message in messages:
        if message == b"\\x17":
            os._exit(4)
        batch.append(message)
        os.write(1, b"\\5")
        if len(batch) == 2:
            if {bug}:
                os._exit(3)
            os.write(1, b"".join(m + b"\\n" for m in batch) + b"\\0")
            batch = []
    if rest == b"\\x17":
        os.write(1, b"".join(m + b"\\n" for m in batch) + b"\\0")
        rest, batch = b"", []
"""
"""A worker that asks for batches of two messages, also after the second."""


def test_batch_and_timeout_are_kept(etlstage: Etlstage, tmp_path: Path) -> None:
    """A case, and its program, know what fills a batch (issue 26)."""
    worker = tmp_path / "worker.py"
    worker.write_text(FILLS_BATCHES.format(bug='b"" in batch'))
    found = etlstage(
        *("fuzz", "--seed", "1", "--timeout", "4", "--batch", "worker:2"),
        *("--dialect", "marker:bnc_after_last=true"),
        *("--", sys.executable, "-S", "worker.py"),
        code=1,
    )
    assert "batch=BatchPolicy(size=2)" in found.stdout
    assert "timeout=4.0" in found.stdout
    assert "CaseFailed: the worker" in run_program(found.stdout, tmp_path)

    worker.write_text(FILLS_BATCHES.format(bug="False"))
    assert etlstage("replay").stdout.endswith("1 case: 1 fixed, 0 failed\n")
    assert run_program(found.stdout, tmp_path) == ""


def test_interrupted_search_keeps_what_it_has_found(
    etlstage: Etlstage, start: Started, tmp_path: Path
) -> None:
    """A bug is shown and kept, even if it was still being shrunk (issue 26)."""
    (tmp_path / "worker.py").write_text(DIES_WHEN_EMPTY)
    os.mkfifo(tmp_path / "shrinking")
    worker = (sys.executable, "-S", "worker.py")
    process = start("fuzz", "--seed", "1", "--timeout", "1", "--", *worker)
    with open(tmp_path / "shrinking", "rb") as shrinking:
        assert shrinking.read(1) == b"!"
    process.send_signal(signal.SIGINT)

    out, err = process.communicate(timeout=HANG)

    assert (process.returncode, err) == (5, "etlstage: error: interrupted\n")
    assert out.startswith("FAILED the worker has 1 reply outstanding: exited with")
    assert out.count("FAILED") == 1
    played = etlstage("replay")
    assert (played.returncode, played.stderr) == (1, "")
    assert played.stdout.endswith("1 case: 0 fixed, 1 failed\n")


def test_model_is_found_beside_the_worker(etlstage: Etlstage, tmp_path: Path) -> None:
    """It is in the working directory; a difference from it is reported (issue 12)."""
    (tmp_path / "worker.py").write_text(LINES)
    (tmp_path / "model.py").write_text(
        "def same(message):\n    return [message]\n"
        "def upper(message):\n    return [message.upper()]\n"
    )
    command = ("--", sys.executable, "-S", "worker.py")
    options = ("--seed", "1", "--max-examples", "25", "--model")
    passed = etlstage("fuzz", *options, "model:upper", *command)
    assert (passed.returncode, passed.stderr) == (0, "")
    failed = etlstage("fuzz", *options, "model:same", *command, code=1)
    assert failed.stdout.startswith(
        "FAILED it differs from the model: gave [b'X'] for b'x',"
        " but [b'x'] in the model\n"
    )


def test_stage_of_a_pipeline_is_fuzzed(
    etlstage: Etlstage, pipeline: Path, tmp_path: Path
) -> None:
    """Its settings are the file's; values of variables are not kept (issue 12)."""
    (tmp_path / "upper.py").write_text(
        "import os\nassert os.environ['KEY'] == 'verysecret'\n"
        + READS.format(how="upper")
    )
    text = pipeline.read_text().replace(
        "[python, upper.py]}",
        "[python, -S, upper.py, '${NAME}'], env: {KEY: '${SECRET}'}}",
    )
    pipeline.write_text(text)
    env = {"NAME": "hiddenword", "SECRET": "verysecret"}
    fuzz = ("fuzz", "--seed", "1", "pipeline.yaml", "--stage", "upper")

    found = etlstage(*fuzz, env=env)

    assert (found.returncode, found.stderr) == (1, "")
    assert "  1. x | <EOM>\n" in found.stdout
    assert "  from etlstage.config.lookup import stage_from_yaml\n" in found.stdout
    call = "  verify(stage_from_yaml('pipeline.yaml', 'upper'), Case([Step("
    assert call in found.stdout
    kept = [*(tmp_path / ".etlstage" / "failures").iterdir()]
    told = [found.stdout, *(path.read_text() for path in kept)]
    assert len(told) == 3
    assert not any(word in text for text in told for word in env.values())

    assert etlstage(*fuzz, env=env).stdout.startswith(
        "regression: a saved case still fails"
    )
    played = etlstage("replay", env=env)
    assert played.stdout.splitlines()[0].endswith("; pipeline.yaml --stage upper)")
    pipeline.write_text(text.replace("name: upper", "name: shout"))
    gone = etlstage("replay", env=env, code=2)
    assert "unknown stage 'upper'" in gone.stderr


def test_sample_is_begun_from(etlstage: Etlstage, tmp_path: Path) -> None:
    """A bug that random messages miss is found near one of the sample (issue 12)."""
    (tmp_path / "worker.py").write_text(
        "import sys\n"
        "for line in sys.stdin.buffer:\n"
        "    if line.startswith(b'total;'):\n"
        "        int(line[6:])\n"
        "    sys.stdout.buffer.write(b'\\0')\n"
        "    sys.stdout.flush()\n"
    )
    (tmp_path / "sample").write_text("total;17\ntotal;4\n")
    worker = ("--", sys.executable, "-S", "worker.py")
    found = etlstage("fuzz", "--seed", "1", "--sample", "sample", *worker, code=1)
    assert "  1. total;" in found.stdout
    (tmp_path / "sample").write_text("one\n\0two\n")
    wrong = etlstage("fuzz", "--sample", "sample", *worker, code=2)
    assert "message 2 of the sample: " in wrong.stderr


PICKY = """\
import json, sys
for line in sys.stdin.buffer:
    text = line[:-1].decode()
    if json.loads(text)["n"] >= 7:
        sys.exit(3)
    sys.stdout.buffer.write(line + b"\\0")
    sys.stdout.flush()
"""


@pytest.mark.parametrize(
    ("option", "value"), [("--json-schema", "in.json"), ("--strategy", "mine:orders")]
)
def test_input_is_drawn_as_it_is_described(
    etlstage: Etlstage, tmp_path: Path, option: str, value: str
) -> None:
    """Shortened input still fits the description (issue 26)."""
    (tmp_path / "worker.py").write_text(PICKY)
    (tmp_path / "in.json").write_text(
        '{"type": "object", "required": ["n"], "additionalProperties": false,'
        ' "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}}'
    )
    (tmp_path / "mine.py").write_text(
        "from hypothesis import strategies as st\n"
        "orders = st.integers(0, 9).map(lambda n: b'{\"n\": %d}' % n)\n"
    )
    fuzz = ("fuzz", "--seed", "1", option, value)
    found = etlstage(*fuzz, "--", sys.executable, "worker.py", code=1)
    assert found.stdout.startswith(
        "FAILED the worker has 1 reply outstanding: exited with status"
    )
    (shortest,) = re.findall(r"^  1\. (.*)<EOM>$", found.stdout, re.MULTILINE)
    assert json.loads(shortest)["n"] in (7, 8, 9)


def test_text_is_drawn(etlstage: Etlstage, tmp_path: Path) -> None:
    """Input that is not text can't hide other bugs then (issue 26)."""
    (tmp_path / "worker.py").write_text(
        "import sys\n"
        "for line in sys.stdin.buffer:\n"
        "    line.decode()\n"
        "    sys.stdout.buffer.write(line + b'\\0')\n"
        "    sys.stdout.flush()\n"
    )
    fuzz = ("fuzz", "--seed", "1", "--max-examples", "30")
    worker = ("--", sys.executable, "-S", "worker.py")
    assert etlstage(*fuzz, "--text", *worker).returncode == 0
    assert etlstage(*fuzz, *worker).returncode == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--text", "--json-in"), "--json-in can't be used with --text"),
        (("--text", "--sample", "in.json"), "--text can't be used with --sample"),
        (("--json-schema", "no.json"), "--json-schema no.json: no such file"),
        (("--json-schema", "text"), "--json-schema text is not a JSON document: "),
        (("--json-schema", "list"), "--json-schema list is not a JSON object"),
        (("--strategy", "mine"), "strategy is 'mine', expected module:name"),
    ],
)
def test_input_that_can_not_be_drawn(
    etlstage: Etlstage, tmp_path: Path, options: tuple[str, ...], text: str
) -> None:
    """It is wrong usage (issue 26)."""
    for name, content in (("in.json", "{}"), ("text", "{"), ("list", "[]")):
        (tmp_path / name).write_text(content)
    result = etlstage("fuzz", *options, "--", "cat", code=2)
    assert text in result.stderr


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("3", " is of type int, expected a Hypothesis strategy of bytes\n"),
        (
            "lambda: st.binary()",
            (
                " is of type function, expected a Hypothesis strategy of bytes; name"
                " the result of a call, as in messages = orders()\n"
            ),
        ),
        ("st.text()", " draws str, expected bytes; add .map(str.encode)\n"),
        ("st.binary() | st.integers()", " draws int, expected bytes\n"),
        ("st.nothing()", " draws nothing, expected bytes\n"),
        ("st.integers(5, 1)", ": Cannot have max_value=1 < min_value=5\n"),
    ],
)
def test_strategy_that_draws_no_messages(
    etlstage: Etlstage, tmp_path: Path, written: str, text: str
) -> None:
    """It is named, with what was found and what is expected (issue 26)."""
    (tmp_path / "mine.py").write_text(
        f"from hypothesis import strategies as st\norders = {written}\n"
    )
    (tmp_path / "worker.py").write_text(LINES)
    fuzz = ("fuzz", "--seed", "1", "--strategy", "mine:orders")
    result = etlstage(*fuzz, "--", sys.executable, "-S", "worker.py")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"etlstage: error: strategy mine:orders{text}"


def test_messages_with_a_marker_are_left_out(
    etlstage: Etlstage, tmp_path: Path
) -> None:
    """Fuzzing passes only if some were sent; how many were not is shown (issue 26)."""
    (tmp_path / "mine.py").write_text(
        "from hypothesis import strategies as st\n"
        "none = st.just(b'a\\nb')\n"
        "some = st.sampled_from([b'a\\nb', b'b'])\n"
    )
    (tmp_path / "worker.py").write_text(LINES)
    fuzz = ("fuzz", "--seed", "1", "--max-examples", "20", "--strategy")
    worker = ("--", sys.executable, "-S", "worker.py")

    none = etlstage(*fuzz, "mine:none", *worker)
    assert (none.returncode, none.stdout) == (2, "")
    assert none.stderr == (
        "etlstage: error: strategy mine:none: each message that it draws contains a"
        " marker, expected some that can be sent; change the strategy or the markers\n"
    )

    some = etlstage(*fuzz, "mine:some", *worker)
    assert (some.returncode, some.stderr) == (0, "")
    counts = re.search(
        r"^left out (\d+) of (\d+) messages drawn, which contain a marker$",
        some.stdout,
        re.MULTILINE,
    )
    assert counts is not None
    assert 0 < int(counts[1]) < int(counts[2])


def test_strategy_of_a_dialect_without_markers(
    etlstage: Etlstage, tmp_path: Path
) -> None:
    """Each message may be sent in it (issue 26)."""
    (tmp_path / "mine.py").write_text(
        "from hypothesis import strategies as st\nlines = st.just(b'a\\nb')\n"
    )
    (tmp_path / "worker.py").write_text(SESSIONS.format(more=""))
    result = etlstage(
        *("fuzz", "--dialect", "cocaine:event=shout", "--seed", "1"),
        *("--max-examples", "10", "--strategy", "mine:lines"),
        *("--", sys.executable, "-S", "worker.py"),
    )
    assert (result.returncode, result.stderr) == (0, "")
    tried = re.search(r"^tried 10 cases, (\d+) messages", result.stdout, re.MULTILINE)
    assert tried is not None
    assert int(tried[1]) > 0


def test_load_worker_is_fuzzed(etlstage: Etlstage, tmp_path: Path) -> None:
    """It has no outputs, so its model only accepts or refuses messages (issue 12)."""
    (tmp_path / "worker.py").write_text(LINES.replace("line.upper()", 'b""'))
    (tmp_path / "model.py").write_text(
        "from etlstage import worker\n"
        "def keep(message):\n    pass\n"
        "def sort(message):\n"
        "    if message:\n        raise worker.Refuse('x')\n"
    )
    more = ("--kind", "load", "--seed", "1", "--max-examples", "12", "--model")
    worker = ("--", sys.executable, "-S", "worker.py")
    kept = etlstage("fuzz", *more, "model:keep", *worker)
    assert (kept.returncode, kept.stderr) == (0, "")
    refused = etlstage("fuzz", *more, "model:sort", *worker)
    assert re.search(
        r"gave \[\] for b'.', but a refusal in the model\n", refused.stdout
    )
    assert "kind='load', model='model:sort')\n" in refused.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch", "me"], "--batch: unknown driver 'me'"),
        (["--markers", "eom=,eop=x"], "marker eom is empty"),
        (["--kind", "extract"], "an extract worker is given none; 'etlstage check'"),
        (["--kind", "load", "--json-out"], "--json-out: a load worker has no outputs"),
        (["--model", "f"], "model is 'f', expected module:function"),
        (["--model", "json:nothing"], "model json:nothing: module 'json' has no"),
        ([], "there is no file"),
    ],
)
def test_what_is_wrong_is_reported(
    options: list[str], said: str, etlstage: Etlstage
) -> None:
    """Wrong options are reported before the worker is started (issue 12)."""
    result = etlstage("fuzz", *options, "--", "./no-such-worker", code=2)
    assert said in result.stderr


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("./nope", "there is no file {folder}/nope; check the command"),
        ("./upper.py", "{folder}/upper.py is not executable; run: chmod +x"),
    ],
)
def test_worker_that_can_not_be_started(
    command: str, text: str, etlstage: Etlstage, tmp_path: Path
) -> None:
    """It is wrong usage, as exit code 1 means that a bug was found (issue 26)."""
    (tmp_path / "upper.py").write_text(LINES)
    result = etlstage("fuzz", "--", command)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("etlstage: error: stage worker: can't start")
    assert text.format(folder=tmp_path) in result.stderr


SESSIONS = """\
from etlstage.worker import cocaine

def shout(request, response):
    for chunk in request:
        response.write(chunk[0:1].upper() + chunk[1:]{more})

cocaine.run({{"shout": shout}})
"""


def test_worker_that_connects_is_fuzzed(etlstage: Etlstage, tmp_path: Path) -> None:
    """The failure is shown as frames, and kept with its dialect (issue 15)."""
    worker = tmp_path / "worker.py"
    worker.write_text(SESSIONS.format(more=' or b"?"'))
    (tmp_path / "model.py").write_text("def shout(message):\n    return [message]\n")
    fuzz = (
        *("fuzz", "--dialect", "cocaine:event=shout", "--seed", "1"),
        *("--model", "model:shout", "--", sys.executable, "-S", "worker.py"),
    )

    found = etlstage(*fuzz)

    assert (found.returncode, found.stderr) == (1, "")
    assert found.stdout.startswith(
        "FAILED it differs from the model: gave [b'?'] for b'', but [b''] in"
    )
    said = "  1. invoke 2 'shout'; chunk 2 ''; choke 2\n  2. a terminate\n"
    assert said in found.stdout
    assert "CaseFailed: gave [b'?'] for b''" in run_program(found.stdout, tmp_path)
    assert etlstage("replay").stdout.startswith("FAILED gave [b'?']")
    (recording,) = (tmp_path / ".etlstage" / "failures").glob("*.rec")
    played = etlstage("replay", recording)
    assert (played.returncode, played.stdout) == (0, "1 reply, all equal\n")
    worker.write_text(SESSIONS.format(more=""))
    played = etlstage("replay", recording)
    assert played.stdout.splitlines() == [
        "1: invoke 2 'shout'; chunk 2 ''; choke 2",
        "  - chunk 2 '?'; choke 2",
        "  + chunk 2 ''; choke 2",
        "1 reply, 1 different",
    ]


@pytest.mark.parametrize("command", ["fuzz", "check", "try"])
def test_script_that_is_not_there(
    command: str, etlstage: Etlstage, pipeline: Path, tmp_path: Path
) -> None:
    """It is reported as by ``validate``, not as a failure of a worker (issue 26)."""
    (tmp_path / "uper.py").touch()
    (tmp_path / "upper.py").unlink()
    result = etlstage(command, "--", "python", "upper.py")
    absent = f"there is no file {tmp_path}/upper.py (did you mean 'uper.py'?)\n"
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"etlstage: error: {absent}"
    result = etlstage(command, pipeline, "--stage", "upper")
    assert (result.returncode, result.stdout) == (2, "")
    at = f"{pipeline}:5:32: transform[0].worker.command[1]"
    assert result.stderr == f"etlstage: error: {at}: {absent}"
    assert not (tmp_path / ".etlstage").exists()


@pytest.mark.parametrize("command", ["fuzz", "check", "try"])
def test_pipeline_without_a_stage(
    command: str, etlstage: Etlstage, pipeline: Path, tmp_path: Path
) -> None:
    """It is not taken for a program: the error names its stages (issue 26)."""
    result = etlstage(command, "pipeline.yaml")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "etlstage: error: pipeline.yaml is a pipeline: choose one of its stages by"
        " --stage NAME: extract, upper or load\n"
    )
    assert pipeline.parent == tmp_path
    assert not (tmp_path / ".etlstage").exists()


def test_arrow_is_not_needed(tmp_path: Path) -> None:
    """The extra for tests, which lacks Arrow, is enough for ``fuzz`` (issue 26)."""
    worker = tmp_path / "worker.py"
    worker.write_text(LINES)
    fuzz = ("fuzz", "--max-examples", "5", "--", sys.executable, "-S", str(worker))
    done = without_arrow(tmp_path, "main()", *fuzz)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("passed: answers, protocol. ")


PROCESSOR = """\
import json, sys

def say(**said):
    print(json.dumps(said), flush=True)

for line in sys.stdin:
    action = json.loads(line)
    name = action["action"]
    if name == "checkpoint":
        if action["error"]:
            sys.exit(4)
        continue
    if name in ("processRecords", "shardEnded"):
        say(action="checkpoint", sequenceNumber=None)
        if json.loads(next(sys.stdin))["error"]:
            sys.exit(4)
    say(action="status", responseFor=name)
"""


def test_processor_is_searched_kept_and_played(
    etlstage: Etlstage, tmp_path: Path
) -> None:
    """The shortened case is kept, and its recording is replayed (issue 25)."""
    (tmp_path / "processor.py").write_text(PROCESSOR)
    command = (*("--dialect", "kcl", "--", sys.executable, "-S", "processor.py"),)
    found = etlstage("fuzz", "--seed", "1", "--max-examples", "12", *command, code=1)
    assert "it exited with status 4" in found.stdout
    assert "1 record ''; checkpoint: " in found.stdout
    assert "verify(stage, Case([Records([b''], errors=['" in found.stdout
    again = etlstage("replay")
    assert (again.returncode, again.stdout.count("1 failed")) == (1, 1)
    (kept,) = (tmp_path / ".etlstage" / "failures").glob("*.rec")
    played = etlstage("replay", str(kept))
    assert (played.returncode, played.stdout) == (0, "2 replies, all equal\n")


def test_processor_has_no_replies_to_be_compared(etlstage: Etlstage) -> None:
    """Options that compare replies are refused (issue 25)."""
    done = etlstage("fuzz", "--dialect", "kcl", "--stateless", "--", "cat", code=2)
    assert "--stateless: a worker of dialect kcl commits" in done.stderr
