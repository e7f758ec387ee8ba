"""Options that several commands have; nothing heavy is imported for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etlstage.config.reading import Changes

__all__ = ("Debug", "File", "Overlays", "Values", "changes_of")

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="The pipeline, a YAML file.")
]
Overlays = Annotated[
    list[Path] | None,
    typer.Option(
        "--overlay",
        metavar="FILE",
        help="Lay this file over the pipeline; may be repeated, the last wins.",
    ),
]
Values = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set one value, as in transform.clean.workers=4; may be repeated.",
    ),
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Log everything, show tracebacks.")
]


def changes_of(
    overlays: Sequence[Path] | None, values: Sequence[str] | None
) -> Changes:
    """Return what is laid over a pipeline file."""
    from functools import partial

    from etlstage.cli.failure import complain
    from etlstage.config.reading import Changes

    warn = partial(complain, as_="warning")
    return Changes(overlays or (), values or (), warn)
