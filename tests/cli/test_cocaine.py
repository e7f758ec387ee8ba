from __future__ import annotations

import json
from pathlib import Path

from etlstage.config.loader import load
from tests.cli.conftest import Etlstage

PIPELINE = """\
name: p
extract: {worker: {command: [seq, "3"]}}
load: {worker: {command: [cat]}}
"""


def test_application_becomes_a_stage(etlstage: Etlstage, tmp_path: Path) -> None:
    """The stage is printed as YAML, below a comment on what was dropped."""
    profile = {"concurrency": 4, "pool-limit": 2, "log-output": True}
    manifest = {"slave": "/bin/cat", "environment": {"A": "b: c"}}
    (tmp_path / "p.json").write_text(json.dumps(profile))
    (tmp_path / "m.json").write_text(json.dumps(manifest))

    result = etlstage("cocaine", "import", "p.json", "m.json")

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        '# From "p.json", "m.json".\n'
        "# Dropped: log-output: what a worker prints is in the log\n"
        "transform:\n"
        "  - worker:\n"
        '      command: ["/bin/cat"]\n'
        '      env: {"A": "b: c"}\n'
        "    dialect:\n"
        '      name: "cocaine"\n'
        "      concurrency: 4\n"
        "    workers:\n"
        "      min: 0\n"
        "      max: 2\n"
    )
    (tmp_path / "pipeline.yaml").write_text(PIPELINE + result.stdout)
    validated = etlstage("validate", "pipeline.yaml")
    assert (validated.returncode, validated.stderr) == (0, "")


def test_characters_of_any_plane(etlstage: Etlstage, tmp_path: Path) -> None:
    """YAML has no surrogate pairs, and not all characters of JSON (issue 26)."""
    text = '\U0001f600 \u00e9 \x85 \u2028 \x7f \\u "'
    (tmp_path / "p.json").write_text("{}")
    manifest = {"slave": "/bin/cat", "environment": {"A": text}}
    (tmp_path / "m.json").write_text(json.dumps(manifest))
    result = etlstage("cocaine", "import", "p.json", "m.json")
    assert r'{"A": "\U0001f600 \xe9 \x85 \u2028 \x7f \\u \""}' in result.stdout
    path = tmp_path / "pipeline.yaml"
    path.write_text(PIPELINE + result.stdout)
    (stage,) = load(path)[0].transform
    assert stage.stage is not None
    assert stage.stage.program.env == {"A": text}


def test_what_is_no_profile_is_named(etlstage: Etlstage, tmp_path: Path) -> None:
    """The error names the file; the exit code is that of a wrong file."""
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "half.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name, text in (
        ("none.json", "none.json: no such file or directory"),
        ("list.json", "list.json: expected a JSON object"),
        ("half.json", "half.json: expected JSON: Expecting property name"),
        ("deep.json", "deep.json: is nested too deeply"),
    ):
        result = etlstage("cocaine", "import", name, name, code=2)
        assert text in result.stderr
