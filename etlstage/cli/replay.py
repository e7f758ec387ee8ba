"""
``etlstage replay``: a recorded conversation, played to a worker, and what differs.

Exit code 0: the same replies, byte for byte, and the same end; 1: others.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import anyio
import typer

from etlstage.cli.failure import FAILED, complain
from etlstage.cli.options import new_app
from etlstage.cli.screen import Screen
from etlstage.cli.signals import interruptible
from etlstage.cli.subject import silence
from etlstage.config.lookup import stage_from_yaml
from etlstage.errors import ConfigError, os_reason
from etlstage.messages import counted
from etlstage.protocol.base import Dialect, Limits, Shape, Side
from etlstage.stage import Stage
from etlstage.telemetry.terminal import harmless
from etlstage.testing.dialect import kit_of
from etlstage.testing.fuzzing.failures import FOLDER, Failures
from etlstage.testing.recording.comparison import (
    Difference,
    differences,
    other_end,
    shrink,
)
from etlstage.testing.recording.recording import Recording
from etlstage.testing.recording.replay import play
from etlstage.testing.transcript import Channel, clipped

__all__ = ("app",)

SURE: Final = 3
"""How often a case has to pass before it counts as fixed."""
_SHOWN: Final = 20
"""Differences that are shown."""
_STDERR: Final = 5
"""Last lines of stderr that are shown."""

app: typer.Typer = new_app()


@app.command("replay")
def _replay(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="A recording of run --record; default: all failures found by fuzz.",
        ),
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND...]",
            help="The worker to replay it to; default: the one that was recorded.",
        ),
    ] = None,
    *,
    smallest: Annotated[
        bool,
        typer.Option("--shrink", help="Search for the fewest messages that differ."),
    ] = False,
    grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="How much longer than recorded a reply may take.",
        ),
    ] = 10.0,
) -> int:
    """Replay a recorded conversation to a worker, and show which replies differ."""
    if file is None:
        return _replay_failures()
    if file.is_dir():
        found = sorted(path.name for path in file.glob("*.rec"))
        has = f"such as {file / found[0]}" if found else "and it has none"
        raise ConfigError(f"{file} is a folder: name one recording, {has}")
    try:
        recording = Recording.load(file)
    except OSError as error:
        raise ConfigError(f"{file}: {os_reason(error)}") from None
    target = file.with_suffix(f".min{file.suffix}")
    if smallest and target.exists():
        raise ConfigError(f"{target}: is there already; remove it, or rename it")
    one = recording.dialect.open(Side.SUPERVISOR, Limits())
    if smallest and recording.dialect.shape is Shape.COMMITTED:
        raise ConfigError(
            "--shrink: what is checkpointed depends on all before, and no action can be"
            " left out; etlstage fuzz finds a short one"
        )
    if smallest and not one.in_order:
        raise ConfigError("--shrink: sessions overlap, and none can be left out alone")
    if recording.cut:
        complain(f"{file} is not complete: {recording.cut}")
    if recording.blank:
        complain(
            f"{file} has not the content of messages: they are played as so many other bytes,"
            " and it is compared how many replies there are, and how the worker ends"
        )
    stage = recording.stage_of(command or recording.command)
    with interruptible():
        played = anyio.run(_play, recording, stage, grace)
        if smallest and _differs(recording, played):
            whole, recording = recording, anyio.run(_shrink, recording, stage, grace)
            played = anyio.run(_play, recording, stage, grace)
            _keep(target, whole, recording)
    out = Screen()
    for line in _comparison(recording, played):
        out.print(line, soft_wrap=True, highlight=False, markup=False)
    return FAILED if _differs(recording, played) else 0


def _replay_failures() -> int:
    """Play all cases that are kept; return the exit code."""
    silence()
    out, failed, all_kept = Screen(), 0, list(Failures(find=stage_from_yaml))
    with interruptible():
        for kept in all_kept:
            failure = kept.play(SURE)
            failed += failure is not None
            line = (
                f"FIXED  {kept.kind}" if failure is None else f"FAILED {failure.what}"
            )
            where = f"({kept.path.stem}; {kept.origin})"
            out.tell(f"{harmless(line)} {harmless(where)}")
    count = len(all_kept)
    fixed = f"{count - failed:,} fixed, {failed:,} failed"
    out.tell(f"{counted(count, 'case')}: {fixed}" if count else f"no case in {FOLDER}")
    return FAILED if failed else 0


async def _play(recording: Recording, stage: Stage, grace: float) -> Recording:
    return await play(recording, stage, grace=grace)


async def _shrink(recording: Recording, stage: Stage, grace: float) -> Recording:
    return await shrink(recording, stage, grace=grace)


def _differs(recording: Recording, played: Recording) -> bool:
    return any(differences(recording, played)) or bool(other_end(recording, played))


def _keep(path: Path, whole: Recording, smallest: Recording) -> None:
    """Write the smallest recording."""
    try:
        smallest.save(path)
    except OSError as error:
        raise ConfigError(f"{path}: {os_reason(error)}") from None
    before, after = (len(_requests(r)) for r in (whole, smallest))
    line = f"{path}: {after:,} of {counted(before, 'request')} are enough"
    Screen(stderr=True).print(line, soft_wrap=True, highlight=False, markup=False)


def _requests(recording: Recording) -> list[bytes]:
    *requests, _ = kit_of(recording.dialect).cut(
        Side.SUPERVISOR, recording.written(Channel.STDIN)
    )
    return requests


def _comparison(recording: Recording, played: Recording) -> Iterable[str]:
    """Yield the lines that compare a recording with its replay."""
    found = list(differences(recording, played))
    for difference in found[:_SHOWN]:
        yield from _shown(difference, recording.dialect)
    if len(found) > _SHOWN:
        yield f"... {counted(len(found) - _SHOWN, 'more reply', 'more replies')} differ"
    end = other_end(recording, played)
    if end:
        yield end
        for line in _last_lines(played):
            yield f"  stderr: {line}"
    *replies, _ = kit_of(recording.dialect).cut(
        Side.WORKER, played.written(Channel.STDOUT)
    )
    many = counted(len(replies), "reply", "replies")
    equal = "as many as recorded" if recording.blank else "all equal"
    yield f"{many}, {len(found):,} different" if found else f"{many}, {equal}"


def _shown(difference: Difference, dialect: Dialect) -> Iterable[str]:
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


def _last_lines(played: Recording) -> list[str]:
    text = played.written(Channel.STDERR).decode(errors="replace")
    return [harmless(line) for line in text.splitlines()[-_STDERR:]]
