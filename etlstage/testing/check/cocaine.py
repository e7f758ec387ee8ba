"""
Checks of workers of dialect ``cocaine``, in addition to those of any dialect.

Frameworks differ in how they end. If some don't do what the document asks for, it is a
failure only where a supervisor can't live with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from etlstage.errors import LocalProtocolError
from etlstage.messages import Run, counted
from etlstage.protocol.cocaine import CocaineSession, CocaineVersion
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.protocol.events import (
    Added,
    Alive,
    Cancelled,
    Ended,
    Farewell,
    Noise,
    Opened,
)
from etlstage.stage.stage import Stage
from etlstage.testing.check.speaking import takes
from etlstage.testing.check.suite import Check, NotApplicable, Subject
from etlstage.testing.conversation import WorkerMisbehaved, WorkerUnderTest
from etlstage.testing.dialect import ready
from etlstage.transport.base import describe_status

__all__ = ("CHECKS",)

_MOMENT: Final = 0.1  # seconds within which an extra frame would come
_NUMBERS: Final = (1, 126, 300, 70_000, 2**33)
_TRACE: Final = tuple(
    (name, bytes(range(1, 9))) for name in (b"trace_id", b"span_id", b"parent_id")
)
_LATE: Final = re.compile(rb"frame (\d+) for session (\d+)")
_PATIENT: Final = 60.0  # seconds: no framework waits longer for a heartbeat

# --- how it begins, stays alive, and ends ---------------------------------------------


async def announces_itself(subject: Subject) -> None:
    """
    The worker connects to --endpoint, sends its --uuid, and then a heartbeat.

    After its first heartbeat it may receive sessions.
    """
    async with subject.start() as worker:
        await worker.quiet(_MOMENT)
        await subject.settle(worker)


async def sends_heartbeats(subject: Subject) -> None:
    """A worker without a heartbeat within ``timeout.heartbeat`` is killed."""
    most = _dialect_of(subject).heartbeat
    async with subject.start() as worker:
        worker.timeout = min(subject.timeout, most)
        try:
            await worker.until(
                lambda: any(isinstance(event, Alive) for event in worker.events),
                "did not send a second heartbeat",
            )
        except WorkerMisbehaved:
            if worker.broken or worker.status is not None or worker.timeout == most:
                raise
            raise NotApplicable(
                f"it did not send a second heartbeat within {worker.timeout:g} s, and"
                f" may take {most:g} s: to wait as long, set --timeout {most:g}"
            ) from None


async def accepts_heartbeats_at_any_time(subject: Subject) -> None:
    """A heartbeat may arrive at any time, even in a session, and needs no answer."""
    runs = _runs_of(subject, 2)
    async with subject.start() as worker:
        for number, run in enumerate(runs, 1):
            await worker.send(Alive(), Alive())
            await worker.send(_begun(subject, number, run))
            await worker.send(Alive())
            await _add(worker, Added(number, (), ended=True))
        await _as_expected(subject, worker, runs, "between heartbeats")


async def speaks_both_versions(subject: Subject) -> None:
    """
    The worker speaks version 1 if it is started with ``--protocol 1``, else version 0.

    It needs to speak only the version of its runtime.
    """
    async with subject.start() as worker:
        spoken = _version_of(worker)
    other = CocaineVersion.ZERO if spoken is CocaineVersion.ONE else CocaineVersion.ONE
    stage = _with_dialect(subject, replace(_dialect_of(subject), protocol=other))
    runs = _runs_of(subject, 2)
    expected = await subject.expected(runs)
    worker = subject.start(stage)
    worker.timeout = min(worker.timeout, 1 + 4 * subject.pace)
    try:
        async with worker:
            same = [reply for run in runs for reply in await worker.exchange(run)]
    except WorkerMisbehaved:
        same = []
    if same != expected:
        subject.advise(worker, f"it does not speak version {other.value}")


async def terminates_on_request(subject: Subject) -> None:
    """
    The worker answers a terminate with one of its own, and exits with status 0.

    Code 2, abnormal, would mean that no other worker could do the work.
    """
    async with subject.start() as worker:
        await worker.exchange(*_runs_of(subject, 1))
        await worker.send(Farewell())
        status = await worker.exited()
        worker.examine()
        if status < 0:
            worker.fail(f"{describe_status(status)} after a terminate")
        said = [event for event in worker.events if isinstance(event, Farewell)]
        for event in said:
            if event.final:
                worker.fail(
                    f"answered with code {event.code} (abnormal), which means that no"
                    f" worker could do the work: {event.reason}"
                )
        if status:
            subject.advise(worker, f"it {describe_status(status)} after a terminate")
        if not said:
            subject.advise(worker, "it exited without a terminate of its own")


async def ends_its_sessions_before_it_terminates(subject: Subject) -> None:
    """Asked to terminate, the worker ends open sessions before it sends terminate."""
    (run,) = _runs_of(subject, 1)
    async with subject.start() as worker:
        await worker.send(_begun(subject, 1, run))
        await worker.feed(_terminate(subject, _version_of(worker)))
        try:
            await _add(worker, Added(1, (), ended=True))
            await worker.replies()
        except WorkerMisbehaved:
            subject.advise(
                worker,
                "it drops its open sessions on a terminate: etlstage lets them end"
                " first; with other supervisors they may be lost",
            )


async def exits_when_heartbeats_go_unanswered(subject: Subject) -> None:
    """The worker exits if no heartbeat is answered: there is no supervisor any more."""
    async with subject.start(mute=True) as worker:
        try:
            await worker.exited()
        except WorkerMisbehaved:
            stayed = f"it kept running for {subject.timeout:g} s without an answer"
            if subject.timeout >= _PATIENT:
                subject.advise(worker, stayed)
            wait = f"frameworks wait 5 to 60 s: to wait as long, set --timeout {_PATIENT:g}"
            raise NotApplicable(f"{stayed}; {wait}") from None


async def ends_with_its_connection(subject: Subject) -> None:
    """The worker exits when its connection ends, as it does if the supervisor dies."""
    async with subject.start() as worker:
        await worker.exchange(*_runs_of(subject, 1))
        worker.close_stdin()
        await _gone(worker)


async def ends_in_the_middle(subject: Subject) -> None:
    """It exits even if its connection ends within a frame, while a session is open."""
    (run,) = _runs_of(subject, 1)
    async with subject.start() as worker:
        await worker.send(_begun(subject, 1, run))
        await worker.feed(b"\x93\x02")
        await worker.has_read()
        worker.close_stdin()
        await _gone(worker)


async def _gone(worker: WorkerUnderTest) -> None:
    # Being abandoned may be a reason for any status.
    status = await worker.exited()
    if status < 0:
        worker.fail(f"{describe_status(status)} when its connection ended")
    if worker.left:
        left = counted(worker.left, "process", "processes")
        worker.fail(f"left {left} behind, which had to be killed")


def _terminate(subject: Subject, version: CocaineVersion) -> bytes:
    """Return a terminate frame, which the supervisor's side would still hold back."""
    ours = ready(replace(_dialect_of(subject), protocol=version))
    ours.send(Farewell(), 0.0)
    return b"".join(ours.data_to_send())


