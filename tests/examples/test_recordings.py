from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.testing.recording.recording import (
    RecordedLaunch,
    Recording,
    RecordingFolder,
)
from etlstage.testing.recording.replay import differences, other_end, play
from etlstage.testing.transcript import Channel
from etlstage.transport import launch_over_pipes
from tests.examples.languages import ANY_MARKERS, PACKAGE, SHELLS

EXAMPLES = PACKAGE / "examples"
MESSAGES = [b"one", b"two words", b"", b"\xc3\xa9\xff", b"a,b,c", b"x" * 70_000, b"end"]
STRIKES = [b'{"damage":"Minor","cost_usd":0}', b'{"damage":"None","cost_usd":20000}']
INTERPRETERS = {lan.suffix: lan.interpreter for lan in (*ANY_MARKERS, SHELLS[0])}
BESIDE = (
    "asgi/worker.py",
    "demo/clean.py",
    "demo/grade.sh",
    "join/animal.py",
    "start/worker.mjs",
    "start/worker.py",
    "start/worker.sh",
    "trio/worker.py",
)
"""Transform workers of other examples."""

MODES = {
    "load": Mode.SINGLE,
    "load_batch": Mode.BATCH_SUPERVISOR,
    "transform": Mode.SINGLE,
    "transform_batch": Mode.BATCH_SUPERVISOR,
    "extract": Mode.PLAIN,
    "extract_cycle_supervisor_offsets": Mode.CYCLIC,
    "extract_cycle_worker_offsets": Mode.CYCLIC,
}
ARGUMENTS = {
    "load": ("target",),
    "extract": ("source",),
    "extract_cycle_worker_offsets": ("source", "offset"),
}


def stages() -> Iterator[Stage]:
    """Yield a stage for each example, and for each way to use it."""
    for name in BESIDE:
        yield example(EXAMPLES / name, StageKind.TRANSFORM, Mode.SINGLE)
    for script in sorted((EXAMPLES / "workers").glob("*/*")):
        if script.suffix not in INTERPRETERS or script.stem == "__init__":
            continue
        word, _, rest = script.stem.partition("_")
        arguments = ARGUMENTS.get(script.stem, ARGUMENTS.get(word, ()))
        kind = StageKind(word)
        yield example(script, kind, MODES[script.stem], *arguments)
        if rest == "batch" and script.suffix == ".py":
            yield example(script, kind, Mode.BATCH_WORKER, *arguments, "3")


def example(script: Path, kind: StageKind, mode: Mode, *arguments: str) -> Stage:
    """Return a stage with an example worker."""
    return Stage(
        name=f"{script.parent.name} {script.stem} {mode.name}",
        kind=kind,
        dialect=MarkerDialect(mode=mode),
        worker=(*INTERPRETERS[script.suffix], str(script), *arguments),
        batch=BatchPolicy(size=3),
    )


def at(folder: Path, stage: Stage) -> Stage:
    """Return a stage that runs in a folder of its own, with a source to read."""
    folder.mkdir()
    (folder / "source").write_bytes(b"zero\none\n\nthree\xff\n")
    return replace(stage, worker=replace(stage.program, cwd=folder))


async def converse(supervisor: AsyncSupervisor) -> None:
    """Have a stage do its work."""
    if supervisor.stage.kind is not StageKind.EXTRACT:
        # The grader accepts no other records, and exits at them.
        grades = "grade" in supervisor.stage.name
        await supervisor.submit(STRIKES if grades else MESSAGES)
        return
    asks = "supervisor" in supervisor.stage.name
    for end in (2, 4) if asks else (None,):
        start = None if end is None else end - 2
        assert [m async for m in supervisor.extract(start=start, end=end)]


@pytest.mark.parametrize("stage", [*stages()], ids=lambda stage: stage.name)
async def test_recording_of_an_example_plays_equal(
    stage: Stage, tmp_path: Path
) -> None:
    """A replay gives the same bytes on each channel."""
    folder = RecordingFolder(tmp_path / "recordings")
    launch = RecordedLaunch(launch_over_pipes, folder)
    async with AsyncSupervisor(
        at(tmp_path / "one", stage), launch=launch
    ) as supervisor:
        await converse(supervisor)
    recording = Recording.load(folder.path / f"{stage.name}-1.1.rec")
    played = await play(recording, at(tmp_path / "two", stage))
    assert recording.written(Channel.STDOUT)
    for channel in (Channel.STDIN, Channel.STDOUT, Channel.STDERR):
        assert played.written(channel) == recording.written(channel)
    assert not list(differences(recording, played))
    assert not other_end(recording, played)
    assert (recording.exit, played.exit) == (0, 0)
