"""
A worker of dialect ``marker`` with faults: messages and replies in turn.

A fault at a message happens when all replies before it have been passed on. If it ends
the worker, or makes it hang, what the worker has answered meanwhile is dropped; it may
have seen messages that were sent in advance.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar

from etlstage.protocol.base import Shape, Side
from etlstage.testing.dialect import kit_of
from etlstage.testing.faulty.wire import Action, Fault, FaultyWire
from etlstage.testing.hostile.marked import MarkerBytes, Requests, SpoiledReplies
from etlstage.transport import LaunchRequest

__all__ = ("MarkerWire",)


class MarkerWire(FaultyWire):
    """The conversation as the supervisor sees it; see :class:`FaultyWire`."""

    has: ClassVar[frozenset[str]] = frozenset({"markers", "pipes"})

    def follow(self, request: LaunchRequest) -> None:
        """Prepare to parse the conversation."""
        markers = self._markers = MarkerBytes(request.env)
        self._streams = self._dialect.shape is Shape.STREAM
        self._input = Requests(
            markers,
            batches=self._dialect.shape.batches,
            eob_then_eom=getattr(self._dialect, "eob_then_eom", False),
        )
        self._replies = SpoiledReplies(markers, streams=self._streams)
        self.stray: bytes = b"stray print" + markers.eom
        self.eop: bytes = markers.eop
        self._requests = 0  # complete requests
        self._turns = 0  # complete replies
        self._due: deque[tuple[int, Action]] = deque()  # by turns
        self._shapes: deque[tuple[int, Fault]] = deque()  # likewise
        self._unfinished = b""  # an incomplete reply, so far
        self._passed = 0  # bytes of it that were passed on

    @property
    def _idle(self) -> bool:
        return self._turns >= self._requests

    @property
    def undecided(self) -> bool:
        """Whether the fate to report for an exited process is still undecided."""
        return self.hangs or (
            self._streams and not (self._over or self._child.released)
        )

    def _pass_on(self, data: memoryview | bytes) -> int:
        taken = self._wire.write(data)
        for message in self._input.feed(bytes(data[:taken])):
            if message is None:
                self._requests += 1
                continue
            self._number += 1
            self._misbehave("message", message)
            self._requests += self._dialect.shape is not Shape.BATCH
        return taken

    def _hear(self, data: bytes) -> None:
        whole = kit_of(self._dialect).cut(Side.WORKER, self._unfinished + data)
        *replies, self._unfinished = whole
        for reply in replies:
            if self._streams:
                self._number += 1
                self._misbehave("message", reply.removesuffix(self._markers.eom))
            self._pass_reply(reply)
            self._turns += 1
            self._advance()
        if not self._shaped() and not self._streams:
            self._queue += filter(None, [self._unfinished[self._passed :]])
            self._passed = len(self._unfinished)

    def _rest(self) -> bytes:
        rest, self._unfinished = self._unfinished[self._passed :], b""
        self._passed = 0
        return rest

    def _shaped(self) -> bool:
        """Return whether a fault changes the next reply."""
        return bool(self._shapes) and self._shapes[0][0] <= self._turns

    def _pass_reply(self, reply: bytes) -> None:
        unseen, self._passed = reply[self._passed :], 0
        if not self._shaped():
            self._queue.append(unseen)
            return
        shapes = {f["kind"]: f for turn, f in self._shapes if turn <= self._turns}
        if reply == self._markers.bnc and self._dialect.shape is Shape.ASKED_BATCH:
            # A batch is answered as a whole: faults change its reply, not its BNCs.
            self._spoils(self._replies.cut(reply) if "cut" in shapes else [reply])
            return
        while self._shaped():
            _, fault = self._shapes.popleft()
            self._note(fault, self._number)
        self._spoils(self._replies.spoiled(shapes, reply))

    @property
    def _turn(self) -> int:
        """Number of replies before the turn of what is written, or received, now."""
        return self._turns if self._streams else self._requests

    def _shape(self, fault: Fault) -> None:
        self._shapes.append((self._turn, fault))

    def _later(self, act: Action) -> None:
        self._due.append((self._turn, act))
        self._advance()

    def _advance(self) -> None:
        """Queue what is due after the replies that are complete by now."""
        while self._due and self._due[0][0] <= self._turns:
            self._queue.append(self._due.popleft()[1])

    def _turn_deaf(self) -> None:
        super()._turn_deaf()
        self._due.clear()