# --- its sessions ---------------------------------------------------------------------


async def accepts_every_byte(subject: Subject) -> None:
    """A chunk may contain any byte; its session is ended or refused."""
    await takes(subject, bytes(range(256)))


async def accepts_sessions_that_overlap(subject: Subject) -> None:
    """
    Several sessions are open at the same time, with their frames in any order.

    The number in a frame identifies its session.
    """
    runs = _runs_of(subject, min(4, _dialect_of(subject).concurrency))
    ids = range(1, len(runs) + 1)
    async with subject.start() as worker:
        for number in ids:
            await worker.send(_begun(subject, number, []))
        for number, run in zip(ids, runs, strict=True):
            await _add(worker, Added(number, run))
        for number in reversed(ids):
            await _add(worker, Added(number, (), ended=True))
        await _as_expected(subject, worker, runs, "while other sessions were open")


async def answers_while_others_wait(subject: Subject) -> None:
    """A session is answered while another is not complete yet."""
    first, second = _runs_of(subject, 2)
    async with subject.start() as worker:
        await worker.send(_begun(subject, 1, []))
        await worker.send(_whole(subject, 2, second))
        worker.timeout = min(worker.timeout, 1 + 4 * subject.pace)
        try:
            await worker.until(
                lambda: worker.session.owed < 2, "does not answer the second session"
            )
        except WorkerMisbehaved:
            if worker.broken or worker.status is not None:
                raise
            subject.advise(
                worker,
                "it handles one session at a time: its stage needs concurrency: 1",
            )
        await _add(worker, Added(1, first, ended=True))
        await _as_expected(
            subject,
            worker,
            [first, second],
            "when the second session was answered first",
        )


