from __future__ import annotations

import sys
from pathlib import Path

import pytest

from etlstage.config.end import located
from etlstage.config.loader import load
from etlstage.config.model import PipelineKeys
from etlstage.config.stages import stage_of
from etlstage.messages import StageKind
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import (
    BatchPolicy,
    ErrorBudget,
    ErrorPolicy,
    OffsetPolicy,
    Order,
    PoolPolicy,
    RecyclePolicy,
    ResourceLimits,
    RestartPolicy,
    Stage,
    Timeouts,
    WorkerProgram,
)

BASE = Path("/base")
ENDS = """\
name: papers
extract:
  worker: {command: [./fetch.sh, 1.10], limits: {nice: 1}}
  dialect: {mode: cyclic}
  max_reply: 1MiB
  restart: {max: 0}
  timeout: {start: 1s}
load:
  worker: {command: [/bin/load], cwd: sub}
  window: auto
  workers: 2
  restart: {max: 1}
  on_error: {retries: 9}
  recycle: {max_messages: 5}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Name a pipeline file."""
    return tmp_path / "pipeline.yaml"


def model_of(path: Path, transform: str) -> PipelineKeys:
    """Return the model of a file with one transform stage."""
    path.write_text(f"{ENDS}transform:\n  - {transform}\n")
    return load(path)[0]


def transform_of(path: Path, transform: str) -> Stage:
    """Return the transform stage of a file."""
    return stage_of(model_of(path, transform).transform[0], BASE)


def test_defaults_are_those_of_a_stage(path: Path) -> None:
    """The loader adds nothing but the folder."""
    expected = Stage(
        name="transform-1", worker=WorkerProgram(command=("cat",), cwd=BASE)
    )
    assert transform_of(path, "worker: {command: [cat]}") == expected


def test_command_may_stand_for_the_worker(path: Path) -> None:
    """Most workers need nothing else."""
    short = transform_of(path, "worker: [python, x.py]")
    assert short == transform_of(path, "worker: {command: [python, x.py]}")


def test_every_key_reaches_the_stage(path: Path) -> None:
    """Some keys set a field of another name; the values are unchanged."""
    stage = transform_of(
        path,
        r"""worker:
      command: [awk, "-f", prog.awk]
      env: {LANG: C.UTF-8, N: 1.10, ON: yes}
      cwd: work
      limits: {memory: 512MiB, cpu: 1500ms, open_files: 64, core: 0, nice: -5}
      user: nobody
      group: "65534"
      umask: 027
      ready: true
    workers: 3
    order: key
    key: /a~1b/0
    window: 8
    dialect: {eom: "\x1e", eop: '\0', bnc: '\xff', driver: worker, eob_then_eom: true,
              bnc_after_last: true}
    batch: {size: 10, bytes: 1kB, seconds: 2s}
    timeout: {start: 10s, message: 1m, heartbeat: 1h, stop: 500ms}
    restart: {policy: transient, max: 7, within: 2m, delay: 1s, max_delay: 5s,
              never_on: [2, 64]}
    on_error: {retries: 0, then: dead_letter, budget: {count: 20, share: 0.5%}}
    recycle: {max_messages: 1000, max_age: 1h, max_rss: 1GiB, variance: 20%}
    max_message: 1MiB
    max_reply: 2MiB""",
    )
    assert stage == Stage(
        name="transform-1",
        worker=WorkerProgram(
            command=("awk", "-f", "prog.awk"),
            ready=True,
            limits=ResourceLimits(
                memory=512 * 2**20, cpu=2, open_files=64, core=0, nice=-5
            ),
            env={"LANG": "C.UTF-8", "N": "1.10", "ON": "yes"},
            cwd=BASE / "work",
            user="nobody",
            group="65534",
            umask=0o027,
        ),
        kind=StageKind.TRANSFORM,
        dialect=MarkerDialect(
            mode=Mode.BATCH_WORKER,
            markers=Markers(eom=b"\x1e", eop=b"\0", bnc=b"\xff"),
            eob_then_eom=True,
            bnc_after_last=True,
        ),
        batch=BatchPolicy(size=10, bytes=1000, seconds=2.0),
        workers=3,
        window=8,
        order=Order.KEY,
        key="/a~1b/0",
        timeout=Timeouts(start=10.0, message=60.0, heartbeat=3600.0, stop=0.5),
        restart=RestartPolicy(
            policy="transient",
            max=7,
            within=120.0,
            delay=1.0,
            max_delay=5.0,
            never_on=frozenset((2, 64)),
        ),
        on_error=ErrorPolicy(retries=0, budget=ErrorBudget(count=20, share=0.005)),
        recycle=RecyclePolicy(
            max_messages=1000, max_age=3600.0, max_rss=2**30, variance=0.2
        ),
        max_message=1024 * 1024,
        max_reply=2 * 1024 * 1024,
    )


def test_supervisor_drives_a_batch_by_default(path: Path) -> None:
    """An empty ``batch`` is a batch with the defaults."""
    assert transform_of(path, "{worker: {command: [cat]}, batch: {}}").dialect == (
        MarkerDialect(mode=Mode.BATCH_SUPERVISOR)
    )


def test_null_waits_for_ever(path: Path) -> None:
    """For workers that may think for hours."""
    stage = transform_of(
        path, "{worker: {command: [cat]}, timeout: {message: null, start: null}}"
    )
    assert stage.timeout == Timeouts(message=None, start=None)


