"""README's programs for Spark, as they stand there, in a session of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_readme import PROGRAMS, dialogue, typed

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

FILES = {
    "papers.ndjson": '{"id": 1, "title": " one "}\n{"id": 2, "title": "two"}\n',
    "clean.py": """\
#!/usr/bin/env python3
import json
from etlstage import worker

def clean(message):
    row = json.loads(message)
    yield json.dumps({"title": row["title"].strip(), "year": 1990 + row["id"]}).encode()

worker.transform(clean)
""",
    "fetch.py": """\
import json
from etlstage import worker

def fetch(start, end):
    for n in range(start, end):
        yield json.dumps({"id": n, "title": f"title {n}"}).encode()

worker.extract_cycle(fetch, offsets="supervisor", latest=lambda: 2500)
""",
    "index.py": """\
import os
from etlstage import worker

name = os.environ["ETLSTAGE_PARTITION"]
with open(os.path.join(os.environ["ETLSTAGE_STAGING"], name), "wb") as file:
    worker.load(lambda message: file.write(message + b"\\\\n") and None)
""",
}
BEFORE = """
import pathlib, tarfile
from pyspark.sql import SparkSession

for name, text in {files!r}.items():
    pathlib.Path(name).write_text(text)
pathlib.Path("clean.py").chmod(0o755)
with tarfile.open("tools.tar.gz", "w:gz") as archive:
    archive.add("clean.py")
spark = SparkSession.builder.master("local[2]").getOrCreate()
"""


def test_programs_for_spark(
    program: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """A stage as a function of DataFrames, sent to executors, and as a data source."""
    parts = (
        BEFORE.format(files=FILES),
        PROGRAMS["transform"],
        "print([tuple(row) for row in cleaned.sort('id').collect()])",
        PROGRAMS["ship"],
        "shipped = transform(papers, clean, schema='title string, year int')",
        "print(shipped.count())",
        PROGRAMS["data source"],
        "query.processAllAvailable(); query.stop()",
        "print(papers.count(), spark.table('papers').count())",
        "lines = [p.read_text() for p in pathlib.Path('index').iterdir()]",
        "print(sum(text.count('id') for text in lines))",
    )
    ended = program("\n".join(parts))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "[(1, 'one', 1991), (2, 'two', 1992)]",
        "2",
        "2500 2500",
        "2500",
    ]


def test_from_nothing_to_a_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To its end, with all that is shown meanwhile (issue 11)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    for name in [name for name in os.environ if name.startswith("SPARK_")]:
        monkeypatch.delenv(name)
    typed(dialogue("## From nothing to a pipeline", 3))
