from __future__ import annotations

import json
from pathlib import Path

from etlstage.cli.init import copy_examples
from etlstage.config.schema import SCHEMA_FILE, pipeline_schema
from tests.cli.conftest import Etlstage


def test_schema_is_printed(etlstage: Etlstage) -> None:
    """To be kept in a file, for editors."""
    result = etlstage("schema")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout) == pipeline_schema()


def test_pipeline_that_init_writes_has_its_schema_beside_it(tmp_path: Path) -> None:
    """There is no host that would serve it; the first line names the file."""
    copy_examples(tmp_path)
    pipeline = tmp_path / "demo" / "pipeline.yaml"
    first = pipeline.read_text().splitlines()[0]
    assert first == f"# yaml-language-server: $schema={SCHEMA_FILE}"
    schema = json.loads((pipeline.parent / SCHEMA_FILE).read_text())
    assert schema == pipeline_schema()
