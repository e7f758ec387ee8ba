"""Checks of workers of dialect ``marker``, in addition to those of any dialect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from etlstage.messages import Run, StageKind
from etlstage.protocol.marker import Markers
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage.stage import Stage
from etlstage.testing.check.speaking import takes
from etlstage.testing.check.suite import Advice, Check, NotApplicable, Subject
from etlstage.testing.conversation import WorkerMisbehaved
from etlstage.testing.dialect import kit_of

__all__ = ("CHECKS",)

_BYTES: Final = Markers(b"\x1e", b"\x1d", b"\x1c", b"\x06", b"\x1f")
_WORDS: Final = Markers(b"<EOM>", b"[EOP]", b"(EOB)", b"{BNC}", b"/ERR/")


async def accepts_every_byte(subject: Subject) -> None:
    """A message may have any byte that is not a marker; it is answered or refused."""
    markers = _dialect(subject).markers
    unused = set(range(256)) - set(b"".join(markers.named.values()))
    await takes(subject, bytes(sorted(unused)))


async def reads_its_markers_from_the_environment(subject: Subject) -> None:
    """
    The worker reads its markers from ``ETLSTAGE_EOM`` and so on: a stage may set them.

    Other markers are needed only if messages may contain the default ones.
    """
    await _speaks(subject, _BYTES, "markers other than the default ones")


async def accepts_markers_of_several_bytes(subject: Subject) -> None:
    """
    A marker may have several bytes, which may arrive in several reads.

    Also look for it across the end of the previous read.
    """
    try:
        await _speaks(subject, _BYTES, "")
    except Advice:
        raise NotApplicable("it does not speak other markers") from None
    stage = await _speaks(subject, _WORDS, "markers of more than one byte")
    run = subject.messages(2)
    raw = kit_of(stage.dialect).raw(run)
    expected = await subject.expected([run], stage=stage)
    for marker in (_WORDS.eom, _WORDS.eob):
        at = raw.find(marker)
        if at < 0:
            continue
        for place in range(at + 1, at + len(marker)):
            async with subject.start(stage) as worker:
                replies = await worker.exchange(run, cuts=(place,))
                if len(replies) != len(expected) or await subject.differs(
                    [run], replies, stage=stage
                ):
                    worker.fail("replied differently when a marker was read in parts")


async def _speaks(subject: Subject, markers: Markers, which: str) -> Stage:
    """Return the stage with these markers, if the worker can speak them."""
    dialect = _dialect(subject)
    if dialect.markers.eop == dialect.markers.eom:
        markers = markers._replace(eop=markers.eom)
    if dialect.markers.err is None:
        markers = markers.without_err()
    stage = replace(subject.stage, dialect=replace(dialect, markers=markers))
    runs: Sequence[Run] = [[message] for message in subject.messages(2)]
    own = await subject.expected(runs)
    async with subject.start(stage) as worker:
        # Most workers that do not speak them are silent.
        worker.timeout = min(worker.timeout, 1 + 4 * subject.pace)
        try:
            replies = [r for run in runs for r in await worker.exchange(run)]
            same = len(replies) == len(own)
            await subject.settle(worker)
        except WorkerMisbehaved:
            same = False
        if not same:
            subject.advise(worker, f"it does not speak {which}")
    return stage


def _dialect(subject: Subject) -> MarkerDialect:
    assert isinstance(subject.dialect, MarkerDialect)
    return subject.dialect


def _fed(subject: Subject) -> str:
    return "for workers that are given messages" if _extracts(subject) else ""


def _extracts(subject: Subject) -> bool:
    return subject.stage.kind is StageKind.EXTRACT


def _default(subject: Subject) -> str:
    if _dialect(subject).markers.without_err() != Markers(err=None):
        return "its stage sets markers of its own"
    return _fed(subject)


CHECKS: Final = (
    Check(accepts_every_byte, when=_fed),
    Check(reads_its_markers_from_the_environment, when=_default),
    Check(accepts_markers_of_several_bytes, when=_default),
)
