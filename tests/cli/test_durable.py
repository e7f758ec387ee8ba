"""Pipelines with durable edges: run as a whole or in halves, and killed at any time."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from etlstage.cli.state import reset_state
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.delivery.record import CommitRecord
from tests.cli.conftest import Etlstage, left_behind
from tests.cli.forked import Forks, environment
from tests.cli.test_kills import wait_until
from tests.manual.fences import SECTIONS, write

pytestmark = pytest.mark.process

PIPELINE = """\
name: dear
state: state
delivery: exactly-once
extract: {files: {path: in.txt, format: text}}
transform:
  - name: translate
    worker: {command: [python, -S, salt.py]}
    durable: DURABLE
    on_error: {budget: 50%}
  - name: polish
    worker: {command: [python, -S, salt.py]}
    on_error: {budget: 50%}
load: {files: {path: out, format: text, mode: append, epoch: {messages: 200}}}
"""
# Its output for a message is never the same; it refuses some until it is mended.
SALT = """\
import os, random, sys
for line in sys.stdin.buffer:
    if line.startswith(b"x") and not os.path.exists("mended"):
        sys.stdout.buffer.write(b"no x\\x15")
    else:
        salt = b" %d" % random.randrange(10**9)
        sys.stdout.buffer.write(line.rstrip(b"\\n") + salt + b"\\n\\0")
    sys.stdout.flush()
"""


def pipeline(
    folder: Path, lines: list[str], durable: str = "true", more: str = ""
) -> Path:
    """Write a pipeline, its worker and its input."""
    text = PIPELINE.replace("DURABLE", durable)
    (folder / "p.yaml").write_text(text + more)
    (folder / "salt.py").write_text(SALT)
    (folder / "in.txt").write_text("".join(f"{line}\n" for line in lines))
    return folder / "p.yaml"


def loaded(folder: Path, salts: int = 2) -> list[str]:
    """Return the loaded messages, without the salts."""
    lines = [
        line.split()
        for part in (folder / "out").glob("part-*")
        for line in part.read_text().splitlines()
    ]
    assert all(len(line) == 1 + salts for line in lines)
    return sorted(line[0] for line in lines)


def test_halves_of_the_manual(etlstage: Etlstage, tmp_path: Path) -> None:
    """The manual's example runs both halves together."""
    fence, *_ = SECTIONS["how-to/journals.md#Durable edges"]
    write(fence.file, fence.text, tmp_path)
    (tmp_path / "fetch.py").write_text(
        "import json, sys\n"
        "for line in sys.stdin.buffer:\n"
        "    asked = json.loads(line)\n"
        "    numbers = range(asked['start'], asked['end'])\n"
        "    sys.stdout.write(''.join(f'{n}\\n' for n in numbers) + '\\0')\n"
        "    sys.stdout.flush()\n"
    )
    (tmp_path / "dear.py").write_text(SALT)
    done = etlstage("run", "dear.yaml")
    assert (done.returncode, len(loaded(tmp_path, 1))) == (0, 1000)
    assert "edge translate -> load: 1,000 appended, 1,000 read, 0 wait" in done.stdout


def test_halves_are_run_apart(etlstage: Etlstage, tmp_path: Path) -> None:
    """What waits is in the first half's report; the second half reads all of it."""
    lines = [str(n) for n in range(1000)]
    pipeline(tmp_path, lines, "{partitions: 4, key: /id}")
    done = etlstage(
        "run", "p.yaml", "--only-before", "translate", "--report", "r.json", code=0
    )
    report = json.loads((tmp_path / "r.json").read_text())
    (edge,) = (edge for edge in report["edges"] if "journals" in edge)
    assert edge["name"] == "translate -> translate/edge"
    assert edge["journals"]["messages"] == 1000
    assert "loads everything again" not in done.stdout
    done = etlstage("run", "p.yaml", "--only-behind", "translate")
    assert "0 appended, 1,000 read, 0 wait" in done.stdout
    assert loaded(tmp_path) == sorted(lines)
    done = etlstage("run", "p.yaml", "--only-before", "polish", code=2)
    assert "no stage 'polish' has a durable edge, expected one of translate" in (
        done.stderr
    )
    for option in ("--only-before", "--only-behind"):
        words = "--until", "translate", option, "translate"
        done = etlstage("run", "p.yaml", *words, code=2)
        assert "can't be combined with --only-before and --only-behind" in done.stderr


