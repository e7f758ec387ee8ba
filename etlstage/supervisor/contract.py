"""Loads the contract of a stage, with the file of its schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from etlstage.errors import ConfigError
from etlstage.stage.contract import Checker
from etlstage.stage.stage import Stage
from etlstage.supervisor.process import absent, names

__all__ = ("checker_of", "with_schema")


def with_schema(
    stage: Stage,
    folder: Path = Path(),
    listed: Callable[[Path], Iterable[str]] = names,
) -> Stage:
    """
    Return the stage with the schema of its contract in place of the file's path.

    So executors have the schema without the file. A path is relative to ``folder``;
    ``listed`` returns the names in a folder, for a guess at what was meant.

    Raises:
        ConfigError: If the file can't be read, or is not a JSON object.

    """
    path = stage.expect.schema
    if not isinstance(path, Path):
        return stage
    what, place = f"stage {stage.name}: expect.schema", folder / path
    try:
        schema = json.loads(place.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{what}: {absent('file', place, listed)}") from None
    except OSError as error:
        raise ConfigError(f"{what}: {place}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{what}: {place} is not a JSON document: {error}") from None
    if not isinstance(schema, dict):
        raise ConfigError(f"{what}: {place} is not a JSON object")
    return replace(stage, expect=replace(stage.expect, schema=schema))


def checker_of(stage: Stage) -> Checker | None:
    """
    Return a checker of replies against the contract of a stage; None if it has none.

    Raises:
        ConfigError: If its schema is invalid, or the package that checks it is missing.

    """
    if not stage.expect.given:
        return None
    try:
        return Checker(with_schema(stage).expect)
    except ConfigError as error:
        text = str(error)
        known = text.startswith("stage ")
        raise ConfigError(text if known else f"stage {stage.name}: {text}") from None
