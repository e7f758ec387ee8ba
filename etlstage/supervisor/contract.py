"""The contract of a stage, with the file that its schema is in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from etlstage.errors import ConfigError
from etlstage.stage.contract import Checker
from etlstage.stage.stage import Stage
from etlstage.supervisor.process import absent

__all__ = ("checker_of", "with_schema")


def with_schema(stage: Stage, folder: Path = Path()) -> Stage:
    """
    Return a stage with the schema of its contract in place of the file's path.

    Executors have it then, whatever files they have. A path is seen from ``folder``.

    Raises:
        ConfigError: If it can't be read, or is no JSON.

    """
    path = stage.expect.schema
    if not isinstance(path, Path):
        return stage
    what, place = f"stage {stage.name}: expect.schema", folder / path
    try:
        schema = json.loads(place.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{what}: {absent('file', place)}") from None
    except OSError as error:
        raise ConfigError(f"{what}: {place}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{what}: {place} is no JSON document: {error}") from None
    if not isinstance(schema, dict):
        raise ConfigError(f"{what}: {place} is no JSON object")
    return replace(stage, expect=replace(stage.expect, schema=schema))


def checker_of(stage: Stage) -> Checker | None:
    """
    Return what compares replies with the contract of a stage; None if it has none.

    Raises:
        ConfigError: If its schema is none, or what checks it is not installed.

    """
    if not stage.expect.given:
        return None
    try:
        return Checker(with_schema(stage).expect)
    except ConfigError as error:
        text = str(error)
        known = text.startswith("stage ")
        raise ConfigError(text if known else f"stage {stage.name}: {text}") from None