def test_output_of_the_last_load_is_refused_before_anything_is_read(
    etlstage: Etlstage, tmp_path: Path
) -> None:
    """Once that load is over; one that is not over is completed (issue 24)."""
    place = pipeline(tmp_path, ["1", "2", "3"])
    place.write_text(place.read_text().replace("mode: append", "mode: error"))
    assert etlstage("run", "p.yaml", "--only-before", "translate").returncode == 0
    assert etlstage("run", "p.yaml").returncode == 0
    assert loaded(tmp_path) == ["1", "2", "3"]
    again = etlstage("run", "p.yaml", code=2)
    assert "out exists already: remove it, or set mode" in again.stderr
    shown = json.loads(etlstage("state", "show", "p.yaml", "--json").stdout)
    assert shown["edges"]["translate"]["waiting"]["messages"] == 0


def test_letters_of_both_halves_are_listed_retried_and_dropped(
    etlstage: Etlstage, tmp_path: Path
) -> None:
    """A letter that passes before the edge waits there for the second half."""
    pipeline(tmp_path, ["x1", *map(str, range(200)), "x2"])
    (tmp_path / "salt.py").write_text(
        SALT.replace('line.startswith(b"x")', 'line.startswith((b"x", b"13 "))')
    )
    assert etlstage("run", "p.yaml", "-q").returncode == 0
    shown = json.loads(etlstage("state", "show", "p.yaml", "--json").stdout)
    assert shown["dead_letters"] == {"polish": 1, "translate": 2}
    letters = [
        json.loads(line)
        for line in etlstage("dlq", "ls", "p.yaml", "--json").stdout.splitlines()
    ]
    assert [letter["stage"] for letter in letters] == ["polish", *["translate"] * 2]
    dropped = letters[1]["id"]
    assert (
        etlstage("dlq", "drop", "p.yaml", dropped).stdout == "1 dead letter dropped\n"
    )
    (tmp_path / "mended").touch()
    done = etlstage("dlq", "retry", "p.yaml", "-q")
    passed, waits = done.stdout.splitlines()
    assert passed == "2 dead letters passed"
    assert waits.endswith("to load them: etlstage run p.yaml --only-behind translate")
    assert "no dead letters" in etlstage("dlq", "ls", "p.yaml").stdout
    assert "1 message waits" in etlstage("state", "show", "p.yaml").stdout
    done = etlstage("run", "p.yaml", "--only-behind", "translate")
    assert "0 appended, 1 read, 0 wait" in done.stdout
    assert loaded(tmp_path) == sorted([*map(str, range(200)), "x2"])


@pytest.mark.parametrize("durable", [("true", "false"), ("false", "true")])
def test_letters_of_a_stage_that_moved_to_another_part_are_retried_once(
    etlstage: Etlstage, tmp_path: Path, durable: tuple[str, str]
) -> None:
    """An edge is removed or added: their outcome is recorded elsewhere (issue 26)."""
    (tmp_path / "mended").touch()
    before, after = durable
    pipeline(tmp_path, ["1", "x2"], before)
    worker = SALT.replace('b"x") and', 'b"x2 ") and')
    (tmp_path / "salt.py").write_text(worker.replace("mended", "polished"))
    assert etlstage("run", "p.yaml", "-q").returncode == 0
    pipeline(tmp_path, ["1", "x2"], after)
    (tmp_path / "salt.py").write_text(worker.replace("mended", "polished"))
    assert "1 failed again" in etlstage("dlq", "retry", "p.yaml", "-q").stdout
    assert etlstage("dlq", "ls", "p.yaml").stdout.endswith("\n1 dead letter\n")
    (tmp_path / "polished").touch()
    assert etlstage("dlq", "retry", "p.yaml").stdout.endswith("1 dead letter passed\n")
    assert "nothing to retry" in etlstage("dlq", "retry", "p.yaml").stdout
    assert loaded(tmp_path) == ["1", "x2"]


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_letters_before_the_edge_are_superseded(
    etlstage: Etlstage, tmp_path: Path, delivery: str
) -> None:
    """The run that overwrote the output loaded their messages, too (issue 23)."""
    place = pipeline(tmp_path, ["1", "x2", "3"])
    text = place.read_text().replace("mode: append", "mode: overwrite")
    place.write_text(text.replace("exactly-once", delivery))

    def current() -> list[bool]:
        lines = etlstage("dlq", "ls", "p.yaml", "--json").stdout.splitlines()
        return [not json.loads(line)["superseded"] for line in lines]

    for found in ([True], [False, True]):
        assert etlstage("run", "p.yaml", "-q").returncode == 0
        assert current() == found
    (tmp_path / "mended").touch()
    assert etlstage("run", "p.yaml", "-q").returncode == 0
    assert current() == [False, False]
    assert "2 dead letters are skipped" in etlstage("dlq", "retry", "p.yaml").stdout
    assert loaded(tmp_path) == ["1", "3", "x2"]


