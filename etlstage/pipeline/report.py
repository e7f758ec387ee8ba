"""The outcome of a run, for a human and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from etlstage.pipeline.ledger import Ledger
from etlstage.pipeline.secret import Secrets

__all__ = ("Report", "Status")

Status: TypeAlias = Literal["done", "failed", "drained", "forced"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a run did, and what it loaded."""

    name: str
    status: Status
    """``done``: everything loaded. ``failed``: see ``error``. ``drained``: extraction
    was stopped, what was extracted is loaded. ``forced``: stopped in the middle."""
    error: Exception | None
    seconds: float
    ledger: Ledger
    landed: str
    """What reached the destination, in one line."""
    dead_letters: str | None = None
    """The command that shows the dead letters, if there are any."""
    secrets: Secrets = field(default_factory=Secrets, repr=False)
    """What is not to be shown of ``error`` and ``landed``."""

    @property
    def undelivered(self) -> int:
        """Messages in flight between two stages when the run ended."""
        return self.ledger.undelivered

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON, without secrets."""
        conceal = self.secrets.conceal
        return {
            "pipeline": self.name,
            "status": self.status,
            "error": conceal(str(self.error)) if self.error is not None else None,
            "seconds": round(self.seconds, 3),
            "stages": [
                {
                    "stage": account.stage,
                    "kind": account.kind.value,
                    "in": account.received,
                    "done": account.done,
                    "dead": account.dead,
                    "failed": account.failed,
                    "lost": account.lost,
                    "out": account.produced,
                    "skipped": account.skipped,
                    "doubtful": account.doubtful,
                    "seconds": round(account.seconds, 3),
                }
                for account in self.ledger
            ],
            "undelivered": self.undelivered,
            "landed": conceal(self.landed),
            "dead_letters": self.dead_letters,
        }
