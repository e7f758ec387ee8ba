"""What the command line says of a worker, whichever command is about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = (
    "Batch",
    "Dialect",
    "Kind",
    "Markers",
    "Mode",
    "Offsets",
    "Sample",
    "StageName",
    "Timeout",
    "Words",
)

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="-- COMMAND... | FILE --stage NAME",
        help="The worker's command behind --; or a pipeline file that has it.",
    ),
]
Kind = Annotated[
    str | None,
    typer.Option(
        metavar="KIND", help="transform, load or extract; default: transform."
    ),
]
Batch = Annotated[
    str | None,
    typer.Option(
        metavar="DRIVER[:SIZE]",
        help="It answers batches, which the supervisor or the worker closes.",
    ),
]
Mode = Annotated[
    str | None,
    typer.Option(
        metavar="MODE",
        help="plain: it extracts all and exits (the default); cyclic: it is asked.",
    ),
]
Offsets = Annotated[
    str | None,
    typer.Option(
        metavar="BY", help="Who keeps the offsets of a cyclic one: worker, supervisor."
    ),
]
Markers = Annotated[
    str | None,
    typer.Option(metavar="NAME=TEXT,...", help=r"Its markers, as in eom=\x1e,eop=\0."),
]
Dialect = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:KEY=VALUE,...]",
        help="What it speaks, as in cocaine:event=clean; default: marker.",
    ),
]
StageName = Annotated[
    str | None,
    typer.Option("--stage", metavar="NAME", help="The stage of the pipeline FILE."),
]
Timeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", min=0.1, help="How long the worker may take for anything."
    ),
]
Sample = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Messages that the worker can process, one a line.",
    ),
]
