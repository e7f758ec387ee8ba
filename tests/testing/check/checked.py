"""Check a worker, and return the findings."""

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
    Return all findings; a worker that hangs should be given a shorter ``timeout``.

    The time of a script is virtual.

    Args:
        command: The worker's command.
        kind: The stage's kind.
        mode: The mode of dialect marker.
        markers: The markers of dialect marker, if not the defaults.
        dialect: Another dialect, in place of marker.
        stage: More settings of the stage.
        timeout: The subject's time limit, in seconds.
        only: Names of the checks to be made besides gates; empty: all.
        subject: More settings of the subject.

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
    """Return the findings about a worker that is a script."""
    launch = ScriptedLaunch(script)
    return checked(["no-such-program"], timeout=timeout, launch=launch, **subject)


def said(findings: Sequence[Finding], verdict: Verdict) -> dict[str, str]:
    """Return the reasons of the findings with that verdict, by the checks' names."""
    return {
        finding.check.name: finding.reason
        for finding in findings
        if finding.verdict is verdict
    }


def failures(findings: Sequence[Finding]) -> dict[str, str]:
    """Return the reasons of the checks that failed, by their names."""
    return said(findings, Verdict.FAILED)
