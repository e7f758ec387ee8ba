from __future__ import annotations

import platform
import shlex
import sys
from pathlib import Path

import pytest

from etlstage.cli.graph import FORMATS
from etlstage.config.loader import load
from etlstage.config.plan import Part, Plan, plan_of

WORKERS = """\
name: letters
extract: {worker: {command: [seq, "3"]}}
transform:
  - name: upper
    worker: {command: [python, up.py, "{eop}"], cwd: sub, env: {B: x, A: y}}
    workers: {min: 1, max: 3}
    batch: {size: 5, bytes: 16MiB}
    on_error: {retries: 1, budget: 3}
load: {worker: {command: [./keep]}, window: 2, on_error: {then: fail}}
"""


EPOCHS = """\
name: epochs
delivery: exactly-once
state: s
extract:
  worker: {command: [cat]}
  dialect: {mode: cyclic}
  offsets: {by: supervisor}
load:
  worker: {command: [cat]}
  commit: [cat]
  abort: [cat]
"""


def plan(tmp_path: Path, text: str) -> Plan:
    """Return the plan of a file."""
    path = tmp_path / "p.yaml"
    path.write_text(text)
    return plan_of(*load(path))


def about(part: Part) -> dict[str, str]:
    """Return what the plan shows of a stage."""
    return dict(part.about)


def test_workers(tmp_path: Path) -> None:
    """The plan shows how each worker is started, and its policies."""
    extract, upper, keep = plan(tmp_path, WORKERS).parts
    assert (extract.name, extract.what) == ("extract", "seq 3")
    assert about(extract)["runs"].endswith("/seq 3")
    assert "answers" not in about(extract)
    assert upper.what == "python up.py '{eop}'"
    assert about(upper) == {
        "runs": rf"{shlex.quote(sys.executable)} up.py '\000'",
        "python": platform.python_version(),
        "in": f"{tmp_path}/sub",
        "workers": "1 to 3; order total",
        "answers": "batches of up to 5 messages, 16MiB or 1s; sent ahead: auto",
        "errors": "1 retry, then dead-lettered; budget 3 messages",
        "restarts": "permanent, up to 5 without progress in 1m",
        "timeouts": "30s to be ready, 5m for an answer, 5s to stop",
        "dialect": (
            "marker  eob_then_eom false  bnc_after_eob true  bnc_after_last false"
            r"  eob_after_full true  eom \012  eop \000  eob \027  bnc \005  err \025"
        ),
        "env": "A, B",
    }
    assert about(keep)["runs"] == f"{tmp_path}/keep"
    assert about(keep)["answers"] == "one message at a time; sent ahead: 1"
    assert about(keep)["errors"] == "2 retries, then the run fails"
    assert [p.dead_letters for p in (extract, upper, keep)] == [False, True, False]


@pytest.mark.parametrize(
    ("keys", "ahead"),
    [
        ("", ("auto", "1")),
        ("window: 3", ("3", "1")),
        ("batch: {size: 5}, window: 3", ("3", "1")),
        ("batch: {size: 5}, dialect: {driver: worker}, window: 3", ("1", "1")),
        ("dialect: {name: cocaine}, window: 3", ("", "")),
    ],
)
def test_exchanges_sent_ahead(
    tmp_path: Path, keys: str, ahead: tuple[str, str]
) -> None:
    """The plan shows how many a worker is sent at most, if window decides (issue 26)."""
    text = (
        "name: letters\nextract: {worker: {command: [cat]}}\n"
        f"transform: [{{worker: {{command: [cat]}}, {keys}}}]\n"
        f"load: {{worker: {{command: [cat]}}, {keys}}}\n"
    )
    _, *stages = plan(tmp_path, text).parts
    shown = tuple(about(part)["answers"].partition("ahead: ")[2] for part in stages)
    assert shown == ahead


FRAMES = """\
name: frames
engine: {engine}
{more}
extract: {{spark: {{format: json, path: in, key: id, schema: "id  long"}}}}
transform: [{{worker: {{command: [cat]}}}}]
load: {{spark: {{path: out, mode: {mode}, schema: id long, partition_by: [id]}}}}
"""


def frames(engine: str = "local", mode: str = "append", more: str = "") -> str:
    """Return a pipeline from and to DataFrames."""
    return FRAMES.format(engine=engine, mode=mode, more=more)


