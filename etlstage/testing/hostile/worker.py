"""
A worker of the stage protocol that misbehaves according to its fault plan.

It is a generator of steps: bytes to write, seconds to wait, acts; where it reads, it is
sent the input. The steps are carried out by ``program.py`` in a process, and by
``testing/scripted.py`` in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from .kinds import Act, DueFaults, Exit, FaultKind, ReadInput, ShowLife, Step, effect
from .marked import MarkerBytes, Requests, SpoiledReplies

if TYPE_CHECKING:
    from .kinds import Fault

__all__ = ("HostileWorker",)

_MANY: Final = 1000  # messages, at most, that are kept for the reply to a range
_IDLE: Final = 0.05  # seconds without input
_PIPES: Final = frozenset({FaultKind.CLOSE_STDIN, FaultKind.CLOSE_STDOUT})


class HostileWorker:
    """
    One start of a worker.

    Args:
        plan: The faults.
        environment: Where it finds its markers, and how often it has to show life.
        work: Returns the outputs for a message; an exception is a refusal.
        driver: The side that closes a batch, ``worker`` or ``supervisor``; without
            batches ``single``; of an extractor ``plain`` or ``cyclic``.
        size: Messages in a batch, if the worker closes it; or how many numbers there
            are to extract.
        eob_then_eom: Whether an EOM follows EOB.
        reason: Returns the reason of a refusal for an exception.

    Attributes:
        number: Messages read, or extracted.
        made_up: Whether an extra reply was offset by a missing one, so that counting
            replies can't show it.

    """

    def __init__(
        self,
        plan: DueFaults,
        environment: Mapping[str, str],
        work: Callable[[bytes], Iterable[bytes]],
        *,
        driver: str,
        size: int = 0,
        eob_then_eom: bool = False,
        reason: Callable[[Exception], str] = str,
    ) -> None:
        markers = MarkerBytes(environment)
        self.number: int = 0
        self.made_up: bool = False
        self._silent = False
        self._closed: set[FaultKind] = set()
        # Three signs of life are due within the limit, so that one may be late.
        self._every = float(environment.get("ETLSTAGE_HEARTBEAT") or 0) / 3
        self._plan = plan
        self._markers = markers
        self._work = work
        self._driver = driver
        self._size = size
        self._reason = reason
        self._requests = Requests(
            markers,
            batches=driver in ("worker", "supervisor"),
            eob_then_eom=eob_then_eom,
        )
        self._replies = SpoiledReplies(markers, streams=driver == "plain")
        self._one = markers.eop == markers.eom  # a reply is one message
        self._batch: list[bytes] = []
        self._shapes: dict[str, Fault] = {}  # faults of the next reply
        self._ahead = False  # an extra reply has closed a batch, if it did not end us
        self._offset = 0  # of the next message, for requests without one

    @property
    def mute(self) -> bool:
        """Whether it has closed its stdout."""
        return FaultKind.CLOSE_STDOUT in self._closed

    def life(self) -> Generator[Step, bytes | None, None]:
        """Yield all that it does, from its start until after the end of its input."""
        yield from self._moment("start")
        yield from self._show_life()
        if self._driver == "plain":
            yield from self._extract(0, self._size)
        else:
            while data := (yield from self._read()):
                yield from self._feed(data)
        yield from self._moment("end")
        if self._closed:
            yield Act(FaultKind.STALL, {})

    # --- inside -------------------------------------------------------------

    def _read(self) -> Generator[Step, bytes | None, bytes]:
        """Return input; until it comes, show life, and misbehave in idle moments."""
        # Whether there are faults of idle moments, and it is idle.
        waits = "idle" in self._plan and not self._batch and not self._requests
        while FaultKind.CLOSE_STDIN not in self._closed:
            data = yield ReadInput(_IDLE if waits else self._every)
            if data is not None:
                return data
            yield from self._show_life()
            if waits:
                yield from self._moment("idle")
        yield Act(FaultKind.STALL, {})
        return b""

    def _show_life(self) -> Iterator[Step]:
        if not self._silent:
            yield ShowLife()

    def _moment(self, moment: str) -> Iterator[Step]:
        for fault in self._plan.due(moment, self.number, b""):
            yield from self._happens(fault, f" at {moment}")

    def _feed(self, data: bytes) -> Iterator[Step]:
        for message in self._requests.feed(data):
            if self._driver == "cyclic":
                yield from self._serve(message or b"")
            elif message is None:
                yield from self._answer()
            else:
                yield from self._take(message)

    def _take(self, message: bytes) -> Iterator[Step]:
        self.number += 1
        self._batch.append(message)
        for fault in self._plan.due("message", self.number, message):
            yield from self._happens(fault, f" at {message!r}")
        if self._driver == "worker" and len(self._batch) < self._size:
            bnc = self._markers.bnc
            yield from self._replies.cut(bnc) if "cut" in self._shapes else (bnc,)
        elif self._driver != "supervisor":
            yield from self._answer()

    def _answer(self) -> Iterator[Step]:
        batch, self._batch = self._batch, []
        if self._ahead and len(batch) > 1:
            # A worker that closes its batches itself may close one after its first
            # message: so the extra reply was accepted for such a batch, and this reply
            # is the only one to the two batches that were given since.
            self.made_up = True
            yield (
                f"its extra reply was taken for the reply to {batch[0]!r}: counting"
                " replies can't show it"
            )
        try:
            outputs = [output for message in batch for output in self._work(message)]
        except Exception as error:
            if not self._markers.err:
                raise
            self._shapes = {}
            yield self._reason(error).encode() + self._markers.err
            return
        if self._driver == "worker" and FaultKind.TWICE in self._shapes:
            self._ahead = True
        yield from self._reply(outputs)

    def _serve(self, request: bytes) -> Iterator[Step]:
        """Answer a request for a range, or for an offset."""
        asked = json.loads(request) if request else {}
        if "offsets" in asked:
            latest = asked["offsets"] == "latest"
            yield from self._reply([b"%d" % (self._size if latest else 0)])
            return
        start = asked.get("start", self._offset)
        self._offset = min(asked.get("end", self._size), self._size)
        yield from self._extract(start, self._offset)

    def _extract(self, start: int, end: int) -> Iterator[Step]:
        """Give the numbers of a range; no batch, so those found are passed on early."""
        passes = self._driver == "plain" or not self._one
        found: list[bytes] = []
        for number in range(start, end):
            message = b"%d" % number
            self.number += 1
            for fault in self._plan.due("message", self.number, message):
                if passes and not FaultKind(fault["kind"]).shapes:
                    yield self._joined(found)
                    found = []
                yield from self._happens(fault, f" at {message!r}")
            found.extend(self._work(message))
            if passes and len(found) >= _MANY and not self._shapes:
                yield self._joined(found)
                found = []
        yield from self._reply(found)

    def _reply(self, outputs: list[bytes]) -> Iterator[Step]:
        if self._driver == "plain":
            reply = self._joined(outputs)
        elif self._one:
            # Exactly one message, however many outputs there are.
            reply = b"".join(outputs) + self._markers.eom
        else:
            reply = self._joined(outputs) + self._markers.eop
        shapes, self._shapes = self._shapes, {}
        if self._driver == "plain" and FaultKind.PARTIAL in shapes:
            yield reply  # there is no EOP to be left out
            yield Exit(-9)
        yield from self._replies.spoiled(shapes, reply) if shapes else (reply,)

    def _joined(self, outputs: list[bytes]) -> bytes:
        return self._markers.eom.join((*outputs, b""))

    def _happens(self, fault: Fault, where: str) -> Iterator[Step]:
        kind = FaultKind(fault["kind"])
        if kind is not FaultKind.PAUSE:
            yield f"fault {kind}{where}"
        if kind.shapes:
            self._shapes[kind] = fault
        elif kind is FaultKind.NEVER_READY:
            self._silent = True
        elif kind not in self._closed:
            markers = self._markers
            yield effect(fault, b"stray print" + markers.eom, markers.eop)
            if kind in _PIPES:
                self._closed.add(kind)
