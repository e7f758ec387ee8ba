from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from etlstage.errors import Attempt, SinkFailed
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.pipeline import Pipeline
from etlstage.spark import DeadLetterFrame, Destination
from etlstage.spark.dataframe import dead_letter as module

pytestmark = pytest.mark.spark


def letter(number: int, *attempts: Attempt) -> DeadLetter:
    """Return a dead letter."""
    return DeadLetter(
        id=f"r-{number}",
        time="2026-01-02T12:00:00.500+00:00",
        pipeline="p",
        run="r",
        stage="clean",
        place=2**40 + number,
        message=b"\0\xff" * number,
        error="é",
        kind="WorkerLost",
        attempts=attempts,
        config={"name": "clean", "env": ["A"]},
    )


async def test_letters_become_rows(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every field, appended to existing rows, in several chunks."""
    monkeypatch.setattr(module, "_CHUNK", 2)
    out = tmp_path / "dead"
    attempt = Attempt("w", 4711, "died", ("started",), ("oh", "no"))
    for start in (0, 3):
        frame = DeadLetterFrame(spark, Destination(str(out)))
        await frame.write(letter(n, attempt) for n in range(start, start + 3))
        await frame.aclose()
    rows = sorted(spark.read.parquet(str(out)).collect(), key=lambda row: str(row.id))
    assert [row.id for row in rows] == [f"r-{n}" for n in range(6)]
    row = rows[3].asDict(recursive=True)
    assert row.pop("time").astimezone(UTC) == datetime(
        2026, 1, 2, 12, 0, 0, 500_000, UTC
    )
    assert json.loads(row.pop("config")) == {"name": "clean", "env": ["A"]}
    assert row == {
        "id": "r-3",
        "pipeline": "p",
        "run": "r",
        "stage": "clean",
        "place": 2**40 + 4,
        "message": bytearray(b"\0\xff" * 3),
        "error": "é",
        "kind": "WorkerLost",
        "attempts": [
            {
                "worker": "w",
                "pid": 4711,
                "error": "died",
                "story": ["started"],
                "stderr": ["oh", "no"],
            }
        ],
    }
    assert len(list(out.glob("part-*"))) == 4
    assert (out / "_SUCCESS").exists()


PIPELINE = """\
name: frames
spark: {master: "local[1]", config: {spark.sql.shuffle.partitions: 1}}
extract:
  spark: {format: text, path: in.txt}
transform:
  - worker: {command: [sh, -c, 'while read x; do test "$$x" = 2 && exit 3; printf "$$x\\n\\0"; done']}
    restart: {delay: 10ms}
load:
  spark: {format: json, path: out, mode: overwrite, schema: 'n int', epoch: {messages: 1}}
dead_letters: {spark: {format: parquet, path: dead}}
"""


async def test_letters_of_a_run_are_appended(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Those of a worker and of the sink; a session that was given is left as it is."""
    (path := tmp_path / "pipeline.yaml").write_text(PIPELINE)
    (tmp_path / "in.txt").write_text('{"n":1}\n2\n{"n":"x"}\n{"n":3}\n')
    for _ in range(2):
        report = await Pipeline.from_yaml(path, spark=spark).run()
        assert (report.status, report.error) == ("done", None)
        assert [a.dead for a in report.ledger] == [0, 1, 1]
    rows = spark.read.parquet(str(tmp_path / "dead")).collect()
    found = sorted((r.stage, bytes(r.message), r.kind, len(r.attempts)) for r in rows)
    assert found[::2] == found[1::2]
    assert found[::2] == [
        ("load", b'{"n":"x"}', "SinkFailed", 0),
        ("transform-1", b"2", "WorkerLost", 3),
    ]
    assert spark.read.json(str(tmp_path / "out")).count() == 2
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"


async def test_destination_that_can_not_be_written(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The error names the destination."""
    (tmp_path / "file").write_text("")
    frame = DeadLetterFrame(spark, Destination(str(tmp_path / "file" / "x")))
    with pytest.raises(SinkFailed, match=r"can't write the dead letters to .*file/x: "):
        await frame.write(iter([letter(1)]))
