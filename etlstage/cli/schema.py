"""``etlstage schema``: describe the pipeline file for editors."""

from __future__ import annotations

import typer

from etlstage.config.schema import schema_text

__all__ = ("main",)


def main() -> int:
    """Print the JSON Schema of the pipeline file, for editors."""
    typer.echo(schema_text(), nl=False)
    return 0
