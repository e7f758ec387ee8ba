"""The commands ``etlstage journal``, and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ("journal",)

journal: typer.Typer = typer.Typer(name="journal", add_completion=False)

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="The folder of a set of journals.")
]
Name = Annotated[
    str | None,
    typer.Option("--journal", metavar="NAME", help="Only this journal of the set."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]


@journal.callback()
def _journal() -> None:
    """Look into sets of journals, append to them, check and trim them."""


@journal.command("ls")
def _ls(path: Folder, *, as_json: Json = False) -> int:
    """List the journals of a set with their offsets and sizes."""
    from etlstage.cli.journal import list_journals

    return list_journals(path, as_json=as_json)


@journal.command("cat")
def _cat(
    path: Folder,
    *,
    name: Name = None,
    uncommitted: Annotated[
        bool,
        typer.Option(
            "--uncommitted",
            help="All messages: duplicates, acknowledgements, what is not committed.",
        ),
    ] = False,
    begin: Annotated[
        int | None, typer.Option("--from", metavar="OFFSET", help="Begin there.")
    ] = None,
    end: Annotated[
        int | None, typer.Option("--to", metavar="OFFSET", help="End there.")
    ] = None,
    producer: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Only messages of this producer, in hex."),
    ] = None,
) -> int:
    """Print committed messages as JSON lines."""
    from etlstage.cli.journal import print_messages

    return print_messages(
        path,
        journal=name,
        uncommitted=uncommitted,
        begin=begin,
        end=end,
        producer=producer,
        follow=False,
    )


@journal.command("tail")
def _tail(path: Folder, *, name: Name = None) -> int:
    """Print messages as they become committed, from now on."""
    from etlstage.cli.journal import print_messages

    return print_messages(
        path,
        journal=name,
        uncommitted=False,
        begin=None,
        end=None,
        producer=None,
        follow=True,
    )


@journal.command("append")
def _append(path: Folder, *, name: Name = None) -> int:
    """Append lines of stdin as committed messages, JSON objects to a set of such."""
    from etlstage.cli.journal import append_lines

    return append_lines(path, journal=name)


@journal.command("verify")
def _verify(path: Folder, *, as_json: Json = False) -> int:
    """Read all, and count what is committed, pending, rolled back, twice, damaged."""
    from etlstage.cli.journal import verify_set

    return verify_set(path, as_json=as_json)


@journal.command("stat")
def _stat(path: Folder, *, as_json: Json = False) -> int:
    """Show how far each reader is behind, in bytes, messages and seconds."""
    from etlstage.cli.journal import print_stat

    return print_stat(path, as_json=as_json)


@journal.command("readers")
def _readers(
    path: Folder,
    *,
    forget: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Drop the position of this reader."),
    ] = None,
    as_json: Json = False,
) -> int:
    """List readers that have names, and from where on they need the journals."""
    from etlstage.cli.journal import print_readers

    return print_readers(path, forget=forget, as_json=as_json)


@journal.command("trim")
def _trim(path: Folder) -> int:
    """Drop segments that are not to be kept."""
    from etlstage.cli.journal import trim_set

    return trim_set(path)
