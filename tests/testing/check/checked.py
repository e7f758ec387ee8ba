"""Check a worker and return what came of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio

from etlstage.messages import StageKind
from etlstage.protocol.base import Dialect
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.testing import ScriptedLaunch, run_virtually
from etlstage.testing.check import Finding, Subject, Verdict, check_worker, suite
from etlstage.testing.check.suite import Check
from etlstage.testing.scripted import Script
from tests.staged import staged

__all__ = ("checked", "failures", "said", "scripted")

_checks = suite._checks


def checked(
    command: Sequence[str | Path],
    *,
    kind: StageKind = StageKind.TRANSFORM,
    mode: Mode = Mode.SINGLE,
    markers: Markers | None = None,
    dialect: Dialect | None = None,
    stage: dict[str, Any] | None = None,
    timeout: float = 10,
    only: Collection[str] = (),
    **subject: Any,  # noqa: ANN401
) -> list[Finding]:
    """
    Return all findings; a worker that hangs is to be given less time.

    The time of a script is virtual.

    Args:
        command: The worker.
        kind: Of the stage.
        mode: Of dialect marker.
        markers: Of the same, if they are chosen.
        dialect: If it is another one.
        stage: More of the stage.
        timeout: How long it may take for anything, in seconds.
        only: The checks that are made beside gates, by name; none: all.
        subject: More of the subject.

    """
    made = staged(
        tuple(map(str, command)),
        name="w",
        kind=kind,
        dialect=dialect or MarkerDialect(mode=mode, markers=markers or Markers()),
        **(stage or {}),
    )

    def wanted(subject: Subject) -> list[Check]:
        checks = _checks(subject)
        return [c for c in checks if not only or c.gate or c.name in only]

    virtual = isinstance(subject.get("launch"), ScriptedLaunch)
    run = run_virtually if virtual else anyio.run
    with patch.object(suite, "_checks", wanted):
        return run(check_worker, Subject(made, timeout=timeout, **subject))


def scripted(
    script: Script,
    *,
    timeout: float = 5,
    **subject: Any,  # noqa: ANN401
) -> list[Finding]:
    """Return what is found in a worker that is a script."""
    launch = ScriptedLaunch(script)
    return checked(["no-such-program"], timeout=timeout, launch=launch, **subject)


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
