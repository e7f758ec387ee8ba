"""
Checks of record processors.

Each check runs the processor once, or several times, under our own daemon: see
:class:`~etlstage.testing.kcl.ProcessorUnderTest`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import anyio

from etlstage.messages import AnnotatedRun, counted
from etlstage.protocol.events import Assignment, FarewellReason
from etlstage.protocol.kcl.checkpoint import (
    DEPENDENCY,
    INVALID_STATE,
    SHUTDOWN,
    THROTTLING,
    ShardPosition,
)
from etlstage.protocol.kcl.lines import RecordColumn, Version
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.testing.check.suite import Advice, Check, NotApplicable, Subject
from etlstage.testing.fault import Fault, FaultKind, FaultPlan, Moment
from etlstage.testing.kcl import ProcessorUnderTest, sequence_number
from etlstage.testing.transcript import WorkerMisbehaved

__all__ = ("CHECKS",)

_Columns: TypeAlias = Mapping[str, Sequence[Any]]

_FIRST: Final = sequence_number(1)
_SHARD: Final = "shardId-000000000000"
_MANY: Final = 10_000  # records: the most that a daemon gives in an action
_ENOUGH: Final = 12  # records after which a processor has checkpointed if it ever does
_SELDOM: Final = f"it does not checkpoint in processRecords, within {_ENOUGH} records"
_MOMENT: Final = 0.1  # seconds within which an extra status would come
_PAUSE: Final = 6.0  # seconds: published clients wait 5 between two tries


def _daemon(
    subject: Subject,
    position: object = None,
    *faults: Fault,
    more: float = 0.0,
) -> ProcessorUnderTest:
    return ProcessorUnderTest(
        subject.stage,
        Assignment(_SHARD, position),
        faults=FaultPlan(faults),
        launch=subject.launch,
        timeout=subject.timeout + more,
    )


def _failed(number: int, error: str) -> Fault:
    return Fault(FaultKind.FAIL_CHECKPOINT, number=number, data=error.encode())


def _records(
    subject: Subject,
    count: int = 3,
    first: int = 1,
    columns: _Columns | None = None,
) -> AnnotatedRun:
    """Return ``count`` records; ``columns`` add to the usual ones, or replace them."""
    named: dict[str, Sequence[Any]] = {
        RecordColumn.SEQUENCE: [sequence_number(first + n) for n in range(count)],
        RecordColumn.PARTITION: [f"key-{n % 7}" for n in range(count)],
        RecordColumn.ARRIVAL: [1476889707000 + n for n in range(count)],
        RecordColumn.BEHIND: [0] * count,
    }
    return AnnotatedRun(subject.messages(count), **{**named, **(columns or {})})


async def _ended(processor: ProcessorUnderTest, why: FarewellReason) -> None:
    status = await processor.end(why)
    if status:
        processor.fail(f"exited with status {status} after its last action, expected 0")


async def _life(
    subject: Subject, *actions: AnnotatedRun, position: object = None, more: float = 0.0
) -> ProcessorUnderTest:
    """Return a processor that was given actions, and then the end of its shard."""
    async with _daemon(subject, position, more=more) as processor:
        for action in actions:
            await processor.give(action)
        await processor.end()
    return processor


async def initializes(subject: Subject) -> None:
    """
    The processor answers ``initialize`` with one status, and exits after ``leaseLost``.

    Flush stdout after each line: the daemon waits for it.
    """
    async with _daemon(subject) as processor:
        await _ended(processor, FarewellReason.LOST)


async def answers_each_action_once(subject: Subject) -> None:
    """
    Each action is answered with one status that names it.

    A second status would be taken for the answer to the next action, which is then
    lost. Is a callback called twice?
    """
    async with _daemon(subject) as processor:
        for place in range(3):
            await processor.give(_records(subject, 2, 2 * place + 1))
            await anyio.sleep(_MOMENT)
            if processor.broken:
                processor.fail(processor.broken)
        await processor.end(FarewellReason.LOST)
    processor.blame_surplus()
    (await _life(subject)).blame_surplus()


async def writes_nothing_else_to_stdout(subject: Subject) -> None:
    """Output for people belongs on stderr: on stdout a daemon logs it as unexpected."""
    processor = await _life(subject, _records(subject))
    if processor.noise:
        lines = counted(len(processor.noise), "line")
        shown = processor.transcript.shown(subject.dialect)
        raise Advice(f"{lines} on stdout that no daemon understands", shown)


async def checkpoints_at_all(subject: Subject) -> None:
    """Without checkpoints all records of a shard come again after a restart."""
    async with _daemon(subject) as processor:
        await processor.give(_records(subject))
        before = any(text.startswith("< checkpoint ") for text in processor.said)
        await processor.end()
        if not before:
            shown = processor.transcript.shown(subject.dialect)
            raise Advice("it checkpoints only at the end of a shard", shown)


async def checkpoints_what_was_delivered(subject: Subject) -> None:
    """A checkpoint at an undelivered record, or before the last one, is refused."""
    actions = (_records(subject, 4, place) for place in range(1, 12, 4))
    (await _life(subject, *actions)).blame_illegal()


async def checkpoints_the_end_of_a_shard(subject: Subject) -> None:
    """
    Without a checkpoint in ``shardEnded`` the shards that follow this one never begin.

    Checkpoint without a sequence number: that of the last record does not count if it
    was checkpointed before.
    """
    async with _daemon(subject) as processor:
        await processor.give(_records(subject))
        await _ended(processor, FarewellReason.ENDED)


async def checkpoints_the_end_of_an_empty_shard(subject: Subject) -> None:
    """The end of a shard is checkpointed even if no record was delivered."""
    async with _daemon(subject) as processor:
        await _ended(processor, FarewellReason.ENDED)


async def checkpoints_the_end_again_when_throttled(subject: Subject) -> None:
    """The checkpoint store may be overloaded: retry within the action."""
    number = len((await _life(subject)).asked)
    throttled = _failed(number, THROTTLING)
    async with _daemon(subject, None, throttled, more=_PAUSE) as processor:
        await _ended(processor, FarewellReason.ENDED)


async def _survives(subject: Subject, error: str) -> ProcessorUnderTest:
    """Return a processor given records, its first checkpoint answered by an error."""
    failed = _failed(1, error)
    async with _daemon(subject, None, failed, more=_PAUSE) as processor:
        for place in range(1, _ENOUGH, 3):
            await processor.give(_records(subject, 3, place))
        if not processor.asked:
            raise NotApplicable(_SELDOM)
        why = FarewellReason.LOST if error == SHUTDOWN else FarewellReason.ENDED
        await processor.end(why)
    return processor


async def survives_throttling(subject: Subject) -> None:
    """The processor does not exit if a checkpoint is throttled."""
    await _survives(subject, THROTTLING)


async def survives_a_store_that_fails(subject: Subject) -> None:
    """The processor does not exit if the checkpoint store fails."""
    await _survives(subject, DEPENDENCY)


async def survives_a_lost_lease(subject: Subject) -> None:
    """
    ``ShutdownException`` as the answer to a checkpoint means that the lease is lost.

    ``leaseLost`` follows; until then the processor answers every action.
    """
    processor = await _survives(subject, SHUTDOWN)
    again = sum(
        asked.position == processor.asked[0].position for asked in processor.asked
    )
    if again > 1:
        processor.fail(f"tried a checkpoint again after {SHUTDOWN}: it can't succeed")


async def survives_an_unknown_error(subject: Subject) -> None:
    """Any Java exception may answer a checkpoint; exiting ends the whole daemon."""
    try:
        await _survives(subject, "NullPointerException")
    except WorkerMisbehaved as error:
        raise Advice(error.what, error.transcript) from None


async def lets_go_of_a_lost_lease(subject: Subject) -> None:
    """There must be no checkpoint in ``leaseLost``: another runner has the shard."""
    async with _daemon(subject) as processor:
        await processor.give(_records(subject))
        await _ended(processor, FarewellReason.LOST)
        for error in INVALID_STATE, SHUTDOWN:
            if processor.refused(error):
                processor.fail(f"asked for a checkpoint after leaseLost: {error}")
        if any(b'"checkpoint"' in line for line in processor.noise):
            processor.fail("asked for a checkpoint after the status of leaseLost")


async def answers_a_request_to_shut_down(subject: Subject) -> None:
    """
    The processor answers ``shutdownRequested``, and then ``leaseLost``.

    This is its last chance to checkpoint; records without a checkpoint are processed
    again.
    """
    assert isinstance(subject.dialect, KclDialect)
    if subject.dialect.version is Version.LEGACY:
        raise NotApplicable("daemons of that version do not request it")
    async with _daemon(subject) as processor:
        await processor.give(_records(subject))
        await _ended(processor, FarewellReason.DRAIN)
        if left := processor.session.uncommitted:
            shown = processor.transcript.shown(subject.dialect)
            records = counted(left, "record")
            raise Advice(
                f"it leaves {records} without a checkpoint when asked to shut down",
                shown,
            )


async def begins_at_any_checkpoint(subject: Subject) -> None:
    """After a restart the processor gets only the records after its last checkpoint."""
    total = 8
    places = {sequence_number(place): place for place in range(1, total + 1)}
    actions = (_records(subject, 4, place) for place in range(1, total, 4))
    processor = await _life(subject, *actions)
    positions = [asked.position for asked in processor.asked[:-1]]
    for position in dict.fromkeys(positions):
        if position.sequence not in places:
            continue  # which is for another check
        done = places[position.sequence]
        left = [_records(subject, total - done, done + 1)] if done < total else []
        (await _life(subject, *left, position=position)).blame_illegal()


async def exits_when_stdin_ends(subject: Subject) -> None:
    """A daemon that is gone sends nothing: the processor exits when its stdin ends."""
    async with _daemon(subject) as processor:
        await processor.give(_records(subject))
        await processor.exited()


async def exits_when_an_answer_does_not_come(subject: Subject) -> None:
    """Stdin may end instead of the answer to a checkpoint."""
    async with _daemon(
        subject, None, Fault(FaultKind.END_INPUT, number=1)
    ) as processor:
        await processor.initialized()
        for place in range(1, _ENOUGH, 3):
            processor.begin(_records(subject, 3, place))
            try:
                await processor.until(
                    lambda: bool(processor.asked) or not processor.session.owed,
                    "did not answer processRecords",
                )
            except WorkerMisbehaved:
                # Its stdin has ended by then, and it may have exited.
                if not processor.asked:
                    raise
            if processor.asked:
                break
        else:
            raise NotApplicable(_SELDOM)
        await processor.exited()


async def waits_for_a_late_answer(subject: Subject) -> None:
    """The answer to a checkpoint may take a while; nothing else is sent meanwhile."""
    late = Fault(FaultKind.PAUSE, Moment.CHECKPOINT, number=1, seconds=0.5)
    async with _daemon(subject, None, late) as processor:
        await processor.give(_records(subject))
        await processor.end()


async def accepts_no_records(subject: Subject) -> None:
    """Any list of records may be empty, so that processors can act by time."""
    actions = (_records(subject, count) for count in (0, 3, 0))
    (await _life(subject, *actions)).blame_illegal()


async def accepts_many_records(subject: Subject) -> None:
    """An action may have 10,000 records, in a line of several megabytes."""
    await _life(subject, _records(subject, _MANY), more=_PAUSE)


async def accepts_records_without_data(subject: Subject) -> None:
    """The data of a record may be empty."""
    await _life(subject, AnnotatedRun([b""] * 3, **_records(subject).columns))


async def accepts_keys_beyond_ascii(subject: Subject) -> None:
    """A partition key is any text of up to 256 characters."""
    keys = ["k\u00e4tzchen", "\u2028\u732b", "\U0001f408" * 128]
    await _life(subject, _records(subject, columns={RecordColumn.PARTITION: keys}))


async def accepts_records_that_were_put_as_one(subject: Subject) -> None:
    """Aggregated records share a sequence number and differ in sub-sequence numbers."""
    numbers: _Columns = {
        RecordColumn.SEQUENCE: [_FIRST] * 3,
        RecordColumn.SUB: [0, 1, 2],
    }
    (await _life(subject, _records(subject, columns=numbers))).blame_illegal()


async def begins_within_records_that_were_put_as_one(subject: Subject) -> None:
    """The checkpoint in ``initialize`` may have a sub-sequence number."""
    numbers: _Columns = {
        RecordColumn.SEQUENCE: [_FIRST] * 2,
        RecordColumn.SUB: [2, 3],
    }
    begin, action = ShardPosition(_FIRST, 1), _records(subject, 2, columns=numbers)
    (await _life(subject, action, position=begin)).blame_illegal()


CHECKS: Final = (
    Check(initializes, gate=True),
    Check(answers_each_action_once),
    Check(writes_nothing_else_to_stdout),
    Check(checkpoints_at_all),
    Check(checkpoints_what_was_delivered),
    Check(checkpoints_the_end_of_a_shard),
    Check(checkpoints_the_end_of_an_empty_shard),
    Check(checkpoints_the_end_again_when_throttled),
    Check(survives_throttling),
    Check(survives_a_store_that_fails),
    Check(survives_a_lost_lease),
    Check(survives_an_unknown_error),
    Check(lets_go_of_a_lost_lease),
    Check(answers_a_request_to_shut_down),
    Check(begins_at_any_checkpoint),
    Check(exits_when_stdin_ends),
    Check(exits_when_an_answer_does_not_come),
    Check(waits_for_a_late_answer),
    Check(accepts_no_records),
    Check(accepts_many_records),
    Check(accepts_records_without_data),
    Check(accepts_keys_beyond_ascii),
    Check(accepts_records_that_were_put_as_one),
    Check(begins_within_records_that_were_put_as_one),
)
