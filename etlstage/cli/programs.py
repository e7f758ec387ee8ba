"""The commands that are about one worker, for whoever writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etlstage.cli.arguments import (
    Batch,
    Dialect,
    Kind,
    Markers,
    Mode,
    Offsets,
    Sample,
    StageName,
    Timeout,
    Words,
)
from etlstage.cli.fuzzing import fuzzing

__all__ = ("programs",)

programs: typer.Typer = typer.Typer(add_completion=False)
programs.add_typer(fuzzing)


@programs.command("check")
def _check(
    words: Words,
    *,
    kind: Kind = None,
    batch: Batch = None,
    mode: Mode = None,
    offsets: Offsets = None,
    markers: Markers = None,
    dialect: Dialect = None,
    stage: StageName = None,
    sample: Sample = None,
    timeout: Timeout = 5.0,
    junit: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the findings as JUnit's XML."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as one JSON object.")
    ] = False,
) -> int:
    """
    Check that a worker, in whatever language, keeps to the protocol.

    It is started about twenty times and given messages that it has to answer, or to
    refuse: let one that loads do so where it does no harm.
    """
    from etlstage.cli.check import check
    from etlstage.cli.subject import Options

    return check(
        words,
        Options(kind, batch, mode, offsets, markers, stage, dialect),
        sample=sample,
        timeout=timeout,
        junit_file=junit,
        as_json=as_json,
    )


@programs.command("try")
def _try(
    words: Words,
    *,
    kind: Kind = None,
    batch: Batch = None,
    mode: Mode = None,
    offsets: Offsets = None,
    markers: Markers = None,
    dialect: Dialect = None,
    stage: StageName = None,
    sample: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Messages, one a line; default: those of stdin, or of the pipeline.",
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, help="Messages, at most.")
    ] = 5,
    timeout: Timeout = 5.0,
) -> int:
    """Hand a few messages to a worker, and show what it replies."""
    from etlstage.cli.subject import Options
    from etlstage.cli.try_ import try_worker

    return try_worker(
        words,
        Options(kind, batch, mode, offsets, markers, stage, dialect),
        sample=sample,
        limit=limit,
        timeout=timeout,
    )


@programs.command("replay")
def _replay(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="A recording of run --record; default: all that fuzz has found.",
        ),
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND...]",
            help="The worker to play it to; default: the one that was recorded.",
        ),
    ] = None,
    *,
    shrink: Annotated[
        bool,
        typer.Option("--shrink", help="Look for the fewest messages that differ."),
    ] = False,
    patience: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="How much longer than then a reply may take."
        ),
    ] = 10.0,
) -> int:
    """Play a recorded conversation to a worker, and show which replies differ."""
    if file is None:
        from etlstage.cli.fuzz import replay_failures

        return replay_failures()
    from etlstage.cli.replay import replay

    return replay(file, command or [], smallest=shrink, patience=patience)
