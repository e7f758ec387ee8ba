from __future__ import annotations

from pathlib import Path

import pytest

from etlstage.cli.scaffold import copy_examples, init
from etlstage.errors import ConfigError


def test_init_copies_all_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says what to do next."""
    folder = tmp_path / "new" / "place"
    assert init(folder) == 0
    assert (folder / "demo" / "pipeline.yaml").is_file()
    assert (folder / "workers" / "shell" / "transform.sh").is_file()
    assert not list(folder.rglob("__*"))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"examples are in {folder}; run one:"
    assert f"  etlstage run {folder}/demo/pipeline.yaml" in said
    assert said[-2] == f"a notebook that joins tables: {folder}/join/join.py"
    assert (folder / "join" / "join.py").is_file()
    assert said[-1] == f"an HTTP service answered by workers: {folder}/asgi/app.py"
    assert (folder / "asgi" / "app.py").is_file()


def test_one_example_has_the_folder_for_itself(tmp_path: Path) -> None:
    """The demo is no deeper than it must be."""
    copy_examples(tmp_path, "demo")
    assert (tmp_path / "pipeline.yaml").is_file()
    assert not (tmp_path / "workers").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """Not even another file is written when one is in the way."""
    mine = tmp_path / "pipeline.yaml"
    mine.write_text("mine")
    with pytest.raises(ConfigError) as caught:
        copy_examples(tmp_path, "demo")
    assert str(caught.value) == (
        f"{mine} exists already and is not overwritten; name a new directory"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["pipeline.yaml"]
    assert mine.read_text() == "mine"


def test_place_that_cant_be_written(tmp_path: Path) -> None:
    """A file where a folder should be."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        copy_examples(tmp_path / "file", "demo")
    assert str(caught.value) == (f"{tmp_path}/file can't be written: file exists")
