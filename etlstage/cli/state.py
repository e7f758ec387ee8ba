"""
``etlstage state``: show, reset or take over what a pipeline has stored.

Of the pipeline file, only the name, the ends and the state need be valid.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from etlstage.cli.failure import naming
from etlstage.cli.letters import Letters, chosen, current, find, find_stored
from etlstage.cli.options import Json, Overlays, Values, Yes, changes_of, new_app
from etlstage.cli.screen import columns, confirm
from etlstage.errors import ConfigError
from etlstage.messages import counted
from etlstage.pipeline.dead_letter.files import FOLDER
from etlstage.pipeline.delivery.delivery import Delivery, take_over, unusable
from etlstage.pipeline.delivery.folder import EDGES, JOURNALS, WAITING, behind
from etlstage.pipeline.delivery.holder import LOCK, Holder, holder_of
from etlstage.pipeline.delivery.record import RECORDS, CommitRecord
from etlstage.telemetry.terminal import harmless

if TYPE_CHECKING:
    from etlstage.pipeline.edge import Waiting

__all__ = ("app", "reset_state", "show_state", "take_state_over")

OF_STREAMS: Final = ("checkpoint*", "failed.json", "stop-*")
"""What engine streaming stores in addition."""
NOTE: Final = "*.json"
"""Records about what waits. They stay: the next run removes what they name, wherever."""
GONE: Final = ".removed"
"""Suffix of a folder whose files are being deleted: no part of it must be used."""

app: typer.Typer = new_app("state")

Place = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="Pipeline file, or its state directory."),
]


@app.command("show")
def show_state(
    place: Place,
    *,
    overlays: Overlays = None,
    values: Values = None,
    as_json: Json = False,
) -> int:
    """Show what is stored, where the next run resumes, and what holds the lock."""
    found = find(place, changes_of(overlays, values))
    if not os.path.exists(found.state):
        typer.echo("null" if as_json else f"nothing is stored in {_path(found.state)}")
        return 0
    edges = behind(found.state)
    if as_json:
        plain = _plain(found.state) | {"dead_letters": _letters(found)}
        if edges:
            plain["edges"] = {
                _stage(at): _plain(at) | {"waiting": _waiting(at)._asdict()}
                for at in edges
            }
        typer.echo(json.dumps(plain, indent=2))
        return 0
    lines = list(_lines(found.state))
    for at in edges:
        lines.append(("edge", f"after stage {_stage(at)}: {_waiting(at)}"))
        lines += _lines(at)
    lines += _dead(found)
    for line in columns(lines):
        typer.echo(line)
    return 0


@app.command("reset")
def reset_state(
    place: Place, *, overlays: Overlays = None, values: Values = None, yes: Yes = False
) -> int:
    """Delete checkpoints, but no dead letters."""
    state = find_stored(place, changes_of(overlays, values)).state
    if not os.path.exists(state):
        typer.echo(f"nothing is stored in {_path(state)}")
        return 0
    with ExitStack() as stack:
        parts = [stack.enter_context(Delivery(at)) for at in (state, *behind(state))]
        twice = filter(None, (_twice(part.record) for part in parts))
        anew = "; ".join(("the next run starts from the beginning", *twice))
        if not yes:
            waits = "".join(f"; {_waiting(part.folder)}" for part in parts[1:])
            confirm(
                f"delete checkpoints and waiting messages in {_path(state)}"
                f" (next run: {_goes_on(parts[0].record)}{waits}),"
                f" so that {anew}?"
            )
        for part in parts:
            _forget_shards(part.folder)
        # The first part first: waiting messages are better loaded twice than never.
        for part in parts:
            _forget(part)
    typer.echo(anew)
    return 0


@app.command("take-over")
def take_state_over(
    place: Place, *, overlays: Overlays = None, values: Values = None, yes: Yes = False
) -> int:
    """Take the state from a run that holds it, which then can't commit any more."""
    state = find_stored(place, changes_of(overlays, values)).state
    holders = {at: _holder(at) for at in (state, *behind(state))}
    taken = {at: holder for at, (held, holder) in holders.items() if held}
    if not taken:
        raise ConfigError(f"no run holds {state}: there is nothing to take over")
    holder = next(filter(None, taken.values()), None)
    who = f"{holder} ({holder.state})" if holder is not None else "a run"
    if not yes:
        confirm(
            f"take {_path(state)} over from {harmless(who)}? It can't commit what it"
            " does from now on, and a load that is not by epochs may contain that twice"
        )
    # Another run may have begun while the question was asked.
    for at, before in taken.items():
        if _holder(at) != (True, before):
            raise ConfigError(
                f"the run that held {at} has ended: nothing was taken over; see what"
                " holds it now with 'etlstage state show'"
            )
    # All are taken over before anything is printed, which may end the command.
    for record in [take_over(at) for at in taken]:
        typer.echo(f"taken over: the next run resumes {_goes_on(record)}")
    return 0


def _holder(state: Path) -> tuple[bool, Holder | None]:
    with naming(f"{state / LOCK}: can't be read"):
        return holder_of(state)