@pytest.mark.parametrize(
    ("written", "budget"),
    [
        ("20", ErrorBudget(count=20)),
        ("0", ErrorBudget(count=0)),
        ("2.5%", ErrorBudget(share=0.025)),
        ("100 %", ErrorBudget(share=1.0)),
        ("{count: 5}", ErrorBudget(count=5)),
        ("{share: 5%}", ErrorBudget(share=0.05)),
        ("{count: 5, share: 5%}", ErrorBudget(count=5, share=0.05)),
    ],
)
def test_budget(path: Path, written: str, budget: ErrorBudget) -> None:
    """A number bounds the count, a percentage the share; the other is unbounded."""
    stage = transform_of(
        path, f"{{worker: {{command: [cat]}}, on_error: {{budget: {written}}}}}"
    )
    assert stage.on_error == ErrorPolicy(budget=budget)


def test_run_may_end_with_the_first_failure(path: Path) -> None:
    """``then: fail`` is the strictest policy."""
    keys = "{worker: {command: [cat]}, on_error: {then: fail}, order: none}"
    stage = transform_of(path, keys)
    assert stage.on_error == ErrorPolicy(then="fail")
    assert stage.order is Order.NONE


@pytest.mark.parametrize(
    ("written", "mask"), [("022", 0o22), ("0o77", 0o77), ("7", 0o7), ('"002"', 0o2)]
)
def test_mask_is_octal(path: Path, written: str, mask: int) -> None:
    """As umask(1) reads it, with quotes or without."""
    stage = transform_of(path, f"worker: {{command: [cat], umask: {written}}}")
    assert stage.program.umask == mask


@pytest.mark.parametrize(
    ("written", "runs"),
    [
        ("python", sys.executable),
        ("python3", sys.executable),
        ("python3.12", "python3.12"),
        ("/usr/bin/python3", "/usr/bin/python3"),
        ("awk", "awk"),
        ("./clean.sh", "/base/clean.sh"),
        ("bin/clean", "/base/bin/clean"),
        ("../clean", "/base/../clean"),
    ],
)
def test_program(path: Path, written: str, runs: str) -> None:
    """A name is looked up, a path is relative to the file, ``python`` is our own."""
    stage = transform_of(path, f"worker: {{command: [{written}, ./data]}}")
    assert stage.program.command == (runs, "./data")


def test_ends(path: Path) -> None:
    """Extract and load workers take their own modes."""
    model = model_of(path, "worker: {command: [cat]}")
    extract = stage_of(model.extract, BASE)
    assert extract.kind is StageKind.EXTRACT
    assert extract.dialect == MarkerDialect(mode=Mode.CYCLIC)
    assert extract.program.command == ("/base/fetch.sh", "1.10")
    assert extract.max_reply == 1024 * 1024
    assert extract.restart.max == 0
    assert extract.timeout.start == 1.0
    assert extract.program.limits.nice == 1
    sink = stage_of(model.load, BASE)
    assert sink.kind is StageKind.LOAD
    assert sink.dialect == MarkerDialect()
    assert sink.pool == PoolPolicy(min=2, max=2)
    assert (sink.window, sink.program.cwd) == (None, BASE / "sub")
    assert (sink.restart.max, sink.on_error.retries) == (1, 9)
    assert sink.recycle.max_messages == 5


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("data/a.json", "/base/data/a.json"),
        ("/data/*.json", "/data/*.json"),
        ("s3a://bucket/a", "s3a://bucket/a"),
        ("file:/a", "file:/a"),
        ("a:b", "/base/a:b"),
    ],
)
def test_located(written: str, read: str) -> None:
    """A path with a scheme is kept as it is; others are relative to the file."""
    assert located(written, BASE) == read


def test_workers_come_and_go(path: Path) -> None:
    """The number of workers varies between two bounds, if they are written."""
    stage = transform_of(
        path, "{worker: {command: [cat]}, workers: {max: 8, idle: 5m}}"
    )
    assert stage.pool == PoolPolicy(min=1, max=8, idle=300.0)


@pytest.mark.parametrize(
    ("cwd", "program"), [("", "/base/clean"), (", cwd: sub", "/base/sub/clean")]
)
def test_command_is_seen_from_where_it_runs(path: Path, cwd: str, program: str) -> None:
    """Its arguments are left to the worker, which sees them from there (issue 11)."""
    stage = transform_of(path, f"worker: {{command: [./clean, ./x]{cwd}}}")
    assert stage.program.command == (program, "./x")


@pytest.mark.parametrize("engine", ["local", "spark", "streaming"])
def test_offsets_of_any_dialect(path: Path, engine: str) -> None:
    """``offsets`` does not depend on the marker dialect (issue 23)."""
    path.write_text(
        f"name: p\nengine: {engine}\nextract:\n  worker: {{command: [cat]}}\n"
        "  dialect: {name: cocaine, concurrency: 3}\n"
        "  offsets: {by: supervisor, end: 9}\nload: {worker: {command: [cat]}}\n"
    )
    extract = load(path)[0].extract
    assert extract.offsets == OffsetPolicy(by="supervisor", end=9)
    assert stage_of(extract, BASE).dialect == CocaineDialect(concurrency=3)


def test_dialect_by_its_name_alone(path: Path) -> None:
    """A mapping names it, too; without a name it is ``marker`` (issue 23)."""
    text = "worker: {command: [cat]}, timeout: {heartbeat: 5s}, dialect"
    named = transform_of(path, f"{{{text}: cocaine, batch: {{}}}}").dialect
    assert named == CocaineDialect(batches=True, heartbeat=5.0)
    assert transform_of(path, f"{{{text}: marker}}").dialect == MarkerDialect()
    assert transform_of(path, f'{{{text}: {{eop: "\\x1f"}}}}').dialect == MarkerDialect(
        markers=Markers(eop=b"\x1f")
    )
    for driver, mode in ("worker", Mode.BATCH_WORKER), ("supervisor", Mode.SINGLE):
        made = transform_of(path, f"{{{text}: {{driver: {driver}}}}}").dialect
        assert made == MarkerDialect(mode=mode)
