"""``etlstage cocaine import``: an application of Cocaine as a stage of a pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from etlstage.errors import ConfigError
from etlstage.protocol.registry import Translation, translation

__all__ = ("cocaine",)

cocaine: typer.Typer = typer.Typer(name="cocaine", add_completion=False)


@cocaine.callback()
def _cocaine() -> None:
    """Bring applications of Cocaine along."""


@cocaine.command("import")
def _import(
    profile: Annotated[
        Path, typer.Argument(metavar="PROFILE", help="The profile, JSON.")
    ],
    manifest: Annotated[
        Path, typer.Argument(metavar="MANIFEST", help="The manifest, JSON.")
    ],
) -> int:
    """Print the stage that a profile and a manifest describe."""
    made = translation("cocaine", _read(profile), _read(manifest))
    for line in _written(made, profile, manifest):
        typer.echo(line)
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected an object of JSON")
    return document


def _written(made: Translation, profile: Path, manifest: Path) -> Iterator[str]:
    """Yield lines of YAML: what was dropped, and the keys."""
    # A name that came from outside is no more than a comment.
    names = json.dumps([profile.name, manifest.name])
    yield f"# From {names[1:-1]}."
    for dropped in made.dropped:
        yield f"# Dropped: {json.dumps(dropped)[1:-1]}"
    yield "transform:"
    lead = "  - "
    for group, keys in made.keys.items():
        yield f"{lead}{group}:"
        lead = "    "
        # All of JSON is YAML.
        yield from (f"      {key}: {json.dumps(value)}" for key, value in keys.items())
