"""
What does it cost to load each message exactly once?

DataFrame -> stage -> Parquet on engines ``local`` and ``streaming``, with epochs of
100,000 messages, exactly once and at least once; and whether the driver's memory grows
with the epochs. Both keep a state directory. A stream loads files once in any case, so
there is one into PostgreSQL, too, started as in the tests.
"""

from __future__ import annotations

import json
import resource
import secrets
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import anyio
from pyspark.sql import SparkSession

from benchmarks.harness import Row, echo_worker, memory, messages, paired
from benchmarks.spark import session
from etlstage import Pipeline
from tests.database import PostgreSQL, drivers, postgresql

COUNT = 1_000_000
INTO_TABLE = 200_000
EPOCH = 100_000
PIPELINE = """\
name: once
engine: {engine}
delivery: {delivery}
state: {folder}/state
extract:
  spark: {{format: text, path: {source}, options: {{maxFilesPerTrigger: "1"}}}}
transform:
  - worker: {{command: [{echo}]}}
load:
  spark: {{mode: append, epoch: {{messages: {epoch}}}, {place}}}
"""


def measure() -> list[Row]:
    """Return messages per second of both, and megabytes."""
    rows = []
    jars = {"spark.jars": drivers()}
    with session(jars) as spark, tempfile.TemporaryDirectory() as folder:
        source = write(Path(folder), COUNT)
        for engine in "local", "streaming":
            once, least = paired(
                partial(run, engine, "exactly-once", source, COUNT, spark),
                partial(run, engine, "at-least-once", source, COUNT, spark),
            )
            what = f"exactly-once, engine {engine}"
            rows.append(Row(what, once, "at-least-once", least, "messages/s", 0.8))
        with postgresql() as server:
            few = write(Path(folder, "few"), INTO_TABLE)
            into = partial(run, "streaming", server=server)
            once, least = paired(
                partial(into, "exactly-once", few, INTO_TABLE, spark),
                partial(into, "at-least-once", few, INTO_TABLE, spark),
            )
        what = "exactly-once, engine streaming, into PostgreSQL"
        rows.append(Row(what, once, "at-least-once", least, "messages/s", 0.8))
    name = "exactly-once, driver memory"
    return [*rows, memory(name, "benchmarks.exactly_once", 10, 1)]


def write(folder: Path, count: int) -> Path:
    """Write an input with a file for each epoch; return its folder."""
    source = folder / "in"
    source.mkdir(parents=True)
    lines = b"\n".join(messages(EPOCH))
    for number in range(count // EPOCH):
        (source / f"{number:04}.txt").write_bytes(lines)
    return source


def run(
    engine: str,
    delivery: str,
    source: Path,
    count: int,
    spark: SparkSession,
    server: PostgreSQL | None = None,
) -> float:
    """Run a pipeline in a folder of its own; return its messages per second."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pipeline.yaml")
        place = f"path: {folder}/out"
        if server is not None:
            table = f"rows_{secrets.token_hex(4)}"
            options = json.dumps({**server.options, "dbtable": table})
            place = f"format: jdbc, options: {options}"
        text = PIPELINE.format(
            engine=engine,
            delivery=delivery,
            folder=folder,
            source=source,
            echo=echo_worker(),
            epoch=EPOCH,
            place=place,
        )
        path.write_text(text)
        started = time.perf_counter()
        report = anyio.run(Pipeline.from_yaml(path, spark=spark).run)
        seconds = time.perf_counter() - started
    assert report.status == "done", report.error
    assert report.ledger[-1].done == count, report.ledger
    return count / seconds


def main(count: int) -> None:
    """Run once and print the peak, in megabytes."""
    with session() as spark, tempfile.TemporaryDirectory() as folder:
        run("local", "exactly-once", write(Path(folder), count), count, spark)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    main(int(sys.argv[1]))
