"""``etlstage schema``: describe the pipeline file for editors."""

from __future__ import annotations

import typer

from etlstage.cli.options import new_app
from etlstage.config.schema import schema_text

__all__ = ("app",)

app: typer.Typer = new_app()


@app.command("schema")
def _schema() -> int:
    """Print the JSON Schema of the pipeline file, for editors."""
    typer.echo(schema_text(), nl=False)
    return 0
