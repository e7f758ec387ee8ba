from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.testing.recording.recording import Recording
from etlstage.testing.transcript import Channel, Entry
from tests.cli.conftest import Etlstage, write_pipeline
from tests.cli.forked import Forks, environment

V2 = """\
import sys
for line in sys.stdin.buffer:
    times = 2 if line == b"b\\n" else 1
    sys.stdout.buffer.write(line.upper() * times + b"\\0")
    sys.stdout.flush()
"""
"""The next version of upper.py; it has something wrong with b."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    """Record a run of the pipeline once for all tests."""
    folder = tmp_path_factory.mktemp("recorded")
    words = "run", f"{write_pipeline(folder)}", "--record", "recordings"
    result = forks.run(words, folder, environment(), "")
    assert result.returncode == 0
    assert result.stdout.endswith("3 conversations recorded in recordings\n")
    (folder / "v2.py").write_text(V2)
    return folder


@pytest.fixture
def recordings(recorded: Path, tmp_path: Path) -> Path:
    """Return a copy of the run's recordings, beside the workers."""
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    return tmp_path / "recordings"


def test_each_worker_of_a_run_is_recorded(recordings: Path) -> None:
    """So are extract and load workers, in files that are named after the workers."""
    names = sorted(path.name for path in recordings.iterdir())
    assert names == ["extract-1.1.rec", "load-1.1.rec", "upper-1.1.rec"]
    recording = Recording.load(recordings / "upper-1.1.rec")
    assert recording.written(Channel.STDOUT) == b"A\n\0B\n\0C\n\0"


def test_same_worker_answers_the_same(recordings: Path, etlstage: Etlstage) -> None:
    """Without a command the recorded worker is started."""
    for name, many in ("upper", "3 replies"), ("extract", "3 replies"):
        result = etlstage("replay", recordings / f"{name}-1.1.rec")
        assert result.stdout == f"{many}, all equal\n"
        assert (result.returncode, result.stderr) == (0, "")


def test_other_replies_are_shown_with_their_markers(
    recordings: Path, etlstage: Etlstage
) -> None:
    """Each message whose reply differs is shown with both replies."""
    result = etlstage("replay", recordings / "upper-1.1.rec", "--", "python3", "v2.py")
    assert result.stdout == (
        "2: b<EOM>\n  - B<EOM><EOP>\n  + B<EOM>B<EOM><EOP>\n3 replies, 1 different\n"
    )
    assert result.returncode == 1


def test_worker_that_dies_is_reported_with_its_last_words(
    recordings: Path, etlstage: Etlstage
) -> None:
    """How it ended is reported, too."""
    program = "echo oh dear >&2; kill -SEGV $$"
    file = recordings / "load-1.1.rec"
    result = etlstage("replay", file, "--", "sh", "-c", program, code=1)
    assert "  + (nothing)\n" in result.stdout
    assert "the worker was killed by SIGSEGV; the recorded one exited" in result.stdout
    assert "  stderr: oh dear\n" in result.stdout


def test_recording_that_is_not_complete_is_named(
    recordings: Path, etlstage: Etlstage
) -> None:
    """It is compared as far as it goes."""
    file = recordings / "upper-1.1.rec"
    os.truncate(file, file.stat().st_size - 10)
    result = etlstage("replay", file)
    assert "is not complete: the file ends within a line" in result.stderr
    assert result.returncode == 0


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("pipeline.yaml", "pipeline.yaml:1: is not a line of a recording"),
        ("nowhere.rec", "nowhere.rec: no such file or directory"),
    ],
)
def test_other_files_are_refused(
    etlstage: Etlstage, pipeline: Path, name: str, error: str
) -> None:
    """They are wrong usage."""
    result = etlstage("replay", name)
    assert (result.returncode, error in result.stderr) == (2, True)


def test_folder_in_place_of_a_recording(recordings: Path, etlstage: Etlstage) -> None:
    """The error names a recording that is in there (issue 27)."""
    refused = etlstage("replay", "recordings", code=2)
    assert refused.stderr == (
        "etlstage: error: recordings is a folder: name one recording, such as"
        " recordings/extract-1.1.rec\n"
    )
    for path in recordings.iterdir():
        path.unlink()
    assert etlstage("replay", "recordings").stderr.endswith("but it has none\n")


def test_recordings_of_another_run_are_not_mixed(
    recordings: Path, etlstage: Etlstage, pipeline: Path
) -> None:
    """A folder holds the recordings of one run."""
    result = etlstage("run", pipeline, "--record", recordings, code=2)
    assert "holds recordings of another run; remove them" in result.stderr


def test_workers_elsewhere_are_not_recorded(etlstage: Etlstage, pipeline: Path) -> None:
    """Spark's executors start them; the error comes before anything is started."""
    frames = (
        "extract: {spark: {path: a.txt, format: text}}\nload: {spark: {path: out}}\n"
    )
    text = re.sub(r"(extract|load): .*\n", "", pipeline.read_text())
    pipeline.write_text(f"engine: spark\n{text}{frames}")
    (pipeline.parent / "a.txt").touch()
    result = etlstage("run", pipeline, "--record", "recordings", code=2)
    assert "pipeline.yaml:1:9: engine spark starts workers in" in result.stderr


def test_secrets_are_not_recorded(etlstage: Etlstage, pipeline: Path) -> None:
    """A variable in a command is recorded as it is written in the file."""
    text = pipeline.read_text()
    pipeline.write_text(text.replace("upper.py]", "upper.py, '${KEY}']"))
    etlstage("run", pipeline, "--record", "recordings", env={"KEY": "hunter22"}, code=0)
    recording = Recording.load(pipeline.parent / "recordings" / "upper-1.1.rec")
    assert recording.command[-1] == "${KEY}"


def test_expect_is_proposed_from_recordings(
    recordings: Path, etlstage: Etlstage
) -> None:
    """They may be those of a stage in a folder, or one file."""
    result = etlstage("expect", "infer", "recordings", "--stage", "upper")
    assert result.stderr == ""
    first, *lines = result.stdout.splitlines()
    assert first == "# from 3 replies of stage upper, 0 refused"
    assert lines[:2] == ["expect:", "  outputs: 1"]
    assert re.fullmatch(r"  max_seconds: \d+m?s", lines[-1])
    wrong = etlstage("expect", "infer", "recordings", "--stage", "upcase", code=2)
    assert "unknown stage 'upcase'" in wrong.stderr
    path = recordings / "upper-1.1.rec"
    schema = etlstage("expect", "infer", path, "--schema", "out.json")
    assert schema.stderr == "etlstage: error: not all outputs are JSON documents\n"


@pytest.mark.parametrize("depth", [980, 100_000])
def test_schema_of_an_output_that_is_nested_too_deeply(
    tmp_path: Path, etlstage: Etlstage, depth: int
) -> None:
    """It is not proposed, and the error is about the output (issue 26)."""
    output = b"[" * depth + b"]" * depth
    data = ((Channel.STDIN, b"x\n"), (Channel.STDOUT, output + b"\n\0"))
    entries = (Entry(channel, part, 0.0) for channel, part in data)
    recording = Recording(stage="s", dialect=MarkerDialect(), entries=(*entries,))
    recording.save(tmp_path / "s.rec")
    result = etlstage(
        "expect", "infer", tmp_path / "s.rec", "--schema", "out.json", code=2
    )
    assert result.stderr == (
        "etlstage: error: an output is nested too deeply for a schema\n"
    )
