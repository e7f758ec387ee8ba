from __future__ import annotations

import json
import shutil
from pathlib import Path

import anyio
import pytest

from etlstage.config.build_retry import Retries
from etlstage.journal import Journals, Publisher
from etlstage.pipeline.dead_letter.files import FOLDER
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.policy import letter_time
from etlstage.pipeline.dead_letter.retry import Retry, Settled, UnderWay
from etlstage.pipeline.dead_letter.store import SETTLED, supersede
from etlstage.pipeline.delivery.delivery import Delivery
from tests.cli.conftest import Etlstage, worker, write_pipeline
from tests.cli.forked import Forks, environment

pytestmark = pytest.mark.process

BROKEN = """\
    import sys
    from pathlib import Path
    for line in sys.stdin.buffer:
        if line.strip() in Path("bad").read_bytes().split():
            sys.stdout.buffer.write(b"not this one\\x15")
        else:
            sys.stdout.buffer.write(line.strip() + b"!\\n\\0")
        sys.stdout.flush()
"""
PICKY = """\
    import sys
    from pathlib import Path
    for line in sys.stdin.buffer:
        reply = b"\\n\\0" if Path("good").exists() else b"not this one\\x15"
        sys.stdout.buffer.write(line.strip() + reply)
        sys.stdout.flush()
"""
SEE = "to see what is left: etlstage dlq ls pipeline.yaml\n"
EXTRACT = "extract: {worker: {command: [printf, 'a\\nb\\nc\\nd\\n']}}\n"
PIPELINE = f"""\
name: letters
{EXTRACT}\
transform:
  - {{name: one, worker: {{command: [python, broken.py]}}, on_error: &few {{budget: 3}}}}
  - {{name: two, worker: {{command: [python, broken.py]}}, on_error: *few}}
load: {{worker: {{command: [python, keep.py]}}}}
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    """Run a pipeline whose workers refuse some messages, once for all tests."""
    folder = tmp_path_factory.mktemp("ran")
    write_pipeline(folder).write_text(PIPELINE)
    worker(folder / "broken.py", BROKEN)
    (folder / "bad").write_text("b c")
    words = "run", "pipeline.yaml", "-q"
    assert forks.run(words, folder, environment(), "").returncode == 0
    return folder


@pytest.fixture
def failed(ran: Path, tmp_path: Path) -> Path:
    """Return the pipeline file of a copy of that run, with its letters."""
    shutil.copytree(ran, tmp_path, dirs_exist_ok=True)
    return tmp_path / "pipeline.yaml"


def listed(etlstage: Etlstage) -> list[tuple[str, str, int]]:
    """Return the id, the stage and the number of attempts of each letter."""
    lines = etlstage("dlq", "ls", "pipeline.yaml", "--json").stdout.splitlines()
    found = map(json.loads, lines)
    return [(x["id"], x["stage"], len(x["attempts"])) for x in found]


@pytest.mark.usefixtures("failed")
def test_retry(etlstage: Etlstage, tmp_path: Path) -> None:
    """A letter goes through its stage and on; it is loaded once or stays (issue 14)."""
    assert [attempts for _, _, attempts in listed(etlstage)] == [1, 1]
    (tmp_path / "bad").write_text("c b!")
    again = etlstage("dlq", "retry", "pipeline.yaml", "-q")
    assert (again.returncode, again.stdout) == (
        1,
        f"1 dead letter passed, 1 failed again, 1 new dead letter in later stages\n{SEE}",
    )
    (kept, one, attempts), (new, two, _) = listed(etlstage)
    assert (one, two, attempts) == ("one", "two", 2)
    assert (tmp_path / "loaded.txt").read_text() == "a!!\nd!!\n"
    (tmp_path / "bad").write_text("")
    passed = etlstage("dlq", "retry", "pipeline.yaml", new, "-q")
    assert (passed.returncode, passed.stdout) == (0, "1 dead letter passed\n")
    assert (tmp_path / "loaded.txt").read_text() == "a!!\nd!!\nb!!\n"
    assert [id_ for id_, _, _ in listed(etlstage)] == [kept]
    twice = etlstage("dlq", "retry", "pipeline.yaml", new, code=2)
    assert twice.stderr.endswith(f"dead letter '{new}' has passed in a retry\n")


def test_letters_of_a_run_that_replaced_nothing_are_left_out(
    pipeline: Path, etlstage: Etlstage, tmp_path: Path
) -> None:
    """The output is the previous run's, and lacks only what that dead-lettered."""
    worker(tmp_path / "broken.py", BROKEN)
    pipeline.write_text(
        PIPELINE.replace("budget: 3", "budget: 2").replace(
            "load: {worker: {command: [python, keep.py]}}",
            "load: {files: {path: out, format: text, mode: overwrite}}",
        )
    )

    def rows() -> list[str]:
        files = (tmp_path / "out").glob("part-*")
        return sorted(row for file in files for row in file.read_text().splitlines())

    (tmp_path / "bad").write_text("b c")
    assert etlstage("run", "pipeline.yaml", "-q").returncode == 0
    whole = [id_ for id_, _, _ in listed(etlstage)]
    (tmp_path / "bad").write_text("b c d")
    etlstage("run", "pipeline.yaml", "-q", code=1)
    assert len(listed(etlstage)) > len(whole)
    assert rows() == ["a!!", "d!!"]
    shown = etlstage("dlq", "ls", "pipeline.yaml").stdout
    current, left_out = shown.split("\nsuperseded: ")
    assert all(id_ in current and id_ not in left_out for id_ in whole)
    (tmp_path / "bad").write_text("")
    again = etlstage("dlq", "retry", "pipeline.yaml", "-q")
    assert again.returncode == 0, again.stdout + again.stderr
    assert rows() == ["a!!", "b!!", "c!!", "d!!"]
    # The next run replaces all of it, and what it dead-letters is current again.
    (tmp_path / "bad").write_text("a")
    assert etlstage("run", "pipeline.yaml", "-q").returncode == 0
    (tmp_path / "bad").write_text("")
    assert etlstage("dlq", "retry", "pipeline.yaml", "-q").returncode == 0
    assert rows() == ["a!!", "b!!", "c!!", "d!!"]


