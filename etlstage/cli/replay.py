"""
``etlstage replay``: replay a recorded conversation to a worker, and compare.

Exit code 0: the same replies, byte for byte, and the same end; 1: any difference.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from etlstage.cli.failure import FAILED, WRONG_USAGE, complain, naming
from etlstage.cli.options import of_seconds
from etlstage.cli.screen import Screen
from etlstage.cli.signals import run_interruptible
from etlstage.cli.subject import silence
from etlstage.config.lookup import stage_from_yaml
from etlstage.errors import ConfigError, EtlstageError
from etlstage.messages import counted
from etlstage.protocol.base import Dialect, Side
from etlstage.telemetry.terminal import harmless
from etlstage.testing.dialect import kit_of
from etlstage.testing.fuzzing.failures import FOLDER, Failures
from etlstage.testing.recording.recording import Recording
from etlstage.testing.recording.replay import (
    Difference,
    differences,
    other_end,
    play,
)
from etlstage.testing.transcript import Channel, clipped

__all__ = ("main",)

SURE: Final = 3
"""How often a case has to pass before it counts as fixed."""
_SHOWN: Final = 20
"""Maximum number of differences that are shown."""
_STDERR: Final = 5
"""Maximum number of last lines of stderr that are shown."""


def main(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="Recording made by run --record; default: all failures found by fuzz.",
        ),
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND...]",
            help="Worker to replay the recording to; default: the recorded one.",
        ),
    ] = None,
    *,
    grace: Annotated[
        float,
        of_seconds("How much longer a reply may take than in the recording.", 0),
    ] = 10.0,
) -> int:
    """Replay a recorded conversation to a worker, and show which replies differ."""
    if file is None:
        return run_interruptible(_replay_failures)
    if os.path.isdir(file):
        found = sorted(path.name for path in file.glob("*.rec"))
        has = f"such as {file / found[0]}" if found else "but it has none"
        raise ConfigError(f"{file} is a folder: name one recording, {has}")
    with naming(file):
        recording = Recording.load(file)
    if recording.cut:
        complain(f"{file} is not complete: {recording.cut}")
    stage = recording.stage_of(command or recording.command)
    played = run_interruptible(partial(play, recording, stage, grace=grace))
    out = Screen()
    others, end = [*differences(recording, played)], other_end(recording, played)
    for line in _comparison(played, others, end):
        out.print(line, soft_wrap=True, highlight=False, markup=False)
    return FAILED if others or end else 0


async def _replay_failures() -> int:
    """Replay all saved cases; return the exit code."""
    silence()
    failures = Failures(find=stage_from_yaml)
    out, played, failed, code = Screen(), 0, 0, 0
    for path in failures:
        try:
            kept = failures.read(path)
        except ConfigError as error:
            complain(str(error))
            code = WRONG_USAGE
            continue
        line = f"FIXED  {kept.kind}"
        try:
            if (failure := await kept.play(SURE)) is not None:
                line = f"FAILED {failure.what}"
                failed += 1
        except EtlstageError as error:  # such as a program that is gone
            line = f"FAILED {error}"
            failed += 1
        played += 1
        where = f"({path.stem}; {kept.origin})"
        out.tell(f"{harmless(line)} {harmless(where)}")
    fixed = f"{played - failed:,} fixed, {failed:,} failed"
    if played or code:
        out.tell(f"{counted(played, 'case')}: {fixed}")
    else:
        out.tell(f"no cases in {FOLDER}")
    return code or (FAILED if failed else 0)


def _comparison(
    played: Recording, found: Sequence[Difference], end: str
) -> Iterator[str]:
    """Yield the lines that compare a recording with its replay."""
    for difference in found[:_SHOWN]:
        yield from _shown(difference, played.dialect)
    if len(found) > _SHOWN:
        yield f"... {counted(len(found) - _SHOWN, 'more reply', 'more replies')} differ"
    if end:
        yield end
        text = played.written(Channel.STDERR).decode(errors="replace")
        for line in text.splitlines()[-_STDERR:]:
            yield f"  stderr: {harmless(line)}"
    *replies, _ = kit_of(played.dialect).cut(
        Side.WORKER, played.written(Channel.STDOUT)
    )
    many = counted(len(replies), "reply", "replies")
    yield f"{many}, {f'{len(found):,} different' if found else 'all equal'}"


def _shown(difference: Difference, dialect: Dialect) -> Iterator[str]:
    def shown(data: bytes, side: Side = Side.WORKER) -> str:
        if not data:
            return "(nothing)"
        if (reader := kit.reader()) is not None:
            return harmless("; ".join(reader.read(side, data)))
        return clipped(data, kit.shown)

    kit = kit_of(dialect)
    number, request, was, now = difference
    yield f"{number}: {shown(request, Side.SUPERVISOR)}" if request else f"{number}:"
    yield f"  - {shown(was)}"
    yield f"  + {shown(now)}"