def test_frames(tmp_path: Path) -> None:
    """The plan shows paths, how rows become messages, and the size of epochs."""
    made = plan(tmp_path, frames())
    extract, _, end = made.parts
    assert (extract.what, end.what) == ("json from in", "parquet to out")
    assert about(extract) == {
        "path": f"{tmp_path}/in",
        "message": "the only column if it is text or binary, else all as JSON",
        "key": "id",
        "schema": "id long",
    }
    assert about(end) == {
        "path": f"{tmp_path}/out",
        "mode": "append",
        "columns": "id long",
        "folders by": "id",
        "epoch": "1,000,000 messages or 128MiB",
        "errors": "dead-lettered; budget 1%",
    }
    once = frames(more="delivery: exactly-once\nstate: s")
    said = "1,000,000 messages or 128MiB"
    epochs = [
        frames("spark"),
        frames("streaming"),
        once,
        once.replace("transform: [{worker: {command: [cat]}}]", ""),
        once.replace(
            'spark: {format: json, path: in, key: id, schema: "id  long"}',
            "worker: {command: [cat]}, dialect: {mode: cyclic}, offsets: {by: supervisor}",
        ),
    ]
    assert [about(plan(tmp_path, text).parts[-1])["epoch"] for text in epochs] == [
        "the whole run, undivided",
        "a batch of the stream, undivided",
        f"{said} of extract; outputs of the same message are not divided",
        said,
        (
            f"{said}, but the messages from a range of 1,000 offsets of extract can't"
            " be divided: for smaller epochs set extract.offsets.step"
        ),
    ]
    worker = EPOCHS + "  epoch: {messages: 10, bytes: 1MiB}\n"
    for text, most in ((EPOCHS, said), (worker, "10 messages or 1MiB")):
        assert about(plan(tmp_path, text).parts[-1])["epoch"] == (
            f"{most}, but the messages from a range of 1,000 offsets of extract can't"
            " be divided: for smaller epochs set extract.offsets.step"
        )
    tables = WORKERS.replace('worker: {command: [seq, "3"]}', "spark: {table: t}")
    assert plan(tmp_path, tables).parts[0].what == "Spark from table t"


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        (WORKERS, ["in memory, one run", "in memory, one run"]),
        (frames(), ["a spool on disk in the temporary", "in memory, one run"]),
        (
            frames().replace("key: id,", "key: id, spool: x,"),
            ["a spool on disk in {here}/x, all", "in memory, one run"],
        ),
        (
            f"{frames()}\nstate: kept",
            ["a spool on disk in {here}/kept, all", "in memory, one run"],
        ),
        (
            frames("spark"),
            [
                "in memory, what Spark gives a task",
                "a folder on disk, all messages of the",
            ],
        ),
        (
            frames("streaming"),
            [
                "in memory, what Spark gives",
                "a folder on disk, all messages of a batch",
            ],
        ),
    ],
)
def test_edges(tmp_path: Path, text: str, bounds: list[str]) -> None:
    """Each edge joins two stages, and shows how many messages wait between them."""
    made = plan(tmp_path, text)
    names = [part.name for part in made.parts]
    assert [(e.start, e.end) for e in made.edges] == [
        (names[0], names[1]),
        (names[1], names[2]),
    ]
    for edge, bound in zip(made.edges, bounds, strict=True):
        assert edge.how.startswith(bound.format(here=tmp_path))


CYCLIC = WORKERS.replace(
    '{worker: {command: [seq, "3"]}}',
    "{worker: {command: [x]}, dialect: {mode: cyclic}, offsets: {by: supervisor}}",
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            WORKERS,
            "at least once: a run that is repeated reads everything again, and may load",
        ),
        (
            "state: s\n" + CYCLIC,
            "at least once: a run that is repeated resumes after what is known to be",
        ),
        (CYCLIC, "at least once: a run that is repeated reads everything again"),
        (
            frames(mode="overwrite"),
            (
                "at least once: a run that is repeated reads everything again, and"
                " replaces what was loaded"
            ),
        ),
        (
            frames(mode="error"),
            (
                "at least once: a run that is repeated reads everything again, and is"
                " refused if there is output"
            ),
        ),
        (
            frames("spark"),
            (
                "at least once: a run that is repeated reads everything again, and may"
                " load some messages twice; a run that fails before loading loads"
                " nothing"
            ),
        ),
        (
            "engine: spark\n" + WORKERS,
            (
                "at least once: a run that is repeated reads everything again, and may"
                " load some messages twice; a load task that is retried may have loaded"
                " some already"
            ),
        ),
        (
            frames(more="delivery: exactly-once\nstate: s").replace(
                "path: out", "format: jdbc, options: {url: u, dbtable: t}"
            ),
            "exactly once: an epoch and its record are added in one transaction;",
        ),
        (
            frames("streaming", more="delivery: exactly-once"),
            (
                "exactly once: files of a batch are moved into the path once it is"
                " recorded; those of an unrecorded one are removed"
            ),
        ),
        (
            frames("streaming").replace("path: out", "path: out, format: Parquet"),
            "at least once: files of a batch are moved into the path once it is",
        ),
        (
            frames("streaming").replace("path: out", "path: 's3a://b/out'"),
            "at least once: a batch that is repeated after a crash replaces its folder",
        ),
        (
            frames("streaming", more="delivery: exactly-once").replace(
                "path: out", "format: jdbc, options: {url: u, dbtable: t}"
            ),
            "exactly once: each batch and its record are added in one transaction",
        ),
        (
            frames("streaming").replace("path: out", "table: t"),
            "at least once: a batch that is repeated after a crash is loaded again",
        ),
    ],
)
def test_guarantees(tmp_path: Path, text: str, said: str) -> None:
    """The guarantee is worded for the engine and the sink."""
    assert dict(plan(tmp_path, text).about)["delivery"].startswith(said)