def test_retry_leaves_the_mark_of_complete_output(
    pipeline: Path, etlstage: Etlstage, tmp_path: Path
) -> None:
    """Output that a failed run left is not complete after it (issue 23)."""
    worker(tmp_path / "broken.py", BROKEN)
    pipeline.write_text(
        PIPELINE.replace("budget: 3", "budget: 1").replace(
            "load: {worker: {command: [python, keep.py]}}",
            "load: {files: {path: out, format: text, epoch: {messages: 1}}}",
        )
    )
    (tmp_path / "bad").write_text("b d")
    assert etlstage("run", "pipeline.yaml", "-q").returncode == 1
    (tmp_path / "bad").write_text("")
    assert etlstage("dlq", "retry", "pipeline.yaml", "-q").returncode == 0
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert list((tmp_path / "out").glob("part-*"))


def test_retry_that_may_have_loaded_is_repeated_into_the_same_output(
    pipeline: Path, etlstage: Etlstage, tmp_path: Path
) -> None:
    """One that is killed before it is recorded has loaded already (issue 23)."""

    def retry(out: str) -> tuple[int, str]:
        pipeline.write_text(text.replace("path: out", f"path: {out}"))
        done = etlstage("dlq", "retry", "pipeline.yaml", "-q")
        return done.returncode, done.stderr

    def rows(out: str) -> list[str]:
        parts = (tmp_path / out).glob("part-*")
        return sorted(line for part in parts for line in part.read_text().split())

    (tmp_path / "in.txt").write_text("a\nb\nc\nd\n")
    text = f"""\
delivery: exactly-once
state: state
extract: {{files: {{path: in.txt, format: text}}}}
{PIPELINE.partition("load:")[0].replace(EXTRACT, "")}
load: {{files: {{path: out, format: text, mode: append}}}}
"""
    pipeline.write_text(text)
    worker(tmp_path / "broken.py", BROKEN)
    (tmp_path / "bad").write_text("b c")
    assert etlstage("run", "pipeline.yaml", "-q").returncode == 0
    (tmp_path / "bad").write_text("")
    worker(tmp_path / "broken.py", "raise SystemExit(3)")
    assert retry("none")[0] == 1  # it has loaded nothing
    worker(tmp_path / "broken.py", BROKEN)
    pipeline.write_text(text)
    (part,) = Retries.of_file(pipeline)
    found = [
        letter
        for letter in Settled(part.state / FOLDER).letters("one")
        if isinstance(letter, DeadLetter)
    ]
    with Delivery(part.state) as delivery:
        made = part.pipeline(Retry(found, 1), delivery)
        assert anyio.run(made.run).error is None
        # It is killed here.
    code, error = retry("other")
    assert code == 1
    assert (
        "retry 1 that was interrupted can't be repeated: it has loaded into text"
        in (error)
    )
    assert (
        "other (if it was moved there, link its old path to the new one); complete it"
        " with the old settings, or remove "
    ) in error
    assert rows("other") == []
    place = part.state / FOLDER / SETTLED / "retry.json"
    stored = place.read_text()
    place.write_text("{")
    assert f"can't use {place}: Expecting property name" in retry("out")[1]
    place.write_text(stored)
    (tmp_path / "link").symlink_to(tmp_path)
    assert retry("link/out") == (0, "")  # the same place
    assert rows("out") == ["a!!", "b!!", "c!!", "d!!"]


