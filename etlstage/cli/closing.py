"""The end of a run: the report on the screen and as a file."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

from etlstage.cli.failure import complain
from etlstage.cli.progress import accounts_table
from etlstage.cli.screen import Screen
from etlstage.errors import ConfigError
from etlstage.pipeline.report import KeptLetters, Report, closing_lines

__all__ = ("EXIT_CODES", "ReportFile", "report_nothing", "show_report")

EXIT_CODES: Final = {"done": 0, "failed": 1, "drained": 4, "forced": 5}


def show_report(report: Report, screen: Screen) -> None:
    """Print the closing report."""
    seconds = [f"{account.seconds:.1f}" for account in report.ledger]
    screen.print(accounts_table(report.ledger, "seconds", seconds))
    for line in closing_lines(report):
        screen.tell(line)


def report_nothing(file: Path, *, report: Path | None, html: Path | None) -> None:
    """
    Tell that a run was interrupted before it began, also in its report.

    The report of an earlier run would be taken for its own; the page is removed.

    Args:
        file: The pipeline.
        report: Where the report goes, or None.
        html: Where its page would go, or None.

    """
    said = "interrupted before the run began"
    complain(said)
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    plain: dict[str, object] = {
        "pipeline": str(file),
        "run": None,
        "status": "forced",
        "error": said,
        "started": now,
        "ended": now,
        "seconds": 0.0,
        "stages": [],
        "edges": [],
        "output": None,
        "dead_letters": KeptLetters()._asdict(),
    }
    try:
        if report is not None:
            with ReportFile(report) as place:
                place.write(f"{json.dumps(plain, indent=2)}\n")
        if html is not None and html.is_file():
            html.unlink()
    except (ConfigError, OSError) as error:
        complain(str(error), as_="warning")


class ReportFile:
    """
    Holds the place for a report from before the run until it is written.

    The file appears whole or not at all, for us alone to read; that it can be written
    is known at once.

    Args:
        path: The file.

    Raises:
        ConfigError: If it can't.

    """

    def __init__(self, path: Path) -> None:
        try:
            # A link stays a link; what it points to is replaced.
            self._path = path.resolve()
            if self._path.exists() and not self._path.is_file():
                raise ConfigError(f"report {path} is not a regular file")
            handle, self._part = tempfile.mkstemp(
                prefix=f".{self._path.name}.", dir=self._path.parent
            )
            os.close(handle)
        except OSError as error:
            raise ConfigError(_unwritten(path, error)) from None
        except RuntimeError:
            loop = OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            raise ConfigError(_unwritten(path, loop)) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            os.unlink(self._part)

    def write(self, text: str) -> None:
        """
        Put a report in its place; may be called once.

        If there is no room by now, or no folder, that is told, and no more: what was
        loaded is loaded, and a failure would have it loaded again.
        """
        try:
            # A name that is not UTF-8 is no reason to have no report.
            with open(self._part, "wb") as file:
                file.write(text.encode(errors="backslashreplace"))
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._part, self._path)
        except OSError as error:
            with suppress(OSError):  # nor may stderr
                complain(_unwritten(self._path, error), as_="warning")


def _unwritten(path: Path, error: OSError) -> str:
    said = (error.strerror or str(error)).lower()
    return f"report {path} can't be written: {said}"
