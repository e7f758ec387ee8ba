"""
Every scenario of the stage protocol, with real workers in every language.

The workers' handling of single bytes is tested in ``tests/examples``; here they run
under the supervisor, as users of the examples will run them.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import anyio
import pytest

import etlstage
from etlstage.messages import StageKind
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, Stage
from etlstage.supervisor import AsyncSupervisor
from tests.examples.languages import ALL, PYTHONS, Language
from tests.patience import HANG
from tests.staged import staged
from tests.supervisor.workers import Settings, outputs

each_language = pytest.mark.parametrize("language", ALL, ids=str)
each_python = pytest.mark.parametrize("language", PYTHONS, ids=str)

LINES = [b"%d %s" % (n, b"x" * (n % 5)) for n in range(2500)]
ODD = Markers(b"<eom>", b"\0\0", b"\\\xff", b"<bnc>")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Return a folder for programs that comes first on shell workers' PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def example(
    language: Language,
    worker: str,
    tools: Path,
    *arguments: object,
    **settings: Unpack[Settings],
) -> Stage:
    """Return a stage that runs an example worker."""
    if missing := language.missing():
        pytest.skip(f"not installed: {', '.join(missing)}")
    for tool, program in language.tools.items():
        (tools / tool).symlink_to(shutil.which(program) or program)
    program, *options = language.interpreter
    command = (shutil.which(program), *options, language.script(worker), *arguments)
    root = Path(etlstage.__file__).parent.parent
    env = {"PATH": f"{tools}:/usr/bin:/bin", "PYTHONPATH": str(root)}
    settings |= {"name": worker, "env": env}
    return staged(tuple(map(str, command)), **settings)


async def submit(stage: Stage, messages: list[bytes]) -> list[tuple[bytes, ...]]:
    """Return the outputs of each message; no worker may fail or hang."""
    with anyio.fail_after(HANG):
        async with AsyncSupervisor(stage) as supervisor:
            results = await supervisor.submit(messages)
    assert [r.message for r in results] == messages
    return outputs(results)


async def take(messages: AsyncIterator[bytes]) -> list[bytes]:
    """Return the messages of a round."""
    with anyio.fail_after(HANG):
        return [message async for message in messages]


# --- T and L, single messages --------------------------------------------------------


@each_language
async def test_transform_single(language: Language, tools: Path) -> None:
    """Zero, one and many outputs; more than pipes hold; two workers, in order."""
    stage = example(language, "transform", tools, workers=2)

    assert await submit(stage, [b"", *LINES]) == [
        tuple(line.split()) for line in [b"", *LINES]
    ]


@each_language
async def test_load_single(language: Language, tools: Path, tmp_path: Path) -> None:
    """No output, one EOP for each message, and everything is loaded in order."""
    target = tmp_path / "target"
    stage = example(language, "load", tools, target, kind=StageKind.LOAD)

    assert await submit(stage, LINES[:200]) == [()] * 200
    assert target.read_bytes() == b"".join(line + b"\n" for line in LINES[:200])


# --- T and L, batches ----------------------------------------------------------------

REPEATED = [b"a", b"b", b"a", b"", b"c", b"c", b"", b"d"]
CLOSED = BatchPolicy(size=3, seconds=3600)
OPEN = BatchPolicy(seconds=3600)


def batching(
    language: Language,
    tools: Path,
    *size: int,
    **settings: Unpack[Settings],
) -> Stage:
    """Return a stage with batches; with a ``size`` its worker closes them."""
    mode = Mode.BATCH_WORKER if size else Mode.BATCH_SUPERVISOR
    settings["dialect"] = MarkerDialect(mode=mode)
    return example(language, "transform_batch", tools, *size, **settings)


@each_language
async def test_transform_batch_by_supervisor(language: Language, tools: Path) -> None:
    """Messages repeated within a batch are passed on once."""
    first, second, third = (b"a", b"b"), (b"", b"c"), (b"", b"d")
    assert await submit(batching(language, tools, batch=CLOSED), REPEATED) == [
        *((), (), first),
        *((), (), second),
        *((), third),
    ]


@each_language
async def test_batches_ahead_of_their_answers(language: Language, tools: Path) -> None:
    """With many batches in flight and two workers, the order is kept."""
    batch = BatchPolicy(size=7)
    stage = batching(language, tools, batch=batch, workers=2, window=9)

    assert [m for group in await submit(stage, LINES) for m in group] == LINES


@each_python
@pytest.mark.parametrize("size", [1, 3, 100])
async def test_transform_batch_by_worker(
    language: Language, tools: Path, size: int
) -> None:
    """It closes each batch at ``size``; the supervisor closes the last one."""
    seen = await submit(batching(language, tools, size, batch=OPEN), REPEATED)

    batches = [REPEATED[at : at + size] for at in range(0, len(REPEATED), size)]
    assert [group for group in seen if group] == [
        tuple(dict.fromkeys(batch)) for batch in batches
    ]


@each_python
@pytest.mark.parametrize(
    ("size", "mode", "batch"),
    [((), Mode.BATCH_SUPERVISOR, CLOSED), ((6,), Mode.BATCH_WORKER, OPEN)],
    ids=["supervisor", "worker"],
)
async def test_load_batch(
    language: Language,
    tools: Path,
    tmp_path: Path,
    size: tuple[int, ...],
    mode: Mode,
    batch: BatchPolicy,
) -> None:
    """Each batch is a transaction, including the last, and answered with EOP alone."""
    target = tmp_path / "target.sqlite"
    settings: Settings = {"kind": StageKind.LOAD, "batch": batch}
    settings["dialect"] = MarkerDialect(mode=mode)
    stage = example(language, "load_batch", tools, target, *size, **settings)

    assert await submit(stage, LINES[:20]) == [()] * 20
    assert rows(target) == LINES[:20]


def rows(database: Path) -> list[bytes]:
    """Return the messages in the database."""
    with closing(sqlite3.connect(database)) as connection:
        found = connection.execute("SELECT message FROM messages ORDER BY rowid")
        return [message for (message,) in found]


# --- E -------------------------------------------------------------------------------


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Write the lines to a file; return its path."""
    path = tmp_path / "lines"
    path.write_bytes(b"".join(line + b"\n" for line in LINES))
    return path


