from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Etlstage


def test_properties_become_a_stage(etlstage: Etlstage, tmp_path: Path) -> None:
    """The output is a pipeline file, except for its name (issue 25)."""
    (tmp_path / "d.properties").write_text(
        "executableName = /bin/cat\nstreamName = clicks\nmaxRecords = 5\n"
    )
    result = etlstage("kcl", "import", "d.properties")

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        '# From "d.properties".\n'
        "state: state\n"
        "extract:\n"
        "  kinesis:\n"
        '    stream: "clicks"\n'
        '    from: "latest"\n'
        "load:\n"
        "  worker:\n"
        '    command: ["/bin/cat"]\n'
        "  dialect:\n"
        '    name: "kcl"\n'
        "  batch:\n"
        "    size: 5\n"
    )
    (tmp_path / "pipeline.yaml").write_text("name: p\n" + result.stdout)
    validated = etlstage("validate", "pipeline.yaml")
    assert (validated.returncode, validated.stderr) == (0, "")


def test_file_that_is_not_there(etlstage: Etlstage) -> None:
    """The error is one line; the exit code is that of a wrong file."""
    result = etlstage("kcl", "import", "none.properties")
    assert result.returncode == 2
    assert "none.properties: no such file or directory" in result.stderr
