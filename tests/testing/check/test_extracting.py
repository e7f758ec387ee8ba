"""Bugs that workers have when they extract, each found by the check about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest

from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.testing import ScriptedWorker
from etlstage.testing.check import Finding, Verdict, extracting
from etlstage.testing.scripted import Script
from tests.testing.check import extractors as x
from tests.testing.check.checked import checked, failures, said, scripted

GIVES_AGAIN: Final = "repeats a range"
LATEST: Final = "knows its latest offset"
OWES: Final = "has 1 reply outstanding: timed out after 3 seconds"

OF_RANGES: Final = [
    (x.EndInRange, "ranges meet", "1 at a time, than for all at once: "),
    (x.StartNotInRange, "ranges meet", "1 at a time, than for all at once: "),
    (x.TenAPage, "ranges meet", "1 at a time, than for all at once: "),
    (x.LosesLast, "ranges meet", "2 at a time, than for all at once: "),
    (
        x.SkipsRepeated,
        GIVES_AGAIN,
        "gave different messages for 0 to 45 when asked again: ",
    ),
    (x.GoesOn, GIVES_AGAIN, "gave different messages for 0 to 45: "),
    (x.NoOrder, GIVES_AGAIN, "gave different messages for 0 to 45"),
    (x.GivesOnce, GIVES_AGAIN, "gave different messages for 0 to 45: "),
    (
        x.MarksOnDisk,
        GIVES_AGAIN,
        "45 messages first, then 0; message 1 was b'line 0', then not",
    ),
    (x.RefusesMany, GIVES_AGAIN, "refused the range 0 to 45: too many"),
    (
        x.Resumes,
        "repeats what was cut short",
        "gave different messages after it was killed in",
    ),
    (x.FallingLatest, LATEST, "reported that 44 is its latest offset, then 41"),
    (x.WaveringLatest, LATEST, "reported that 45 is its latest offset, then 44"),
    (x.OtherLatest, LATEST, "is its latest offset, then 43 in another process"),
    (x.LatestInWords, LATEST, "gave 1 message as its latest offset, expected one who"),
    (x.DiesAtInitial, LATEST, "exited with status 4"),
    (x.ReadIsRequest, "accepts requests in parts", "exited with status 1"),
    (
        x.OneARead,
        "accepts requests at once",
        "has 2 replies outstanding: timed out after 3 seconds",
    ),
    (x.NothingWithoutOutput, "answers a request", OWES),
    (x.Buffers, "answers a request", "replied only when its stdin was closed: flush"),
    (x.EndsTwice, "answers a request", "wrote 1 reply too many: <EOP>"),
    (x.OneIsEnough, "accepts many requests", "exited with status 0"),
    (x.Greets, "writes nothing unsolicited", "wrote unsolicited output: extracting"),
    (x.StaysOn, "ends", "did not exit: timed out after 3 seconds"),
    (x.Stubborn, "exits on SIGTERM", "did not exit: timed out after 3 seconds"),
]

OF_KEEPERS: Final = [
    (
        x.StoresFirst,
        "repeats what was not received",
        "did not give the same messages again: 45 messages first, then 0",
    ),
    (x.NothingNew, "accepts many requests", OWES),
]


async def ends_with_eop(worker: ScriptedWorker) -> None:
    """Write EOP at the end, as if all were a reply."""
    await worker.reply(b"a", b"b")


async def fails_in_the_middle(worker: ScriptedWorker) -> int:
    """Write half of a source, and fail."""
    await worker.write(b"a\n")
    return 1


async def ends_in_a_message(worker: ScriptedWorker) -> None:
    """Forget the last EOM."""
    await worker.write(b"a\nb")


PLAIN: Final = [
    (ends_with_eop, "the worker works in cycles; set dialect.mode: cyclic"),
    (fails_in_the_middle, "exited with status 1: the extraction counts as incomplete"),
    (ends_in_a_message, "ended its output with incomplete data: b"),
]


def cyclic(extractor: type[x.Ranges], *, ranges: bool = True) -> list[Finding]:
    """Return the findings about a worker that answers requests."""
    disk: dict[Any, int] = {}
    return scripted(
        lambda worker: extractor(worker, disk).run(),
        kind=StageKind.EXTRACT,
        mode=Mode.CYCLIC,
        ranges=ranges,
        timeout=3,
    )


def plain(program: Script | Sequence[str]) -> list[Finding]:
    """Return the findings about a worker that writes all and exits."""
    if callable(program):
        return scripted(program, kind=StageKind.EXTRACT, mode=Mode.PLAIN)
    return checked(program, kind=StageKind.EXTRACT, mode=Mode.PLAIN)


@pytest.mark.parametrize(("bug", "name", "reason"), OF_RANGES)
def test_bug_of_ranges_is_found(bug: type[x.Ranges], name: str, reason: str) -> None:
    """Spark's reads rely on ranges, and so do restarts (issue 12)."""
    assert reason in failures(cyclic(bug))[name]


