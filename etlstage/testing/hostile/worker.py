"""
A worker of the stage protocol that misbehaves by its fault plan.

It is a generator of what it does next: bytes to write, seconds to wait, acts; where it
reads, it is sent what came. Who does that is ``program.py`` in a process, and
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

_MANY: Final = 1000  # messages of a range that are kept for its reply
_IDLE: Final = 0.05  # seconds without input
_PIPES: Final = frozenset({FaultKind.CLOSE_STDIN, FaultKind.CLOSE_STDOUT})


class HostileWorker:
    """
    One start of a worker.

    Args:
        plan: What goes wrong.
        environment: Where it finds its markers, and how often it is to show life.
        work: What it makes of a message; what it raises is a refusal.
        driver: Who closes a batch, ``worker`` or ``supervisor``, or ``single``; of an
            extractor ``plain`` or ``cyclic``.
        size: Messages in a batch, if we close it; or the numbers there are to extract.
        eob_then_eom: Whether an EOM follows EOB.
        reason: What a refusal has of an exception.

    Attributes:
        number: Messages read, or extracted.
        made_up: Whether a reply too many was made up for by one too few, so that no
            count can show it.

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
        # One may be late of three that are given in the time that is allowed.
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
        self._shapes: dict[str, Fault] = {}  # what is wrong with the reply to come
        self._ahead = False  # a reply too many has closed a batch, if we live on
        self._offset = 0  # of the next message, for one who does not name it

    @property
    def mute(self) -> bool:
        """Whether it has closed its stdout."""
        return FaultKind.CLOSE_STDOUT in self._closed

    def life(self) -> Generator[Step, bytes | None, None]:
        """Yield all that it does, from its start to behind the end of its input."""
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
        """Return what comes; until then show life, and do what is done when idle."""
        # Something happens when it has nothing to do, and it has nothing.
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
            # A worker that ends its batches itself may end one behind its first
            # message: so the reply too many was taken, and of the two batches that we
            # have been given since, this reply is the only one.
            self.made_up = True
            yield f"its second reply was that to {batch[0]!r}: no count shows it"
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
        """Answer a request for a range, or for the offsets that there are."""
        asked = json.loads(request) if request else {}
        if "offsets" in asked:
            latest = asked["offsets"] == "latest"
            yield from self._reply([b"%d" % (self._size if latest else 0)])
            return
        start = asked.get("start", self._offset)
        self._offset = min(asked.get("end", self._size), self._size)
        yield from self._extract(start, self._offset)

    def _extract(self, start: int, end: int) -> Iterator[Step]:
        """Give the numbers of a range; no batch, so what was found is passed on."""
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
            # Exactly one message, whatever we have.
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
