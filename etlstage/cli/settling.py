"""``etlstage dlq drop`` and ``dlq export``: dead letters that are done with, or copied."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import typer

from etlstage.cli.confirm import confirm
from etlstage.cli.letters import as_read, check_ended, chosen, find, ids_of
from etlstage.config.reading import Changes
from etlstage.errors import ConfigError
from etlstage.messages import counted
from etlstage.pipeline.dead_letter.retry import settle
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.telemetry.terminal import harmless

__all__ = ("drop_letters", "export_letters")


def drop_letters(
    place: Path,
    changes: Changes,
    numbers: Sequence[str],
    *,
    stage: str | None,
    yes: bool,
) -> int:
    """
    Mark letters as dropped; return the exit code.

    Args:
        place: A pipeline file, its state directory, or a file of dead letters.
        changes: What is laid over the pipeline.
        numbers: The letters' ids, or beginnings that no others have; empty: all.
        stage: The only stage to look at, or None.
        yes: Whether not to ask before all are dropped.

    Raises:
        ConfigError: If there are no such letters, or there is no such place.
        StateUnusable: If a run has the state directory, or is to go on first, or it
            can't be recorded.

    """
    state = find(place, changes).state
    if not state.exists():
        typer.echo("no dead letters")
        return 0
    with Delivery(state) as delivery:
        check_ended(delivery)
        found = find(place, changes)
        ids = ids_of(found, numbers, stage)
        if ids is None:
            ids = {letter.id for letter in chosen(found, stage)}
        said = counted(len(ids), "dead letter")
        if not ids:
            typer.echo("no dead letters")
            return 0
        if not numbers and not yes:
            confirm(f"drop {said} of {harmless(str(place))}?")
        settle(state, sorted(ids), "dropped")
    typer.echo(f"{said} dropped")
    return 0


def export_letters(
    place: Path,
    changes: Changes,
    numbers: Sequence[str],
    *,
    stage: str | None,
    to: Path,
    raw: bool,
) -> int:
    """
    Copy letters into a file; return the exit code.

    Args:
        place: A pipeline file, its state directory, or a file of dead letters.
        changes: What is laid over the pipeline.
        numbers: The letters' ids, or beginnings that no others have; empty: all.
        stage: The only stage to look at, or None.
        to: The file, which is not there yet.
        raw: Whether to write messages alone, as a worker reads them.

    Raises:
        ConfigError: If there are no such letters, or the file is there, or can't be
            written.

    """
    found = find(place, changes)
    ids = ids_of(found, numbers, stage)
    count = 0
    try:
        # Messages are nobody's but ours.
        with open(to, "xb", opener=_ours) as file:
            for letter in chosen(found, stage):
                if ids is None or letter.id in ids:
                    line = f"{json.dumps(letter.to_dict())}\n"
                    file.write(as_read(letter) if raw else line.encode())
                    count += 1
    except FileExistsError:
        raise ConfigError(f"{to} exists already") from None
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        raise ConfigError(f"{to}: can't be written: {said}") from None
    typer.echo(f"{counted(count, 'dead letter')} written to {harmless(str(to))}")
    return 0


def _ours(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