def test_what_waits_keeps_an_edge_as_it_is(etlstage: Etlstage, tmp_path: Path) -> None:
    """A changed edge is refused at its key, and a removed one, too."""
    lines = [str(n) for n in range(100)]
    pipeline(tmp_path, lines, "{partitions: 2, key: /id}")
    etlstage("run", "p.yaml", "-q", "--only-before", "translate")
    for durable, said in (
        ("{partitions: 3, key: /id}", "p.yaml:8:27: transform[0].durable.partitions:"),
        ("{partitions: 2, key: /n}", "p.yaml:8:35: transform[0].durable.key: was /id,"),
        ("false", "p.yaml:2:8: state: stage translate was durable, and 100 messages"),
    ):
        pipeline(tmp_path, lines, durable)
        done = etlstage("run", "p.yaml", code=2)
        assert said in done.stderr
        assert "100 messages wait" in done.stderr
    pipeline(tmp_path, lines, "{partitions: 2, key: /id}")
    etlstage("run", "p.yaml", "-q", "--only-behind", "translate")
    pipeline(tmp_path, lines, "false")
    assert etlstage("validate", "p.yaml").returncode == 0


@pytest.mark.parametrize("interrupted", ["first part", "part before the edge"])
def test_second_edge_is_kept_while_a_run_needs_it(
    etlstage: Etlstage, tmp_path: Path, interrupted: str
) -> None:
    """Another part is before it than before the first edge (issue 24)."""
    first = interrupted == "first part"
    text = PIPELINE.replace("DURABLE", "true").replace(
        "load:",
        "  - {name: last, worker: {command: [python, -S, salt.py]}}\nload:",
    )
    text = text.replace("salt.py", "first.py", 1)
    if first:
        text = text.replace("exactly-once", "at-least-once")
    pipeline(tmp_path, ["1", "2", "3"])
    (tmp_path / "first.py").write_text(SALT)
    place = tmp_path / "p.yaml"
    second = "  - name: polish\n"
    place.write_text(text.replace(second, f"{second}    durable: true\n"))
    part = "run", "p.yaml", "--only-before", "polish"
    broken = tmp_path / ("first.py" if first else "salt.py")
    if first:
        assert etlstage(*part, "--limit", "2").returncode == 0
    broken.write_text("raise SystemExit(1)")
    assert etlstage(*part).returncode == 1
    broken.write_text(SALT)
    place.write_text(text)
    found = etlstage("run", "p.yaml", code=2)
    why = "2 messages wait" if first else "a run was interrupted"
    assert f"state: stage polish was durable, and {why}" in found.stderr


def test_run_that_needs_a_later_edge_whose_first_was_removed(
    etlstage: Etlstage, tmp_path: Path
) -> None:
    """What the part behind the first has recorded, has ended (issue 24)."""
    one = PIPELINE.replace("DURABLE", "false").replace(
        "load:", "  - {name: last, worker: {command: [python, -S, salt.py]}}\nload:"
    )
    second = "  - name: polish\n"
    assert second in one
    later = one.replace(second, f"{second}    durable: true\n")
    pipeline(tmp_path, ["1", "2", "3"])
    place = tmp_path / "p.yaml"
    place.write_text(later.replace("false", "true"))
    done = etlstage("run", "p.yaml")
    assert done.returncode == 0, done.stderr
    place.write_text(later)
    (tmp_path / "salt.py").write_text("raise SystemExit(1)")
    assert etlstage("run", "p.yaml", "--only-before", "polish").returncode == 1
    place.write_text(one)
    found = etlstage("validate", "p.yaml")
    assert found.returncode == 2, found.stdout
    why = "a run was interrupted"
    assert f"state: stage polish was durable, and {why}" in found.stderr


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_empty_input_that_is_run_in_halves_is_complete(
    etlstage: Etlstage, tmp_path: Path, delivery: str
) -> None:
    """The first half has read to its end, though there was nothing (issue 24)."""
    place = pipeline(tmp_path, [])
    place.write_text(place.read_text().replace("exactly-once", delivery))
    for half in ("--only-before", "--only-behind"):
        done = etlstage("run", "p.yaml", half, "translate", code=0)
        assert "output complete" in done.stdout


