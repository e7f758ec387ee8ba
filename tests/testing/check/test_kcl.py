"""What the checks find in record processors."""

from __future__ import annotations

from typing import Any

import pytest

from etlstage.messages import StageKind
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.testing.check import Finding, Verdict
from etlstage.testing.check.kcl import CHECKS
from tests.testing.check.checked import failures, said, scripted
from tests.testing.check.processors import Processor

pytestmark = pytest.mark.core


def found(*bugs: str, **more: Any) -> list[Finding]:  # noqa: ANN401 - passed on
    """Return the findings about a processor with these bugs."""
    return scripted(Processor(*bugs), kind=StageKind.LOAD, dialect=KclDialect(), **more)


def test_good_processor_passes() -> None:
    """It passes all checks of its dialect, and no others are made."""
    findings = found()
    assert [finding.check for finding in findings] == [*CHECKS]
    assert {
        f.check.name: f.reason for f in findings if f.verdict is not Verdict.PASSED
    } == {}


@pytest.mark.parametrize(
    ("bug", "name", "reason"),
    [
        ("names another", "initializes", "sent a status for nothing, expected one for"),
        ("names none", "initializes", "sent a status that names no action"),
        ("dies of initialize", "initializes", "exited with status 3"),
        ("hangs in initialize", "initializes", "did not answer initialize within 2 s"),
        ("hangs in leaseLost", "initializes", "did not answer leaseLost"),
        (
            "hangs in processRecords",
            "answers each action once",
            "did not answer processRecords",
        ),
        (
            "leaves after a batch",
            "answers each action once",
            "closed stdout between two actions",
        ),
        (
            "checkpoints between actions",
            "answers each action once",
            "asked for a checkpoint with no action in flight",
        ),
        (
            "does not wait",
            "answers each action once",
            "before it had the answer to a checkpoint",
        ),
        ("goes back", "checkpoints what was delivered", "is before the last one"),
        (
            "dies of shutdownRequested",
            "answers a request to shut down",
            "exited with status 3",
        ),
        (
            "begins at the beginning only",
            "begins at any checkpoint",
            "exited with status 3",
        ),
        ("dies of no data", "accepts records without data", "exited with status 3"),
        ("exits badly", "initializes", "exited with status 3 after its last action"),
        ("answers twice", "answers each action once", "is a callback called twice?"),
        *(
            (
                f"answers {action} twice",
                "answers each action once",
                "sent a status after that of its last action, expected one for each",
            )
            for action in ("leaseLost", "shardEnded")
        ),
        (
            "invents numbers",
            "checkpoints what was delivered",
            "which was not delivered or is before the last one",
        ),
        (
            "keeps doubles",
            "checkpoints what was delivered",
            "which was not delivered, expected the number of a record",
        ),
        (
            "floods stdout",
            "answers each action once",
            "wrote over 1,048,576 bytes to stdout that are not messages",
        ),
        (
            "checkpoints behind its status",
            "lets go of a lost lease",
            "asked for a checkpoint after the status of leaseLost",
        ),
        (
            "counts on",
            "checkpoints what was delivered",
            "which was not delivered, expected the number of a record",
        ),
        (
            "ignores the end of a shard",
            "checkpoints the end of a shard",
            "answered shardEnded without a checkpoint",
        ),
        (
            "ends with a number",
            "checkpoints the end of a shard",
            "that of the last record was stored before, and does not count",
        ),
        (
            "needs records to end",
            "checkpoints the end of an empty shard",
            "answered shardEnded without a checkpoint",
        ),
        (
            "tries once",
            "checkpoints the end again when throttled",
            "again after ThrottlingException",
        ),
        ("dies of ThrottlingException", "survives throttling", "exited with status 3"),
        (
            "dies of KinesisClientLibDependencyException",
            "survives a store that fails",
            "exited with status 3",
        ),
        ("dies of ShutdownException", "survives a lost lease", "exited with status 3"),
        ("insists", "survives a lost lease", "tried a checkpoint again"),
        (
            "checkpoints behind leaseLost",
            "lets go of a lost lease",
            "asked for a checkpoint after leaseLost: InvalidStateException",
        ),
        ("ignores the end", "exits when stdin ends", "did not exit"),
        ("waits for ever", "exits when an answer does not come", "did not exit"),
        (
            "hangs in processRecords",
            "exits when an answer does not come",
            "did not answer processRecords",
        ),
        ("dies of no records", "accepts no records", "exited with status 3"),
        ("checkpoints None", "accepts no records", "asked for a checkpoint at None"),
        ("dies of many", "accepts many records", "exited with status 3"),
        ("dies of keys", "accepts keys beyond ascii", "exited with status 3"),
        (
            "forgets sub-sequence numbers",
            "begins within records that were put as one",
            "which was not delivered or is before the last one",
        ),
        (
            "takes no sub-sequence number",
            "begins within records that were put as one",
            "exited with status 3",
        ),
    ],
)
def test_planted_bug_is_found(bug: str, name: str, reason: str) -> None:
    """The check about it fails."""
    assert reason in failures(found(bug, only=[name], timeout=2))[name]


@pytest.mark.parametrize(
    ("bug", "name", "reason"),
    [
        (
            "prints",
            "writes nothing else to stdout",
            "1 line on stdout that no daemon understands",
        ),
        (
            "never checkpoints",
            "checkpoints at all",
            "it checkpoints only at the end of a shard",
        ),
        (
            "dies of NullPointerException",
            "survives an unknown error",
            "exited with status 3",
        ),
        (
            "ignores a request",
            "answers a request to shut down",
            "it leaves 3 records without a checkpoint",
        ),
    ],
)
def test_what_its_author_should_know(bug: str, name: str, reason: str) -> None:
    """Bugs that break nothing are advice."""
    bugs = [bug, *["never checkpoints"] * (bug == "ignores a request")]
    assert reason in said(found(*bugs, only=[name]), Verdict.ADVICE)[name]


def test_processor_whose_checkpoints_are_refused_has_checkpointed() -> None:
    """Only the check about what it asks for is about them (issue 26)."""
    name = "checkpoints at all"
    assert name in said(found("invents numbers", only=[name]), Verdict.PASSED)


def test_checks_that_need_checkpoints() -> None:
    """They don't apply to a processor that never checkpoints."""
    missed = said(found("never checkpoints"), Verdict.NOT_APPLICABLE)
    assert missed.keys() == {
        "survives throttling",
        "survives a store that fails",
        "survives a lost lease",
        "survives an unknown error",
        "exits when an answer does not come",
    }
