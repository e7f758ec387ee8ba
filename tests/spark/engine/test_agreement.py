"""Engines agree on a pipeline's results, whatever its ends, orders and dialects."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from etlstage.pipeline import DeadLetter, Pipeline, Report
from etlstage.pipeline.dead_letter.files import letter_files, read_letters
from tests.systems import workers

pytestmark = [pytest.mark.spark, pytest.mark.classic, pytest.mark.slow]

# A message has what is to be done with it; a result has the names of its stages.
SINGLE = """\
import json, sys
from etlstage import worker

def answer(message):
    row = json.loads(message)
    if row["do"] == "refuse":
        raise worker.Refuse("asked to")
    for _ in range({"none": 0, "two": 2}.get(row["do"], 1)):
        yield json.dumps(row | {"by": row["by"] + sys.argv[1]}).encode()
"""
WORKERS = {
    **workers.transforms(SINGLE),
    "count.py": workers.WORKERS["count.py"],
    "load.py": workers.LOAD["load.py"],
}
ALL: Final = {"then": "dead_letter", "budget": "100%"}
numbers: Final = count()


@st.composite
def stages(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Draw a transform stage."""
    how = draw(st.sampled_from(["single", "cocaine", "batch"]))
    driver = draw(st.sampled_from(["worker", "supervisor"])) if how == "batch" else ""
    stage: dict[str, Any] = {
        "name": name,
        "worker": {"command": ["python", f"{how}.py", name, driver]},
        "workers": draw(st.integers(1, 3)),
        "order": draw(st.sampled_from(["none", "key", "total"])),
        "on_error": ALL,
    }
    if stage["order"] == "key":
        stage["key"] = "/key"
    if how == "cocaine":
        concurrency = draw(st.integers(1, 5))
        stage["dialect"] = {"name": "cocaine", "concurrency": concurrency}
    elif how == "batch":
        stage["dialect"] = {"driver": driver}
        stage["batch"] = {"size": 3}
    return stage


@st.composite
def rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw the input; each row has what is to be done with it."""
    asked = st.sampled_from(["one", "one", "one", "none", "two", "refuse", "reject"])
    made = draw(st.lists(st.tuples(st.integers(0, 3), asked), max_size=25))
    return [{"n": n, "key": k, "do": do, "by": ""} for n, (k, do) in enumerate(made)]


@st.composite
def pipelines(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a pipeline."""
    engine = draw(st.sampled_from(["local", "spark", "streaming"]))
    # Ends with Spark work on all engines, ends without it only on the local one.
    end = st.sampled_from(["spark", "files"] if engine == "local" else ["spark"])
    line = [draw(stages(name)) for name in "ab"[: draw(st.integers(0, 2))]]
    extract: dict[str, Any] = {draw(end): {"path": "in", "format": "text"}}
    if draw(st.booleans()):
        step = draw(st.integers(1, 10))
        extract = {
            "worker": {"command": ["python", "count.py"]},
            "dialect": {"mode": "cyclic"},
            "offsets": {"by": "supervisor", "start": 0, "step": step},
        }
    load: dict[str, Any] = {draw(end): {"path": "out", "format": "text"}}
    if draw(st.booleans()):
        load = {"worker": {"command": ["python", "load.py"]}, "on_error": ALL}
    return {
        "name": "p",
        "engine": engine,
        "state": "state",
        "extract": extract,
        "transform": line,
        "load": load,
    }


def batched(stage: dict[str, Any]) -> bool:
    """Return whether a refused message is refused together with others."""
    return "batch" in stage


def expected(
    read: list[dict[str, Any]], pipeline: dict[str, Any]
) -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """Return the messages to be loaded, and those to be dead-lettered by stage."""
    dead: Counter[tuple[str, str]] = Counter()
    messages = [json.dumps(row) for row in read]
    for stage in pipeline["transform"]:
        made = []
        for message in messages:
            row = json.loads(message)
            if row["do"] == "refuse":
                dead[stage["name"], message] += 1
                continue
            out = json.dumps(row | {"by": row["by"] + stage["name"]})
            made += [out] * {"none": 0, "two": 2}.get(row["do"], 1)
        messages = made
    if "worker" in pipeline["load"]:
        for message in messages:
            if json.loads(message)["do"] == "reject":
                dead["load", message] += 1
        messages = [m for m in messages if json.loads(m)["do"] != "reject"]
    return Counter(messages), dead


