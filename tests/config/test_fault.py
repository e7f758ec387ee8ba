from __future__ import annotations

from pathlib import Path

import pytest

from etlstage.config.loader import load
from etlstage.config.schema import pipeline_schema
from etlstage.errors import ConfigError
from etlstage.testing import FaultKind

PIPELINE = """\
name: letters
extract: {spark: {path: in.txt, format: text}}
transform: [{name: upper, worker: {command: [cat]}}]
load: {worker: {command: [cat]}}
faults:
  - %s
"""


def problems(tmp_path: Path, fault: str) -> str:
    """Return what is wrong with a file that has that fault."""
    path = tmp_path / "pipeline.yaml"
    path.write_text(PIPELINE % fault)
    with pytest.raises(ConfigError) as error:
        load(path)
    return str(error.value)


def test_file_may_have_all_that_can_be_done_from_outside() -> None:
    """Kinds that happen inside a process can't be written in a file."""
    keys = pipeline_schema()["properties"]["faults"]["items"]["properties"]
    kinds = keys["kind"]["anyOf"][0]["enum"]
    assert set(kinds) == {kind.value for kind in FaultKind if not kind.inside}


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (
            "{stage: uper, kind: kill}",
            "pipeline.yaml:6:13: faults[0].stage: unknown stage 'uper' (did you mean",
        ),
        (
            "{stage: extract, kind: kill}",
            "pipeline.yaml:6:13: faults[0].stage: has no worker that could have faults",
        ),
        ("{stage: upper, kind: spin}", "6:26: faults[0].kind: unknown kind 'spin'"),
        (
            "{stage: upper, kind: skip, at: end}",
            "faults[0].at: must be message: skip changes a reply",
        ),
        (
            "{stage: upper, kind: kill, at: start, message: 7}",
            "faults[0].message: needs at: message",
        ),
        (
            "{stage: upper, kind: never_ready, contains: x}",
            "faults[0].contains: needs at: message",
        ),
        (
            "{stage: upper, kind: fail_checkpoint, times: 2}",
            "faults[0].times: needs number",
        ),
        ("{stage: upper}", "faults[0].kind: "),
    ],
)
def test_fault_that_makes_no_sense_is_refused(
    tmp_path: Path, fault: str, problem: str
) -> None:
    """The error has the line and column."""
    assert problem in problems(tmp_path, fault)


def test_fault_is_what_is_written(tmp_path: Path) -> None:
    """Values have units, as everywhere in the file."""
    path = tmp_path / "pipeline.yaml"
    path.write_text(
        PIPELINE % "{stage: load, kind: pause, seconds: 2s, probability: 5%, size: 1kB}"
    )
    (fault,) = load(path)[0].faults
    assert (fault.seconds, fault.probability, fault.size) == (2.0, 0.05, 1000)
    assert (fault.at, fault.status) == (None, 1)
