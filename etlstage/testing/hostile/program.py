"""
A worker of the stage protocol that misbehaves as its fault plan says.

What is a message and what a batch is defined in the protocol; all it writes are raw
bytes.

Usage: ``python -I -S hostile DRIVER SIZE TRANSFORM [PLAN]``. DRIVER is ``single``,
``worker`` or ``supervisor``; SIZE counts the messages of a batch, if the worker
drives; TRANSFORM is ``identity``, ``upper``, ``count`` or ``nothing``. Without PLAN
it is in ``ETLSTAGE_FAULTS``.
"""

from __future__ import annotations

import json
import os
from typing import Final

from .acts import Acts
from .input import Input
from .markers import Markers
from .output import SHAPES, Output
from .plan import Plan
from .status import Status
from .system import wait

__all__ = ("Worker", "main")

_IDLE: Final = 0.05  # seconds without input


class Worker:
    """
    One process: reads, answers, and does what the plan says.

    Args:
        plan: What goes wrong.
        driver: Who closes a batch, or ``single``.
        size: Messages in a batch, if we close it.
        transform: What becomes of a message.

    """

    def __init__(self, plan: Plan, driver: str, size: int, transform: str) -> None:
        self._plan = plan
        self._driver = driver
        self._size = size
        self._transform = transform
        markers = Markers()
        self._input = Input(markers, batches=driver != "single")
        self._output = Output(markers)
        self._status = Status()
        self._acts = Acts(markers, self._input, self._output, self._status)
        self._number = 0  # messages read
        self._batch: list[bytes] = []

    def run(self) -> None:
        """Work until the end of the input."""
        self._misbehave("start")
        self._status.show()
        answer = self._answer if self._driver == "single" else self._collect
        self._await_input()
        while (messages := self._input.read()) is not None:
            for message in messages:
                answer(message)
            self._output.flush()
            self._await_input()
        self._misbehave("end")
        if self._input.closed or self._output.closed:
            wait()

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
                self._acts.do(fault)


def main(arguments: list[str]) -> None:
    """Be the worker that the command line describes."""
    driver, size, transform, *rest = arguments
    plan = json.loads(rest[0] if rest else os.environ.get("ETLSTAGE_FAULTS", "{}"))
    faults = Plan(plan.get("faults", []), plan.get("seed", 0))
    Worker(faults, driver, int(size), transform).run()
