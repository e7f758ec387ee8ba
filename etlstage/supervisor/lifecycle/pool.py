r"""
What to do about what happens to the workers of a stage.

The supervisor reports every event with its time, and performs the instructions that
come back. Nothing here runs, waits or reads a clock, so every interleaving can be
tried. Data does not pass through here: an event per message would cost more than the
message.

The life of a worker, which keeps its name over all its starts::

    EXITED --> STARTING --> RUNNING --> STOPPING --> BACKOFF --> STARTING ...
                                                 \-> EXITED   (done, or not wanted)
                                                 \-> FATAL    (no progress)

*STARTING* ends when the worker says that it is ready; one that never says so is
RUNNING at once. *STOPPING* is every way to an end that we have begun: a fault, a
worker that is worn, the supervisor's own end. A process that ends unasked goes from
where it is to the state behind it.

A start makes *progress* when it answered something, or died of a message that it had
read: then the search for the culprit has come a step further. Only starts without
progress count against ``RestartPolicy.max``: messages that kill workers must not use
up what protects from a program that can't even start.

What concerns one worker is in ``worker.py``. Here is what concerns several: that only
one of them is replaced at a time, and that somebody is told when none is left.
"""

from __future__ import annotations

from collections.abc import Callable

from etlstage.stage.stage import Stage
from etlstage.supervisor.lifecycle.events import Event, StopRequested
from etlstage.supervisor.lifecycle.instructions import GiveUp, Instruction
from etlstage.supervisor.lifecycle.transition import State
from etlstage.supervisor.lifecycle.worker import WorkerLife

__all__ = ("PoolState",)


class PoolState:
    """
    Decides over the workers of a stage.

    Args:
        stage: Its policies.
        random: Returns a number from 0 to 1, for jitter and variance.

    """

    def __init__(self, stage: Stage, random: Callable[[], float] = lambda: 0.0) -> None:
        self._out: list[Instruction] = []
        names = [f"{stage.name}-{n}" for n in range(1, stage.workers + 1)]
        self._slots = {
            name: WorkerLife(name, stage, random, self._out) for name in names
        }
        self.stopping = False
        """The supervisor is to end: no worker is started any more."""
        self.given_up = False
        """No worker is left, although messages may be."""

    def __repr__(self) -> str:
        return f"<PoolState {list(self._slots.values())}>"

    def __getitem__(self, worker: str) -> State:
        """Return the state of a worker."""
        return self._slots[worker].state

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers."""
        return tuple(self._slots)

    @property
    def alive(self) -> int:
        """How many workers have a process, or are about to."""
        return sum(slot.alive for slot in self._slots.values())

    @property
    def finished(self) -> bool:
        """Whether there is no process, and none will be started."""
        return all(slot.finished for slot in self._slots.values())

    def begin(self) -> list[Instruction]:
        """Return what starts the workers."""
        for slot in self._slots.values():
            slot.spawn()
        return self._drain()

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """
        Return what to do about ``event``, in this order.

        Args:
            event: What happened.
            now: When, in seconds.

        Raises:
            AssertionError: If it can't have happened.

        """
        if isinstance(event, StopRequested):
            self.stopping = True
            for slot in self._slots.values():
                slot.handle(event, now)
        else:
            slot = self._slots[event.worker]
            slot.handle(event, now)
            self._retire_one(now)
            self._give_up(slot)
        return self._drain()

    def story(self, worker: str, now: float) -> tuple[str, ...]:
        """Return the last things that happened to a worker, oldest first."""
        return self._slots[worker].story.tell(now)

    def validate(self) -> None:
        """Assert what always holds between two events."""
        for slot in self._slots.values():
            slot.validate()
        retiring = [slot for slot in self._slots.values() if slot.retiring]
        assert len(retiring) <= 1, f"{retiring} retire at the same time"
        assert not self.given_up or self.finished, "given up too early"
        assert not self.finished or self.stopping or self.given_up, (
            "no worker is left, and nobody is told"
        )

    def _retire_one(self, now: float) -> None:
        """Replace a worn worker, if the others are all there."""
        others = [slot for slot in self._slots.values() if not slot.finished]
        if all(slot.state is State.RUNNING for slot in others):
            worn = next((slot for slot in others if slot.worn is not None), None)
            if worn is not None:
                worn.retire(now)

    def _give_up(self, last: WorkerLife) -> None:
        if self.finished and not self.stopping and not self.given_up:
            self.given_up = True
            self._out.append(GiveUp(last.name, last.end))

    def _drain(self) -> list[Instruction]:
        out = self._out[:]
        self._out.clear()
        return out
