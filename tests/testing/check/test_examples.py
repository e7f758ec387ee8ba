"""Every example worker passes: what users copy keeps to the protocol."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.testing.check import Verdict
from tests.examples.languages import (
    ANY_MARKERS,
    DEMO,
    JOIN,
    PACKAGE,
    PYTHONS,
    SHELLS,
    WORKERS,
)
from tests.testing.check.checked import checked, failures, said

SHELL = SHELLS[0]
FOUR = (*ANY_MARKERS, SHELL)
START = PACKAGE / "examples" / "start"
NODE = ANY_MARKERS[-1].interpreter


class Example(NamedTuple):
    """One worker, and what it is for."""

    name: str
    command: tuple[str | Path, ...]
    kind: StageKind = StageKind.TRANSFORM
    mode: Mode = Mode.SINGLE
    ranges: bool = False
    sample: tuple[bytes, ...] = ()


T, E, L = StageKind.TRANSFORM, StageKind.EXTRACT, StageKind.LOAD
GRADED = (b'{"damage":"minor","cost_usd":0}', b'{"damage":"none","cost_usd":7}')
ASKED = (b'{"text": "a b"}', b'{"text": ""}', b'{"text": "c"}')
BATCHES = (("", Mode.BATCH_SUPERVISOR), ("3", Mode.BATCH_WORKER))
TABLE = [
    *(Example(f"{x}-transform", (*x.interpreter, x.script("transform"))) for x in FOUR),
    *(
        Example(
            f"{x}-transform-batch-worker",
            (*x.interpreter, x.script("transform_batch"), "3"),
            mode=Mode.BATCH_WORKER,
        )
        for x in PYTHONS
    ),
    *(
        Example(
            f"{x}-extract", (*x.interpreter, x.script("extract"), "in"), E, Mode.PLAIN
        )
        for x in PYTHONS
    ),
    *(
        Example(
            f"{x}-extract-worker-offsets",
            (*x.interpreter, x.script("extract_cycle_worker_offsets"), "in", "offset"),
            E,
            Mode.CYCLIC,
        )
        for x in PYTHONS
    ),
    *(
        Example(
            f"{x}-extract-supervisor-offsets",
            (*x.interpreter, x.script("extract_cycle_supervisor_offsets"), "in"),
            E,
            Mode.CYCLIC,
            ranges=True,
        )
        for x in PYTHONS
    ),
    Example("start-python", (sys.executable, START / "worker.py")),
    Example("start-sh", ("sh", START / "worker.sh")),
    Example("demo-clean", (sys.executable, DEMO / "clean.py")),
    Example("join-animal", (sys.executable, JOIN / "animal.py")),
    Example(
        "asgi",
        (sys.executable, PACKAGE / "examples" / "asgi" / "worker.py"),
        sample=ASKED,
    ),
    Example("trio", (sys.executable, PACKAGE / "examples" / "trio" / "worker.py")),
]
SLOW = [
    Example("start-node", (*NODE, START / "worker.mjs")),
    *(
        Example(
            f"{x}-transform-batch",
            (*x.interpreter, x.script("transform_batch")),
            mode=Mode.BATCH_SUPERVISOR,
        )
        for x in FOUR
    ),
    Example("demo-grade", ("sh", DEMO / "grade.sh"), sample=GRADED),
    *(Example(f"{x}-load", (*x.interpreter, x.script("load"), "out"), L) for x in FOUR),
    *(
        Example(
            f"{x}-load-batch-{mode.value}",
            (*x.interpreter, x.script("load_batch"), "out", *([size] if size else [])),
            L,
            mode,
        )
        for x in PYTHONS
        for size, mode in BATCHES
    ),
]
# These ignore markers that they do not support, or report them and exit.
FEWER_MARKERS = {"sh", "start", "demo"}


def passes(example: Example, folder: Path) -> None:
    """Check an example, with its data in a folder of its own."""
    lines = (b"line %d\n" % number for number in range(200))
    (folder / "in").write_bytes(b"".join(lines))
    assert shutil.which(str(example.command[0]))

    findings = checked(
        example.command,
        kind=example.kind,
        mode=example.mode,
        ranges=example.ranges,
        sample=example.sample,
        stage={"cwd": folder},
    )

    assert failures(findings) == {}
    passed = [item for item in findings if item.verdict is Verdict.PASSED]
    assert len(passed) >= (2 if example.mode is Mode.PLAIN else 7)
    advice = set(said(findings, Verdict.ADVICE))
    if example.name.partition("-")[0] not in FEWER_MARKERS:
        assert advice == set()


@pytest.mark.parametrize("example", TABLE, ids=lambda example: example.name)
def test_example_keeps_to_the_protocol(example: Example, tmp_path: Path) -> None:
    """There are some in each language, with the SDK and without it (issue 12)."""
    passes(example, tmp_path)


@pytest.mark.slow  # each syncs to the disk, or many programs are started
@pytest.mark.parametrize("example", SLOW, ids=lambda example: example.name)
def test_slow_example_keeps_to_the_protocol(example: Example, tmp_path: Path) -> None:
    """Workers that load into a file or a database are among them (issue 12)."""
    passes(example, tmp_path)


def test_no_example_is_forgotten() -> None:
    """A new worker needs a row in a table (issue 12)."""
    checked_ones = {
        word
        for example in [*TABLE, *SLOW]
        for word in example.command
        if isinstance(word, Path)
    }
    suffixes = (".py", ".sh", ".mjs")
    workers = {
        path
        for path in WORKERS.rglob("*")
        if path.suffix in suffixes and path.name != "__init__.py"
    }
    assert workers <= checked_ones
