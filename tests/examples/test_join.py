from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from etlstage.cli.init import copy_examples
from tests.examples.conftest import Start
from tests.examples.languages import DEMO, JOIN, PYTHONS

SDK = PYTHONS[1]


def records(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def classified(start: Start, *species: str) -> list[dict[str, str] | None]:
    """Return the worker's reply to each, None for nothing."""
    worker = start(SDK, JOIN / "animal.py")
    sent = "".join(f"{name}\n" for name in species).encode()
    answer = worker.answer_to(sent, until=b"\0", times=len(species))
    assert worker.finish() == (b"", 0)
    return [json.loads(reply) if reply else None for reply in answer.split(b"\0")[:-1]]


def command() -> list[str]:
    """Return the command that the folder's README names."""
    found = re.search(r"```bash\n(.+)\n```", (JOIN / "README.md").read_text())
    assert found is not None
    program, *arguments = shlex.split(found[1])
    assert program == "python"
    return [sys.executable, *arguments]


@pytest.mark.parametrize(
    ("species", "animal", "kind"),
    [
        ("European starling", "starling", "bird"),
        ("Pacific golden-plover", "plover", "bird"),
        ("Blackbirds", "blackbird", "bird"),
        ("Rock pigeon", "pigeon", "bird"),
        ("Mourning dove", "pigeon", "bird"),
        ("White-tailed deer", "deer", "mammal"),
    ],
)
def test_species_is_classified(
    start: Start, species: str, animal: str, kind: str
) -> None:
    """The family is the last word, in the singular, or what it is known as."""
    assert classified(start, species) == [{"animal": animal, "kind": kind}]


def test_unknown_species_has_no_answer(start: Start) -> None:
    """Only EOP, so that its row goes no further."""
    assert classified(start, "Unknown bird - small", "Coyote") == [
        None,
        {"animal": "coyote", "kind": "mammal"},
    ]


def test_each_state_has_one_region() -> None:
    """The join makes no row twice, and loses none."""
    regions = [row["state"] for row in records(JOIN / "regions.csv")]

    assert len(regions) == len(set(regions)) == 51
    strikes = records(DEMO / "birdstrikes.csv")
    assert {row["Origin State"] for row in strikes} <= set(regions)


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_notebook_runs_where_init_puts_it(start: Start, tmp_path: Path) -> None:
    """Its output is what the tables and the worker give, and what its README shows."""
    copy_examples(tmp_path / "etl")
    folder = tmp_path / "etl" / "join"

    done = subprocess.run(
        command(),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    rows = pq.read_table(folder / "out" / "animals").to_pylist()
    assert {
        (row["region"], row["place"]): (row["animal"], row["strikes"], row["cost_usd"])
        for row in rows
    } == expected(start)
    table = re.findall(
        r"\| ([^|]+) \| (\w+ \d.*) \|", (folder / "README.md").read_text()
    )
    assert table == [
        (region, shown(rows, region)) for region in sorted({r["region"] for r in rows})
    ]


def shown(rows: list[dict[str, object]], region: str) -> str:
    """Return the animals of a region as the README writes them."""
    ranked = sorted(
        (row["place"], row["animal"], row["strikes"])
        for row in rows
        if row["region"] == region
    )
    return ", ".join(f"{animal} {strikes}" for _, animal, strikes in ranked)


def expected(start: Start) -> dict[tuple[str, int], tuple[str, int, int]]:
    """Return the first three of each region, counted here."""
    regions = {row["state"]: row["region"] for row in records(JOIN / "regions.csv")}
    strikes = records(DEMO / "birdstrikes.csv")
    animals = classified(start, *(row["Wildlife Species"] for row in strikes))
    counts: Counter[tuple[str, str]] = Counter()
    costs: Counter[tuple[str, str]] = Counter()
    for row, animal in zip(strikes, animals, strict=True):
        if animal is not None and animal["kind"] == "bird":
            at = regions[row["Origin State"]], animal["animal"]
            counts[at] += 1
            costs[at] += int(row["Cost Total $"])
    found = {}
    for region in set(regions.values()):
        ranked = sorted((-n, at) for at, n in counts.items() if at[0] == region)
        for place, (n, at) in enumerate(ranked[:3], 1):
            found[region, place] = (at[1], -n, costs[at])
    return found
