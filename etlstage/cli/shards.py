"""``etlstage shards``: list, hand over, take or reset the shards of runners."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from etlstage.cli.options import Json, Yes, new_app
from etlstage.cli.screen import columns, confirm
from etlstage.errors import ConfigError
from etlstage.messages import counted
from etlstage.shard import operator
from etlstage.shard.lease import Lease
from etlstage.shard.table import (
    LEASES_FILE,
    NEWS,
    TABLE,
    News,
    PostgresLeases,
    SQLiteLeases,
    is_url,
    open_leases,
    without_password,
)

__all__ = ("app",)

app: typer.Typer = new_app("shards")

Where = Annotated[
    str,
    typer.Argument(
        metavar="LEASES",
        help="Pipeline file, its state directory, or shards.leases: a file, or"
        " postgresql://...",
    ),
]
Shard = Annotated[
    str, typer.Argument(metavar="SHARD", help="Name of the shard, or the end of it.")
]
Table = Annotated[
    str | None, typer.Option(metavar="NAME", help=f"Table of leases; default: {TABLE}.")
]


@app.command("ls")
def _ls(where: Where, *, table: Table = None, as_json: Json = False) -> int:
    """List the shards: owner, checkpoint, lag, last error."""
    with _opened(where, table) as leases:
        rows, news = leases.read(), leases.news()
    shown = [_shown(lease, news.get(lease.shard, NEWS)) for lease in rows]
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
        return 0
    if not rows:
        typer.echo("there are no shards until a run has started")
        return 0
    cells = [["shard", "owner", "checkpoint", "lag", "last error"]]
    cells += [_cells(lease, news.get(lease.shard, NEWS)) for lease in rows]
    for line in columns(cells):
        typer.echo(line)
    return 0


@app.command("show")
def _show(
    where: Where, shard: Shard, *, table: Table = None, as_json: Json = False
) -> int:
    """Show everything that is known of one shard."""
    with _opened(where, table) as leases:
        lease = operator.find_lease(leases, shard)
        shown = _shown(lease, leases.news().get(lease.shard, NEWS))
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
        return 0
    none: tuple[object, ...] = (None, [])
    for line in columns((n, "-" if v in none else str(v)) for n, v in shown.items()):
        typer.echo(line)
    return 0


@app.command("release")
def _release(where: Where, shard: Shard, *, table: Table = None) -> int:
    """Ask the owner of a shard to release it; its worker may commit once more."""
    with _opened(where, table) as leases:
        lease = operator.release(leases, shard)
    typer.echo(f"{lease.owner} has been asked to hand over {lease.shard}")
    return 0


@app.command("take")
def _take(where: Where, shard: Shard, *, table: Table = None) -> int:
    """Take a shard from its owner, which then can't commit it any more."""
    with _opened(where, table) as leases:
        lease = operator.take(leases, shard)
    typer.echo(f"{lease.shard} is free: {lease.owner} can't commit it any more")
    return 0


@app.command("reset")
def _reset(
    where: Where,
    shard: Annotated[
        str | None,
        typer.Argument(metavar="SHARD", help="Shard to reset; default: all."),
    ] = None,
    *,
    table: Table = None,
    yes: Yes = False,
) -> int:
    """Delete checkpoints: shards are read again from their beginning."""
    with _opened(where, table) as leases:
        lease = None if shard is None else operator.find_lease(leases, shard)
        chosen = leases.read() if lease is None else [lease]
        if not yes:
            what = counted(len(chosen), "shard") if lease is None else lease.shard
            owned = sum(row.owner is not None and not row.ended for row in chosen)
            owners = f" ({owned} with an owner)" if owned else ""
            confirm(
                f"delete the checkpoints of {what}{owners}, so that all records are"
                " loaded again?"
            )
        if lease is None:
            leases.forget()
            text = "the next run starts from the beginning"
        else:
            operator.reset(leases, lease.shard)
            text = (
                f"shard {lease.shard} starts from the beginning: at once in a live run,"
                " otherwise in the next one"
            )
    typer.echo(text)
    return 0


@contextmanager
def _opened(where: str, table: str | None) -> Iterator[SQLiteLeases | PostgresLeases]:
    if not is_url(where) and Path(where).suffix in (".yaml", ".yml"):
        where, named = _of_file(Path(where))
        table = table or named
    elif os.path.isdir(where):
        where = str(Path(where) / LEASES_FILE)
    try:
        leases = open_leases(where, None, table=table or TABLE, made=None)
    except ConfigError as error:
        raise ConfigError(f"{without_password(where)}: {error}") from error
    with closing(leases):
        yield leases


def _of_file(path: Path) -> tuple[str, str]:
    """Return where the leases of a pipeline are, and the name of their table."""
    from etlstage.config.loader import load
    from etlstage.config.model import ShardKeys

    keys, document = load(path)
    shards = keys.load.shards or ShardKeys()
    if shards.leases is not None:
        where = shards.leases
        return where if is_url(where) else str(document.folder / where), shards.table
    if not keys.extract.end.sharded or keys.state is None:
        raise ConfigError(
            f"{path}: has neither the key load.shards.leases nor a stream with the key"
            " state"
        )
    return str(document.folder / keys.state / LEASES_FILE), shards.table


def _shown(lease: Lease, news: News) -> dict[str, Any]:
    position = json.loads(lease.position) if lease.position is not None else None
    at = None if news.moved is None else round(time.time() - news.moved, 1)
    return {
        "shard": lease.shard,
        "parents": list(lease.parents),
        "owner": lease.owner,
        "claimant": lease.claimant,
        "checkpoint": position,
        "ended": lease.ended,
        "counter": lease.counter,
        "switches": lease.switches,
        "uncommitted": news.lag,
        "seconds_since_checkpoint": at,
        "last_error": news.error,
    }


def _cells(lease: Lease, news: News) -> list[str]:
    shown = _shown(lease, news)
    checkpoint, lag = "-", "-"
    if lease.ended:
        checkpoint = "ended"
    elif shown["checkpoint"] is not None:
        checkpoint = ".".join(map(str, shown["checkpoint"])).removesuffix(".0")
    if news.lag is not None and not lease.ended:
        lag = counted(news.lag, "record")
        if (seconds := shown["seconds_since_checkpoint"]) is not None and news.lag:
            lag += f", {seconds:.0f} s"
    owner = "-" if lease.ended or lease.owner is None else lease.owner
    return [lease.shard, owner, checkpoint, lag, news.error or "-"]