async def accepts_a_session_without_chunks(subject: Subject) -> None:
    """A choke may directly follow the invoke; the session is ended or refused."""
    await _lives_on(subject, [])


async def accepts_more_chunks_than_one(subject: Subject) -> None:
    """A session may have several chunks, read or not; it is ended or refused."""
    await _lives_on(subject, subject.messages(3))


async def _lives_on(subject: Subject, messages: Run) -> None:
    async with subject.start() as worker:
        await worker.send(_whole(subject, 1, messages))
        await worker.replies()
        await worker.exchange(subject.messages(1))
        await subject.settle(worker)


async def refuses_an_event_that_it_does_not_know(subject: Subject) -> None:
    """
    Each session ends, or gets an error, even for an event without a handler.

    Only the worker can know that there will be no answer.
    """
    (run,) = _runs_of(subject, 1)
    dialect = _dialect_of(subject)
    known = dialect.event or subject.stage.kind.value
    async with subject.start(
        _with_dialect(subject, replace(dialect, event=""))
    ) as worker:
        await worker.send(Opened(1, run, each=False, event="no such event"))
        (reply,) = await worker.replies()
        await worker.send(Opened(2, run, each=False, event=known))
        await worker.replies()
        await subject.settle(worker)
        if reply.refused is None:
            subject.advise(worker, "it handles an event of any name")


async def accepts_a_session_that_is_cancelled(subject: Subject) -> None:
    """An error may end the supervisor's half of a session; other sessions continue."""
    runs = _runs_of(subject, 3)
    async with subject.start() as worker:
        await worker.send(_begun(subject, 1, runs[0]))
        await worker.send(Cancelled(1, 7, "not wanted any more"))
        await worker.send(_begun(subject, 2, []), Cancelled(2, 7, "neither"))
        await worker.send(_begun(subject, 3, runs[2][:1]))
        if not _several(subject):
            await worker.send(_begun(subject, 4, runs[1]))
            await worker.send(Cancelled(4, 7, "nor that"))
        await _add(worker, Added(3, runs[2][1:], ended=True))
        await _as_expected(
            subject, worker, runs[2:], "when other sessions were cancelled"
        )


async def writes_nothing_after_the_end(subject: Subject) -> None:
    """
    A session ends with its choke or error, and its number is not used again.

    Cocaine's own runtimes drop a worker that sends more.
    """
    async with subject.start() as worker:
        for run in _runs_of(subject, 3):
            await worker.exchange(run)
        # Any frame of a session counts as output here.
        await worker.quiet(_MOMENT)
        await subject.settle(worker)
        refused = any(isinstance(e, Ended) and e.refusals for e in worker.events)
        for event in worker.events:
            late = _LATE.match(event.data) if isinstance(event, Noise) else None
            # Before version 1 a choke, which is frame 6, follows an error.
            if late and not (refused and late[1] == b"6"):
                worker.fail(f"sent more for session {int(late[2])}, which it had ended")


