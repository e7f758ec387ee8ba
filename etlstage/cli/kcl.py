"""``etlstage kcl``: record processors of the Kinesis Client Library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etlstage.cli.failure import FAILED, naming
from etlstage.cli.imported import written
from etlstage.cli.options import new_app, of_seconds
from etlstage.cli.screen import Screen
from etlstage.cli.signals import run_interruptible
from etlstage.cli.subject import Options, lines_of, program_of, silence
from etlstage.config.fault import fault_plan
from etlstage.protocol.registry import translation
from etlstage.testing.kcl_daemon import records_of, shards_of, simulate

__all__ = ("app",)

app: typer.Typer = new_app("kcl")


@app.command("import")
def _import(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Properties file of the daemon.")
    ],
) -> int:
    """Print the load stage that a daemon's properties describe."""
    with naming(file):
        text = file.read_text(encoding="latin-1")  # like Java's properties
    for line in written(translation("kcl", text), [file], "load"):
        typer.echo(line)
    return 0


@app.command("simulate")
def _simulate(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...", help="Command of the record processor."
        ),
    ],
    *,
    records: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="One record per line: its data, or JSON with data, key and time.",
        ),
    ] = None,
    shards: Annotated[
        int,
        typer.Option(min=1, max=1000, help="Number of shards, each with a processor."),
    ] = 1,
    version: Annotated[
        str, typer.Option(help="Version of the daemon: v2, v1, 2014 or document.")
    ] = "v2",
    batch: Annotated[
        int, typer.Option(min=1, help="Maximum number of records in an action.")
    ] = 3,
    faults: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Fault plan, with faults as in a pipeline file."
        ),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="NUMBER", help="Checkpoint after which to begin."
        ),
    ] = None,
    timeout: Annotated[float, of_seconds("Timeout of each action.")] = 30.0,
) -> int:
    """Run a record processor under a simulated daemon, without AWS or Java."""
    silence()
    dialect = f"kcl:version={version}"
    program = program_of(command, Options(kind="load", dialect=dialect))
    lines = [b"one", b"two", b"three", b"four", b"five"]
    if records is not None:
        lines = lines_of(records)
    parts = shards_of(records_of(lines), shards)
    plan = None if faults is None else fault_plan(faults)
    screen = Screen()

    async def main() -> bool:
        return await simulate(
            program.stage,
            parts,
            size=batch,
            tell=screen.tell,
            faults=plan,
            begin=begin,
            timeout=timeout,
        )

    return 0 if run_interruptible(main) else FAILED
