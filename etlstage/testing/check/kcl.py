"""
What a record processor should do.

Each check is a life of the processor, or some, under a daemon of ours: see
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
from etlstage.testing.kcl import ProcessorUnderTest
from etlstage.testing.transcript import WorkerMisbehaved

__all__ = ("CHECKS",)

_Columns: TypeAlias = Mapping[str, Sequence[Any]]

_FIRST: Final = 49590338271490256608559692538361571095921575989136588898
_SHARD: Final = "shardId-000000000000"
_MANY: Final = 10_000  # records of an action, the most that a daemon gives
_ENOUGH: Final = 12  # records, in which a processor has checkpointed if it ever does
_SELDOM: Final = f"it does not checkpoint in processRecords, within {_ENOUGH} records"
_MOMENT: Final = 0.1  # seconds in which a status too many would come
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
    first: int = 0,
    columns: _Columns | None = None,
) -> AnnotatedRun:
    """Return so many records, with other columns than those that any has."""
    named: dict[str, Sequence[Any]] = {
        RecordColumn.SEQUENCE: [str(_FIRST + first + n) for n in range(count)],
        RecordColumn.PARTITION: [f"key-{n % 7}" for n in range(count)],
        RecordColumn.ARRIVAL: [1476889707000 + n for n in range(count)],
        RecordColumn.BEHIND: [0] * count,
    }
    return AnnotatedRun(subject.messages(count), **{**named, **(columns or {})})


async def _ended(processor: ProcessorUnderTest, why: FarewellReason) -> None:
    status = await processor.end(why)
    if status:
        processor.fail(f"exited with status {status} at the end of its life")


async def _life(
    subject: Subject, *actions: AnnotatedRun, position: object = None, more: float = 0.0
) -> ProcessorUnderTest:
    """Return what was given actions, and then ended its shard."""
    async with _daemon(subject, position, more=more) as processor:
        for action in actions:
            await processor.give(action)
        await processor.end()
    return processor


async def initializes(subject: Subject) -> None:
    """
    It answers ``initialize`` with one status, and goes when its lease is lost.

    Flush stdout behind each line: the daemon waits for it.
    """
    async with _daemon(subject) as processor:
        await _ended(processor, FarewellReason.LOST)


async def answers_each_action_once(subject: Subject) -> None:
    """
    One status for each action, which names it.

    A second one would be taken for the answer to the next action, which is then lost;
    is a callback called twice?
    """
    async with _daemon(subject) as processor:
        for place in range(3):
            await processor.give(_records(subject, 2, 2 * place))
            await anyio.sleep(_MOMENT)
            if processor.broken:
                processor.fail(processor.broken)
        await processor.end(FarewellReason.LOST)


async def writes_nothing_else_to_stdout(subject: Subject) -> None:
    """What it writes for people belongs on stderr: a daemon logs it as unexpected."""
    processor = await _life(subject, _records(subject))
    if processor.noise:
        lines = counted(len(processor.noise), "line")
        shown = processor.transcript.shown(subject.dialect)
        raise Advice(f"{lines} on stdout that no daemon understands", shown)


async def checkpoints_at_all(subject: Subject) -> None:
    """Without checkpoints all records of a shard come again after a restart."""
    async with _daemon(subject) as processor:
        await processor.give(_records(subject))
        before = len(processor.asked)
        await processor.end()
        if not before:
            shown = processor.transcript.shown(subject.dialect)
            raise Advice("it checkpoints only at the end of a shard", shown)


async def checkpoints_what_was_delivered(subject: Subject) -> None:
    """A number that was not delivered, or is behind the last checkpoint, is refused."""
    actions = (_records(subject, 4, 4 * place) for place in range(3))
    (await _life(subject, *actions)).blame_illegal()


async def checkpoints_the_end_of_a_shard(subject: Subject) -> None:
    """
    Without a checkpoint in ``shardEnded`` the shards behind this one never begin.

    Ask without a sequence number: that of the last record does not count if it was
    checkpointed before.
    """
    async with _daemon(subject) as processor:
        await processor.give(_records(subject))
        await _ended(processor, FarewellReason.ENDED)


async def checkpoints_the_end_of_an_empty_shard(subject: Subject) -> None:
    """Also where no record was delivered."""
    async with _daemon(subject) as processor:
        await _ended(processor, FarewellReason.ENDED)


async def checkpoints_the_end_again_when_throttled(subject: Subject) -> None:
    """A store may have too much to do: try it again, within the action."""
    number = len((await _life(subject)).asked)
    throttled = _failed(number, THROTTLING)
    async with _daemon(subject, None, throttled, more=_PAUSE) as processor:
        await _ended(processor, FarewellReason.ENDED)


async def _survives(subject: Subject, error: str) -> ProcessorUnderTest:
    """Return what was given records, its first checkpoint answered with an error."""
    failed = _failed(1, error)
    async with _daemon(subject, None, failed, more=_PAUSE) as processor:
        for place in range(0, _ENOUGH, 3):
            await processor.give(_records(subject, 3, place))
        if not processor.asked:
            raise NotApplicable(_SELDOM)
        why = FarewellReason.LOST if error == SHUTDOWN else FarewellReason.ENDED
        await processor.end(why)
    return processor


async def survives_throttling(subject: Subject) -> None:
    """A checkpoint that is throttled is no reason to exit."""
    await _survives(subject, THROTTLING)


async def survives_a_store_that_fails(subject: Subject) -> None:
    """So is one whose store has failed."""
    await _survives(subject, DEPENDENCY)


async def survives_a_lost_lease(subject: Subject) -> None:
    """
    A checkpoint that is answered with ``ShutdownException``: the lease is another's.

    ``leaseLost`` follows; until then all is answered.
    """
    processor = await _survives(subject, SHUTDOWN)
    again = sum(
        asked.position == processor.asked[0].position for asked in processor.asked
    )
    if again > 1:
        processor.fail(f"tried a checkpoint again after {SHUTDOWN}: it can't succeed")


async def survives_an_unknown_error(subject: Subject) -> None:
    """A daemon answers with the name of any exception of Java; to exit ends them all."""
    try:
        await _survives(subject, "NullPointerException")
    except WorkerMisbehaved as error:
        raise Advice(error.what, error.transcript) from None


async def lets_go_of_a_lost_lease(subject: Subject) -> None:
    """In ``leaseLost`` there is no checkpoint: the shard is another's."""
    async with _daemon(subject) as processor:
        await processor.give(_records(subject))
        await _ended(processor, FarewellReason.LOST)
        for error in INVALID_STATE, SHUTDOWN:
            if processor.refused(error):
                processor.fail(f"asked for a checkpoint behind leaseLost: {error}")


