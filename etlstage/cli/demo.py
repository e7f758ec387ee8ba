"""``etlstage demo``: run a pipeline on data that comes with the package."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from etlstage.cli.init import copy_examples
from etlstage.cli.options import Debug, Verbosity
from etlstage.cli.progress import exit_code, run_pipeline
from etlstage.cli.screen import Screen
from etlstage.cli.signals import Signals, interruptible
from etlstage.config.build import pipeline_from_here
from etlstage.config.end import located
from etlstage.config.loader import load
from etlstage.settings.units import literal

__all__ = ("main",)

ROWS: Final = 5
COLUMNS: Final = ("date", "airport", "species", "damage", "cost_usd", "grade")
SORT_BY: Final = "cost_usd"


def main(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", help="Target folder; default: a new temporary one."
        ),
    ] = None,
    *,
    debug: Debug = False,
) -> int:
    """Run a pipeline from Spark through two workers to Spark, and show its output."""
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="etlstage-demo-"))
    copy_examples(folder, "demo")
    file = folder / "pipeline.yaml"
    out = Screen()
    out.tell(f"running {file}")
    pipeline = pipeline_from_here(file)
    with Signals() as signals:
        report = run_pipeline(pipeline, signals, Verbosity(debug=debug))
    if report.status == "done":
        with interruptible():
            _show_rows(out, file)
    pipeline.settle()
    return exit_code(report, debug=debug)


def _show_rows(out: Console, file: Path) -> None:
    """Print some rows of what the pipeline of ``file`` loaded."""
    keys, document = load(file)
    target = keys.load.end.given()
    where = located(target["path"], document.folder)
    count, rows = _loaded(keys.spark.given(), target.get("format"), where)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*(Text("" if v is None else str(v)) for v in row))
    lines = (
        "",
        f"the {ROWS} costliest of {count:,} rows in {where}",
        table,
        "",
        f"run it again: etlstage run {file}",
    )
    for line in lines:
        out.print(line, soft_wrap=line is not table, highlight=False, markup=False)


def _loaded(
    settings: dict[str, Any], kind: str | None, path: str
) -> tuple[int, Sequence[Sequence[object]]]:
    from etlstage.spark import Session, read_frame

    session = Session(**settings)
    try:
        frame = read_frame(session.start(), format=kind, path=literal(path))
        best = frame.select(*COLUMNS).sort(SORT_BY, ascending=False)
        return frame.count(), best.head(ROWS)
    finally:
        session.stop()
