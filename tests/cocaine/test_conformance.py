"""The published framework and our own worker, examined by ``etlstage check``."""

from __future__ import annotations

import sys

import anyio
import pytest

from etlstage import Stage
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.testing.check import Finding, Subject, Verdict, check_worker

# Each of some thirty checks starts a worker or two.
pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

SHOUT = """
from etlstage.worker import cocaine

def shout(request, response):
    for chunk in request:
        response.write(chunk.upper())

cocaine.run({"transform": shout})
"""


def found(*command: str) -> dict[str, Finding]:
    """Return what is found in a worker, by the names of the checks."""
    stage = Stage(name="app", worker=command, dialect=CocaineDialect())
    findings = anyio.run(check_worker, Subject(stage, timeout=10))
    failed = [finding for finding in findings if finding.verdict is Verdict.FAILED]
    assert not failed, "\n".join(line for one in failed for line in one.lines())
    return {finding.check.name: finding for finding in findings}


def test_published_framework_keeps_to_the_protocol(framework: tuple[str, ...]) -> None:
    """It speaks one version, and drops its sessions at a terminate (issue 15)."""
    findings = found(*framework)
    verdicts = {name: finding.verdict for name, finding in findings.items()}
    assert verdicts["exits when heartbeats go unanswered"] is Verdict.PASSED
    advice = {name for name, said in verdicts.items() if said is Verdict.ADVICE}
    assert advice <= {
        "speaks both versions",
        "ends its sessions before it terminates",
    }
    assert findings["speaks both versions"].reason == "it does not speak version 0"


def test_worker_of_the_sdk_keeps_to_the_protocol() -> None:
    """It does so in both versions, and no check has any advice (issue 15)."""
    findings = found(sys.executable, "-c", SHOUT)
    assert [f for f in findings.values() if f.verdict is Verdict.ADVICE] == []