@each_python
async def test_extract_plain(language: Language, tools: Path, lines: Path) -> None:
    """Two rounds are two runs of the program."""
    stage = example(
        language,
        "extract",
        tools,
        lines,
        kind=StageKind.EXTRACT,
        dialect=MarkerDialect(mode=Mode.PLAIN),
    )
    async with AsyncSupervisor(stage) as supervisor:
        for _ in range(2):
            assert await take(supervisor.extract()) == LINES
    async with AsyncSupervisor(
        replace(stage, dialect=MarkerDialect(mode=Mode.PLAIN, markers=ODD))
    ) as supervisor:
        assert await take(supervisor.extract()) == LINES


@each_python
async def test_extract_cyclic_with_offsets_at_the_supervisor(
    language: Language, tools: Path, lines: Path
) -> None:
    """It gives what is asked for, even repeatedly and out of order."""
    stage = example(
        language,
        "extract_cycle_supervisor_offsets",
        tools,
        lines,
        kind=StageKind.EXTRACT,
        dialect=MarkerDialect(mode=Mode.CYCLIC),
    )
    async with AsyncSupervisor(stage) as supervisor:
        for start, end in (0, 10), (2000, 9999), (5, 5), (0, 10):
            messages = await take(supervisor.extract(start=start, end=end))
            assert messages == LINES[start:end]


@each_python
async def test_extract_cyclic_with_offsets_at_the_worker(
    language: Language, tools: Path, lines: Path, tmp_path: Path
) -> None:
    """Each round gives what is new; a second worker resumes after the first."""
    stage = example(
        language,
        "extract_cycle_worker_offsets",
        tools,
        lines,
        tmp_path / "offset",
        kind=StageKind.EXTRACT,
        dialect=MarkerDialect(mode=Mode.CYCLIC),
    )
    async with AsyncSupervisor(stage) as supervisor:
        assert await take(supervisor.extract()) == LINES
        assert await take(supervisor.extract()) == []
        with lines.open("ab") as log:
            log.write(b"new\nstill open")
        assert await take(supervisor.extract()) == [b"new"]
        assert await take(supervisor.extract()) == []
    with lines.open("ab") as log:
        log.write(b"\n")
    async with AsyncSupervisor(stage) as supervisor:
        assert await take(supervisor.extract()) == [b"still open"]
