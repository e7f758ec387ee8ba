"""Check a worker and return what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage
from etlstage.testing.check import Finding, Subject, Verdict, check_worker

__all__ = ("checked", "failures", "said")


def checked(
    command: Sequence[str | Path],
    *,
    kind: StageKind = StageKind.TRANSFORM,
    mode: Mode = Mode.SINGLE,
    stage: dict[str, Any] | None = None,
    timeout: float = 10,
    **subject: Any,  # noqa: ANN401
) -> list[Finding]:
    """Return all findings; a worker that hangs is to be given less time."""
    made = Stage(
        name="w",
        command=tuple(map(str, command)),
        kind=kind,
        dialect=MarkerDialect(mode=mode),
        **(stage or {}),
    )
    return anyio.run(check_worker, Subject(made, timeout=timeout, **subject))


def said(findings: Sequence[Finding], verdict: Verdict) -> dict[str, str]:
    """Return the reasons of those with that verdict, by name."""
    return {
        finding.check.name: finding.reason
        for finding in findings
        if finding.verdict is verdict
    }


def failures(findings: Sequence[Finding]) -> dict[str, str]:
    """Return what has failed, and why."""
    return said(findings, Verdict.FAILED)
