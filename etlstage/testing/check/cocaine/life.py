"""
How a worker of dialect ``cocaine`` should begin, stay alive, and end.

Frameworks differ in how they end; what the document asks for, and some don't do, is a
failure only where a supervisor can't live with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from etlstage.messages import counted
from etlstage.protocol.base import Limits, Side
from etlstage.protocol.cocaine import CocaineVersion
from etlstage.protocol.events import Added, Alive, Farewell, Ready
from etlstage.testing.check.cocaine.talk import (
    as_expected,
    begun,
    dialect_of,
    runs_of,
    version_of,
    with_dialect,
)
from etlstage.testing.check.subject import NotApplicable, Subject
from etlstage.testing.conversation import WorkerMisbehaved, WorkerUnderTest
from etlstage.transport.base import describe_status

__all__ = (
    "accepts_heartbeats_at_any_time",
    "announces_itself",
    "ends_in_the_middle",
    "ends_its_sessions_before_it_terminates",
    "ends_with_its_connection",
    "exits_when_heartbeats_go_unanswered",
    "sends_heartbeats",
    "speaks_both_versions",
    "terminates_on_request",
)

_MOMENT: Final = 0.1  # seconds in which a frame too many would come
_PATIENT: Final = 60.0  # seconds: no framework waits longer for a heartbeat


async def announces_itself(subject: Subject) -> None:
    """
    It connects to --endpoint, sends the --uuid that it was given, and beats.

    The first heartbeat says that it may be given sessions.
    """
    async with subject.start() as worker:
        await worker.quiet(_MOMENT)
        await subject.settle(worker)


async def sends_heartbeats(subject: Subject) -> None:
    """It beats in good time before ``timeout.heartbeat`` is over; what does not is killed."""
    most = dialect_of(subject).heartbeat
    async with subject.start() as worker:
        worker.timeout = min(subject.timeout, most)
        try:
            await worker.until(
                lambda: any(isinstance(event, Alive) for event in worker.events),
                "did not beat a second time",
            )
        except WorkerMisbehaved:
            if worker.broken or worker.status is not None or worker.timeout == most:
                raise
            raise NotApplicable(
                f"it did not beat a second time within {worker.timeout:g} s, and may"
                f" take {most:g}: --timeout {most:g} looks as long"
            ) from None


async def accepts_heartbeats_at_any_time(subject: Subject) -> None:
    """A heartbeat may come at any time, also in a session; it needs no answer."""
    runs = runs_of(subject, 2)
    async with subject.start() as worker:
        for number, run in enumerate(runs, 1):
            await worker.send(Alive(), Alive())
            await worker.send(begun(subject, number, run))
            await worker.send(Alive())
            await worker.send(Added(number, (), ended=True))
        await as_expected(subject, worker, runs, "between heartbeats")


async def speaks_both_versions(subject: Subject) -> None:
    """
    It speaks version 1 if it is given ``--protocol 1``, and else version 0.

    A worker needs to speak no other than that of its runtime.
    """
    async with subject.start() as worker:
        spoken = version_of(worker)
    other = CocaineVersion.ZERO if spoken is CocaineVersion.ONE else CocaineVersion.ONE
    stage = with_dialect(subject, replace(dialect_of(subject), protocol=other))
    runs = runs_of(subject, 2)
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
    It answers a terminate with its own, and exits with status 0.

    Code 2, abnormal, would say that no other worker could do its work.
    """
    async with subject.start() as worker:
        await worker.exchange(*runs_of(subject, 1))
        await worker.send(Farewell())
        status = await worker.exited()
        worker.examine()
        if status < 0:
            worker.fail(f"{describe_status(status)} after a terminate")
        said = [event for event in worker.events if isinstance(event, Farewell)]
        for event in said:
            if event.final:
                worker.fail(
                    f"answered with code {event.code}, abnormal, that none could work:"
                    f" {event.reason}"
                )
        if status:
            subject.advise(worker, f"it {describe_status(status)} after a terminate")
        if not said:
            subject.advise(worker, "it went without a terminate of its own")


async def ends_its_sessions_before_it_terminates(subject: Subject) -> None:
    """Asked to terminate, it ends the sessions that it has, and then says terminate."""
    (run,) = runs_of(subject, 1)
    async with subject.start() as worker:
        await worker.send(begun(subject, 1, run))
        await worker.feed(_terminate(subject, version_of(worker)))
        try:
            await worker.send(Added(1, (), ended=True))
            await worker.replies()
        except WorkerMisbehaved:
            subject.advise(
                worker,
                "it drops its open sessions on a terminate: here it has none then,"
                " elsewhere they may be lost",
            )


async def exits_when_heartbeats_go_unanswered(subject: Subject) -> None:
    """It exits when none of its heartbeats is answered: there is no supervisor then."""
    async with subject.start(mute=True) as worker:
        try:
            await worker.exited()
        except WorkerMisbehaved:
            stayed = f"it stayed for {subject.timeout:g} s without an answer"
            if subject.timeout >= _PATIENT:
                subject.advise(worker, stayed)
            wait = f"frameworks wait 5 to 60 s: --timeout {_PATIENT:g} looks as long"
            raise NotApplicable(f"{stayed}; {wait}") from None


async def ends_with_its_connection(subject: Subject) -> None:
    """It exits when its connection ends: that is what it sees of a dead supervisor."""
    async with subject.start() as worker:
        await worker.exchange(*runs_of(subject, 1))
        worker.close_stdin()
        await _gone(worker)


async def ends_in_the_middle(subject: Subject) -> None:
    """It exits also when its connection ends within a frame, with a session open."""
    (run,) = runs_of(subject, 1)
    async with subject.start() as worker:
        await worker.send(begun(subject, 1, run))
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


def _terminate(subject: Subject, version: CocaineVersion) -> bytes:
    """Return a terminate that no session would say yet."""
    dialect = replace(dialect_of(subject), protocol=version)
    ours, theirs = (dialect.open(side, Limits()) for side in Side)
    theirs.send(Ready(), 0.0)
    ours.receive_data(b"".join(theirs.data_to_send()), 0.0)
    ours.data_to_send()  # an answer to its heartbeat
    ours.send(Farewell(), 0.0)
    return b"".join(ours.data_to_send())