SHARDS = """\
name: p
extract: {worker: {command: [cat]}}
load:
  worker: {command: [cat]}
  dialect: {name: kcl, max_uncommitted_bytes: 100MiB}
  shards: {count: 3}
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # 1 + 128 + 3 * (16 + 8) + 128 + 2 + 8, and what 4 workers write to stderr
        (
            WORKERS,
            "up to 340 MiB; plus a long message (up",
        ),
        # 1 + 128 + 2 + 8 + 2 * 128, and stderr
        (frames(), "up to 396 MiB, beside Spark's"),
        (frames("spark"), "up to 212 MiB in each Spark task"),
        # 1 + 3 * (128 + 2 + 8 + 100), and stderr
        (
            SHARDS,
            "up to 716 MiB; plus",
        ),
    ],
)
def test_memory(tmp_path: Path, text: str, said: str) -> None:
    """The figure is the sum of the table on the page ``limits``."""
    assert dict(plan(tmp_path, text).about)["memory"].startswith(said)


def test_spark(tmp_path: Path) -> None:
    """Spark is shown only if it is used, with the file's settings."""
    assert "Spark" not in dict(plan(tmp_path, WORKERS).about)
    assert dict(plan(tmp_path, frames()).about)["Spark"].startswith(
        "local[*], PySpark "
    )
    session = "spark: {remote: 'sc://h', config: {b: 2, a: 1}, staging: 's3://b/c'}"
    said = dict(plan(tmp_path, frames("spark", more=session)).about)["Spark"]
    assert said.startswith("sc://h, PySpark ")
    assert said.endswith("; a=1; b=2; staging in s3://b/c")
    files = "spark: {files: [clean.py]}"
    said = dict(plan(tmp_path, frames("spark", more=files)).about)["Spark"]
    assert said.endswith("; sent to the executors: clean.py")


@pytest.mark.parametrize(
    ("session", "found"),
    [
        ("", True),
        ("spark: {master: 'local[2]'}", True),
        ("spark: {master: yarn}", False),
    ],
)
def test_programs_of_other_machines(tmp_path: Path, session: str, found: bool) -> None:
    """A program of another machine can't be resolved here."""
    cat = about(plan(tmp_path, frames("spark", more=session)).parts[1])["runs"]
    assert (cat != "cat") is found


def test_state(tmp_path: Path) -> None:
    """The plan shows the state folder and what it keeps."""
    state = {
        "": f"{tmp_path}/.etlstage/letters: dead letters only",
        "state: s\n": f"{tmp_path}/s: positions and dead letters",
    }
    for line, said in state.items():
        assert dict(plan(tmp_path, line + WORKERS).about)["state"] == said
    said = dict(plan(tmp_path, frames("streaming")).about)["state"]
    assert said.endswith("frames: the checkpoint, positions and dead letters")


def test_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets are shown as the references that were written."""
    monkeypatch.setenv("TOKEN", "hunter2")
    text = WORKERS.replace("[./keep]", '["./${TOKEN}", plain], env: {T: "plain"}')
    text = text.replace("cwd: sub", "cwd: '${TOKEN}'") + "state: /x/${TOKEN}\n"
    made = plan(tmp_path, text)
    assert "hunter2" not in str(made)
    assert made.parts[2].what == "'./${TOKEN}' $T"
    assert about(made.parts[1])["in"] == f"{tmp_path}/${{TOKEN}}"


DURABLE = """\
name: dear
state: s
delivery: exactly-once
extract: {files: {path: in.txt, format: text}}
transform:
  - name: one
    worker: {command: [cat]}
    durable: {partitions: 4, key: /id, keep: 7d, limit: 20GiB}
  - name: two
    worker: {command: [cat]}
    durable: true
load: {files: {path: out, format: text}}
"""


def test_durable_edges(tmp_path: Path) -> None:
    """The plan shows where messages wait, how they are spread, and the retention."""
    made = plan(tmp_path, DURABLE)
    assert [(edge.start, edge.end, edge.durable) for edge in made.edges] == [
        ("extract", "one", False),
        ("one", "two", True),
        ("two", "load", True),
    ]
    assert [edge.how for edge in made.edges][1:] == [
        (
            "4 journals on disk, by /id, modulo; messages kept for 7d, up to 20GiB"
            f" unread; in {tmp_path}/s/edge-one/journals"
        ),
        (
            "1 journal on disk; messages kept until they are loaded;"
            f" in {tmp_path}/s/edge-two/journals"
        ),
    ]
    mermaid = "\n".join(FORMATS["mermaid"](made))
    assert "s0 --> s1" in mermaid
    assert "s1 -- journals --> s2" in mermaid
    assert '  "one" -> "two" [label="journals", style=bold];' in FORMATS["dot"](made)
    assert "journals</text>" in "".join(FORMATS["svg"](made))
