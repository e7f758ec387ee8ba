"""
Checks of workers that extract: what Spark's reads, and restarts, rely on.

A range of offsets is read again if its first reading was lost, and adjacent ranges are
read by different processes: between them, nothing may be lost or read twice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import anyio

from etlstage.messages import counted
from etlstage.protocol.base import Shape
from etlstage.testing.check.speaking import (
    blame_a_buffer,
    ends,
    exits_on_SIGTERM,
    piped,
)
from etlstage.testing.check.suite import Advice, Check, NotApplicable, Subject
from etlstage.testing.conversation import WorkerMisbehaved, WorkerUnderTest
from etlstage.testing.transcript import BYTEWISE, Channel

__all__ = ("CHECKS",)

_WINDOW: Final = 60  # offsets that are checked from the first on
_LATER: Final = 5  # offsets that are checked before latest


# --- plain: it writes all, and exits --------------------------------------------------


async def writes_all_and_exits(subject: Subject) -> None:
    """The worker reads nothing, ends each message, and finally exits with status 0."""
    async with subject.start() as worker:
        outputs = await worker.outputs()
        if status := await worker.exited():
            worker.fail(
                f"exited with status {status}: the extraction counts as incomplete"
            )
        if worker.left:
            worker.fail("left processes behind, which had to be killed")
    if not outputs:
        raise Advice(
            "it extracted nothing; if it answers requests, set dialect.mode: cyclic"
        )


async def writes_the_same_again(subject: Subject) -> None:
    """It extracts the same messages each time: input is read again after a failure."""
    readings = []
    for _ in range(2):
        async with subject.start() as worker:
            readings.append(await worker.outputs())
    if readings[0] != readings[1]:
        raise Advice(_apart(*readings))


# --- cyclic: it is asked --------------------------------------------------------------


async def answers_a_request(subject: Subject) -> None:
    """
    Each request is answered while stdin is open.

    Flush stdout after each reply: the supervisor waits for its end.
    """
    if subject.ranges:
        subject.request = await _allowed(subject)
    async with subject.start() as worker:
        try:
            (reply,) = await worker.exchange([subject.request])
            subject.given = reply.outputs
        except WorkerMisbehaved as error:
            await blame_a_buffer(worker, error)
        # It is killed once it has done what it does after a reply: its output counts as
        # received only when it is asked again.
        with anyio.move_on_after(0.2 + subject.pace):
            await worker.exited()
        worker.examine()


async def repeats_what_was_not_received(subject: Subject) -> None:
    """
    A worker that keeps the offset repeats messages that were not received.

    The next request acknowledges the last reply: store the offset only then. A worker
    that is killed before that must give the same messages again.
    """
    first = subject.given
    if not first:
        raise NotApplicable("there was nothing to extract; give it something new")
    async with subject.start() as worker:
        (again,) = await worker.exchange([b""])
        if again.outputs[: len(first)] != first:
            worker.fail(
                "was killed after its reply, and then did not give the same messages"
                f" again: {_apart(first, again.outputs)}"
            )


async def writes_nothing_unsolicited(subject: Subject) -> None:
    """Only replies are written to stdout, one for each request."""
    async with subject.start() as worker:
        await worker.quiet(2 * subject.pace + 0.2)
        await subject.settle(worker)


async def accepts_many_requests(subject: Subject) -> None:
    """The worker answers any number of requests, even if there is nothing to give."""
    async with subject.start() as worker:
        for _ in range(20):
            await worker.exchange([subject.request])
        await subject.settle(worker)


async def accepts_requests_at_once(subject: Subject) -> None:
    """One read may return two requests; each has its own reply."""
    async with subject.start() as worker:
        await worker.exchange([subject.request] * 3)
        await subject.settle(worker)


# --- ranges of offsets ----------------------------------------------------------------


async def knows_its_latest_offset(subject: Subject) -> None:
    """
    The answer to ``{"offsets": "latest"}`` is one whole number, which never falls.

    No request and no stored position goes beyond it.
    """
    async with subject.start() as worker:
        before = await _offset(worker, "latest")
        if before is None:
            subject.advise(
                worker,
                "it refuses to report its latest offset: its stage needs offsets.end",
            )
        start = await _first(worker)
        if start < before:
            await worker.exchange([_range(start, start + 1)])
        for _ in range(2):
            latest = await _offset(worker, "latest")
            if latest is None or latest < before:
                worker.fail(
                    f"reported that {before} is its latest offset, then {latest}"
                )
            before = latest
        await subject.settle(worker)
    async with subject.start() as worker:
        latest = await _offset(worker, "latest")
        if latest is None or latest < before:
            worker.fail(
                f"reported that {before} is its latest offset, then {latest} in"
                " another process"
            )


async def repeats_a_range(subject: Subject) -> None:
    """The same range gives the same messages, in any order and in any process."""
    for start, end in await _windows(subject):
        whole = await _read(subject, start, end)
        async with subject.start() as worker:
            middle = (start + end) // 2
            parts = ((middle, end), (start, end), (start, middle))
            for first, last in (part for part in parts if part[0] < part[1]):
                (reply,) = await worker.exchange([_range(first, last)])
                if (first, last) == (start, end):
                    what = f"gave different messages for {start} to {end}"
                    _compare(worker, whole, reply.outputs, what)
            (reply,) = await worker.exchange([_range(start, end)])
            _compare(worker, whole, reply.outputs, f"{what} when asked again")


async def ranges_meet(subject: Subject) -> None:
    """
    Adjacent ranges give together what the whole range gives: no gap, no duplicates.

    A range includes its start and excludes its end.
    """
    for start, end in await _windows(subject):
        whole = await _read(subject, start, end)
        for step in sorted({1, 2, 7, max(1, (end - start) // 2)}):
            async with subject.start() as worker:
                parts: list[bytes] = []
                for first in range(start, end, step):
                    request = _range(first, min(first + step, end))
                    (reply,) = await worker.exchange([request])
                    parts += reply.outputs
                what = f"gave different messages for {start} to {end}, {step} at a time"
                _compare(worker, whole, tuple(parts), f"{what}, than for all at once")


async def repeats_what_was_cut_short(subject: Subject) -> None:
    """A worker that is killed within a range gives all of it when asked again."""
    for start, end in await _windows(subject):
        whole = await _read(subject, start, end)
        await _cut_short(subject, _range(start, end))
        async with subject.start() as worker:
            (reply,) = await worker.exchange([_range(start, end)])
            what = "gave different messages after it was killed in the middle"
            _compare(worker, whole, reply.outputs, what)


async def _cut_short(subject: Subject, request: bytes) -> None:
    async with subject.start() as worker:
        before = len(worker.transcript.of(Channel.STDOUT))
        await worker.hand_over([[request]])
        await worker.until(
            lambda: len(worker.transcript.of(Channel.STDOUT)) > before, "wrote nothing"
        )


async def accepts_requests_in_parts(subject: Subject) -> None:
    """
    A request may arrive in several reads.

    Keep the incomplete end of a read until the rest has arrived.
    """
    for start, end in (await _windows(subject))[:1]:
        whole = await _read(subject, start, end)
        for cuts in (BYTEWISE, range(3, 4), range(9, 2**62, 9)):
            async with subject.start() as worker:
                (reply,) = await worker.exchange([_range(start, end)], cuts=cuts)
                what = "gave different messages when the request came in parts"
                _compare(worker, whole, reply.outputs, what)


async def _allowed(subject: Subject) -> bytes:
    """Return a request for a range; for the latest offset, if there are no messages."""
    try:
        (start, _), *_ = await _windows(subject)
    except NotApplicable:
        return _asking("latest")
    return _range(start, start + 1)


def _asking(which: str) -> bytes:
    return json.dumps({"offsets": which}).encode()


def _range(start: int, end: int) -> bytes:
    return json.dumps({"start": start, "end": end}).encode()


async def _offset(worker: WorkerUnderTest, which: str) -> int | None:
    """Return an offset that the worker names, or None if it refuses to."""
    (reply,) = await worker.exchange([_asking(which)])
    if reply.refused is not None:
        return None
    try:
        (number,) = reply.outputs
        return int(number)
    except ValueError:
        outputs = counted(len(reply.outputs), "message")
        worker.fail(f"gave {outputs} as its {which} offset, expected one whole number")


async def _first(worker: WorkerUnderTest) -> int:
    try:
        initial = await _offset(worker, "initial")
    except WorkerMisbehaved:
        if worker.status is not None:
            raise
        return 0  # needed only where a pipeline asks for it
    return initial or 0


async def _windows(subject: Subject) -> list[tuple[int, int]]:
    """Return the ranges that are checked: the first offsets, and the last."""
    async with subject.start() as worker:
        try:
            latest = await _offset(worker, "latest")
        except WorkerMisbehaved:
            latest = None
    async with subject.start() as worker:
        try:
            start = await _first(worker)
        except WorkerMisbehaved:
            start = 0
    if latest is None:
        latest = start + _WINDOW
    if latest <= start:
        raise NotApplicable(f"there is nothing to extract before offset {latest}")
    windows = [(start, min(latest, start + _WINDOW))]
    if latest > start + _WINDOW:
        windows.append((max(start, latest - _LATER), latest))
    return windows


async def _read(subject: Subject, start: int, end: int) -> tuple[bytes, ...]:
    """Return what a fresh process gives for a range."""
    async with subject.start() as worker:
        (reply,) = await worker.exchange([_range(start, end)])
        if reply.refused is not None:
            worker.fail(f"refused the range {start} to {end}: {reply.refused}")
        return reply.outputs


def _compare(
    worker: WorkerUnderTest,
    whole: tuple[bytes, ...],
    other: tuple[bytes, ...],
    what: str,
) -> None:
    if other != whole:
        worker.fail(f"{what}: {_apart(whole, other)}")


def _apart(whole: Sequence[bytes], other: Sequence[bytes]) -> str:
    pairs = enumerate(zip(whole, other, strict=False))
    ends = min(len(whole), len(other))
    at = next((n for n, (one, two) in pairs if one != two), ends)
    one, two = (repr(m[at])[:60] if at < len(m) else "nothing" for m in (whole, other))
    return (
        f"{len(whole)} messages first, then {len(other)}; message {at + 1} was {one},"
        f" then {two}"
    )


def _plain(subject: Subject) -> str:
    return "" if subject.shape is Shape.STREAM else "it answers requests"


def _asked(subject: Subject) -> str:
    return "it answers no requests" if subject.shape is Shape.STREAM else ""


def _keeps(subject: Subject) -> str:
    if subject.ranges:
        return "the supervisor keeps the offset"
    return _asked(subject)


def _ranged(subject: Subject) -> str:
    return "" if subject.ranges else "it is not asked for ranges of offsets"


CHECKS: Final = (
    Check(writes_all_and_exits, gate=True, when=_plain),
    Check(writes_the_same_again, when=_plain),
    Check(answers_a_request, gate=True, when=_asked),
    # Before any other check: the second request in a process moves the offset.
    Check(repeats_what_was_not_received, gate=True, when=_keeps),
    Check(writes_nothing_unsolicited, when=_asked),
    Check(accepts_many_requests, when=_asked),
    Check(accepts_requests_at_once, when=_asked),
    Check(knows_its_latest_offset, when=_ranged),
    Check(repeats_a_range, when=_ranged),
    Check(ranges_meet, when=_ranged),
    Check(repeats_what_was_cut_short, when=_ranged),
    Check(accepts_requests_in_parts, when=_ranged),
    Check(ends, when=lambda subject: _asked(subject) or piped(subject)),
    Check(exits_on_SIGTERM, when=_asked),
)
