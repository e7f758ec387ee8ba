"""
A worker of the stage protocol that misbehaves as its fault plan says.

What is a message and what a batch is defined in the protocol; all it writes are raw
bytes.

Usage: ``python -I -S hostile DRIVER SIZE TRANSFORM [PLAN]``. DRIVER is ``single``,
``worker`` or ``supervisor``, or for extraction ``plain`` or ``cyclic``; SIZE counts
the messages of a batch, if the worker drives, or those that there are to extract;
TRANSFORM is ``identity``, ``upper``, ``count`` or ``nothing``. Without PLAN it is in
``ETLSTAGE_FAULTS``.
"""

from __future__ import annotations

import json
import os
from typing import Final

from .acts import Acts
from .input import Input
from .markers import MarkerBytes
from .output import SHAPES, HostileOutput
from .plan import DueFaults
from .status import StatusPipe
from .system import wait

__all__ = ("Worker", "main")

_IDLE: Final = 0.05  # seconds without input
_MANY: Final = 1000  # messages of a range that are kept for its reply


class Worker:
    """
    One process: reads, answers, and does what the plan says.

    Args:
        plan: What goes wrong.
        driver: Who closes a batch, or ``single``; ``plain`` or ``cyclic``.
        size: Messages in a batch, if we close it, or that can be extracted.
        transform: What becomes of a message.

    """

    def __init__(self, plan: DueFaults, driver: str, size: int, transform: str) -> None:
        self._plan = plan
        self._driver = driver
        self._size = size
        self._transform = transform
        markers = MarkerBytes()
        self._input = Input(markers, batches=driver in ("worker", "supervisor"))
        self._output = HostileOutput(markers)
        self._status = StatusPipe()
        self._acts = Acts(markers, self._input, self._output, self._status)
        self._number = 0  # messages read, or extracted
        self._batch: list[bytes] = []
        self._offset = 0  # of the next message, for who does not say which he wants

    def run(self) -> None:
        """Work until the end of the input."""
        self._misbehave("start")
        self._status.show()
        if self._driver == "plain":
            self._extract(0, self._size)
            self._output.flush()
        else:
            self._serve()
        self._misbehave("end")
        if self._input.closed or self._output.closed:
            wait()

    def _serve(self) -> None:
        answer = {"single": self._answer, "cyclic": self._answer_request}.get(
            self._driver, self._collect
        )
        self._await_input()
        while (messages := self._input.read()) is not None:
            for message in messages:
                answer(message)
            self._output.flush()
            self._await_input()

    def _await_input(self) -> None:
        """Send heartbeats, and do what is to be done, while nothing comes."""
        idle = self._input.clean and not self._batch and "idle" in self._plan
        if self._input.closed or not (idle or self._status.every):
            return
        import select

        poll = select.poll()
        poll.register(0, select.POLLIN)
        while not poll.poll(1000 * (_IDLE if idle else self._status.every)):
            self._status.show()
            if idle:
                self._misbehave("idle")

    def _answer(self, message: bytes | None) -> None:
        assert message is not None
        self._number += 1
        if "message" in self._plan:
            self._misbehave("message", message)
        self._reply([self._transformed(message)])

    def _collect(self, message: bytes | None) -> None:
        if message is not None:
            self._number += 1
            self._misbehave("message", message)
            self._batch.append(self._transformed(message))
            if self._driver == "supervisor":
                return
            if len(self._batch) < self._size:
                self._output.ask_for_more()
                return
        batch, self._batch = self._batch, []
        self._reply(batch)

    def _answer_request(self, request: bytes | None) -> None:
        asked = json.loads(request) if request else {}
        if "offsets" in asked:
            latest = asked["offsets"] == "latest"
            self._output.reply([b"%d" % (self._size if latest else 0)])
            return
        start = asked.get("start", self._offset)
        self._offset = min(asked.get("end", self._size), self._size)
        self._extract(start, self._offset)

    def _extract(self, start: int, end: int) -> None:
        """Give the numbers of a range; no batch, so what was found is passed on."""
        for number in range(start, end):
            message = b"%d" % number
            self._number += 1
            self._misbehave("message", message)
            if self._transform != "nothing":
                self._batch.append(self._transformed(message))
            if len(self._batch) >= _MANY and not self._output.shapes:
                self._pass_on()
        batch, self._batch = self._batch, []
        self._output.reply(batch, ends=self._driver == "cyclic")

    def _pass_on(self) -> None:
        if self._driver == "plain" or not self._output.one_to_one:
            batch, self._batch = self._batch, []
            self._output.pass_on(batch)

    def _reply(self, outputs: list[bytes]) -> None:
        self._output.reply([] if self._transform == "nothing" else outputs)

    def _transformed(self, message: bytes) -> bytes:
        if self._transform == "upper":
            return message.upper()
        return b"%d" % self._number if self._transform == "count" else message

    def _misbehave(self, moment: str, message: bytes = b"") -> None:
        for fault in self._plan.due(moment, self._number, message):
            if fault["kind"] in SHAPES:
                self._output.shapes.append(fault)
            else:
                if self._driver in ("plain", "cyclic"):
                    self._pass_on()
                self._acts.do(fault)


def main(arguments: list[str]) -> None:
    """Be the worker that the command line describes."""
    driver, size, transform, *rest = arguments
    plan = json.loads(rest[0] if rest else os.environ.get("ETLSTAGE_FAULTS", "{}"))
    faults = DueFaults(plan.get("faults", []), plan.get("seed", 0), os.environ)
    Worker(faults, driver, int(size), transform).run()
