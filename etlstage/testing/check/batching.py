"""What a worker should do that answers batches, whichever side closes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from etlstage.protocol.base import Shape
from etlstage.testing.check.subject import Advice, Subject
from etlstage.testing.check.suite import Check
from etlstage.testing.conversation import WorkerUnderTest

__all__ = ("CHECKS", "asked_or_answered")

_MANY: Final = 300  # messages, in a batch that is full
_LARGEST: Final = 500  # messages, in the batches of a worker that fills them


async def accepts_batches_of_any_size(subject: Subject) -> None:
    """
    A batch has one message, or two, or as many as it may have; each has one reply.

    It may be closed before it is full.
    """
    sizes = [1, 2, 3, min(subject.stage.batch.size, _MANY), 1]
    async with subject.start() as worker:
        for size in sizes:
            await worker.exchange(subject.messages(size))
        await subject.settle(worker)


async def accepts_an_empty_batch(subject: Subject) -> None:
    """A batch may have no messages; it is answered with one reply."""
    async with subject.start() as worker:
        await worker.exchange([])
        await worker.exchange(subject.messages(2))
        await worker.exchange([])
        await subject.settle(worker)


async def asks_until_its_batch_is_full(subject: Subject) -> None:
    """It asks for one message at a time, up to a bound, and answers a full batch."""
    async with subject.start() as worker:
        size = 0
        while not size or (worker.session.owed and size < _LARGEST):
            size += 1
            await worker.send(worker.more(*subject.messages(1)))
            await asked_or_answered(worker)
        endless = worker.session.owed > 0
        if endless:
            await worker.send(worker.no_more())
        await worker.replies()
        await worker.exchange(subject.messages(1 if endless else 2 * size + 1))
        await subject.settle(worker)
    if endless:
        raise Advice(f"its batches have more than {_LARGEST} messages")


async def asked_or_answered(worker: WorkerUnderTest) -> None:
    """Wait until the worker, that was given a message, asks for more, or has answered."""
    await worker.until(
        lambda: not worker.session.owed or worker.session.room > 0,
        "neither asked for one more message nor answered its batch",
    )


def _for(*shapes: Shape) -> Callable[[Subject], str]:
    what = "batches" if Shape.BATCH in shapes else "batches that they fill"
    said = f"for workers that answer {what}"
    return lambda subject: "" if subject.shape in shapes else said


CHECKS: Final = (
    Check(accepts_batches_of_any_size, when=_for(Shape.BATCH, Shape.ASKED_BATCH)),
    Check(accepts_an_empty_batch, when=_for(Shape.BATCH, Shape.ASKED_BATCH)),
    Check(asks_until_its_batch_is_full, when=_for(Shape.ASKED_BATCH)),
)
