"""``etlstage cocaine import``: print a Cocaine application as a pipeline's stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from etlstage.cli.failure import naming
from etlstage.cli.imported import written
from etlstage.cli.options import new_app
from etlstage.errors import ConfigError
from etlstage.protocol.registry import translation

__all__ = ("app",)

app: typer.Typer = new_app("cocaine")


@app.command("import")
def _import(
    profile: Annotated[
        Path,
        typer.Argument(metavar="PROFILE", help="Profile of the application, in JSON."),
    ],
    manifest: Annotated[
        Path,
        typer.Argument(
            metavar="MANIFEST", help="Manifest of the application, in JSON."
        ),
    ],
) -> int:
    """Print the stage that a Cocaine application's profile and manifest describe."""
    made = translation("cocaine", _read(profile), _read(manifest))
    for line in written(made, [profile, manifest], "transform"):
        typer.echo(line)
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        with naming(path):
            document = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return document