@pytest.mark.parametrize("mode", ["append", "overwrite"])
def test_drop_of_letters_that_an_interrupted_retry_may_have_loaded(
    pipeline: Path, etlstage: Etlstage, tmp_path: Path, mode: str
) -> None:
    """It waits for a retry, which replaces the rows, or for new output (issue 23)."""
    (tmp_path / "in.txt").write_text("a\nb\nc\nd\n")
    pipeline.write_text(f"""\
delivery: exactly-once
state: state
extract: {{files: {{path: in.txt, format: text}}}}
{PIPELINE.partition("load:")[0].replace(EXTRACT, "")}
load: {{files: {{path: out, format: text, mode: {mode}}}}}
""")
    worker(tmp_path / "broken.py", BROKEN)
    (tmp_path / "bad").write_text("b c")
    assert etlstage("run", "pipeline.yaml", "-q").returncode == 0
    (part,) = Retries.of_file(pipeline)
    settled = Settled(part.state / FOLDER)
    b, c = (x for x in settled.letters("one") if isinstance(x, DeadLetter))
    (tmp_path / "bad").write_text("")
    with Delivery(part.state) as delivery:
        made = part.pipeline(Retry([b], settled.next), delivery)
        assert anyio.run(made.run).error is None
        # It is killed here.
    worker(tmp_path / "broken.py", "raise SystemExit(3)")
    assert etlstage("dlq", "retry", "pipeline.yaml", c.id, "-q").returncode == 1
    for words in (
        ["pipeline.yaml", b.id],
        ["state", "--yes"],
        ["pipeline.yaml", "--stage", "one", "--yes"],
    ):
        refused = etlstage("dlq", "drop", *words)
        assert refused.returncode == 1
        assert "a retry of the dead letters in" in refused.stderr
        assert "complete it first with 'etlstage dlq retry'" in refused.stderr
        assert refused.stderr.endswith(f"{UnderWay.path(Path('state'))}\n")
    worker(tmp_path / "broken.py", BROKEN)
    then = ["dlq", "retry"] if mode == "append" else ["run"]
    only = [c.id] if mode == "append" else []
    assert etlstage(*then, "pipeline.yaml", *only, "-q").returncode == 0
    dropped = etlstage("dlq", "drop", "pipeline.yaml", b.id)
    assert dropped.stdout == "1 dead letter dropped\n"
    parts = (tmp_path / "out").glob("part-*")
    rows = sorted(line for one in parts for line in one.read_text().split())
    new = ["b!!"] if mode == "overwrite" else []
    assert rows == ["a!!", *new, "c!!", "d!!"]


@pytest.mark.usefixtures("failed")
def test_superseded_letters_are_left_out(etlstage: Etlstage, tmp_path: Path) -> None:
    """The run that replaced their output processed their messages again (issue 23)."""
    old = [id_ for id_, _, _ in listed(etlstage)]
    assert etlstage("run", "pipeline.yaml", "-q").returncode == 0
    letters = [x for x in listed(etlstage) if x[0] not in old]
    run = letters[0][0].partition("-")[0]
    supersede(tmp_path / ".etlstage" / "letters", run, letter_time())
    (tmp_path / "bad").write_text("")
    shown = etlstage("dlq", "ls", "pipeline.yaml").stdout
    mine, theirs = shown.split(
        f"\nsuperseded: their output was overwritten by run {run}, or never written;"
    )
    assert old[0] not in mine
    assert "2 dead letters\n" in mine
    assert old[0] in theirs
    assert theirs.endswith("2 dead letters superseded\n")
    grouped = etlstage("dlq", "ls", "--group", "pipeline.yaml").stdout
    assert "2 dead letters, 1 cause" in grouped
    assert "superseded  2 dead letters" in " ".join(
        etlstage("state", "show", "pipeline.yaml")
        .stdout.replace("    ", "  ")
        .split("\n")
    )
    again = etlstage("dlq", "retry", "pipeline.yaml", "-q", code=0)
    assert again.stdout == (
        f"2 dead letters are skipped: their output was overwritten by run {run}, or never"
        " written;"
        " 'etlstage dlq drop' removes them\n2 dead letters passed\n"
    )
    nothing = etlstage("dlq", "retry", "pipeline.yaml", old[0], "-q")
    assert nothing.stdout.startswith("1 dead letter is skipped: their output")
    assert "nothing to retry" in nothing.stdout


