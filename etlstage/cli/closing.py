"""The end of a run: the report on the screen and as a file."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from etlstage.cli.failure import complain
from etlstage.cli.progress import accounts_table
from etlstage.cli.screen import Screen
from etlstage.errors import ConfigError, LedgerImbalance
from etlstage.pipeline.report import Report

__all__ = ("EXIT_CODES", "ReportFile", "show_report")

EXIT_CODES: Final = {"done": 0, "failed": 1, "drained": 4, "forced": 5}

ENDINGS: Final = {
    "done": "done in {}",
    "failed": "failed in {}",
    "drained": "drained after a signal in {}; run it again for the rest",
    "forced": "stopped by force in {}",
}


def show_report(report: Report, screen: Screen) -> None:
    """Print the closing report."""
    seconds = [f"{account.seconds:.1f}" for account in report.ledger]
    screen.print(accounts_table(report.ledger, "seconds", seconds))
    lines = [balance(report), report.secrets.conceal(report.landed)]
    if report.dead_letters.messages:
        look = report.secrets.conceal(str(report.dead_letters.command))
        lines.append(f"to see the dead letters: {look}")
    ending = ENDINGS[report.status].format(f"{report.seconds:.1f} s")
    lines.append(f"{report.name}: {ending}")
    for line in lines:
        screen.tell(line)


def balance(report: Report) -> str:
    """Return what the ledger says of a run, in one line."""
    whole = report.status in ("done", "drained")
    try:
        report.ledger.check(whole=whole)
    except LedgerImbalance as error:
        return f"ledger not balanced: {error}"
    *_, last = report.ledger
    counts = {
        "skipped": sum(account.skipped for account in report.ledger),
        "doubtful": sum(account.doubtful for account in report.ledger),
        "dead-lettered": sum(account.dead for account in report.ledger),
        "failed": sum(account.failed for account in report.ledger),
        "not processed": sum(account.lost for account in report.ledger)
        + report.undelivered,
    }
    others = [f"{count:,} {what}" for what, count in counts.items() if count]
    return f"accounted for: {', '.join((f'{last.done:,} loaded', *others))}"


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