@pytest.mark.parametrize(("bug", "name", "reason"), OF_KEEPERS)
def test_bug_of_a_worker_that_keeps_the_offset_is_found(
    bug: type[x.Ranges], name: str, reason: str
) -> None:
    """Nothing may be lost when the worker is killed (issue 12)."""
    assert reason in failures(cyclic(bug, ranges=False))[name]


@pytest.mark.parametrize(("program", "reason"), PLAIN)
def test_bug_of_a_plain_extraction_is_found(program: Script, reason: str) -> None:
    """Only its exit shows that it is complete (issue 12)."""
    assert reason in failures(plain(program))["writes all and exits"]


def test_plain_extraction_that_leaves_a_process_behind_is_found() -> None:
    """That process would be killed in the middle of its work (issue 12)."""
    findings = plain(["sh", "-c", "sleep 60 & echo a"])
    assert "left processes behind" in failures(findings)["writes all and exits"]


def test_every_check_has_a_bug_that_it_finds() -> None:
    """A new check needs a row in a table (issue 12)."""
    found = {name for _, name, _ in [*OF_RANGES, *OF_KEEPERS]}
    only_advice = {"writes the same again"}
    names = {check.name for check in extracting.CHECKS}
    assert found | {"writes all and exits"} == names - only_advice


@pytest.mark.parametrize("count", [45, 200])
@pytest.mark.parametrize("sound", [x.Ranges, x.NoInitial, x.Keeper, x.Grows])
def test_worker_without_a_bug_passes(
    count: int, sound: type[x.Ranges], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without planted bugs there is neither a failure nor advice (issue 12)."""
    monkeypatch.setattr(x.Ranges, "count", count)
    findings = cyclic(sound, ranges=not issubclass(sound, x.Keeper))
    assert failures(findings) == said(findings, Verdict.ADVICE) == {}


@pytest.mark.parametrize("first", [0, 100])
@pytest.mark.parametrize("count", [0, 1, 2, 30, 200])
def test_range_is_one_that_a_supervisor_requests(
    first: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not empty, and between the initial and the latest offset (issue 26)."""
    monkeypatch.setattr(x.Strict, "first", first)
    monkeypatch.setattr(x.Strict, "count", count)
    findings = cyclic(x.Strict)
    assert failures(findings) == said(findings, Verdict.ADVICE) == {}
    skipped = said(findings, Verdict.NOT_APPLICABLE)
    assert (GIVES_AGAIN in skipped) is (count == 0)


def test_worker_that_extracts_nothing_is_reported() -> None:
    """It may be waiting for requests (issue 12)."""
    findings = plain(["true"])
    assert "mode: cyclic" in said(findings, Verdict.ADVICE)["writes all and exits"]


def test_plain_worker_that_never_writes_the_same_is_reported() -> None:
    """After a failure it is run again from its beginning (issue 12)."""

    async def count(worker: ScriptedWorker) -> None:
        await worker.write(b"a\n%d\n" % worker.pid)

    findings = plain(count)
    assert failures(findings) == {}
    advice = said(findings, Verdict.ADVICE)["writes the same again"]
    assert "2 messages first, then 2; message 2 was b'" in advice


def test_worker_that_does_not_know_latest_is_reported() -> None:
    """Its stage needs ``end`` (issue 12)."""
    findings = cyclic(x.UnknownLatest)
    assert "needs offsets.end" in said(findings, Verdict.ADVICE)[LATEST]
    assert failures(findings) == {}


def test_ranges_are_looked_at_although_no_offset_is_known() -> None:
    """One check fails, and the others are made all the same (issue 12)."""
    findings = cyclic(x.NoOffsets)
    assert list(failures(findings)) == [LATEST]
    passed = said(findings, Verdict.PASSED)
    assert {GIVES_AGAIN, "ranges meet", "accepts requests in parts"} <= passed.keys()


def test_nothing_to_extract_is_reported() -> None:
    """A check that had nothing to look at has not passed (issue 12)."""

    class Empty(x.Ranges):
        count = 0

    skipped = said(cyclic(Empty), Verdict.NOT_APPLICABLE)
    assert skipped[GIVES_AGAIN] == "there is nothing to extract before offset 0"
