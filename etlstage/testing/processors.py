"""
Hypothesis rules for record processors, which are ended and restarted.

This module needs the extra ``testing``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from etlstage.messages import AnnotatedRun, StageKind
from etlstage.protocol.events import Assignment, FarewellReason
from etlstage.protocol.kcl.checkpoint import (
    DEPENDENCY,
    THROTTLING,
    Rank,
    ShardPosition,
    position_of,
    rank,
)
from etlstage.protocol.kcl.lines import RecordColumn
from etlstage.protocol.kcl.session import State
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.stage import Stage
from etlstage.testing.factories import Tested, stage_of
from etlstage.testing.fuzzing.steps import Records
from etlstage.testing.kcl import ProcessorUnderTest
from etlstage.testing.machine import Held

__all__ = ("ProcessorMachine", "actions")


def actions(
    data: st.SearchStrategy[bytes] | None = None,
    *,
    max_records: int = 3,
    errors: Sequence[str] = (THROTTLING, DEPENDENCY),
) -> st.SearchStrategy[Records]:
    """
    Draw an action, and the errors that its first checkpoints fail with.

    There are at most two errors, as a client may give up after more.

    Args:
        data: Draws the data of a record.
        max_records: Maximum number of records.
        errors: Names of the exceptions that may be drawn.

    """
    drawn = st.binary(max_size=8) if data is None else data
    return st.builds(
        Records,
        st.lists(drawn, max_size=max_records).map(tuple),
        st.lists(st.sampled_from(errors), max_size=2).map(tuple),
        st.booleans(),
    )


class ProcessorMachine(RuleBasedStateMachine):
    """
    Has a record processor process a shard, with restarts in between.

    ::

        class Clicks(ProcessorMachine):
            tested = ["python", "processor.py"]

        TestClicks = Clicks.TestCase

    Its rules give records, and restart the processor after its last checkpoint; finally
    the shard is ended. The processor has to keep to the protocol, and to checkpoint the
    records it was given, in order. Add rules, and invariants such as what it must have
    written, as to any machine of Hypothesis.

    Attributes:
        tested: A command, a script or a stage. A script runs in virtual time.
        dialect: The dialect and its settings, unless ``tested`` is a stage.
        drawn: Draws an action.

    """

    tested: ClassVar[Tested]
    dialect: ClassVar[KclDialect] = KclDialect()
    drawn: ClassVar[st.SearchStrategy[Records]] = actions()

    def __init__(self) -> None:
        super().__init__()
        self.stored: ShardPosition = position_of(None)
        """The last checkpoint."""
        # Records not checkpointed, with their keys.
        self._given: list[tuple[Rank, str, bytes]] = []
        self._last = 0  # place of the record given last
        self._held: Held[ProcessorUnderTest] | None = None

    @initialize()
    def start(self) -> None:
        """Start a processor after the last checkpoint; give it the records again."""
        tested = type(self).tested  # via self, a script would become a method
        stage, launch = stage_of(tested)
        if not isinstance(tested, Stage):
            stage = replace(stage, kind=StageKind.LOAD, dialect=self.dialect)
        share = Assignment("shardId-000000000000", self.stored)
        made = ProcessorUnderTest(stage, share, launch=launch)
        self._held = Held(made, virtual=callable(tested))
        self._held.open()
        self._held.run(made.initialized())
        stored = rank(self.stored)
        self._given = [each for each in self._given if each[0] > stored]
        if self._given:
            ranks, keys, data = zip(*self._given, strict=True)
            given = {
                RecordColumn.SEQUENCE: [str(number) for number, _ in ranks],
                RecordColumn.SUB: [sub for _, sub in ranks],
                RecordColumn.PARTITION: keys,
            }
            columns = {**Records(data).run(1).columns, **given}
            self._give(AnnotatedRun([*data], **columns))

    @precondition(lambda self: self._held is not None)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        """Give records to the processor; if it loses its lease, start another one."""
        assert self._held is not None
        action = data.draw(self.drawn, label="action")
        run = action.run(self._last + 1)
        self._last += len(run)
        numbers = map(int, run.columns[RecordColumn.SEQUENCE])
        subs = run.columns.get(RecordColumn.SUB) or [0] * len(run)
        ranks = zip(numbers, subs, strict=True)
        keys = run.columns[RecordColumn.PARTITION]
        self._given += zip(ranks, keys, action.messages, strict=True)
        self._give(run, action.errors)
        if self._held.entered.session.state is not State.READY:
            self.restart(FarewellReason.LOST)  # by a ShutdownException

    @precondition(lambda self: self._held is not None)
    @rule(why=st.sampled_from([FarewellReason.LOST, FarewellReason.DRAIN]))
    def restart(self, why: FarewellReason) -> None:
        """End the processor, and start another one."""
        self._end(why)
        self.start()

    @invariant()
    def goes_on(self) -> None:
        """Check that checkpoints never move backwards."""
        if self._held is not None:
            stored = self._held.entered.stored
            assert rank(self.stored) <= rank(stored)
            self.stored = stored

    def teardown(self) -> None:
        """End the shard."""
        if self._held is not None:
            self._end(FarewellReason.ENDED)

    def _give(self, run: AnnotatedRun, errors: Sequence[str] = ()) -> None:
        assert self._held is not None
        processor = self._held.entered
        processor.errors.extend(errors)
        self._held.run(processor.give(run))
        processor.errors.clear()
        processor.blame_illegal()

    def _end(self, why: FarewellReason) -> None:
        held, self._held = self._held, None
        assert held is not None
        try:
            # There is nothing to end after a failure; a lost lease has its exit, too.
            if why is FarewellReason.LOST or held.entered.session.state is State.READY:
                status = held.run(held.entered.end(why))
                assert not status, f"it exited with status {status}"
            self.stored = held.entered.stored
        finally:
            held.close()
