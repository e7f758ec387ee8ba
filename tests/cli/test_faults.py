from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Etlstage

FAULTS = """\
faults:
  - {stage: upper, kind: kill, message: 2, start: 1}
  - {stage: upper, kind: stall, message: 99}
  - {stage: load, kind: refuse, contains: A, data: no A today}
"""


@pytest.fixture
def faulty(pipeline: Path) -> Path:
    """Write a pipeline of three workers with faults."""
    budget = "load: {on_error: {budget: {count: 1}}, worker:"
    text = pipeline.read_text().replace("load: {worker:", budget)
    pipeline.write_text(text + FAULTS)
    return pipeline


def test_faults_happen_and_what_they_led_to_is_reported(
    etlstage: Etlstage, faulty: Path
) -> None:
    """A worker is started again, a message is dead-lettered, the others are loaded."""
    result = etlstage("run", faulty, "--faults", "--report", "report.json", code=0)
    assert (faulty.parent / "loaded.txt").read_text().splitlines()[-2:] == ["B", "C"]
    killed = "1 time; 1 worker was killed by SIGKILL"
    assert result.stdout.splitlines()[-3:] == [
        f"fault kill in upper, message 2, start 1: {killed}",
        "fault stall in upper, message 99: never",
        "fault refuse in load, contains A: 1 time; 1 worker exited with status 0",
    ]
    kill, stall, refuse = json.loads((faulty.parent / "report.json").read_text())[
        "faults"
    ]
    assert (kill["stage"], kill["kind"], kill["message"]) == ("upper", "kill", 2)
    dead = {"worker": "upper-1", "start": 1, "message": 2}
    assert kill["times"] == [{**dead, "exit": "was killed by SIGKILL"}]
    assert (stall["happened"], stall["times"]) == (0, [])
    assert (refuse["happened"], refuse["contains"]) == (1, "A")


def test_recording_has_what_the_supervisor_saw(
    etlstage: Etlstage, faulty: Path
) -> None:
    """The recording includes the injected faults."""
    result = etlstage("run", faulty, "--faults", "--record", "recordings", code=0)
    text = (faulty.parent / "recordings" / "load-1.1.rec").read_text()
    assert "no A today" in text
    assert result.stdout.endswith("4 conversations recorded in recordings\n")


def test_chance_is_the_seed_s(etlstage: Etlstage, pipeline: Path) -> None:
    """The same seed gives the same faults, another seed gives others."""
    with pipeline.open("a") as file:
        file.write("faults: [{stage: upper, kind: refuse, probability: 50%}]\n")
    told = [
        etlstage("run", pipeline, "--faults", "--seed", seed).stdout.splitlines()[-1]
        for seed in ("4", "4", "1")
    ]
    assert told[0] == told[1] != told[2]


@pytest.mark.parametrize("command", ["run", "diff"])
def test_faults_are_refused_where_no_one_wants_them(
    etlstage: Etlstage, faulty: Path, command: str
) -> None:
    """Nothing is started; ``validate`` accepts the file."""
    result = etlstage(command, faulty, code=2)
    assert "faults are only for etlstage run --faults" in result.stderr
    assert "pipeline.yaml:8:3: " in result.stderr
    assert etlstage("validate", faulty).returncode == 0


def test_faults_are_asked_for_where_there_are_none(
    etlstage: Etlstage, pipeline: Path
) -> None:
    """A run that injects nothing would prove nothing."""
    result = etlstage("run", pipeline, "--faults")
    assert (result.returncode, "has no key faults" in result.stderr) == (2, True)


SESSIONS = """\
from etlstage.worker import cocaine

def upper(request, response):
    for chunk in request:
        response.write(chunk.upper())

cocaine.run({"transform": upper})
"""


def test_worker_that_connects_has_faults_of_its_own(
    etlstage: Etlstage, pipeline: Path
) -> None:
    """Another dialect's fault is refused at its place in the file (issue 15)."""
    (pipeline.parent / "upper.py").write_text(SESSIONS)
    worker = "worker: {command: [python, upper.py]}"
    spoken = f"{worker}\n    dialect: {{name: cocaine, concurrency: 1}}"
    text = pipeline.read_text().replace(worker, spoken)
    faults = "  - {stage: upper, kind: kill, message: 2, start: 1}\n"
    faults += "  - {stage: upper, kind: lose_terminate}\n"
    pipeline.write_text(f"{text}faults:\n{faults}")
    result = etlstage("run", pipeline, "--faults", code=0)
    loaded = (pipeline.parent / "loaded.txt").read_text()
    assert loaded.splitlines() == ["A", "B", "C"]
    assert result.stdout.splitlines()[-2:] == [
        "fault kill in upper, message 2, start 1: 1 time; 1 worker was killed by SIGKILL",
        "fault lose_terminate in upper: 1 time; 1 worker exited with status 0",
    ]
    wrong = faults.replace("lose_terminate", "extra_eop")
    wrong += "  - {stage: load, kind: revoke}\n"
    pipeline.write_text(f"{text}faults:\n{wrong}")
    result = etlstage("run", pipeline, "--faults", code=2)
    first, second = re.findall(r"pipeline.yaml:\d+:\d+: (faults.*)", result.stderr)
    what = "extra_eop needs markers, which dialect cocaine does not have"
    assert first == f"faults[1].kind: {what}"
    what = "revoke needs a connection, which dialect marker does not have"
    assert second == f"faults[2].kind: {what}"
