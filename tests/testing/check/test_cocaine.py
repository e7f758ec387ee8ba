"""The checks of dialect ``cocaine``, and what they find."""

from __future__ import annotations

import pytest

from etlstage.messages import StageKind
from etlstage.protocol.cocaine import CocaineVersion
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.testing.check import Finding, Verdict
from tests.testing.check.checked import failures, said, scripted
from tests.testing.check.sessions import (
    ADVISED,
    PLANTED,
    Extracting,
    Loading,
    Refusing,
    Worker,
)


def found(
    worker: type[Worker], *only: str, dialect: CocaineDialect | None = None
) -> list[Finding]:
    """Return the findings about a scripted worker."""
    return scripted(worker.script, dialect=dialect or CocaineDialect(), only=only)


@pytest.mark.parametrize("version", [v for v in CocaineVersion if v.words is not None])
def test_worker_that_keeps_to_the_protocol_passes(version: CocaineVersion) -> None:
    """It does so in each version of the protocol (issue 15)."""
    dialect = CocaineDialect(protocol=version)
    findings = found(Worker, dialect=dialect)
    assert failures(findings) == {}
    assert said(findings, Verdict.ADVICE) == {}
    assert len(said(findings, Verdict.PASSED)) >= 26


@pytest.mark.parametrize(
    ("worker", "kind", "ranges", "why_not"),
    [
        (Loading, StageKind.LOAD, False, {"ends": "for workers that have pipes"}),
        (
            Extracting,
            StageKind.EXTRACT,
            False,
            {
                "writes all and exits": "it answers requests",
                "ranges meet": "it is not asked for ranges of offsets",
            },
        ),
        (
            Extracting,
            StageKind.EXTRACT,
            True,
            {"writes all and exits": "it answers requests"},
        ),
    ],
    ids=["load", "extract", "ranges"],
)
def test_worker_of_another_kind_passes(
    worker: type[Worker], kind: StageKind, ranges: bool, why_not: dict[str, str]
) -> None:
    """Checks that make no sense for a kind are left out, with the reason (issue 15)."""
    dialect = CocaineDialect()
    findings = scripted(worker.script, dialect=dialect, kind=kind, ranges=ranges)
    assert failures(findings) == {}
    assert said(findings, Verdict.ADVICE) == {}
    assert said(findings, Verdict.NOT_APPLICABLE).items() >= why_not.items()
    assert len(said(findings, Verdict.PASSED)) >= 22


@pytest.mark.parametrize("version", [v for v in CocaineVersion if v.words is not None])
def test_worker_that_refuses_every_session_is_checked_to_the_end(
    version: CocaineVersion,
) -> None:
    """It may end a session before we have ended our half of it (issue 26)."""
    findings = found(Refusing, dialect=CocaineDialect(protocol=version))
    assert failures(findings) == {}
    passed = said(findings, Verdict.PASSED)
    assert passed.keys() >= {
        "accepts heartbeats at any time",
        "accepts sessions that overlap",
        "answers while others wait",
        "accepts a session that is cancelled",
        "ends its sessions before it terminates",
    }


@pytest.mark.parametrize(
    ("worker", "name", "reason"),
    [(worker, *why) for worker, why in PLANTED.items()],
    ids=[worker.__name__[1:] for worker in PLANTED],
)
def test_planted_bug_is_found(worker: type[Worker], name: str, reason: str) -> None:
    """The check about it fails, for the right reason (issue 15)."""
    failed = failures(found(worker, name))
    assert list(failed) == [name]
    assert reason in failed[name]


@pytest.mark.parametrize(
    ("worker", "name", "reason"),
    [(worker, *why) for worker, why in ADVISED.items()],
    ids=[worker.__name__[1:] for worker in ADVISED],
)
def test_what_frameworks_do_is_advice(
    worker: type[Worker], name: str, reason: str
) -> None:
    """A supervisor can live with it (issue 15)."""
    findings = found(worker, name)
    assert failures(findings) == {}
    assert reason in said(findings, Verdict.ADVICE)[name]


def test_heart_that_stops_is_a_failure_where_there_is_time_to_see_it() -> None:
    """Otherwise the reason names the timeout that would do (issue 15)."""
    check = "sends heartbeats"
    findings = found(Worker, check)
    assert failures(findings) == {}
    assert said(findings, Verdict.NOT_APPLICABLE)[check].endswith(
        "and may take 30 s: to wait as long, set --timeout 30"
    )
    findings = found(Worker, check, dialect=CocaineDialect(heartbeat=0.2))
    assert "did not send a second heartbeat" in failures(findings)[check]


def test_failure_shows_the_frames() -> None:
    """The transcript has their names and arguments (issue 15)."""
    (worker,) = [w for w in PLANTED if w.__name__ == "_SaysMore"]
    findings = found(worker, check := "writes nothing after the end")
    (finding,) = (item for item in findings if item.check.name == check)
    transcript = finding.transcript.replace(" | ", "; ")
    lines = [line.split(maxsplit=1)[1] for line in transcript.splitlines()]
    assert lines[1:4] == [
        "recv    handshake 'uuid'; heartbeat",
        "sent    heartbeat; invoke 2 'transform'; chunk 2 'one'; choke 2",
        "recv    chunk 2 'ONE'; choke 2; chunk 2 'more'",
    ]
