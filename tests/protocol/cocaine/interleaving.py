"""
Random conversations: every exchange must end once, with its own outputs.

Either side sends anything at any time; what it sends is delivered in pieces of any
size, late or at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from random import Random
from typing import Final

from etlstage.protocol.base import Side
from etlstage.protocol.cocaine import CocaineSession, CocaineVersion
from etlstage.protocol.events import (
    Added,
    Alive,
    Cancelled,
    Ended,
    Event,
    Farewell,
    Noise,
    Opened,
    Ready,
)

_VERSIONS: Final = [version for version in CocaineVersion if version.words is not None]


class Interleaving:
    """
    One conversation.

    Args:
        seed: Determines everything that happens.

    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)  # noqa: S311 - repeatable
        version = self.random.choice(_VERSIONS)
        self.ours = CocaineSession(Side.SUPERVISOR, version, concurrency=5)
        self.theirs = CocaineSession(Side.WORKER, version)
        self.wires = {Side.SUPERVISOR: bytearray(), Side.WORKER: bytearray()}
        self.last = 0
        self.asked: set[int] = set()  # sessions that the worker has not ended
        self.outputs: dict[int, list[bytes]] = defaultdict(list)
        self.written: dict[int, list[bytes]] = defaultdict(list)
        self.ends: Counter[int] = Counter()
        self.cancelled: set[int] = set()
        self.theirs.send(Ready("u"))

    def run(self, steps: int) -> None:
        """Take random steps, then let all open exchanges end, and compare."""
        acts: list[Callable[[], None]] = [
            *[self._open] * 2,
            *[self._answer] * 3,
            *[self._deliver] * 4,
            self._beat,
            self._cancel,
        ]
        for _ in range(steps):
            self.random.choice(acts)()
        for _ in range(3):
            self._deliver_all()
            for id_ in [*self.asked]:
                self._end(id_)
        self._compare()

    def _open(self) -> None:
        if self.ours.room >= 1:
            self.last += self.random.choice([1, 1, 3])
            message, whole = b"%d:in" % self.last, self.random.random() < 0.8
            self.ours.send(
                Opened(self.last, [message], each=False, ended=whole, event="e")
            )
            self.ends[self.last] += 0

    def _answer(self) -> None:
        if not self.asked:
            return
        id_ = self.random.choice([*self.asked])
        if self.random.random() < 0.5:
            self._write(id_)
        else:
            self._end(id_)

    def _write(self, id_: int) -> None:
        output = b"%d:%d" % (id_, self.random.randrange(1000))
        self.written[id_].append(output)
        self.theirs.send(Added(id_, [output]))

    def _end(self, id_: int) -> None:
        self.asked.remove(id_)
        if self.random.random() < 0.3:
            self.theirs.send(Ended.refused(id_, 7, str(id_)))
        else:
            self.theirs.send(Ended(id_, [()]))

    def _cancel(self) -> None:
        open_ = [id_ for id_, count in self.ends.items() if not count]
        if open_:
            id_ = self.random.choice(open_)
            self.cancelled.add(id_)
            self.ends[id_] += 1
            self.ours.send(Cancelled(id_, 0, "too late"))

    def _beat(self) -> None:
        self.random.choice([self.ours, self.theirs]).send(Alive())

    def _deliver(self) -> None:
        side = self.random.choice([*Side])
        self._pass(side, self.random.choice([1, 5, 50, 5000]))

    def _deliver_all(self) -> None:
        for side in (Side.SUPERVISOR, Side.WORKER, Side.SUPERVISOR):
            self._pass(side, 10**9)

    def _pass(self, sender: Side, size: int) -> None:
        here, there = self.ours, self.theirs
        if sender is Side.WORKER:
            here, there = there, here
        wire = self.wires[sender]
        wire += b"".join(here.data_to_send())
        there.receive_data(bytes(wire[:size]) or b"", 0.0)
        del wire[:size]
        for event in there.events_received():
            if sender is Side.WORKER:
                self._hear(event)
            else:
                self._listen(event)

    def _listen(self, event: Event) -> None:
        """Handle an event as the worker."""
        if isinstance(event, Opened):
            self.asked.add(event.first)
        elif isinstance(event, Cancelled) and event.id in self.asked:
            self._end(event.id)

    def _hear(self, event: Event) -> None:
        """Handle an event as the supervisor."""
        match event:
            case Added(id_, messages):
                assert not self.ends[id_], f"{event} behind the end"
                self.outputs[id_] += messages
            case Ended(id_, _, [refusal]):
                assert refusal == (0, 7, refusal.category, str(id_))
                self.ends[id_] += 1
            case Ended(first, groups):
                for id_, group in enumerate(groups, first):
                    self.outputs[id_] += group
                    self.ends[id_] += 1
            case Ready() | Alive() | Noise():
                pass
            case _:
                raise AssertionError(f"unreachable: {event}")

    def _compare(self) -> None:
        assert set(self.ends.values()) <= {1}, f"{self.ends} ends"
        assert (self.ours.owed, self.theirs.owed) == (0, 0)
        for id_, outputs in self.outputs.items():
            written = self.written[id_]
            whole = id_ not in self.cancelled
            assert outputs == (written if whole else written[: len(outputs)])
        self.ours.send(Farewell(1, "all is said"))
        assert len(self.ours.data_to_send()) >= 1