async def accepts_numbers_with_gaps(subject: Subject) -> None:
    """
    The number of a session is any number higher than the earlier ones.

    It may need more than one byte, or more than four.
    """
    runs = _runs_of(subject, len(_NUMBERS))
    async with subject.start() as worker:
        for number, run in zip(_NUMBERS, runs, strict=True):
            await worker.send(_whole(subject, number, run))
            await worker.until(
                lambda: not worker.session.owed,
                f"did not end session {number}",
            )
        await _as_expected(subject, worker, runs, "when session numbers had gaps")


async def accepts_headers(subject: Subject) -> None:
    """A frame may have a fourth element: headers, such as those of a trace."""
    runs = _runs_of(subject, 2)
    async with subject.start() as worker:
        if _version_of(worker) is not CocaineVersion.ONE:
            raise NotApplicable("it speaks a version that has no headers")
        for number, run in enumerate(runs, 1):
            await worker.send(_whole(subject, number, run)._replace(headers=_TRACE))
        await _as_expected(subject, worker, runs, "when frames had headers")


# --- what they have in common ---------------------------------------------------------


def _dialect_of(subject: Subject) -> CocaineDialect:
    assert isinstance(subject.dialect, CocaineDialect)
    return subject.dialect


def _with_dialect(subject: Subject, dialect: CocaineDialect) -> Stage:
    return replace(subject.stage, dialect=dialect)


def _version_of(worker: WorkerUnderTest) -> CocaineVersion:
    assert isinstance(worker.session, CocaineSession)
    return worker.session.version


def _runs_of(subject: Subject, count: int) -> list[Run]:
    """Return ``count`` exchanges of one message each."""
    return [[message] for message in subject.messages(count)]


def _begun(subject: Subject, number: int, messages: Run) -> Opened:
    """Return the event that opens a session, and leaves it open."""
    return _whole(subject, number, messages)._replace(ended=False)


def _whole(subject: Subject, number: int, messages: Run) -> Opened:
    return Opened(number, messages, each=False)


async def _add(worker: WorkerUnderTest, event: Added) -> None:
    """Send more of a session, unless the worker has ended it, as it may at any time."""
    try:
        await worker.send(event)
    except LocalProtocolError:
        await worker.reply_to(event.id)


async def _as_expected(
    subject: Subject, worker: WorkerUnderTest, runs: Sequence[Run], how: str
) -> None:
    """Fail unless the replies are those that each run would get alone."""
    replies = await worker.replies()
    await subject.settle(worker)
    if difference := await subject.differs(runs, replies):
        worker.fail(f"{difference}, {how}")


def _several(subject: Subject) -> str:
    one = _dialect_of(subject).concurrency == 1
    return "it is given one session at a time" if one else ""


CHECKS: Final = (
    Check(announces_itself, gate=True),
    Check(sends_heartbeats),
    Check(accepts_heartbeats_at_any_time),
    Check(accepts_every_byte),
    Check(accepts_sessions_that_overlap, when=_several),
    Check(answers_while_others_wait, when=_several),
    Check(accepts_a_session_without_chunks),
    Check(accepts_more_chunks_than_one),
    Check(refuses_an_event_that_it_does_not_know),
    Check(accepts_a_session_that_is_cancelled),
    Check(writes_nothing_after_the_end),
    Check(accepts_numbers_with_gaps),
    Check(accepts_headers),
    Check(speaks_both_versions),
    Check(terminates_on_request),
    Check(ends_its_sessions_before_it_terminates),
    Check(exits_when_heartbeats_go_unanswered),
    Check(ends_with_its_connection),
    Check(ends_in_the_middle),
)
