"""
Checks of workers that are given messages, in any dialect.

None of them knows which reply is right; see ``suite.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from signal import SIGTERM
from typing import Final, NoReturn

import anyio

from etlstage.messages import Run, StageKind, counted
from etlstage.protocol.base import Shape
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.testing.check.suite import Advice, Check, NotApplicable, Subject
from etlstage.testing.conversation import WorkerMisbehaved, WorkerUnderTest
from etlstage.testing.fuzzing.oracle import AnsweredSteps, Oracles, compare
from etlstage.testing.fuzzing.steps import Step
from etlstage.testing.replies import Reply
from etlstage.testing.transcript import BYTEWISE, Channel

__all__ = ("CHECKS", "blame_a_buffer", "piped", "takes")

KiB: Final = 1024
_MOMENT: Final = 0.1  # seconds within which an extra reply would come
_HELD: Final = 2.0  # seconds within which buffered output is written
_MANY: Final = 300  # messages: more than any that a worker might hold back
_OFTEN: Final = 40  # places at which a short conversation is cut
_FULL: Final = 300  # messages, at most, in a full batch
_LARGEST: Final = 500  # messages, at most, in a batch that a worker fills
_ALONE: Final = 12  # messages of a sample that are given to a process of their own
_STDERR: Final = 2000  # bytes per message: more than a reader would like


async def answers(subject: Subject) -> None:
    """
    Each message is answered while more may come.

    Flush stdout after each reply: the supervisor waits for its end.
    """
    messages = subject.messages(3)
    began = anyio.current_time()
    async with subject.start() as worker:
        try:
            subject.note(messages, await _one_by_one(worker, messages[:1]))
            subject.pace = anyio.current_time() - began
            await worker.quiet(_MOMENT)
        except WorkerMisbehaved as error:
            await blame_a_buffer(worker, error)
        began = anyio.current_time()
        subject.note(messages[1:], await _one_by_one(worker, messages[1:]))
        subject.each = (anyio.current_time() - began) / 2
        await worker.quiet(_MOMENT)
        await subject.settle(worker)


async def _one_by_one(worker: WorkerUnderTest, messages: Run) -> list[Reply]:
    return [reply for m in messages for reply in await worker.exchange([m])]


async def blame_a_buffer(worker: WorkerUnderTest, error: WorkerMisbehaved) -> NoReturn:
    """Raise the error, or one that explains why the worker has not replied."""
    if worker.status is None and not worker.transcript.of(Channel.STDOUT):
        sent = len(worker.transcript.of(Channel.STDIN))
        if 0 < sent == worker.unread():
            worker.fail(
                f"has read nothing within {worker.timeout:g} s: if it needs"
                f" longer to start, set --timeout {6 * worker.timeout:g}"
            )
        worker.close_stdin()
        with anyio.move_on_after(min(worker.timeout, _HELD)):
            await worker.exited()
        if not worker.session.owed:
            worker.fail(
                "replied only when its stdin was closed: flush stdout after each"
                " reply; or it buffers its input, as mawk does without -W interactive"
            )
    raise error


async def writes_nothing_unsolicited(subject: Subject) -> None:
    """
    Only replies are written to stdout, one for each exchange.

    Diagnostics belong on stderr: a stray line, or an extra reply, would be taken for
    the reply to another message.
    """
    first, (_, second) = subject.divisible, subject.messages(2)
    async with subject.start() as worker:
        # Once it has read a byte, it has written what it writes at its start.
        await worker.feed(subject.kit.raw([first])[:1])
        await worker.has_read()
        await worker.quiet(_MOMENT)
        await worker.begin(first, 1)
        if subject.shape is Shape.ASKED_BATCH:
            await _asked_or_answered(worker)
        if subject.shape.batches and (worker.session.owed or not worker.events):
            await worker.send(worker.no_more())
        await worker.replies()
        await worker.quiet(_MOMENT)
        await worker.exchange([second])
        await worker.quiet(_MOMENT)
        await subject.settle(worker)


async def accepts_an_empty_message(subject: Subject) -> None:
    """A message may be empty; like any other, it is answered or refused."""
    await takes(subject, b"")


async def accepts_bytes_that_are_no_text(subject: Subject) -> None:
    """A message may be any bytes, not only UTF-8; it is answered or refused."""
    await takes(subject, b"caf\xe9 \xff\xfe \xc3")


async def accepts_a_long_message(subject: Subject) -> None:
    """A message of 64 KiB, and one of 1 MiB, is answered or refused."""
    for size in (64 * KiB, KiB * KiB):
        if size <= subject.stage.max_message:
            await takes(subject, b"x" * size)


async def takes(subject: Subject, message: bytes) -> None:
    """
    Send a message that the worker may be unable to process, and one after it.

    If there is a sample of what it can process, dying of another message only merits
    advice.
    """
    async with subject.start() as worker:
        try:
            replies = await worker.exchange([message])
        except WorkerMisbehaved:
            if subject.sample and worker.status is not None:
                subject.advise(
                    worker,
                    "it dies of a message that it can't process: refusing it costs no"
                    " restart",
                )
            raise
        if not subject.shape.batches:
            subject.note([message], replies)
        await worker.exchange(subject.messages(1))
        await subject.settle(worker)


async def accepts_many_messages_at_once(subject: Subject) -> None:
    """
    One read may return many messages.

    The supervisor sends messages ahead of their replies. The replies come in the order
    of the messages, unless each reply names its message.
    """
    count = max(3, int(min(_MANY, subject.timeout / 4 / max(subject.each, 0.001))))
    runs = _runs(subject, count)
    async with subject.start() as worker:
        runs = runs[: await worker.hand_over(runs)]
        replies = await worker.replies()
        await subject.settle(worker)
        written = len(worker.transcript.of(Channel.STDERR))
        subject.chatter = written / sum(map(len, runs))
        expected = await subject.expected(runs)
        if difference := await subject.differs(runs, replies):
            if Counter(expected) == Counter(replies):
                difference = f"gave its replies in a different order: {difference}"
            worker.fail(f"{difference}, when the messages came at once")


async def handles_input_byte_by_byte(subject: Subject) -> None:
    """
    Input that is written at once may arrive in several reads.

    Keep the incomplete end of a read until the rest has arrived.
    """
    runs = _runs(subject, 3)
    async with subject.start() as worker:
        replies = [r for m in runs for r in await worker.exchange(m, cuts=BYTEWISE)]
        await subject.settle(worker)
        if difference := await subject.differs(runs, replies):
            worker.fail(f"{difference}, when the messages came a byte at a time")


async def handles_input_split_anywhere(subject: Subject) -> None:
    """
    A read may end anywhere, even within a message.

    Keep the incomplete end of a read until the rest has arrived.
    """
    run = subject.messages(2)
    size = len(subject.kit.raw(run))
    places = range(1, min(size, _OFTEN))
    runs = [run for _ in places]
    async with subject.start() as worker:
        replies: list[Reply] = []
        for place in places:
            replies += await worker.exchange(run, cuts=(place,))
        await subject.settle(worker)
        if difference := await subject.differs(runs, replies):
            worker.fail(f"{difference}, when the messages came in two parts")


# --- batches, whichever side closes them ----------------------------------------------


async def accepts_batches_of_any_size(subject: Subject) -> None:
    """
    A batch has one message, two, or up to its maximum; each batch has one reply.

    A batch may be closed before it is full.
    """
    sizes = [1, 2, 3, min(subject.stage.batch.size, _FULL), 1]
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
    """The worker requests message after message up to a limit, then answers."""
    async with subject.start() as worker:
        size = 0
        while not size or (worker.session.owed and size < _LARGEST):
            size += 1
            await worker.send(worker.more(*subject.messages(1)))
            await _asked_or_answered(worker)
        endless = worker.session.owed > 0
        if endless:
            await worker.send(worker.no_more())
        await worker.replies()
        vain = not endless and _asks_in_vain(worker, size)
        await worker.exchange(subject.messages(1 if endless else 2 * size + 1))
        await subject.settle(worker)
        if vain:
            subject.advise(
                worker,
                "it writes BNC after the message that fills its batch: leave that out,"
                f" or set dialect.bnc_after_last: true and batch.size: {size}",
            )
    if endless:
        raise Advice(f"its batches have more than {_LARGEST} messages")


def _asks_in_vain(worker: WorkerUnderTest, size: int) -> bool:
    """Return whether undeclared BNC preceded its first reply, to a full batch."""
    dialect = worker.stage.dialect
    if not isinstance(dialect, MarkerDialect) or dialect.bnc_after_last:
        return False
    requests = dialect.markers.bnc * size
    return worker.transcript.of(Channel.STDOUT).startswith(requests)


async def _asked_or_answered(worker: WorkerUnderTest) -> None:
    """Wait until the worker, given a message, asks for more or has answered."""
    await worker.until(
        lambda: not worker.session.owed or worker.session.room > 0,
        "neither asked for one more message nor answered its batch",
    )


# --- the end --------------------------------------------------------------------------


async def answers_before_it_ends(subject: Subject) -> None:
    """Input written before stdin was closed is answered; then the worker exits."""
    async with subject.start() as worker:
        await worker.hand_over(_runs(subject, 20))
        worker.close_stdin()
        await worker.replies()
        await subject.settle(worker)


async def ends(subject: Subject) -> None:
    """
    The worker exits when its stdin ends: that is how it is stopped.

    A load worker proves by exit status 0 that the messages it answered are loaded.
    """
    async with subject.start() as worker:
        await worker.exchange(subject.messages(1))
        await subject.end(worker)


async def ends_in_the_middle(subject: Subject) -> None:
    """
    The worker exits even if its stdin ends within a message, or within a batch.

    This happens if the supervisor is killed.
    """
    message = subject.divisible
    half = subject.kit.raw([message])[: max(1, len(message) // 2)]
    async with subject.start() as worker:
        if subject.shape.batches:
            await worker.send(worker.more(message))
        await worker.feed(half)
        await worker.has_read()
        worker.close_stdin()
        await worker.exited()
        if not subject.shape.batches and worker.transcript.of(Channel.STDOUT):
            subject.advise(worker, "it treats an unterminated last message as complete")


async def exits_on_SIGTERM(subject: Subject) -> None:  # noqa: N802 - shown to users
    """The worker exits on SIGTERM; otherwise it is killed, whatever it is doing."""
    async with subject.start() as worker:
        await worker.exchange(subject.messages(1))
        worker.signal(SIGTERM)
        await worker.exited()


async def continues_after_a_refusal(subject: Subject) -> None:
    """
    A worker that refuses a message gives a reason, and answers the next message.

    A refusal reports that a message can't be processed, and needs no restart.
    """
    if not subject.refused:
        raise NotApplicable("it has refused nothing that it was given")
    message, reason = subject.refused[0]
    others = [m for m in subject.messages(8) if m != message]
    async with subject.start() as worker:
        (no,) = await worker.exchange([message])
        replies = await _one_by_one(worker, others)
        await subject.settle(worker)
        if all(reply.refused is not None for reply in replies):
            if subject.sample:
                worker.fail("refuses all messages of the sample")
            raise Advice(
                "it refuses all test words: give it a sample of what it can process"
            )
    if no.refused is None:
        raise Advice("it refused a message first, and answered the same message later")
    if not reason.strip():
        raise Advice("it gives no reason for a refusal")


async def replies_the_same_again(subject: Subject) -> None:
    """
    The same messages get the same replies in every process.

    A message is given to another worker if the first was lost while it held the
    message.
    """
    runs = _runs(subject, 12)
    if await subject.tell(runs) != await subject.expected(runs):
        raise Advice(
            "it gave different replies to the same messages in another process"
        )


async def keeps_no_state(subject: Subject) -> None:
    """The reply to a message does not depend on earlier messages."""
    *_, last = messages = subject.messages(6)
    runs = [[message] for message in [*messages, *messages]]
    replies = await subject.expected(runs)
    alone = await subject.tell([[last]])
    if len(replies) == len(runs) and [replies[5]] != alone:
        raise Advice(
            "the reply to a message depends on earlier messages: after a restart, or"
            " with several workers, it will be different"
        )
    if replies[: len(replies) // 2] != replies[len(replies) // 2 :]:
        raise Advice("a message that comes again gets a different reply")


async def writes_little_to_stderr(subject: Subject) -> None:
    """Each line on stderr is logged; if there are too many, most are dropped."""
    if subject.chatter > _STDERR:
        raise Advice(
            f"it wrote {subject.chatter:,.0f} bytes to stderr for each message"
        )


async def load_workers_output_nothing(subject: Subject) -> None:
    """A load worker has no outputs: its replies are empty."""
    replies = await subject.expected(_runs(subject, 12))
    outputs = sum(len(reply.outputs) for reply in replies)
    if outputs:
        raise Advice(f"it gave {counted(outputs, 'message')}, which are discarded")


def _runs(subject: Subject, count: int) -> list[Run]:
    """Return ``count`` messages, each an exchange; in batches, three at a time."""
    messages = subject.messages(count)
    size = 3 if subject.shape.batches else 1
    return [messages[at : at + size] for at in range(0, count, size)]


def piped(subject: Subject) -> str:
    """Return why checks of pipes do not apply to a worker; empty if they do."""
    return (
        "for workers that have pipes" if subject.dialect.connection is not None else ""
    )


def _not_asked(subject: Subject) -> str:
    asks = subject.shape is Shape.ASKED_BATCH
    return "it is given one message at a time, on request" if asks else ""


def _for(*shapes: Shape) -> Callable[[Subject], str]:
    what = "batches" if Shape.BATCH in shapes else "batches that they fill"
    said = f"for workers that answer {what}"
    return lambda subject: "" if subject.shape in shapes else said


def _loads(subject: Subject) -> str:
    return "" if subject.stage.kind is StageKind.LOAD else "for load workers"


async def keeps_its_contract(subject: Subject) -> None:
    """
    Each reply to the sample satisfies ``expect`` of the stage.

    In a run, by default, a message whose reply does not is dead-lettered. If replies
    depend on earlier messages, or on their order, they differ after a restart.
    """
    async with subject.start() as worker:
        replies = await _one_by_one(worker, subject.sample)
        worker.examine_contract(replies)
        some = zip(subject.sample[:_ALONE], replies, strict=False)
        asked: AnsweredSteps = [(Step((message,)), [reply]) for message, reply in some]
        await compare(subject.start, worker, asked, Oracles())
        await subject.settle(worker)


def _no_sample(subject: Subject) -> str:
    return (
        "" if subject.sample else "only for a sample is it known what a reply must be"
    )


def _refuses(subject: Subject) -> str:
    return "a batch is refused as a whole" if subject.shape.batches else ""


CHECKS: Final = (
    Check(answers, gate=True),
    Check(writes_nothing_unsolicited, when=piped),
    Check(accepts_an_empty_message),
    Check(accepts_bytes_that_are_no_text),
    Check(accepts_a_long_message),
    Check(accepts_many_messages_at_once, when=_not_asked),
    Check(handles_input_byte_by_byte),
    Check(handles_input_split_anywhere),
    Check(accepts_batches_of_any_size, when=_for(Shape.BATCH, Shape.ASKED_BATCH)),
    Check(accepts_an_empty_batch, when=_for(Shape.BATCH, Shape.ASKED_BATCH)),
    Check(asks_until_its_batch_is_full, when=_for(Shape.ASKED_BATCH)),
    Check(answers_before_it_ends, when=lambda s: _not_asked(s) or piped(s)),
    Check(ends, when=piped),
    Check(ends_in_the_middle, when=piped),
    Check(exits_on_SIGTERM),
    Check(replies_the_same_again),
    Check(keeps_no_state),
    Check(keeps_its_contract, when=_no_sample, promised=True),
    Check(load_workers_output_nothing, when=_loads),
    Check(continues_after_a_refusal, last=True, when=_refuses),
    Check(writes_little_to_stderr, last=True, when=_not_asked),
)
