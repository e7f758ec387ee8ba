from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Etlstage

pytestmark = pytest.mark.spark


def test_demo(etlstage: Etlstage, tmp_path: Path) -> None:
    """It runs its pipeline, shows rows, and leaves all files to the user."""
    result = etlstage("demo", "here", code=0)
    # If Spark is slow, the run reports its progress.
    events = {json.loads(line)["event"] for line in result.stderr.splitlines()}
    assert events <= {"progress"}
    out = result.stdout
    assert re.search(r"^load +3,993 +3,993 +0 +0 ", out, re.MULTILINE)
    assert re.search(r"^accounted for: 3,993 loaded", out, re.MULTILINE)
    assert f"the 5 costliest of 3,993 rows in {tmp_path}/here/out/birdstrikes" in out
    assert re.search(r"^1995-09-19 +LAGUARDIA NY .* 3811576 +3 *$", out, re.MULTILINE)
    assert "run it again: etlstage run here/pipeline.yaml" in out
    assert (tmp_path / "here" / "out" / "birdstrikes" / "_SUCCESS").exists()
