from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tests.cli.conftest import Etlstage
from tests.manual.fences import SECTIONS

REFUSING: Final = """\
import sys
for line in sys.stdin.buffer:
    end = b"no\\x15" if line == b"c\\n" else line.upper() + b"\\0"
    sys.stdout.buffer.write(end)
    sys.stdout.flush()
"""


def comparable(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report with its type or length in place of each value that varies."""
    for part in [report, *report["stages"]]:
        part["seconds"] = type(part["seconds"])
    for part in report["stages"]:
        part["busy"] = type(part["busy"])
    for part in [report, *report["stages"]]:
        part |= {key: len(part[key]) for key in ("started", "ended")}
    report["run"] = len(report["run"])
    where = report["dead_letters"].pop("where")
    report["dead_letters"]["where"] = Path(where).parts[-3:]
    return report


def test_report_is_as_the_manual_shows_it(
    etlstage: Etlstage, pipeline: Path, tmp_path: Path
) -> None:
    """Its keys are the same, as are the values that don't vary (issue 11)."""
    pipeline.write_text(pipeline.read_text().replace(r"c\n", r"c\nd\ne\n"))
    (tmp_path / "upper.py").write_text(REFUSING)
    assert etlstage("run", "pipeline.yaml", "--report", "r.json").returncode == 0
    written = json.loads((tmp_path / "r.json").read_text())
    _, upper, load = written["stages"]
    assert 0 < upper["busy"] <= written["seconds"]
    assert 0 < load["busy"] <= written["seconds"]
    (fence,) = SECTIONS["reference/report.md#The report"]
    assert comparable(written) == comparable(json.loads(fence.text))
    order = list(written), list(written["stages"][0]), list(written["edges"][0])
    shown = json.loads(fence.text)
    assert order == (list(shown), list(shown["stages"][0]), list(shown["edges"][0]))
