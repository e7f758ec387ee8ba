"""
Runners with clocks of their own, a table that fails, and checks of what must hold.

Nothing here is random: a test decides what happens next.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import Enum

from etlstage.shard.keeper import LeaseKeeper, Phase
from etlstage.shard.lease import (
    Answer,
    CheckpointAsked,
    Event,
    FailRunner,
    Instruction,
    Lease,
    Left,
    Read,
    ReadFailed,
    Start,
    Stop,
    TableRead,
    TimerRang,
    WorkerEnded,
    Write,
    WriteFailed,
    WriteRefused,
    Written,
)

__all__ = ("FAILOVER", "Mode", "Runner", "World")

FAILOVER = 10.0


class Mode(Enum):
    """The fate of a request to the table."""

    DONE = "done"
    LOST = "lost"
    """It is lost."""
    UNTOLD = "untold"
    """It is done, but the answer is lost."""
    LATE = "late"
    """It will be done some time later, and the answer is lost."""


class Runner:
    """
    A runner, its workers, and its requests and answers in transit.

    Args:
        name: Name of the runner.
        start: Identifies this start of the runner.
        rate: Seconds that the runner's clock advances each second.
        offset: Initial time of the runner's clock.
        alone: Whether no other start of the name can be running.

    """

    def __init__(
        self,
        name: str,
        start: str,
        rate: float,
        offset: float,
        *,
        alone: bool = False,
    ) -> None:
        self.keeper = LeaseKeeper(
            name, start, failover=FAILOVER, hand_over=5.0, alone=alone
        )
        self.rate = rate
        self.clock = offset
        self.asked = True
        self.requests: list[Read | Write] = []
        self.answers: list[Event] = []
        self.workers: dict[str, int] = {}  # last position, by shard
        self.stopping: set[str] = set()
        self.pending: dict[str, int] = {}  # checkpoints that wait for an answer
        self.stopped = False  # SIGSTOP
        self.alive = True
        self.refused = ""
        self.left = False


class World:
    """All runners and the one table."""

    def __init__(self, leases: Sequence[Lease]) -> None:
        self.rows = {lease.shard: lease for lease in leases}
        self.runners: list[Runner] = []
        self.late: list[Write] = []
        self.acknowledged: dict[str, int] = {}
        self._starts = itertools.count()

    def begin(
        self,
        name: str = "",
        rate: float = 1.0,
        offset: float = 0.0,
        *,
        alone: bool = False,
    ) -> Runner:
        """Start a runner."""
        number = next(self._starts)
        runner = Runner(name or f"r{number}", str(number), rate, offset, alone=alone)
        self.runners.append(runner)
        self.tell(runner, TimerRang())
        return runner

    # --- what happens -----------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        """Let time pass for all runners; those that are due look at their clocks."""
        for runner in self.runners:
            runner.clock += seconds * runner.rate
            self.ring(runner)

    def ring(self, runner: Runner) -> None:
        """Let a runner look at its clock, if that is due."""
        due = runner.keeper.due()
        if runner.alive and not runner.stopped and (due is None or due <= runner.clock):
            self.tell(runner, TimerRang())

    def jump(self, runner: Runner, seconds: float) -> None:
        """Let a runner's clock jump, and the runner look at it."""
        runner.clock += seconds
        self.tell(runner, TimerRang())

    def tell(self, runner: Runner, event: Event) -> None:
        """Report an event to a runner, and start its instructions."""
        for instruction in runner.keeper.handle(event, runner.clock):
            self._begin(runner, instruction)

    def _begin(self, runner: Runner, instruction: Instruction) -> None:
        match instruction:
            case Read() | Write():
                runner.requests.append(instruction)
            case Start(lease):
                self._start(runner, lease)
            case Stop(shard):
                if shard in runner.workers:  # it may have ended at that moment
                    runner.stopping.add(shard)
            case Answer(shard, stored):
                position = runner.pending.pop(shard)
                if stored:
                    before = self.acknowledged.get(shard, 0)
                    self.acknowledged[shard] = max(before, position)
                    if shard in runner.workers:  # it may be gone meanwhile
                        runner.workers[shard] = position
            case FailRunner(text):
                runner.refused, runner.alive = text, False
            case Left():
                assert not runner.workers
                runner.left, runner.alive = True, False

    def _start(self, runner: Runner, lease: Lease) -> None:
        assert lease.shard not in runner.workers, "one worker a shard"
        assert lease.owner == runner.keeper.owner
        assert not lease.ended
        for parent in lease.parents:
            assert self.rows[parent].ended, "a child began before its parent ended"
        runner.workers[lease.shard] = int(lease.position or 0)

    def do(self, runner: Runner, index: int = 0, mode: Mode = Mode.DONE) -> None:
        """Let the table perform a request of a runner."""
        request = runner.requests.pop(index)
        if isinstance(request, Read):
            rows = [*self.rows.values()]
            answer: Event = TableRead(rows) if mode is Mode.DONE else ReadFailed()
        else:
            answer = WriteFailed(request.number)
            if mode is Mode.LATE:
                self.late.append(request)
            elif mode is not Mode.LOST:
                written = self.swap(request)
                if mode is Mode.DONE:
                    one = Written if written else WriteRefused
                    answer = one(request.number)
        runner.answers.append(answer)

    def swap(self, write: Write) -> bool:
        """Replace a row by another, as a table does; check that the write is legal."""
        row, (_, before, after) = self.rows.get(write.before.shard), write
        if row is None or (row.owner, row.counter) != (before.owner, before.counter):
            return False
        if (after.position, after.ended) != (row.position, row.ended):
            assert before.owner == after.owner, "only the owner moves a checkpoint"
            assert int(after.position or 0) >= int(row.position or 0), "it went back"
            assert not row.ended
        assert after.counter == row.counter + 1
        self.rows[row.shard] = after
        return True

    def hear(self, runner: Runner, index: int = 0) -> None:
        """Let a runner receive the answer to a request."""
        self.tell(runner, runner.answers.pop(index))

    def ask(self, runner: Runner, shard: str, step: int, *, ended: bool) -> None:
        """Let a worker ask for a checkpoint."""
        if shard not in runner.pending:
            position = runner.pending[shard] = runner.workers[shard] + step
            self.tell(runner, CheckpointAsked(shard, str(position), ended))

    def end(self, runner: Runner, shard: str, *, failed: bool = False) -> None:
        """Let a worker end."""
        del runner.workers[shard]
        runner.stopping.discard(shard)
        self.tell(runner, WorkerEnded(shard, failed))
        assert shard not in runner.pending or runner.keeper.phases.get(shard)

    # --- how it is --------------------------------------------------------------

    def work(self, runner: Runner) -> None:
        """Perform everything in transit for a runner, until nothing is left."""
        while runner.alive:
            if runner.answers:
                self.hear(runner)
            elif runner.requests:
                self.do(runner)
            elif going := self._going(runner):
                self.end(runner, going[0])
            else:
                return

    def _going(self, runner: Runner) -> list[str]:
        """Return the workers that are about to end: asked to, or at a shard's end."""
        phases = runner.keeper.phases
        ended = {one for one in runner.workers if phases.get(one) is Phase.ENDED}
        return sorted(runner.stopping | ended)

    def go_on(self, seconds: float, step: float = 0.5) -> set[str]:
        """Let all live runners work undisturbed; return shards that had an owner."""
        owned: set[str] = set()
        for write in self.late:
            self.swap(write)
        self.late.clear()
        for _ in range(int(seconds / step)):
            self.pass_time(step)
            for runner in self.runners:
                if not runner.stopped:
                    self.work(runner)
            owned |= {shard for shard in self.rows if self.owners(shard)}
        return owned

    def owners(self, shard: str) -> list[Runner]:
        """Return the runners that could move a shard's checkpoint now."""
        row = self.rows[shard]
        return [
            runner
            for runner in self.runners
            if runner.keeper.owner == row.owner
            and runner.keeper.phases.get(shard) in (Phase.RUNNING, Phase.HANDING)
        ]

    def wanted(self) -> list[str]:
        """Return the shards that must have an owner."""
        return [
            row.shard
            for row in self.rows.values()
            if not row.ended and all(self.rows[p].ended for p in row.parents)
        ]

    def check(self) -> None:
        """Assert that shards have one owner, and that no acknowledgement is lost."""
        for shard, row in self.rows.items():
            assert len(self.owners(shard)) <= 1
            assert self.acknowledged.get(shard, 0) <= int(row.position or 0)
