"""Commands about what outlives a run, and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etlstage.cli.options import Debug, File, Overlays, Values, changes_of
from etlstage.cli.verbosity import Verbosity

__all__ = ("dlq", "state")

dlq: typer.Typer = typer.Typer(name="dlq", add_completion=False)
state: typer.Typer = typer.Typer(name="state", add_completion=False)


@dlq.callback()
def _dlq() -> None:
    """Inspect, retry, drop or export dead-lettered messages."""


Letters = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="The pipeline file, its state directory, or a file of dead letters.",
    ),
]


@dlq.command("ls")
def _dlq_ls(
    file: Letters,
    *,
    overlays: Overlays = None,
    values: Values = None,
    stage: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only dead letters of this stage."),
    ] = None,
    group: Annotated[
        bool, typer.Option("--group", help="Count them by cause: one row for each.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line.")
    ] = False,
) -> int:
    """List dead letters, one per line."""
    from etlstage.cli.dlq import list_groups, list_letters

    show = list_groups if group else list_letters
    return show(file, changes_of(overlays, values), stage=stage, as_json=as_json)


@dlq.command("show")
def _dlq_show(
    file: Letters,
    number: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="The id of the dead letter, or how it begins."
        ),
    ],
    *,
    overlays: Overlays = None,
    values: Values = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Only the message, byte for byte, as its worker reads it: followed"
            " by EOM, and by EOB if the supervisor closes batches.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The dead letter as one JSON object.")
    ] = False,
) -> int:
    """Show one dead letter: its message, error, attempts and stage."""
    from etlstage.cli.dlq import show_letter

    changes = changes_of(overlays, values)
    return show_letter(file, changes, number, raw=raw, as_json=as_json)


Ids = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ID]...", help="Their ids, or how these begin; default: all."
    ),
]
OfStage = Annotated[
    str | None,
    typer.Option("--stage", metavar="NAME", help="Only dead letters of this stage."),
]


@dlq.command("retry")
def _dlq_retry(
    file: File,
    numbers: Ids = None,
    *,
    overlays: Overlays = None,
    values: Values = None,
    stage: OfStage = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Tell only what is wrong.")
    ] = False,
    debug: Debug = False,
) -> int:
    """Run dead letters through their stage and on; add what passes to the output."""
    from etlstage.cli.retry import retry_letters

    changes, verbosity = changes_of(overlays, values), Verbosity(debug, quiet)
    return retry_letters(file, changes, numbers or (), stage=stage, verbosity=verbosity)


@dlq.command("drop")
def _dlq_drop(
    file: Letters,
    numbers: Ids = None,
    *,
    overlays: Overlays = None,
    values: Values = None,
    stage: OfStage = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask before all are dropped.")
    ] = False,
) -> int:
    """Mark dead letters as dropped: they are no longer listed, nor retried."""
    from etlstage.cli.dlq import drop_letters

    changes = changes_of(overlays, values)
    return drop_letters(file, changes, numbers or (), stage=stage, yes=yes)


@dlq.command("export")
def _dlq_export(
    file: Letters,
    numbers: Ids = None,
    *,
    to: Annotated[
        Path, typer.Option("--to", metavar="PATH", help="The file to write; a new one.")
    ],
    overlays: Overlays = None,
    values: Values = None,
    stage: OfStage = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Only the messages, as their workers read them."),
    ] = False,
) -> int:
    """Write dead letters into a file: a JSON object on each line, or raw messages."""
    from etlstage.cli.dlq import export_letters

    changes = changes_of(overlays, values)
    return export_letters(file, changes, numbers or (), stage=stage, to=to, raw=raw)


@state.callback()
def _state() -> None:
    """Show what runs have stored, forget it, or take it from a run that holds it."""


Place = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="The pipeline file, or its state directory."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@state.command("show")
def _state_show(
    file: Place,
    *,
    overlays: Overlays = None,
    values: Values = None,
    as_json: Annotated[bool, typer.Option("--json", help="As a JSON object.")] = False,
) -> int:
    """Show what is stored, where a run would go on, and who holds the lock."""
    from etlstage.cli.state import show_state

    return show_state(file, changes_of(overlays, values), as_json=as_json)


@state.command("reset")
def _state_reset(
    file: Place, *, overlays: Overlays = None, values: Values = None, yes: Yes = False
) -> int:
    """Forget how far runs have come; dead letters stay."""
    from etlstage.cli.state import reset_state

    return reset_state(file, changes_of(overlays, values), yes=yes)


@state.command("take-over")
def _state_take_over(
    file: Place, *, overlays: Overlays = None, values: Values = None, yes: Yes = False
) -> int:
    """Take the state from a run that holds it: that run can't commit any more."""
    from etlstage.cli.state import take_state_over

    return take_state_over(file, changes_of(overlays, values), yes=yes)