@pytest.mark.parametrize("how", ["moved", "linked", "by another folder"])
def test_moved_project_loads_what_waits(
    etlstage: Etlstage, tmp_path: Path, how: str
) -> None:
    """The first half has ended in the journals, which are moved, too (issue 24)."""
    project = tmp_path / "project"
    project.mkdir()
    pipeline(project, ["1", "2", "3"])
    words = "project/p.yaml", "--only-before", "translate"
    assert etlstage("run", *words).returncode == 0
    name = "project/../project" if how == "by another folder" else "other"
    if how == "moved":
        project.rename(tmp_path / name)
    elif how == "linked":
        (tmp_path / name).symlink_to(project)
    etlstage("run", f"{name}/p.yaml", code=0)
    assert loaded(tmp_path / name) == ["1", "2", "3"]


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_run_that_fails_without_the_edge_is_repeated(
    etlstage: Etlstage, tmp_path: Path, delivery: str
) -> None:
    """The interrupted run had no edge, whose folder stays (issue 24)."""
    pipeline(tmp_path, ["1", "2", "3"])
    assert etlstage("run", "p.yaml").returncode == 0
    place = pipeline(tmp_path, ["1", "2", "3"], "false")
    place.write_text(place.read_text().replace("exactly-once", delivery))
    (tmp_path / "salt.py").write_text("raise SystemExit(1)")
    assert etlstage("run", "p.yaml").returncode == 1
    (tmp_path / "salt.py").write_text(SALT)
    etlstage("run", "p.yaml", code=0)
    assert loaded(tmp_path) == ["1", "1", "2", "2", "3", "3"]


def test_reset_forgets_what_waits(etlstage: Etlstage, tmp_path: Path) -> None:
    """The next run reads and loads all, once."""
    pipeline(tmp_path, [str(n) for n in range(100)])
    etlstage("run", "p.yaml", "-q", "--only-before", "translate")
    assert "100 messages wait" in etlstage("state", "show", "p.yaml").stdout
    done = etlstage("state", "reset", "p.yaml", "--yes")
    assert done.stdout == "the next run starts from the beginning\n"
    done = etlstage("run", "p.yaml")
    assert "edge translate -> polish: 100 appended, 100 read, 0 wait" in done.stdout
    assert loaded(tmp_path) == sorted(str(n) for n in range(100))


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        (CommitRecord, "store", 2),  # each part stores one when it is taken
        (CommitRecord, "store", 3),
        (Path, "rename", 0),
        (shutil, "rmtree", 0),
        (os, "rmdir", 0),
    ],
)
def test_reset_that_is_killed_loses_nothing(
    etlstage: Etlstage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    owner: object,
    name: str,
    calls: int,
) -> None:
    """Before any of its steps: the next run loads all of the input (issue 26)."""
    place = pipeline(tmp_path, [str(n) for n in range(100)])
    assert etlstage("run", "p.yaml", "-q").returncode == 0
    step = partial(next, iter([getattr(owner, name)] * calls), kill)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *args, **kw: step()(*args, **kw))
        with pytest.raises(KeyboardInterrupt):
            reset_state(place, yes=True)
    pipeline(tmp_path, [str(n) for n in range(100, 140)])
    for _ in range(2):  # the first may load what waits
        assert etlstage("run", "p.yaml", "-q").returncode == 0
    assert {str(n) for n in range(100, 140)} <= {*loaded(tmp_path)}


def kill(*_: object, **_more: object) -> None:
    """End a command as a signal does."""
    raise KeyboardInterrupt


