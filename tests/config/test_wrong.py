"""
Files with a mistake, in ``wrong/``, and the exact errors that they print.

The errors are at the end of each file, in comments. ``# shape`` above them means that
the file is wrong whatever its other keys and the machine, so the JSON Schema must
reject it, too, and an editor that has the schema shows the mistake.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import jsonschema
import pytest
from ruamel.yaml import YAML

from etlstage.config.loader import examine
from etlstage.config.schema import pipeline_schema
from etlstage.errors import ConfigError

WRONG: Final = sorted((Path(__file__).parent / "wrong").glob("*.yaml"))
SHAPE: Final = "# shape\n"
SCHEMA: Final = pipeline_schema()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder in which a pipeline could run."""
    programs = {
        "run.sh": "#!/bin/sh\n",
        "gone.sh": "#!/nowhere/sh\n",
        "text.sh": "echo\n",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name in ("clean.py", "in.txt", "plain.sh", "bin/tool"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "out").mkdir()
    return tmp_path


def errors_of(path: Path) -> list[str]:
    """Return what is wrong with a file, without the names of folders."""
    with pytest.raises(ConfigError) as caught:
        examine(path)
    here = (f"{path.parent}/", "")
    return [problem.replace(*here) for problem in caught.value.problems]


def test_there_are_many() -> None:
    """Otherwise the folder was not found."""
    assert len(WRONG) >= 60


@pytest.mark.parametrize("file", WRONG, ids=[path.stem for path in WRONG])
def test_wrong_file(file: Path, folder: Path) -> None:
    """Each mistake is reported in its place, and nothing else is."""
    text = file.read_text()
    head, _, said = text.partition("# error: ")
    (folder / "p.yaml").write_text(text)
    expected = f"# error: {said}".removesuffix("\n").split("\n")
    assert [f"# error: {error}" for error in errors_of(folder / "p.yaml")] == expected
    if head.endswith(SHAPE):
        data = YAML(typ="safe", pure=True).load(text)
        assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(data)