async def answers_a_request_to_shut_down(subject: Subject) -> None:
    """
    ``shutdownRequested`` is answered, and then ``leaseLost``.

    It is the last time that it may checkpoint: what it does not, comes again.
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
                f"it leaves {records} without a checkpoint when it is to shut down",
                shown,
            )


async def begins_at_any_checkpoint(subject: Subject) -> None:
    """After a restart it is given what is behind its last checkpoint, and no more."""
    total = 8
    actions = (_records(subject, 4, place) for place in range(0, total, 4))
    processor = await _life(subject, *actions)
    positions = [asked.position for asked in processor.asked[:-1]]
    for position in dict.fromkeys(positions):
        begin = int(position.sequence) - _FIRST + 1
        left = [_records(subject, total - begin, begin)] if begin < total else []
        (await _life(subject, *left, position=position)).blame_illegal()


async def exits_when_stdin_ends(subject: Subject) -> None:
    """A daemon that is gone sends nothing: the end of stdin is the end."""
    async with _daemon(subject) as processor:
        await processor.give(_records(subject))
        await processor.exited()


async def exits_when_an_answer_does_not_come(subject: Subject) -> None:
    """Stdin may end in place of the answer to a checkpoint."""
    async with _daemon(
        subject, None, Fault(FaultKind.END_INPUT, number=1)
    ) as processor:
        await processor.initialized()
        for place in range(0, _ENOUGH, 3):
            processor.begin(_records(subject, 3, place))
            with anyio.move_on_after(subject.timeout):
                while not processor.asked and processor.session.owed:
                    await processor.changed()
            if processor.asked:
                break
        else:
            raise NotApplicable(_SELDOM)
        await processor.exited()


async def waits_for_a_late_answer(subject: Subject) -> None:
    """A checkpoint may take a while; nothing else is sent meanwhile."""
    late = Fault(FaultKind.PAUSE, Moment.CHECKPOINT, number=1, seconds=0.5)
    async with _daemon(subject, None, late) as processor:
        await processor.give(_records(subject))
        await processor.end()


async def accepts_no_records(subject: Subject) -> None:
    """A list may be empty, also the first one; so that it can act by time."""
    actions = (_records(subject, count) for count in (0, 3, 0))
    (await _life(subject, *actions)).blame_illegal()


async def accepts_many_records(subject: Subject) -> None:
    """There may be 10,000 in an action, a line of several megabytes."""
    await _life(subject, _records(subject, _MANY), more=_PAUSE)


async def accepts_records_without_data(subject: Subject) -> None:
    """Their data may be empty."""
    await _life(subject, AnnotatedRun([b""] * 3, **_records(subject).columns))


async def accepts_keys_beyond_ascii(subject: Subject) -> None:
    """A partition key is any text of up to 256 characters."""
    keys = ["k\u00e4tzchen", "\u2028\u732b", "\U0001f408" * 128]
    await _life(subject, _records(subject, columns={RecordColumn.PARTITION: keys}))


async def accepts_records_that_were_put_as_one(subject: Subject) -> None:
    """Their sequence number is the same, and their sub-sequence numbers differ."""
    numbers: _Columns = {
        RecordColumn.SEQUENCE: [str(_FIRST)] * 3,
        RecordColumn.SUB: [0, 1, 2],
    }
    (await _life(subject, _records(subject, columns=numbers))).blame_illegal()


async def begins_within_records_that_were_put_as_one(subject: Subject) -> None:
    """The checkpoint that ``initialize`` names may have a sub-sequence number."""
    numbers: _Columns = {
        RecordColumn.SEQUENCE: [str(_FIRST)] * 2,
        RecordColumn.SUB: [2, 3],
    }
    begin, action = ShardPosition(str(_FIRST), 1), _records(subject, 2, columns=numbers)
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
