"""
Hypothesis rules for sessions with a worker of dialect ``cocaine``.

This module needs the extra ``testing``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from etlstage.errors import LocalProtocolError
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.protocol.events import (
    Added,
    Alive,
    Cancelled,
    Event,
    Opened,
)
from etlstage.stage import Stage
from etlstage.testing.conversation import WorkerUnderTest
from etlstage.testing.factories import Tested, stage_of
from etlstage.testing.machine import Held
from etlstage.worker.refusal import Refuse

__all__ = ("SessionMachine", "chunks")


def chunks() -> st.SearchStrategy[bytes]:
    """Draw the content of a chunk: any bytes, including some that look like a frame."""
    return st.binary(max_size=8) | st.sampled_from([b"\x93\x01\x01\x90", b"\xc1", b"x"])


class SessionMachine(RuleBasedStateMachine):
    """
    Compares a worker, in sessions that overlap in any way, with a model.

    ::

        class Shout(SessionMachine):
            tested = ["python", "shout.py"]
            dialect = CocaineDialect(event="shout")

            def model(self, chunks):
                return [chunk.upper() for chunk in chunks]

        TestShout = Shout.TestCase

    Its rules begin a session, send a chunk in it, end or cancel it, send a heartbeat,
    and restart the worker. A worker may end its reply to a session early: it is not
    sent the rest, and the reply is compared at the session's end. Add rules, and
    invariants, as to any machine of Hypothesis.

    Attributes:
        tested: A command, a script or a stage. A script runs in virtual time.
        dialect: The dialect and its settings, unless ``tested`` is a stage.
        chunks: Draws the chunks to send.

    """

    tested: ClassVar[Tested]
    dialect: ClassVar[CocaineDialect] = CocaineDialect()
    chunks: ClassVar[st.SearchStrategy[bytes]] = chunks()

    def model(self, chunks: Sequence[bytes]) -> Iterable[bytes]:
        """
        Return the chunks of the reply to a session with these chunks.

        Raise ``worker.Refuse`` if the reply must be an error, which is not compared.
        """
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[int, list[bytes]] = {}
        self._last = 0
        self._held: Held[WorkerUnderTest] | None = None

    # --- rules --------------------------------------------------------------

    @initialize()
    def start(self) -> None:
        """Start the worker."""
        tested = type(self).tested  # via self, a script would become a method
        stage, launch = stage_of(tested)
        if not isinstance(tested, Stage):
            stage = replace(stage, dialect=self.dialect)
        made = WorkerUnderTest(stage, launch=launch)
        self._held = Held(made, virtual=callable(tested))
        self._held.open()
        self._open, self._last = {}, 0

    @precondition(lambda self: self._room)
    @rule(data=st.data(), gap=st.integers(1, 3))
    def begin(self, data: st.DataObject, gap: int) -> None:
        """Begin a session, with any higher number than the last one."""
        self._last += gap
        given = data.draw(st.lists(self.chunks, max_size=2), label="chunks")
        self._open[self._last] = given
        self._say(Opened(self._last, list(given), each=False, ended=False))

    @precondition(lambda self: self._open)
    @rule(data=st.data())
    def pass_on(self, data: st.DataObject) -> None:
        """Send another chunk in a session."""
        number, chunk = self._one(data), data.draw(self.chunks, label="chunk")
        self._open[number].append(chunk)
        self._say(Added(number, [chunk]))

    @precondition(lambda self: self._open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """End a session, and compare its reply."""
        self._compare(self._one(data))

    @precondition(lambda self: self._open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Cancel a session, whose reply is then not compared."""
        number = self._one(data)
        del self._open[number]
        self._say(Cancelled(number, 7, "not wanted"))

    @rule()
    def beat(self) -> None:
        """Send a heartbeat."""
        self._say(Alive())

    @rule()
    def restart(self) -> None:
        """End all sessions, terminate the worker, and start another one."""
        self.teardown()
        self.start()

    def teardown(self) -> None:
        """End all sessions, and terminate the worker."""
        if (held := self._held) is None:
            return
        try:
            for number in [*self._open]:
                self._compare(number)
            held.run(held.entered.close())
        finally:
            self._held = None
            held.close()

    # --- how ----------------------------------------------------------------

    @property
    def _room(self) -> bool:
        return self._held is not None and self._held.entered.session.room >= 1

    def _one(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from([*self._open]), label="session")

    def _say(self, event: Event) -> None:
        assert self._held is not None
        self._held.run(_tell(self._held.entered, event))

    def _compare(self, number: int) -> None:
        assert self._held is not None
        worker, given = self._held.entered, self._open.pop(number)
        self._say(Added(number, (), ended=True))
        reply = self._held.run(worker.reply_to(number))
        outputs = None if reply.refused is not None else list(reply.outputs)
        try:
            expected: list[bytes] | None = list(self.model(given))
        except Refuse:
            expected = None
        assert outputs == expected, (
            f"the model returned {expected!r} to {given!r}, and the worker {outputs!r}"
        )


async def _tell(worker: WorkerUnderTest, event: Event) -> None:
    try:
        await worker.send(event)
    except LocalProtocolError:
        if isinstance(event, Added) and event.id in worker.ended:
            return  # the worker needed no more for its reply
        # Its end of the connection is closed: report how the worker exited instead.
        await worker.until(lambda: False, "can't be sent any more")
