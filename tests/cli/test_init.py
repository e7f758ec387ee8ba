from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from etlstage.cli.init import copy_examples, main
from etlstage.errors import ConfigError
from tests.cli.conftest import Etlstage
from tests.examples.languages import ANY_MARKERS

NODE = ANY_MARKERS[-1].interpreter[0]


def test_init_copies_all_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It also prints what to do next."""
    folder = tmp_path / "new" / "place"
    assert main(folder) == 0
    assert (folder / "demo" / "pipeline.yaml").is_file()
    assert os.access(folder / "workers" / "shell" / "transform.sh", os.X_OK)
    assert not list(folder.rglob("__*"))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"examples are in {folder}; run one:"
    assert f"  etlstage run {folder}/demo/pipeline.yaml" in said
    assert said[-4] == f"a notebook that joins tables: {folder}/join/join.py"
    assert (folder / "join" / "join.py").is_file()
    assert said[-3] == f"an HTTP service answered by workers: {folder}/asgi/app.py"
    assert (folder / "asgi" / "app.py").is_file()
    assert said[-2] == f"a service on trio: {folder}/trio/server.py"
    assert (folder / "trio" / "server.py").is_file()
    assert said[-1] == f"sessions that are kept open: {folder}/cocaine/service.py"
    assert (folder / "cocaine" / "worker.py").is_file()


BUILT = {"c": "cc -O2 -o", "go": "go build -o"}


@pytest.mark.parametrize("language", ["python", "sh", "awk", "node", "c", "go"])
def test_start_passes_its_own_tests(
    etlstage: Etlstage, tmp_path: Path, language: str
) -> None:
    """The new pipeline is valid, its tests pass, and the next commands are printed."""
    result = etlstage("init", "mine", "--worker", language)
    assert (result.returncode, result.stderr) == (0, "")
    first, *commands = result.stdout.splitlines()
    suffix = {"python": "py", "awk": "awk.sh", "node": "mjs"}.get(language, language)
    assert first == f"a pipeline is in mine; change mine/worker.{suffix}, then:"
    if language in BUILT:
        build = commands.pop(0)
        assert build == f"  {BUILT[language]} mine/worker mine/worker.{suffix}"
    assert commands == [f"  etlstage {x} mine/pipeline.yaml" for x in ("test", "run")]
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {
        "names.txt",
        "pipeline.yaml",
        f"worker.{suffix}",
        *(["test_worker.py"] if language == "python" else []),
    }
    if language in BUILT:
        if shutil.which(build.split()[0]) is None:
            pytest.skip(f"there is no {build.split()[0]}")
        subprocess.run(build.split(), cwd=tmp_path, check=True)
    # Node may be installed as a wheel, outside PATH.
    folder = Path(NODE).parent if Path(NODE).is_absolute() else ""
    node = {"PATH": f"{folder}:{os.environ['PATH']}"}
    tested = etlstage("test", "mine/pipeline.yaml", env=node)
    assert (tested.returncode, tested.stderr) == (0, "")
    assert tested.stdout.endswith("2 tests: 2 passed\n")
    valid = etlstage("validate", "mine/pipeline.yaml", env=node)
    assert (valid.returncode, valid.stderr) == (0, "")


@pytest.mark.parametrize("language", ["node", *BUILT])
def test_start_answers_messages_before_one_that_is_cut_off(
    etlstage: Etlstage, tmp_path: Path, language: str
) -> None:
    """No reply is left in a buffer at the end (issue 22)."""
    assert etlstage("init", "mine", "--worker", language).returncode == 0
    command = [NODE, "mine/worker.mjs"]
    if language in BUILT:
        command = ["mine/worker"]
        build = [*BUILT[language].split(), *command, f"mine/worker.{language}"]
        if shutil.which(build[0]) is None:
            pytest.skip(f"there is no {build[0]}")
        subprocess.run(build, cwd=tmp_path, check=True)
    ended = subprocess.run(
        command, cwd=tmp_path, input=b" a \nb", capture_output=True, check=True
    )
    assert ended.stdout == b"a\n\0"


@pytest.mark.parametrize("words", [(), ("--worker", "c")])
def test_commands_can_be_pasted(etlstage: Etlstage, words: tuple[str, ...]) -> None:
    """A folder with blanks and a dollar sign is quoted for the shell (issue 26)."""
    result = etlstage("init", "my $new one", *words)
    lines = result.stdout.splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("  ")]
    assert commands
    for command in commands:
        assert command[-1].startswith("my $new one/")
        assert f"'{command[-1]}'" in result.stdout
    if words:
        assert commands[0][:5] == [
            "cc",
            "-O2",
            "-o",
            "my $new one/worker",
            "my $new one/worker.c",
        ]


def test_start_has_a_test_of_the_function(etlstage: Etlstage, tmp_path: Path) -> None:
    """``pytest`` passes in the new folder (issue 12)."""
    assert etlstage("init", "mine", "--worker", "python").returncode == 0
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "mine"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 passed" in ended.stdout, ended.stdout


def test_language_that_is_not_known(etlstage: Etlstage, tmp_path: Path) -> None:
    """Nothing is written."""
    result = etlstage("init", "mine", "--worker", "nod")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "etlstage: error: --worker: unknown language 'nod' (did you mean 'node'?)\n"
    )
    assert not (tmp_path / "mine").exists()


def test_one_example_has_the_folder_for_itself(tmp_path: Path) -> None:
    """A single example is not nested in a folder of its own."""
    copy_examples(tmp_path, "demo")
    assert (tmp_path / "pipeline.yaml").is_file()
    assert not (tmp_path / "workers").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """If one file is in the way, no other is written either."""
    mine = tmp_path / "pipeline.yaml"
    mine.write_text("mine")
    with pytest.raises(ConfigError) as caught:
        copy_examples(tmp_path, "demo")
    assert str(caught.value) == (
        f"{mine} exists already and is not overwritten; name a new directory"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["pipeline.yaml"]
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("words", [(), ("--worker", "sh")])
def test_folder_that_has_files(
    etlstage: Etlstage, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Nothing is written there without a yes (issue 26)."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".git").touch()
    assert etlstage("init", "mine", *words).returncode == 0
    shutil.rmtree(tmp_path / "mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    result = etlstage("init", "mine", *words, code=2)
    assert result.stderr.endswith("no terminal to ask on: pass --yes\n")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    result = etlstage("init", "mine", *words, given="n\n")
    assert (result.returncode, result.stderr) == (1, "nothing was written\n")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    assert etlstage("init", "mine", *words, "--yes").returncode == 0


@pytest.mark.parametrize("name", ["workers", "trio", "demo/pipeline.yaml"])
def test_nothing_is_written_through_a_link_or_beside_a_file(
    tmp_path: Path, name: str
) -> None:
    """No file is written unless all can be, and none outside (issue 26)."""
    folder, elsewhere = tmp_path / "etl", tmp_path / "elsewhere"
    place = folder / name
    place.parent.mkdir(parents=True)
    place.symlink_to(elsewhere)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=f"{place} exists already and is not"):
        copy_examples(folder)
    assert sorted(tmp_path.rglob("*")) == before
    if place.parent == folder:
        place.unlink()
        place.write_text("a file")
        with pytest.raises(ConfigError, match=f"{place} exists already and is not a d"):
            copy_examples(folder)
        assert sorted(tmp_path.rglob("*")) == before


def test_place_that_cant_be_written(tmp_path: Path) -> None:
    """There is a file where a folder should be."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        copy_examples(tmp_path / "file", "demo")
    assert str(caught.value) == (f"{tmp_path}/file can't be written: file exists")
