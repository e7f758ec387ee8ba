from __future__ import annotations

import json

from etlstage.config.schema import pipeline_schema
from tests.cli.conftest import Etlstage


def test_schema_is_printed(etlstage: Etlstage) -> None:
    """It is to be kept in a file, for editors."""
    result = etlstage("schema")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout) == pipeline_schema()
