"""The main job: Spark JSON, a Python worker, a shell worker, Parquet."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

PIPELINE = """\
name: whole
spark: {master: "local[2]"}
extract:
  spark: {format: json, path: in.ndjson, options: {primitivesAsString: "true"}}
transform:
  - name: halve
    worker: {command: [python, halve.py]}
    workers: 2
  - name: sign
    worker: {command: [sh, sign.sh]}
load:
  spark: {format: parquet, path: out, mode: overwrite, schema: "id long, part string"}
"""

# None, one or two messages for each record.
HALVE = """\
import json
from etlstage import worker

def halve(message):
    number = int(json.loads(message)["id"])
    for part in range(number % 3):
        yield b'{"id": %d, "part": "%d' % (number, part)

worker.transform(halve)
"""

# awk alone would wait for a full block of input.
SIGN = """\
while IFS= read -r line; do printf '%s signed"}\\n\\000' "$line"; done
"""


def run(folder: Path, count: int) -> list[tuple[int, str]]:
    """Run the pipeline on ``count`` records and return the rows, sorted."""
    (folder / "pipeline.yaml").write_text(PIPELINE)
    (folder / "halve.py").write_text(HALVE)
    (folder / "sign.sh").write_text(SIGN)
    with (folder / "in.ndjson").open("w") as records:
        records.writelines(f'{{"id": {n}, "name": "n{n}"}}\n' for n in range(count))
    if not count:
        # Without a record Spark can't infer any column.
        text = PIPELINE.replace("format: json", 'format: json, schema: "id string"')
        (folder / "pipeline.yaml").write_text(text)
    command = [sys.executable, "-m", "etlstage", "run", "pipeline.yaml"]
    done = subprocess.run(
        [*command, "--report", "report.json"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "report.json").read_text())
    rows = pq.read_table(folder / "out").to_pydict()
    made = len(rows["id"])
    assert [stage["in"] for stage in report["stages"]] == [None, count, made, made]
    assert (folder / "out" / "_SUCCESS").exists()
    return sorted(zip(rows["id"], rows["part"], strict=True))


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [0, 1, 100_000])
def test_rows_are_exactly_those_expected(tmp_path: Path, count: int) -> None:
    """Whatever the number of records, none is missing and none comes twice."""
    assert run(tmp_path, count) == [
        (number, f"{part} signed")
        for number in range(count)
        for part in range(number % 3)
    ]
