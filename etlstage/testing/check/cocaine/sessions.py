"""What a worker of dialect ``cocaine`` should make of its sessions."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from etlstage.messages import Run
from etlstage.protocol.cocaine import CocaineVersion
from etlstage.protocol.events import Added, Cancelled, Ended, Noise, Opened
from etlstage.testing.check.cocaine.talk import (
    as_expected,
    begun,
    dialect_of,
    runs_of,
    version_of,
    whole,
    with_dialect,
)
from etlstage.testing.check.speaking import takes
from etlstage.testing.check.subject import NotApplicable, Subject
from etlstage.testing.conversation import WorkerMisbehaved

__all__ = (
    "accepts_a_session_that_is_cancelled",
    "accepts_a_session_without_chunks",
    "accepts_every_byte",
    "accepts_headers",
    "accepts_more_chunks_than_one",
    "accepts_numbers_with_gaps",
    "accepts_sessions_that_overlap",
    "answers_while_others_wait",
    "refuses_an_event_that_it_does_not_know",
    "writes_nothing_after_the_end",
)

_MOMENT: Final = 0.1  # seconds in which a frame too many would come
_NUMBERS: Final = (1, 126, 300, 70_000, 2**33)
_TRACE: Final = tuple(
    (name, bytes(range(1, 9))) for name in (b"trace_id", b"span_id", b"parent_id")
)
_LATE: Final = re.compile(rb"frame (\d+) for session (\d+)")


async def accepts_every_byte(subject: Subject) -> None:
    """A chunk may hold any byte; its session is ended, or refused."""
    await takes(subject, bytes(range(256)))


async def accepts_sessions_that_overlap(subject: Subject) -> None:
    """
    Sessions are open at the same time, and their frames come in any order.

    A frame belongs to the session whose number it has.
    """
    runs = runs_of(subject, min(4, dialect_of(subject).concurrency))
    ids = range(1, len(runs) + 1)
    async with subject.start() as worker:
        for number in ids:
            await worker.send(begun(subject, number, []))
        for number, run in zip(ids, runs, strict=True):
            await worker.send(Added(number, run))
        for number in reversed(ids):
            await worker.send(Added(number, (), ended=True))
        await as_expected(subject, worker, runs, "while other sessions were open")


async def answers_while_others_wait(subject: Subject) -> None:
    """A session is answered while another has not come to its end."""
    first, second = runs_of(subject, 2)
    async with subject.start() as worker:
        await worker.send(begun(subject, 1, []))
        await worker.send(whole(subject, 2, second))
        worker.timeout = min(worker.timeout, 1 + 4 * subject.pace)
        try:
            await worker.until(
                lambda: worker.session.owed < 2, "does not answer the second session"
            )
        except WorkerMisbehaved:
            if worker.broken or worker.status is not None:
                raise
            subject.advise(
                worker, "it has one session at a time: its stage needs concurrency: 1"
            )
        await worker.send(Added(1, first, ended=True))
        await as_expected(subject, worker, [first, second], "in turn")


async def accepts_a_session_without_chunks(subject: Subject) -> None:
    """A choke may follow the invoke; the session is ended, or refused."""
    await _lives_on(subject, [])


async def accepts_more_chunks_than_one(subject: Subject) -> None:
    """A session may have several chunks, read or not; it is ended, or refused."""
    await _lives_on(subject, subject.messages(3))


async def _lives_on(subject: Subject, messages: Run) -> None:
    async with subject.start() as worker:
        await worker.send(whole(subject, 1, messages))
        await worker.replies()
        await worker.exchange(subject.messages(1))
        await subject.settle(worker)


async def refuses_an_event_that_it_does_not_know(subject: Subject) -> None:
    """
    Each session has an end, or an error, also that of an event without a handler.

    Only the worker can tell that nothing will come.
    """
    (run,) = runs_of(subject, 1)
    dialect = dialect_of(subject)
    known = dialect.event or subject.stage.kind.value
    async with subject.start(
        with_dialect(subject, replace(dialect, event=""))
    ) as worker:
        await worker.send(Opened(1, run, each=False, event="no such event"))
        (reply,) = await worker.replies()
        await worker.send(Opened(2, run, each=False, event=known))
        await worker.replies()
        await subject.settle(worker)
        if reply.refused is None:
            subject.advise(worker, "it handles an event of any name")


async def accepts_a_session_that_is_cancelled(subject: Subject) -> None:
    """An error may end our half of a session; the others go on."""
    runs = runs_of(subject, 3)
    async with subject.start() as worker:
        await worker.send(begun(subject, 1, runs[0]))
        await worker.send(Cancelled(1, 7, "not wanted any more"))
        await worker.send(begun(subject, 2, []), Cancelled(2, 7, "neither"))
        await worker.send(whole(subject, 3, runs[2]))
        await as_expected(subject, worker, runs[2:], "when others were cancelled")


async def writes_nothing_after_the_end(subject: Subject) -> None:
    """
    A session is over with its choke, or its error, and its number is not used again.

    The runtimes of Cocaine drop the whole worker that says more.
    """
    async with subject.start() as worker:
        for run in runs_of(subject, 3):
            await worker.exchange(run)
        # Whatever is a frame of a session counts as heard.
        await worker.quiet(_MOMENT)
        await subject.settle(worker)
        refused = any(isinstance(e, Ended) and e.refusals for e in worker.events)
        for event in worker.events:
            late = _LATE.match(event.data) if isinstance(event, Noise) else None
            # Before version 1 a choke, which is frame 6, comes behind an error.
            if late and not (refused and late[1] == b"6"):
                worker.fail(f"sent more for session {int(late[2])}, which it had ended")


async def accepts_numbers_with_gaps(subject: Subject) -> None:
    """
    The number of a session is any that is higher than those before.

    It may have more than a byte, and more than four.
    """
    runs = runs_of(subject, len(_NUMBERS))
    async with subject.start() as worker:
        for number, run in zip(_NUMBERS, runs, strict=True):
            await worker.send(whole(subject, number, run))
            await worker.until(
                lambda: not worker.session.owed,
                f"did not end session {number}",
            )
        await as_expected(subject, worker, runs, "when their numbers had gaps")


async def accepts_headers(subject: Subject) -> None:
    """A frame may have a fourth element: headers, such as those of a trace."""
    runs = runs_of(subject, 2)
    async with subject.start() as worker:
        if version_of(worker) is not CocaineVersion.ONE:
            raise NotApplicable("it speaks a version that has no headers")
        for number, run in enumerate(runs, 1):
            await worker.send(whole(subject, number, run)._replace(headers=_TRACE))
        await as_expected(subject, worker, runs, "when their frames had headers")