@pytest.mark.usefixtures("failed")
def test_retry_that_can_not_be(
    etlstage: Etlstage, failed: Path, tmp_path: Path
) -> None:
    """Nothing is started, and the error states what to do (issue 14)."""
    nothing = etlstage("dlq", "retry", "pipeline.yaml", "--stage", "two")
    said = "no dead letters of stage two: nothing to retry\n"
    assert (nothing.returncode, nothing.stdout) == (0, said)
    with Delivery(tmp_path / ".etlstage" / "letters"):
        result = etlstage("dlq", "retry", "pipeline.yaml")
    assert result.returncode == 1
    assert "another run uses the state directory" in result.stderr
    failed.write_text(PIPELINE.replace("name: one", "name: won"))
    result = etlstage("dlq", "retry", "pipeline.yaml", code=2)
    assert "has no stage 'one' (did you mean 'won'?), but there are" in result.stderr


@pytest.mark.usefixtures("failed")
@pytest.mark.parametrize("exactly_once", [True, False], ids=["exact", "stream"])
def test_letters_of_a_run_that_broke_off(
    etlstage: Etlstage, tmp_path: Path, *, exactly_once: bool
) -> None:
    """It writes its last letters anew, so it must be completed first (issue 14)."""
    state = tmp_path / ".etlstage" / "letters"
    with Delivery(state, exactly_once=exactly_once, whole=True) as delivery:
        delivery.begin(
            "a97b3e10", stages=["extract", "one", "load"], letters={}, from_start=True
        )
    for command in (["retry"], ["drop", "--yes"]):
        result = etlstage("dlq", *command, "pipeline.yaml", code=1)
        assert "the run a97b3e10 that uses" in result.stderr
        assert "was interrupted: complete it first" in result.stderr
    assert len(listed(etlstage)) == 2


@pytest.mark.usefixtures("failed")
def test_retry_that_was_taken_over(etlstage: Etlstage, tmp_path: Path) -> None:
    """It must not record outcomes: the letters are another's now (issue 14)."""
    state = tmp_path / ".etlstage" / "letters"
    taking = f"""\
        from pathlib import Path
        from etlstage import worker
        from etlstage.pipeline.delivery.delivery import take_over
        worker.transform(lambda message: take_over(Path({str(state)!r})) and [message])
    """
    worker(tmp_path / "broken.py", taking)
    result = etlstage("dlq", "retry", "pipeline.yaml", "-q", code=1)
    assert "another run has taken over the state directory" in result.stderr
    assert [attempts for _, _, attempts in listed(etlstage)] == [1, 1]


@pytest.mark.usefixtures("failed")
def test_retries_of_two_states_are_apart(
    etlstage: Etlstage, tmp_path: Path, pipeline: Path
) -> None:
    """Neither takes what the other has loaded for its own (issue 14)."""
    for name, script in (
        (
            "load",
            "while read line; do echo $line >> aside.$ETLSTAGE_EPOCH; printf '\\0'; done",
        ),
        ("commit", "read told; mv aside.$ETLSTAGE_EPOCH final.$1; printf '\\0'"),
        ("abort", "read told; rm -f aside.$1 final.$1; printf '\\0'"),
    ):
        (tmp_path / name).write_text(script)
    stages = PIPELINE.partition("load:")[0]
    load = """\
load:
  worker: {command: [sh, load]}
  commit: [sh, commit]
  abort: [sh, abort]
"""
    for number in (1, 2):
        (tmp_path / "bad").write_text("b c")
        text = f"delivery: exactly-once\nstate: state-{number}\n{stages}{load}"
        pipeline.write_text(text)
        assert etlstage("run", "pipeline.yaml", "-q").returncode == 0
        (tmp_path / "bad").write_text("")
        assert etlstage("dlq", "retry", "pipeline.yaml", "-q").returncode == 0
    found = [path.read_text() for path in tmp_path.glob("final.*")]
    assert sorted(found) == ["a!!\nd!!\n"] * 2 + ["b!!\nc!!\n"] * 2
    assert len([*tmp_path.glob("final.retry-*-1")]) == 2


