"""``etlstage schema``: what may stand in a pipeline file."""

from __future__ import annotations

import typer

from etlstage.config.schema import schema_text

__all__ = ("schema",)


def schema() -> int:
    """Print the JSON Schema of the pipeline file; return the exit code."""
    typer.echo(schema_text(), nl=False)
    return 0
