"""
What a worker of dialect ``cocaine`` should do beside what any worker should.

Frameworks differ in how they end; what the document asks for, and some don't do, is a
failure only where a supervisor can't live with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from etlstage.messages import Run, counted
from etlstage.protocol.base import Limits, Side
from etlstage.protocol.cocaine import CocaineSession, Version
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.protocol.events import (
    ExchangeCancelled,
    ExchangeOpened,
    ExchangeRefused,
    ExchangesEnded,
    Farewell,
    LifeSeen,
    Noise,
    OutputOf,
    Ready,
)
from etlstage.stage.stage import Stage
from etlstage.testing.check.speaking import takes
from etlstage.testing.check.subject import NotApplicable, Subject
from etlstage.testing.check.suite import Check
from etlstage.testing.conversation import WorkerFailed, WorkerUnderTest
from etlstage.transport.base import describe_status

__all__ = ("CHECKS",)

_MOMENT: Final = 0.1  # seconds in which a frame too many would come
_PATIENT: Final = 60.0  # seconds: no framework waits longer for a heartbeat
_NUMBERS: Final = (1, 126, 300, 70_000, 2**33)
_TRACE: Final = tuple(
    (name, bytes(range(1, 9))) for name in (b"trace_id", b"span_id", b"parent_id")
)
_LATE: Final = re.compile(rb"frame (\d+) for session (\d+)")


async def announces_itself(subject: Subject) -> None:
    """
    It connects to --endpoint, says the --uuid that it was told, and beats.

    The first heartbeat says that it may be given sessions.
    """
    async with subject.start() as worker:
        await worker.quiet(_MOMENT)
        await subject.settle(worker)


async def beats_again(subject: Subject) -> None:
    """It beats in good time before ``timeout.heartbeat`` is over; what does not is killed."""
    most = _dialect(subject).heartbeat
    async with subject.start() as worker:
        worker.timeout = min(subject.timeout, most)
        try:
            await worker.until(
                lambda: any(isinstance(event, LifeSeen) for event in worker.events),
                "did not beat a second time",
            )
        except WorkerFailed:
            if worker.broken or worker.status is not None or worker.timeout == most:
                raise
            raise NotApplicable(
                f"it did not beat a second time within {worker.timeout:g} s, and may"
                f" take {most:g}: --timeout {most:g} looks as long"
            ) from None


async def takes_heartbeats_at_any_time(subject: Subject) -> None:
    """A heartbeat may come unasked, and in the middle of a session; it needs no answer."""
    runs = _runs(subject, 2)
    async with subject.start() as worker:
        for number, run in enumerate(runs, 1):
            await worker.send(LifeSeen(), LifeSeen())
            await worker.send(_begun(subject, number, run))
            await worker.send(LifeSeen())
            await worker.send(ExchangesEnded([(number, ())]))
        await _as_expected(subject, worker, runs, "between heartbeats")


async def takes_every_byte(subject: Subject) -> None:
    """A chunk may hold any byte; its session is ended, or refused."""
    await takes(subject, bytes(range(256)))


async def takes_sessions_that_overlap(subject: Subject) -> None:
    """
    Sessions are open at the same time, and their frames come in any order.

    A frame belongs to the session whose number it has.
    """
    runs = _runs(subject, min(4, _dialect(subject).concurrency))
    ids = range(1, len(runs) + 1)
    async with subject.start() as worker:
        for number in ids:
            await worker.send(_begun(subject, number, []))
        for number, run in zip(ids, runs, strict=True):
            await worker.send(OutputOf(number, run))
        for number in reversed(ids):
            await worker.send(ExchangesEnded([(number, ())]))
        await _as_expected(subject, worker, runs, "while other sessions were open")


async def answers_while_others_wait(subject: Subject) -> None:
    """A session is answered while another has not come to its end."""
    first, second = _runs(subject, 2)
    async with subject.start() as worker:
        await worker.send(_begun(subject, 1, []))
        await worker.send(_whole(subject, 2, second))
        worker.timeout = min(worker.timeout, 1 + 4 * subject.pace)
        try:
            await worker.until(
                lambda: worker.session.owed < 2, "does not answer the second session"
            )
        except WorkerFailed:
            if worker.broken or worker.status is not None:
                raise
            subject.advise(
                worker, "it has one session at a time: its stage needs concurrency: 1"
            )
        await worker.send(OutputOf(1, first), ExchangesEnded([(1, ())]))
        await _as_expected(subject, worker, [first, second], "in turn")


async def takes_a_session_without_chunks(subject: Subject) -> None:
    """A choke may follow the invoke; the session is ended, or refused."""
    await _lives_on(subject, [])


async def takes_more_chunks_than_one(subject: Subject) -> None:
    """A session may have several chunks, read or not; it is ended, or refused."""
    await _lives_on(subject, subject.messages(3))


async def _lives_on(subject: Subject, messages: Run) -> None:
    async with subject.start() as worker:
        await worker.send(_whole(subject, 1, messages))
        await worker.replies()
        await worker.exchange(subject.messages(1))
        await subject.settle(worker)


async def refuses_an_event_that_it_does_not_know(subject: Subject) -> None:
    """
    Each session has an end, or an error, also that of an event without a handler.

    Nobody else can tell that nothing will come.
    """
    (run,) = _runs(subject, 1)
    dialect = _dialect(subject)
    known = dialect.event or subject.stage.kind.value
    async with subject.start(_with(subject, replace(dialect, event=""))) as worker:
        await worker.send(ExchangeOpened(1, run, "no such event"))
        (reply,) = await worker.replies()
        await worker.send(ExchangeOpened(2, run, known))
        await worker.replies()
        await subject.settle(worker)
        if reply.refused is None:
            subject.advise(worker, "it handles an event of any name")


async def takes_a_session_that_is_cancelled(subject: Subject) -> None:
    """An error may end our half of a session; the others go on."""
    runs = _runs(subject, 3)
    async with subject.start() as worker:
        await worker.send(_begun(subject, 1, runs[0]))
        await worker.send(ExchangeCancelled(1, 7, "not wanted any more"))
        await worker.send(_begun(subject, 2, []), ExchangeCancelled(2, 7, "neither"))
        await worker.send(_whole(subject, 3, runs[2]))
        await _as_expected(subject, worker, runs[2:], "when others were cancelled")


async def says_nothing_behind_the_end(subject: Subject) -> None:
    """
    A session is over with its choke, or its error, and its number is not used again.

    The runtimes of Cocaine drop the whole worker that says more.
    """
    async with subject.start() as worker:
        for run in _runs(subject, 3):
            await worker.exchange(run)
        # Whatever is a frame of a session counts as heard.
        await worker.quiet(_MOMENT)
        await subject.settle(worker)
        refused = {e.id for e in worker.events if isinstance(e, ExchangeRefused)}
        for event in worker.events:
            late = _LATE.match(event.data) if isinstance(event, Noise) else None
            # Before version 1 a choke, which is frame 6, comes behind an error.
            if late and not (refused and late[1] == b"6"):
                worker.fail(f"said more for session {int(late[2])}, which it had ended")


async def takes_numbers_with_gaps(subject: Subject) -> None:
    """
    The number of a session is any that is higher than those before.

    It may have more than a byte, and more than four.
    """
    runs = _runs(subject, len(_NUMBERS))
    async with subject.start() as worker:
        for number, run in zip(_NUMBERS, runs, strict=True):
            await worker.send(_whole(subject, number, run))
            await worker.until(
                lambda: not worker.session.owed,
                f"did not end session {number}",
            )
        await _as_expected(subject, worker, runs, "when their numbers had gaps")


async def takes_headers(subject: Subject) -> None:
    """A frame may have a fourth element: headers, such as those of a trace."""
    runs = _runs(subject, 2)
    async with subject.start() as worker:
        if _version(worker) is not Version.ONE:
            raise NotApplicable("it speaks a version that has no headers")
        for number, run in enumerate(runs, 1):
            await worker.send(_whole(subject, number, run)._replace(headers=_TRACE))
        await _as_expected(subject, worker, runs, "when their frames had headers")


async def speaks_both_versions(subject: Subject) -> None:
    """
    It speaks version 1 if it is told ``--protocol 1``, and else version 0.

    A worker needs to speak no other than that of its runtime.
    """
    async with subject.start() as worker:
        spoken = _version(worker)
    other = Version.ZERO if spoken is Version.ONE else Version.ONE
    stage = _with(subject, replace(_dialect(subject), protocol=other))
    runs = _runs(subject, 2)
    expected = await subject.expected(runs)
    worker = subject.start(stage)
    worker.timeout = min(worker.timeout, 1 + 4 * subject.pace)
    try:
        async with worker:
            same = [reply for run in runs for reply in await worker.exchange(run)]
    except WorkerFailed:
        same = []
    if same != expected:
        subject.advise(worker, f"it does not speak version {other.value}")


async def terminates_when_it_is_told(subject: Subject) -> None:
    """
    It answers a terminate with its own, and exits with status 0.

    Code 2, abnormal, would say that no other worker could do its work.
    """
    async with subject.start() as worker:
        await worker.exchange(*_runs(subject, 1))
        await worker.send(_dialect(subject).farewell())
        status = await worker.exited()
        worker.examine()
        if status < 0:
            worker.fail(f"{describe_status(status)} when it was told to terminate")
        said = [event for event in worker.events if isinstance(event, Farewell)]
        for event in said:
            if event.final:
                worker.fail(
                    f"answered with code {event.code}, abnormal, that none could work:"
                    f" {event.reason}"
                )
        if status:
            subject.advise(worker, f"it {describe_status(status)}, having been told")
        if not said:
            subject.advise(worker, "it went without a terminate of its own")


async def ends_its_sessions_before_it_terminates(subject: Subject) -> None:
    """Told to terminate, it ends the sessions that it has, and then says terminate."""
    (run,) = _runs(subject, 1)
    async with subject.start() as worker:
        await worker.send(_begun(subject, 1, run))
        await worker.feed(_terminate(subject, _version(worker)))
        try:
            await worker.send(ExchangesEnded([(1, ())]))
            await worker.replies()
        except WorkerFailed:
            subject.advise(
                worker,
                "it drops the sessions that it has when it is told to terminate: here"
                " it is told when it has none, elsewhere they may be lost",
            )


async def leaves_when_nobody_answers(subject: Subject) -> None:
    """It exits when none of its heartbeats is answered: there is no supervisor then."""
    async with subject.start(mute=True) as worker:
        try:
            await worker.exited()
        except WorkerFailed:
            stayed = f"it stayed for {subject.timeout:g} s without an answer"
            if subject.timeout >= _PATIENT:
                subject.advise(worker, stayed)
            wait = f"frameworks wait 5 to 60 s: --timeout {_PATIENT:g} looks as long"
            raise NotApplicable(f"{stayed}; {wait}") from None


async def ends_with_its_connection(subject: Subject) -> None:
    """It exits when its connection ends: that is what it sees of a dead supervisor."""
    async with subject.start() as worker:
        await worker.exchange(*_runs(subject, 1))
        worker.close_stdin()
        await _gone(worker)


async def ends_in_the_middle(subject: Subject) -> None:
    """It exits also when its connection ends within a frame, with a session open."""
    (run,) = _runs(subject, 1)
    async with subject.start() as worker:
        await worker.send(_begun(subject, 1, run))
        await worker.feed(b"\x93\x02")
        await worker.has_read()
        worker.close_stdin()
        await _gone(worker)


async def _gone(worker: WorkerUnderTest) -> None:
    # That it was abandoned may be a reason for any status.
    status = await worker.exited()
    if status < 0:
        worker.fail(f"{describe_status(status)} when its connection ended")
    if worker.left:
        left = counted(worker.left, "process", "processes")
        worker.fail(f"left {left} behind, which had to be killed")


def _dialect(subject: Subject) -> CocaineDialect:
    assert isinstance(subject.dialect, CocaineDialect)
    return subject.dialect


def _with(subject: Subject, dialect: CocaineDialect) -> Stage:
    return replace(subject.stage, dialect=dialect)


def _version(worker: WorkerUnderTest) -> Version:
    assert isinstance(worker.session, CocaineSession)
    return worker.session.version


def _runs(subject: Subject, count: int) -> list[Run]:
    """Return so many exchanges: of a message each."""
    return [[message] for message in subject.messages(count)]


def _begun(subject: Subject, number: int, messages: Run) -> ExchangeOpened:
    """Return what opens a session, and leaves it open."""
    return _whole(subject, number, messages)._replace(ended=False)


def _whole(subject: Subject, number: int, messages: Run) -> ExchangeOpened:
    return ExchangeOpened(number, messages, subject.stage.kind.value)


async def _as_expected(
    subject: Subject, worker: WorkerUnderTest, runs: Sequence[Run], how: str
) -> None:
    replies = await worker.replies()
    await subject.settle(worker)
    if difference := await subject.differs(runs, replies):
        worker.fail(f"{difference}, {how}")


def _terminate(subject: Subject, version: Version) -> bytes:
    """Return a terminate that no session would say yet."""
    dialect = replace(_dialect(subject), protocol=version)
    ours, theirs = (dialect.open(side, Limits()) for side in Side)
    theirs.send(Ready())
    ours.receive_data(b"".join(theirs.data_to_send()), 0.0)
    ours.data_to_send()  # an answer to its heartbeat
    ours.send(dialect.farewell())
    return b"".join(ours.data_to_send())


def _several(subject: Subject) -> str:
    one = _dialect(subject).concurrency == 1
    return "it is given one session at a time" if one else ""


CHECKS: Final = (
    Check(announces_itself, gate=True),
    Check(beats_again),
    Check(takes_heartbeats_at_any_time),
    Check(takes_every_byte),
    Check(takes_sessions_that_overlap, when=_several),
    Check(answers_while_others_wait, when=_several),
    Check(takes_a_session_without_chunks),
    Check(takes_more_chunks_than_one),
    Check(refuses_an_event_that_it_does_not_know),
    Check(takes_a_session_that_is_cancelled),
    Check(says_nothing_behind_the_end),
    Check(takes_numbers_with_gaps),
    Check(takes_headers),
    Check(speaks_both_versions),
    Check(terminates_when_it_is_told),
    Check(ends_its_sessions_before_it_terminates),
    Check(leaves_when_nobody_answers),
    Check(ends_with_its_connection),
    Check(ends_in_the_middle),
)
