"""
Planted bugs of record processors, each found and shown by the shortest case.

The processors are scripts: a try takes milliseconds, and no process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

from etlstage.messages import StageKind
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.stage import Stage
from etlstage.testing import Case, Records, ScriptedLaunch
from etlstage.testing.fuzzing.fuzz import Found, Fuzzer, processor_cases, processor_ends
from etlstage.testing.fuzzing.oracle import FailureKind, Oracles
from etlstage.testing.fuzzing.shortening import shorten
from tests.testing.check.processors import Processor
from tests.testing.fuzzed import searched

pytestmark = pytest.mark.core

ONE: Final = Records((b"",))
ENDS: Final = processor_ends()


def search(*bugs: str, examples: int = 60, given: Sequence[Case] = ENDS) -> list[Found]:
    """Return the failures that are found in a script."""
    fuzzer = Fuzzer(
        Stage(
            name="worker",
            kind=StageKind.LOAD,
            worker=("no-such-program",),
            dialect=KclDialect(),
        ),
        processor_cases(),
        Oracles(),
        given=given,
        launch=ScriptedLaunch(lambda worker: Processor(*bugs)(worker)),
    )
    return searched(fuzzer, examples)


@pytest.mark.parametrize(
    ("bug", "kind", "shortest", "said"),
    [
        ("names another", FailureKind.BREAKS, [], "expected one for initialize"),
        ("answers twice", FailureKind.BREAKS, [Records()], "called twice?"),
        (
            "answers leaseLost twice",
            FailureKind.BREAKS,
            [Records(end="lost")],
            "sent a status after that of its last action",
        ),
        ("answers shardEnded twice", FailureKind.BREAKS, [], "called twice?"),
        ("invents numbers", FailureKind.BREAKS, [ONE], "was not delivered"),
        ("keeps doubles", FailureKind.BREAKS, [ONE], "was not delivered"),
        (
            "counts on",
            FailureKind.BREAKS,
            [Records((b"", b""))],
            "was not delivered, expected the number of a record",
        ),
        (
            "ignores the end of a shard",
            FailureKind.BREAKS,
            [],
            "answered shardEnded without a checkpoint",
        ),
        (
            "ends with a number",
            FailureKind.BREAKS,
            [ONE],
            "was stored before, and does not count",
        ),
        ("dies of no records", FailureKind.CRASHES, [Records()], "status 3"),
        (
            "dies of ThrottlingException",
            FailureKind.CRASHES,
            [Records((b"",), ("ThrottlingException",))],
            "status 3",
        ),
        (
            "dies of ShutdownException",
            FailureKind.CRASHES,
            [Records((b"",), ("ShutdownException",))],
            "status 3",
        ),
        (
            "ignores the end",
            FailureKind.HANGS,
            [Records(end="eof")],
            "did not exit after the end of its stdin",
        ),
        (
            "exits badly",
            FailureKind.CRASHES,
            [Records(end="lost")],
            "status 3",
        ),
        (
            "dies of three together",
            FailureKind.CRASHES,
            [Records((b"",) * 3, put_as_one=True)],
            "status 3",
        ),
    ],
)
def test_bug_is_found(
    bug: str, kind: FailureKind, shortest: list[Records], said: str
) -> None:
    """It is shrunk to its known minimum, which fails from a fresh start (issues 25, 26)."""
    found = search(bug)[0]
    assert (found.failure.kind, found.steady) == (kind, True), found
    assert found.case == Case((*shortest,))
    assert said in found.failure.what


@pytest.mark.parametrize(
    "found",
    [
        Records((b"a",), end="drain"),
        Records((b"",), ("ThrottlingException", "ShutdownException")),
        Records((b"a", b"b"), put_as_one=True, end="lost"),
    ],
)
def test_simplest_end_is_tried(found: Records) -> None:
    """Whatever is found first, the shortest case is the same (issue 26)."""

    def fails(case: Case) -> bool:
        return any(
            step.end in ("lost", "drain") or "ShutdownException" in step.errors
            for step in case.steps
            if isinstance(step, Records)
        )

    assert shorten(Case((Records((b"c",)), found)), fails) == Case(
        (Records(end="lost"),)
    )


def test_bug_before_the_end_of_stdin() -> None:
    """It is no crash of a processor that exits as it should (issue 26)."""
    case = Case((Records((b"",), end="eof"),))
    (found,) = search("invents numbers", examples=1, given=[case])
    assert found.failure.kind is FailureKind.BREAKS


def test_sound_processor_passes() -> None:
    """It does so whatever its checkpoints return, and however its life ends."""
    assert search() == []


def test_case_reads_as_a_program() -> None:
    """The printed text, and what is saved, are the same case (issue 25)."""
    step = Records((b"a", b"b"), ("ThrottlingException",), put_as_one=True, end="lost")
    case = Case((ONE, step))
    assert eval(repr(case)).to_plain() == case.to_plain()  # noqa: S307
    assert repr(case) == (
        "Case([Records([b'']), Records([b'a', b'b'],"
        " errors=['ThrottlingException'], put_as_one=True, end='lost')])"
    )
    assert Case.from_plain(case.to_plain()) == case
    assert [*case.written(KclDialect())] == [
        "1 record ''",
        "2 records 'a', 'b' put as one; checkpoint: ThrottlingException; end: lost",
        "the end of the shard",
    ]
