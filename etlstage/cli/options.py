"""Options that several commands share, and how much they log; fast to import."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etlstage.cli.screen import Screen
    from etlstage.config.reading import Changes

__all__ = (
    "NORMAL",
    "Batch",
    "Debug",
    "Dialect",
    "File",
    "Json",
    "JsonLines",
    "JunitFile",
    "Kind",
    "Level",
    "LogFormat",
    "Markers",
    "Mode",
    "Offsets",
    "Overlays",
    "Quiet",
    "Sample",
    "StageName",
    "Timeout",
    "Values",
    "Verbosity",
    "Words",
    "Yes",
    "changes_of",
    "new_app",
    "of_seconds",
)


def new_app(name: str | None = None, **settings: Any) -> typer.Typer:  # noqa: ANN401
    """
    Return an app for commands; help is plain text, as Rich costs 60 ms per start.

    Args:
        name: Name of a group of commands; None: the app is a single command.
        settings: Settings of typer.

    """
    app = typer.Typer(
        name=name,
        rich_markup_mode=None,
        # Tracebacks are shown only with --debug, and then plain.
        pretty_exceptions_enable=False,
        **({"add_completion": False} | settings),
    )
    if name is not None:
        # Without a callback, a group of one command would be that command.
        app.callback()(lambda: None)
    return app


def of_seconds(help_: str, least: float = 0.1) -> Any:  # noqa: ANN401 - as typer's
    """
    Return an option that is a finite number of seconds.

    Args:
        help_: Its help.
        least: Its minimum.

    """
    return typer.Option(metavar="SECONDS", min=least, callback=_finite, help=help_)


def _finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is not a finite number of seconds.")
    return seconds


# --- of a pipeline --------------------------------------------------------------------

File = Annotated[Path, typer.Argument(metavar="FILE", help="Pipeline file, in YAML.")]
Overlays = Annotated[
    list[Path] | None,
    typer.Option(
        "--overlay",
        metavar="FILE",
        help="File to lay over the pipeline; may be repeated, the last one wins.",
    ),
]
Values = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Key to set, as in transform.clean.workers=4; may be repeated.",
    ),
]


def changes_of(
    overlays: Sequence[Path] | None, values: Sequence[str] | None
) -> Changes:
    """Return the changes to lay over a pipeline file."""
    from functools import partial

    from etlstage.cli.failure import complain
    from etlstage.config.reading import Changes

    warn = partial(complain, as_="warning")
    return Changes(overlays or (), values or (), warn)


# --- of a worker ----------------------------------------------------------------------

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="-- COMMAND... | FILE --stage NAME",
        help="Command of the worker, after --; or a pipeline file that defines it.",
    ),
]
Kind = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="Kind of stage: transform (the default), load or extract.",
    ),
]
Batch = Annotated[
    str | None,
    typer.Option(
        metavar="DRIVER[:SIZE]",
        help="Feed the worker batches, closed by the driver: supervisor or worker.",
    ),
]
Mode = Annotated[
    str | None,
    typer.Option(
        metavar="MODE",
        help="How an extract worker works: plain extracts all and exits (the default),"
        " cyclic extracts on request.",
    ),
]
Offsets = Annotated[
    str | None,
    typer.Option(
        metavar="BY",
        help="Who keeps the offsets of a cyclic worker: worker or supervisor.",
    ),
]
Markers = Annotated[
    str | None,
    typer.Option(
        metavar="NAME=TEXT,...", help=r"Markers of the worker, as in eom=\x1e,eop=\0."
    ),
]
Dialect = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:KEY=VALUE,...]",
        help="Dialect of the worker, as in cocaine:event=clean; default: marker.",
    ),
]
StageName = Annotated[
    str | None,
    typer.Option("--stage", metavar="NAME", help="Stage of the pipeline FILE."),
]
Timeout = Annotated[float, of_seconds("Timeout of each step of the worker.")]
Sample = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File of messages that the worker can process, one per line.",
    ),
]

# --- of any command -------------------------------------------------------------------

Debug = Annotated[
    bool, typer.Option("--debug", help="Log everything, and show tracebacks.")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Log only warnings and errors.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonLines = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per line.")
]
JunitFile = Annotated[
    Path | None,
    typer.Option("--junit", metavar="FILE", help="Write the results as JUnit XML."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

# --- of what is logged --------------------------------------------------------------


class Level(Enum):
    """The lowest level of events that are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def number(self) -> int:
        """The number of the level in ``logging``."""
        number: int = getattr(logging, self.name)
        return number


class LogFormat(Enum):
    """How events are logged."""

    CONSOLE = "console"
    """For people."""
    JSON = "json"
    """One object per line."""


@dataclass(frozen=True)
class Verbosity:
    """How much of a run is shown, and how."""

    debug: bool = False
    """Everything: also each step on the way to a message's outcome, and tracebacks."""
    quiet: bool = False
    """Only warnings and errors."""
    level: Level = Level.INFO
    format: LogFormat | None = None
    """None: for people on a terminal, JSON everywhere else."""

    def for_people(self, screen: Screen) -> bool:
        """Return whether output on ``screen`` is for people."""
        if self.format is None:
            return screen.watched
        return self.format is LogFormat.CONSOLE

    @property
    def threshold(self) -> int:
        """The lowest level of events that are logged, as a number in ``logging``."""
        least = logging.WARNING if self.quiet else logging.DEBUG
        wanted = logging.DEBUG if self.debug else self.level.number
        return max(least, wanted)


NORMAL: Final = Verbosity()