def test_second_run_of_either_half_is_refused(
    etlstage: Etlstage, tmp_path: Path
) -> None:
    """The error names the holder of the half, which can be taken over."""
    pipeline(tmp_path, ["1"])
    for half, option in ((".", "before"), ("edge-translate", "behind")):
        with Delivery(tmp_path / "state" / half):
            done = etlstage("run", "p.yaml", f"--only-{option}", "translate", code=1)
            assert f"another run uses the state directory {tmp_path}" in done.stderr
            assert f"pid {os.getpid()}" in done.stderr
            taken = etlstage("state", "take-over", "p.yaml", "--yes")
            assert taken.stdout.startswith("taken over: the next run resumes from")


def test_part_of_the_input_passes_the_edge(etlstage: Etlstage, tmp_path: Path) -> None:
    """A run that loads nothing leaves no journals."""
    pipeline(tmp_path, [str(n) for n in range(100)])
    done = etlstage("run", "p.yaml", "--until", "polish", "--limit", "3")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["0", "1", "2"]
    assert not (tmp_path / "state").exists()
    plainly = ("--set", "delivery=at-least-once")
    done = etlstage("run", "p.yaml", "--limit", "10", *plainly)
    assert "edge translate -> polish: 10 appended, 10 read, 0 wait" in done.stdout
    assert "output incomplete" in done.stdout
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert len(loaded(tmp_path)) == 10


def test_limit_is_that_of_the_part_that_runs_first(
    etlstage: Etlstage, tmp_path: Path
) -> None:
    """Of what waits, too, only so many are read, each once (issue 24)."""
    pipeline(tmp_path, [str(n) for n in range(100)])
    plainly = ("--set", "delivery=at-least-once")
    for option, limit, counts in (
        ("before", "10", "10 appended, 0 read, 10 wait"),
        ("behind", "6", "0 appended, 6 read, 4 wait"),
        ("behind", "3", "0 appended, 3 read, 1 wait"),
        ("behind", "3", "0 appended, 1 read, 0 wait"),
    ):
        words = f"--only-{option}", "translate", "--limit", limit
        done = etlstage("run", "p.yaml", *words, *plainly, code=0)
        assert f"edge translate -> polish: {counts}" in done.stdout
    assert "output incomplete" in done.stdout
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert loaded(tmp_path) == [str(n) for n in range(10)]


def check_kills(
    folder: Path, forks: Forks, kills: int, durable: str, *, seed: int
) -> None:
    """Kill the run, or its workers, at random times, until a run completes."""
    lines = [f"{'x' if n % 100 == 7 else ''}{n}" for n in range(20_000)]
    pipeline(folder, lines, durable)
    chance, done, ended = random.Random(seed), 0, False  # noqa: S311
    while not ended:
        with (folder / "output").open("wb") as output:
            words = ["run", "p.yaml", "-q"]
            run = forks.start(words, folder, environment(), output)
        if done < kills:
            try:
                # A fast machine completes a run that is not killed early.
                run.wait(chance.uniform(0.1, 0.7 if done else 0.2))
            except subprocess.TimeoutExpired:
                done += 1
                ours = [] if chance.random() < 0.7 else workers(folder)
                for pid in ours:
                    os.kill(pid, signal.SIGKILL)
                if not ours:
                    run.kill()
        run.wait()
        said = (folder / "output").read_text()
        assert run.returncode in {0, -signal.SIGKILL}, said
        ended = run.returncode == 0
        wait_until(lambda: not left_behind(folder))
    assert done
    assert loaded(folder) == sorted(line for line in lines if line[0] != "x")
    letters = (folder / "state/dead_letters/translate.jsonl").read_text().splitlines()
    dead = [base64.b64decode(json.loads(letter)["message"]) for letter in letters]
    assert sorted(dead) == sorted(x.encode() for x in lines if x[0] == "x")


def workers(folder: Path) -> list[int]:
    """Return the workers of a run."""
    found = []
    for pid in left_behind(folder):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"salt.py" in words and b"-S" in words:
            found.append(pid)
    return found


def test_run_that_is_killed(tmp_path: Path, forks: Forks) -> None:
    """Nothing is lost or doubled after a few kills."""
    check_kills(tmp_path, forks, 3, "true", seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("durable", ["true", "{partitions: 3, key: /id, keep: read}"])
def test_run_that_is_killed_many_times(
    tmp_path: Path, forks: Forks, durable: str
) -> None:
    """Each message is loaded once, and each refusal is kept once."""
    check_kills(tmp_path, forks, 20, durable, seed=2)
