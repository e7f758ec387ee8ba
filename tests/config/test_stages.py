from __future__ import annotations

import sys
from pathlib import Path

import pytest

from etlstage.config.loader import load
from etlstage.config.model import PipelineKeys
from etlstage.config.stages import (
    extract_stage,
    load_stage,
    located,
    transform_stage,
)
from etlstage.messages import StageKind
from etlstage.protocol.marker import Markers, Mode
from etlstage.supervisor import BatchPolicy, Stage, Timeouts

BASE = Path("/base")
ENDS = """\
name: papers
extract: {worker: {command: [./fetch.sh, 1.10]}, mode: cyclic, max_reply: 1MiB}
load: {worker: {command: [/bin/load], cwd: sub}, window: auto, workers: 2}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Name a pipeline file."""
    return tmp_path / "pipeline.yaml"


def model_of(path: Path, transform: str) -> PipelineKeys:
    """Return the model of a file with one transform stage."""
    path.write_text(f"{ENDS}transform:\n  - {transform}\n")
    return load(path)[0]


def stage_of(path: Path, transform: str) -> Stage:
    """Return the transform stage of a file."""
    return transform_stage(model_of(path, transform).transform[0], "t", BASE)


def test_defaults_are_those_of_a_stage(path: Path) -> None:
    """The loader adds nothing but the folder."""
    expected = Stage(name="t", command=("cat",), cwd=BASE)
    assert stage_of(path, "worker: {command: [cat]}") == expected


def test_every_key_reaches_the_stage(path: Path) -> None:
    """Names differ in places, values do not."""
    stage = stage_of(
        path,
        r"""worker:
      command: [awk, "-f", prog.awk]
      markers: {eom: "\x1e", eop: '\0', bnc: '\xff'}
      env: {LANG: C.UTF-8, N: 1.10, ON: yes}
      cwd: work
    workers: 3
    window: 8
    batch: {driver: worker, size: 10, bytes: 1kB, seconds: 2s, eob_then_eom: true,
            bnc_after_last: true}
    timeout: {message: 1m, stop: 500ms}
    max_message: 1MiB
    max_reply: 2MiB""",
    )
    assert stage == Stage(
        name="t",
        command=("awk", "-f", "prog.awk"),
        kind=StageKind.TRANSFORM,
        mode=Mode.BATCH_WORKER,
        markers=Markers(eom=b"\x1e", eop=b"\0", bnc=b"\xff"),
        batch=BatchPolicy(
            size=10, bytes=1000, seconds=2.0, eob_then_eom=True, bnc_after_last=True
        ),
        workers=3,
        window=8,
        timeout=Timeouts(message=60.0, stop=0.5),
        env={"LANG": "C.UTF-8", "N": "1.10", "ON": "yes"},
        cwd=BASE / "work",
        max_message_bytes=1024 * 1024,
        max_reply_bytes=2 * 1024 * 1024,
    )


def test_supervisor_drives_a_batch_unless_said_otherwise(path: Path) -> None:
    """An empty ``batch`` is a batch with the defaults."""
    assert stage_of(path, "{worker: {command: [cat]}, batch: {}}").mode is (
        Mode.BATCH_SUPERVISOR
    )


def test_null_waits_for_ever(path: Path) -> None:
    """For workers that may think for hours."""
    stage = stage_of(path, "{worker: {command: [cat]}, timeout: {message: null}}")
    assert stage.timeout == Timeouts(message=None)


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
    """A name is looked up, a path is relative to the file, Python is ours."""
    stage = stage_of(path, f"worker: {{command: [{written}, ./data]}}")
    assert stage.command == (runs, "./data")


def test_ends(path: Path) -> None:
    """Extract and load workers take their own modes."""
    model = model_of(path, "worker: {command: [cat]}")
    extract = extract_stage(model.extract, "e", BASE)
    assert extract.kind is StageKind.EXTRACT
    assert extract.mode is Mode.CYCLIC
    assert extract.command == ("/base/fetch.sh", "1.10")
    assert extract.max_reply_bytes == 1024 * 1024
    sink = load_stage(model.load, "l", BASE)
    assert sink.kind is StageKind.LOAD
    assert sink.mode is Mode.SINGLE
    assert (sink.workers, sink.window, sink.cwd) == (2, None, BASE / "sub")


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
    """A path with a scheme is not on this machine's terms."""
    assert located(written, BASE) == read
