"""``etlstage expect infer``: propose a contract that a stage's replies have kept."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from etlstage.cli.failure import complain, naming
from etlstage.cli.options import new_app
from etlstage.cli.screen import Screen
from etlstage.errors import ConfigError, guess, os_reason
from etlstage.messages import StageKind, counted
from etlstage.testing.recording.inference import inferred, schema_of
from etlstage.testing.recording.recording import Recording

__all__ = ("app",)

app: typer.Typer = new_app("expect")


@app.command("infer")
def _infer(
    place: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Recording made by run --record, or a folder of recordings.",
        ),
    ],
    *,
    stage: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Stage, if several were recorded."),
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="New file for the JSON Schema of the outputs.",
        ),
    ] = None,
) -> int:
    """Propose the key expect of a stage from recorded replies of its workers."""
    found = _of_stage(place, stage)
    for recording in found:
        if recording.cut:
            complain(f"worker {recording.worker}: {recording.cut}", as_="warning")
    made = inferred(found)
    lines = {
        name: value
        for name, value in made.contract.plain().items()
        if value is not None and value is not False
    }
    if schema is not None:
        try:
            text = json.dumps(schema_of(found), indent=2) + "\n"
        except RecursionError:
            raise ConfigError("an output is nested too deeply for a schema") from None
        with naming(schema), schema.open("x", encoding="utf-8") as file:
            file.write(text)
        lines["schema"] = str(schema)
    of = f"{counted(made.replies, 'reply', 'replies')} of stage {found[0].stage}"
    out = Screen()
    out.tell(f"# from {of}, {made.refused:,} refused")
    out.tell("expect:")
    for name, value in lines.items():
        shown = str(value) if name == "max_seconds" else json.dumps(value)
        out.tell(f"  {name}: {shown}")
    return 0


def _of_stage(place: Path, name: str | None) -> Sequence[Recording]:
    """Return the recordings of one stage, in the order of their names."""
    paths = sorted(place.glob("*.rec")) if os.path.isdir(place) else [place]
    try:
        found = [Recording.load(path) for path in paths]
    except OSError as error:
        raise ConfigError(f"{error.filename}: {os_reason(error)}") from None
    found = [one for one in found if one.kind is StageKind.TRANSFORM]
    names = list(dict.fromkeys(recording.stage for recording in found))
    if not names:
        raise ConfigError(f"{place} has no recording of a transform worker")
    if name is None and len(names) > 1:
        raise ConfigError(
            f"--stage: choose one of the recorded stages: {', '.join(names)}"
        )
    if name is not None and name not in names:
        known = guess(name, names) or f", expected {' or '.join(names)}"
        raise ConfigError(f"--stage: unknown stage {name!r}{known}")
    return [recording for recording in found if name in (None, recording.stage)]
