"""Options that several commands have, and how much one logs; all of it starts fast."""

from __future__ import annotations

import logging
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
)


def new_app(name: str | None = None, **settings: Any) -> typer.Typer:  # noqa: ANN401
    """
    Return a place for commands; help is plain text, as Rich costs 60 ms a start.

    Args:
        name: Of a group of commands; None: it is one command.
        settings: Those of typer.

    """
    app = typer.Typer(
        name=name,
        rich_markup_mode=None,
        # A traceback is for --debug, and then the plain one.
        pretty_exceptions_enable=False,
        **({"add_completion": False} | settings),
    )
    if name is not None:
        # Without one a group of one command would be that command.
        app.callback()(lambda: None)
    return app


# --- of a pipeline --------------------------------------------------------------------

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="The pipeline, a YAML file.")
]
Overlays = Annotated[
    list[Path] | None,
    typer.Option(
        "--overlay",
        metavar="FILE",
        help="Lay this file over the pipeline; may be repeated, the last wins.",
    ),
]
Values = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set one value, as in transform.clean.workers=4; may be repeated.",
    ),
]


def changes_of(
    overlays: Sequence[Path] | None, values: Sequence[str] | None
) -> Changes:
    """Return what is laid over a pipeline file."""
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
        help="The worker's command behind --; or a pipeline file that has it.",
    ),
]
Kind = Annotated[
    str | None,
    typer.Option(
        metavar="KIND", help="transform, load or extract; default: transform."
    ),
]
Batch = Annotated[
    str | None,
    typer.Option(
        metavar="DRIVER[:SIZE]",
        help="The worker takes batches, closed by driver supervisor or worker.",
    ),
]
Mode = Annotated[
    str | None,
    typer.Option(
        metavar="MODE",
        help="Of an extract worker: plain extracts all and exits (the default),"
        " cyclic extracts on request.",
    ),
]
Offsets = Annotated[
    str | None,
    typer.Option(
        metavar="BY", help="Who keeps the offsets of a cyclic one: worker, supervisor."
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
    typer.Option("--stage", metavar="NAME", help="The stage of the pipeline FILE."),
]
Timeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", min=0.1, help="Timeout of each step of the worker."
    ),
]
Sample = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Messages that the worker can process, one a line.",
    ),
]

# --- of any command -------------------------------------------------------------------

Debug = Annotated[
    bool, typer.Option("--debug", help="Log everything, show tracebacks.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only log errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonLines = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
JunitFile = Annotated[
    Path | None,
    typer.Option("--junit", metavar="FILE", help="Write the results as JUnit XML."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

# --- of what is logged --------------------------------------------------------------


class Level(Enum):
    """The least level of events that are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def number(self) -> int:
        """As ``logging`` has it."""
        number: int = getattr(logging, self.name)
        return number


class LogFormat(Enum):
    """How events are logged."""

    CONSOLE = "console"
    """For people."""
    JSON = "json"
    """An object a line."""


@dataclass(frozen=True)
class Verbosity:
    """How much of a run is shown, and how."""

    debug: bool = False
    """Everything: also each step on the way to a message's outcome, and tracebacks."""
    quiet: bool = False
    """Nothing but what is wrong."""
    level: Level = Level.INFO
    format: LogFormat | None = None
    """None: for people on a terminal, JSON everywhere else."""

    def for_people(self, screen: Screen) -> bool:
        """Whether what is shown on ``screen`` is for people."""
        if self.format is None:
            return screen.watched
        return self.format is LogFormat.CONSOLE

    @property
    def threshold(self) -> int:
        """The least level of events that are logged, as ``logging`` has it."""
        least = logging.WARNING if self.quiet else logging.DEBUG
        wanted = logging.DEBUG if self.debug else self.level.number
        return max(least, wanted)


NORMAL: Final = Verbosity()