def _forget_shards(state: Path) -> None:
    """Delete the checkpoints of record processors, which are not given what is before."""
    from etlstage.shard.sink import CHECKPOINTS_FILE, CheckpointFile
    from etlstage.shard.table import LEASES_FILE

    CheckpointFile.forget(state / CHECKPOINTS_FILE)
    with naming(f"{state / LEASES_FILE}: can't be deleted"):
        # The database first: SQLite then deletes what a killed reset leaves beside it.
        _remove(sorted(state.glob(f"{LEASES_FILE}*")))


def _forget(part: Delivery) -> None:
    """Delete the checkpoint of a part, and the messages that wait for it."""
    state = part.folder
    try:
        # A stream without a checkpoint starts from the beginning, whatever its record.
        _remove(path for what in OF_STREAMS for path in state.glob(what))
        # The fence stays: a run whose state was taken over must not get it back.
        # The record comes before what waits: by its position, a run would skip as much
        # of what comes next.
        CommitRecord(fence=part.record.fence).store(state)
        waiting = [path for what in WAITING for path in state.glob(what)]
        _remove(path for path in waiting if not path.match(NOTE))
        _remove(state.glob(f"{JOURNALS}*"))
    except OSError as error:
        raise unusable(state, error) from error


def _stage(folder: Path) -> str:
    """Return the stage after whose durable edge a state directory is used."""
    return folder.name.removeprefix(EDGES.removesuffix("*"))


def _waiting(folder: Path) -> Waiting:
    from etlstage.pipeline.edge import DurableEdge  # few need Arrow

    try:
        return DurableEdge(_stage(folder), folder.parent, folder).unread()
    except OSError as error:
        raise unusable(folder, error) from error


def _plain(state: Path) -> dict[str, Any]:
    held, holder = _holder(state)
    lock = {**holder._asdict(), "state": holder.state} if held and holder else held
    return {
        "state": str(state),
        "lock": lock or None,
        "record": asdict(CommitRecord.latest(state)),
        "files": {path.name: size for path, size in _others(state)},
    }


def _lines(state: Path) -> Iterator[tuple[str, str]]:
    (held, holder), record = _holder(state), CommitRecord.latest(state)
    yield "state", str(state)
    if not held:
        yield "lock", "free"
    elif holder is None:
        yield "lock", "held; its holder can't be read"
    else:
        yield "lock", f"held by {holder}: {holder.state}"
    if record.fence:
        yield "fence", str(record.fence)
    if record.run:
        ended = "running" if held else "interrupted"
        if record.ended and record.resumes:
            at = record.position is not None
            ended = "ended at a position" if at else "ended, its load is not complete"
        elif record.ended:
            ended = "completed"
        yield "last run", f"{record.run}, {record.delivery}; {ended}"
    if record.last_load:
        yield "last load", _load(record.last_load)
    yield "next run", _goes_on(record)
    for path, size in _others(state):
        yield path.name, counted(size, "byte")


def _dead(found: Letters) -> Iterator[tuple[str, str]]:
    for stage, count in _letters(found).items():
        yield "dead letters", f"{count:,} of stage {stage}"
    old = sum(map(found.settled.superseded, chosen(found, None)))
    if old:
        yield (
            "superseded",
            f"{counted(old, 'dead letter')}: output overwritten or never written",
        )


def _load(last: Mapping[str, object]) -> str:
    source, sink = last.get("input") or "its input", last.get("output") or "its output"
    epoch = int(str(last.get("epoch", 0)))
    return f"{last.get('load')}: from {source} into {sink}, up to epoch {epoch:,}"


def _goes_on(record: CommitRecord) -> str:
    if not record.epoch or not record.resumes:
        return "from the beginning"
    text = f"after epoch {record.epoch:,} of load {record.load}"
    if record.position is not None:
        text += f", at position {json.dumps(record.position)}"
    return text


def _twice(record: CommitRecord) -> str:
    """Return what is loaded already, if the next run would not have loaded it again."""
    output = record.moved_from or record.output
    # What waits in an edge is deleted.
    if not record.epoch or not record.resumes or output.startswith("edge "):
        return ""
    where = f"into {harmless(output)} " if output else ""
    return f"what was loaded {where}up to epoch {record.epoch:,} stays, and is loaded again"


def _letters(found: Letters) -> dict[str, int]:
    """Return how many letters each stage has that are not superseded."""
    counts: dict[str, int] = {}
    for letter in current(found, None):
        counts[letter.stage] = counts.get(letter.stage, 0) + 1
    return counts


def _others(state: Path) -> Iterator[tuple[Path, int]]:
    """Yield what else is stored, with its size in bytes."""
    known = {LOCK, FOLDER, *(path.name for path in state.glob(RECORDS))}
    known |= {path.name for path in behind(state)}
    for path in sorted(state.iterdir()):
        if path.name not in known:
            files = path.rglob("*") if path.is_dir() else (path,)
            yield path, sum(file.lstat().st_size for file in files if file.is_file())


def _remove(paths: Iterable[Path]) -> None:
    for path in [*paths]:
        if path.is_dir() and not path.is_symlink():
            gone = path.with_name(path.name.removesuffix(GONE) + GONE)
            if path != gone:
                _remove([gone])  # left by a reset that was killed
                path.rename(gone)
            shutil.rmtree(gone)
        else:
            path.unlink(missing_ok=True)


def _path(path: Path) -> str:
    return harmless(str(path))
