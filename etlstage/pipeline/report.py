"""The outcome of a run, for a human and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

from etlstage.messages import StageKind
from etlstage.pipeline.interfaces import Output
from etlstage.pipeline.ledger import Account, Ledger
from etlstage.pipeline.secret import Secrets

__all__ = ("KeptLetters", "Report", "Status")

Status: TypeAlias = Literal["done", "failed", "drained", "forced"]


class KeptLetters(NamedTuple):
    """The dead letters of a run."""

    messages: int = 0
    where: str | None = None
    """The folder that has them, if there are any."""
    command: str | None = None
    """What shows them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a run did, and what it loaded."""

    name: str
    run: str
    """What sets this run apart; dead letters bear it, too."""
    status: Status
    """``done``: everything loaded. ``failed``: see ``error``. ``drained``: extraction
    was stopped, what was extracted is loaded. ``forced``: stopped in the middle."""
    error: Exception | None
    started: datetime
    """In UTC."""
    ended: datetime
    """In UTC."""
    seconds: float
    ledger: Ledger
    landed: str
    """What reached the destination, in one line."""
    output: Output
    """The destination."""
    dead_letters: KeptLetters = field(default_factory=KeptLetters)
    secrets: Secrets = field(default_factory=Secrets, repr=False)
    """What is not to be shown of ``error``, ``landed`` and places."""

    @property
    def undelivered(self) -> int:
        """Messages in flight between two stages when the run ended."""
        return self.ledger.undelivered

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON, without secrets."""
        concealed = self.secrets.concealed
        return {
            "pipeline": self.name,
            "run": self.run,
            "status": self.status,
            "error": concealed(str(self.error)) if self.error is not None else None,
            "started": self.started.isoformat(timespec="milliseconds"),
            "ended": self.ended.isoformat(timespec="milliseconds"),
            "seconds": round(self.seconds, 3),
            "stages": [_stage(account) for account in self.ledger],
            "edges": [_edge(a, b) for a, b in pairwise(self.ledger)],
            "output": {
                **concealed(self.output._asdict()),
                "messages": self.ledger[-1].made,
                "text": concealed(self.landed),
            },
            "dead_letters": concealed(self.dead_letters._asdict()),
        }


def _stage(account: Account) -> dict[str, Any]:
    return {
        "stage": account.stage,
        "kind": account.kind.value,
        "in": None if account.kind is StageKind.EXTRACT else account.received,
        "out": account.made,
        "done": account.done,
        "dead": account.dead,
        "failed": account.failed,
        "lost": account.lost,
        "skipped": account.skipped,
        "doubtful": account.doubtful,
        "restarts": account.restarts,
        "failures": account.failures,
        "seconds": round(account.seconds, 3),
    }


def _edge(start: Account, end: Account) -> dict[str, Any]:
    return {
        "name": f"{start.stage} -> {end.stage}",
        "from": start.stage,
        "to": end.stage,
        "messages": end.received,
        "undelivered": start.produced - end.received,
    }