def prepare(folder: Path, read: list[dict[str, Any]]) -> None:
    """Write the workers and their input, which is cut into two files."""
    folder.mkdir()
    for name, text in WORKERS.items():
        (folder / name).write_text(text)
    for name in "in", "out":
        (folder / name).mkdir()
    lines = [f"{json.dumps(row)}\n" for row in read]
    (folder / "rows").write_text("".join(lines))
    half = len(lines) // 2
    (folder / "in" / "a.txt").write_text("".join(lines[:half]))
    (folder / "in" / "b.txt").write_text("".join(lines[half:]))


def run(folder: Path, pipeline: dict[str, Any], spark: SparkSession) -> Report:
    """Run a pipeline in its folder."""
    if "worker" not in pipeline["load"]:
        (folder / "out").rmdir()
    path = folder / "p.yaml"
    path.write_text(json.dumps(pipeline))

    async def main() -> Report:
        with anyio.fail_after(120):
            return await Pipeline.from_yaml(path, spark=spark).run()

    return anyio.run(main)


def loaded(folder: Path) -> list[list[str]]:
    """Return the loaded messages of each file."""
    files = (folder / "out").glob("[!._]*")
    return [path.read_text().splitlines() for path in files]


def partition(n: int, pipeline: dict[str, Any], count: int) -> int:
    """Return the number of the partition with row ``n`` of ``count``."""
    if "worker" not in pipeline["extract"]:
        return int(n >= count // 2)  # the file
    if pipeline["engine"] == "local":
        return 0
    return int(n // pipeline["extract"]["offsets"]["step"])


def check_order(found: list[list[str]], pipeline: dict[str, Any], count: int) -> None:
    """Check the order of messages of one partition that are loaded in one file."""
    orders = {stage["order"] for stage in pipeline["transform"]}
    if "none" in orders:
        return
    for lines in found:
        last: dict[tuple[int, int], int] = {}
        for row in map(json.loads, lines):
            key = row["key"] if "key" in orders else -1
            group = partition(row["n"], pipeline, count), key
            assert last.get(group, -1) <= row["n"], lines
            last[group] = row["n"]


def dead_letters(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the dead-lettered messages, each with its stage."""
    for path in letter_files(folder / "state"):
        for letter in read_letters(path):
            assert isinstance(letter, DeadLetter)
            yield letter.stage, letter.message.decode()


@pytest.mark.timeout(1200)
@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(read=rows(), pipeline=pipelines())
def test_engines_agree(
    spark: SparkSession,
    tmp_path: Path,
    read: list[dict[str, Any]],
    pipeline: dict[str, Any],
) -> None:
    """
    Each engine loads and dead-letters what the workers' replies imply, in the order
    that its stages keep (issue 23).
    """
    if any(map(batched, pipeline["transform"])):
        read = [row | {"do": row["do"].replace("refuse", "one")} for row in read]
    event(f"{pipeline['engine']}, {len(pipeline['transform'])} stages")
    folder = tmp_path / str(next(numbers))
    prepare(folder, read)
    report = run(folder, pipeline, spark)
    assert report.error is None
    messages, dead = expected(read, pipeline)
    found = loaded(folder)
    assert Counter(chain.from_iterable(found)) == messages
    check_order(found, pipeline, len(read))
    assert Counter(dead_letters(folder)) == dead
    accounts = {account.stage: account for account in report.ledger}
    assert accounts["load"].done == messages.total()
    for stage in pipeline["transform"]:
        refused = sum(n for (name, _), n in dead.items() if name == stage["name"])
        assert accounts[stage["name"]].dead == refused
    shutil.rmtree(folder)