@pytest.mark.usefixtures("failed")
def test_drop_and_export(etlstage: Etlstage, tmp_path: Path) -> None:
    """A copy is readable by its owner alone; dropping all must be confirmed."""
    written = etlstage("dlq", "export", "pipeline.yaml", "--to", "x", "--raw")
    assert (written.returncode, written.stdout) == (0, "2 dead letters written to x\n")
    assert (tmp_path / "x").read_bytes() == b"b\nc\n"
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
    taken = etlstage("dlq", "export", "pipeline.yaml", "--to", "x")
    assert (taken.returncode, taken.stderr) == (
        2,
        "etlstage: error: x exists already\n",
    )
    first, _ = (id_ for id_, _, _ in listed(etlstage))
    assert (
        etlstage("dlq", "export", "pipeline.yaml", first, "--to", "y").returncode == 0
    )
    assert json.loads((tmp_path / "y").read_text())["id"] == first
    assert etlstage("dlq", "drop", "pipeline.yaml", given="n\n").returncode != 0
    dropped = etlstage("dlq", "drop", "pipeline.yaml", first)
    assert (dropped.returncode, dropped.stdout) == (0, "1 dead letter dropped\n")
    dropped = etlstage("dlq", "drop", "pipeline.yaml", given="y\n")
    assert dropped.stdout.endswith("1 dead letter dropped\n")
    assert listed(etlstage) == []


def damaged_journals(path: Path) -> None:
    """Make a set of journals: damage, and a message behind it."""
    with Journals.open(path) as journals:
        (spec,) = journals.partitions()
        journals.append(spec.name, b"no json\n")
        target = spec.name, spec.content_type
        Publisher(journals, mapping=lambda _: target).publish_committed({"n": 1})


def test_damaged_input_is_left_out(
    pipeline: Path, etlstage: Etlstage, tmp_path: Path
) -> None:
    """No stage could process it: it is not a message (issue 24)."""
    damaged_journals(tmp_path / "in")
    worker(tmp_path / "broken.py", BROKEN)
    pipeline.write_text(
        "name: p\nextract: {journal: {path: in, reader: r, on_damage: skip}}\n"
        "transform: [{name: t, worker: {command: [python, broken.py]}}]\n"
        "load: {files: {path: out, format: text}}\n"
    )
    (tmp_path / "bad").touch()
    assert etlstage("run", "pipeline.yaml", "-q").returncode == 0
    ((number, stage, attempts),) = listed(etlstage)
    assert (stage, attempts) == ("extract", 0)
    assert "no json" in etlstage("dlq", "show", "pipeline.yaml", number).stdout
    again = etlstage("dlq", "retry", "pipeline.yaml", code=2)
    assert again.stderr == (
        "etlstage: error: 1 dead letter is damaged input, which no stage can"
        " process: 'etlstage dlq export --raw' writes it, 'etlstage dlq drop' removes"
        " it\n"
    )
    assert len(listed(etlstage)) == 1


def test_damaged_input_is_named_while_other_letters_are_retried(
    pipeline: Path, etlstage: Etlstage, tmp_path: Path
) -> None:
    """The rest passes, which is success; the damage stays a letter (issue 24)."""
    damaged_journals(tmp_path / "in")
    worker(tmp_path / "picky.py", PICKY)
    pipeline.write_text(
        "name: p\nextract: {journal: {path: in, reader: r, on_damage: skip}}\n"
        "transform:\n"
        "  - {name: t, worker: {command: [python, picky.py]}, on_error: {budget: 3}}\n"
        "load: {files: {path: out, format: text}}\n"
    )
    assert etlstage("run", "pipeline.yaml", "-q").returncode == 0
    assert [stage for _, stage, _ in listed(etlstage)] == ["extract", "t"]
    (tmp_path / "good").touch()
    again = etlstage("dlq", "retry", "pipeline.yaml", "-q")
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout == (
        "1 dead letter is damaged input, which no stage can process: 'etlstage dlq"
        " export --raw' writes it, 'etlstage dlq drop' removes it\n"
        "1 dead letter passed\n"
    )
    ((number, stage, _),) = listed(etlstage)
    assert stage == "extract"
    assert etlstage("dlq", "retry", "pipeline.yaml", number).returncode == 2
