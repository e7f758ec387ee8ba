"""
Exchanges whose outputs are passed on as they come: rounds and dialogues.

A *round* is one request to extract, whatever becomes of the workers that answer it.
Its outputs are passed on as they come, as a reply may be larger than memory. So when a
worker is lost in the middle, some outputs have been passed on already. Another worker
gets the same request, and what it repeats is left out: a range gives the same messages
each time. That is checked by the sizes and a checksum of what was passed on.

``dispatch.py`` decides how often a round is tried.

A *dialogue* is an exchange that its caller keeps open: both sides send at any time.
Input from the caller waits here until the link has room for it, and output of the
worker until the caller takes it. Both are bounded: a full buffer makes the other side
wait.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol, runtime_checkable
from zlib import crc32

from etlstage.errors import EtlstageError, SourceFailed
from etlstage.messages import Run, cost_of, counted, joined
from etlstage.supervisor.exchange.exchange import Outcome
from etlstage.supervisor.exchange.submission import Submission

__all__ = ("Dialogue", "Repeat", "Round")


class Repeat(Enum):
    """What becomes of a round whose worker was lost after it had given outputs."""

    NEVER = "never"
    """The round fails: another worker might give other messages."""
    AGAIN = "again"
    """It is requested again; messages that were passed on may come twice."""
    BEHIND = "behind"
    """It is requested again; what was passed on must be repeated, and is left out."""


class Round(Submission):
    """
    One request to extract: its outputs are collected as they come.

    Args:
        on_outcome: Called when :meth:`outputs` has something new, or the round ended.
        request: Text of the request; in shape STREAM, workers are sent none.
        max_unread: Bytes of uncollected outputs, beyond which no more are read.
        repeat: What to do if the worker is lost after outputs were passed on.
        stage: Name of the stage, for errors.

    """

    cancel_reason: tuple[int, str] = 0, "the caller has gone"
    """Code and reason that the worker is sent when the caller is gone."""

    def __init__(
        self,
        on_outcome: Callable[[], None],
        request: bytes,
        *,
        max_unread: int,
        repeat: Repeat = Repeat.NEVER,
        stage: str = "",
    ) -> None:
        super().__init__(on_outcome, max_unread=max_unread)
        self._outputs: deque[Run] = deque()
        self._repeat = repeat
        self._stage = stage
        self._given = 0  # outputs of the worker that has it now
        self._print = (0, 0)  # and their checksum
        self._known = 0  # the most outputs that lost workers gave, and their checksum
        self._known_print = (0, 0)
        self.error: EtlstageError | None = None
        """Why the round has ended early."""
        self.feed([request], 0.0)
        self.close()

    @property
    def finished(self) -> bool:
        """Whether it has ended, well or not."""
        return self.error is not None or super().finished

    @property
    def repeatable(self) -> bool:
        """Whether another worker may be given the request."""
        return self._repeat is not Repeat.NEVER or not self._given

    def rewind(self) -> bool:
        """
        Expect all outputs again, from another worker.

        Returns whether the worker that was lost got further than all before it.
        """
        further = self._repeat is Repeat.BEHIND and self._given > self._known
        if further:
            self._known, self._known_print = self._given, self._print
        self._given, self._print = 0, (0, 0)
        return further

    def deliver(self, outcome: Outcome) -> None:
        """Take the outcome: the end of the round."""
        outputs = joined(outcome.groups)
        if len(outputs):  # if EOP is EOM, the end carries the only message
            self._outputs.append(outputs)
        elif outcome.error is None and self._given < self._known:
            self._fail(f"{counted(self._given, 'message')}, and ended")
        self.error = self.error or outcome.error
        super().deliver(outcome._replace(reply_size=0))
        super().collect()

    def pass_on(self, outputs: Run) -> None:
        """Take outputs before the end."""
        if self._repeat is Repeat.BEHIND:
            outputs = self._fresh(outputs)
        else:
            self._given += len(outputs)
        if len(outputs) and self.error is None:
            self._outputs.append(outputs)
            self._unread += cost_of(outputs)
            self._on_outcome()

    @property
    def over_limit(self) -> bool:
        """Whether nothing more is to be read for it until some is collected."""
        return self.stalled

    def outputs(self) -> list[Run]:
        """Return, once, what has come."""
        outputs, self._outputs = list(self._outputs), deque()
        self._unread = 0
        return outputs

    def _fresh(self, outputs: Run) -> Run:
        """Return the outputs without those that were passed on before a loss."""
        again = self._known - self._given
        self._given += len(outputs)
        if again <= 0:
            self._print = _fingerprint(outputs, self._print)
            return outputs
        self._print = _fingerprint(outputs[:again], self._print)
        if self._given < self._known:
            return ()
        if self._print != self._known_print:
            self._fail("different ones")
        outputs = outputs[again:]
        self._print = _fingerprint(outputs, self._print)
        return outputs

    def _fail(self, found: str) -> None:
        """End the round: the repeated messages differ from those passed on."""
        self.error = SourceFailed(
            f"stage {self._stage}: a worker was lost when it had given"
            f" {counted(self._known, 'message')} of a range; when the range was"
            f" requested again, another worker gave {found}: a range must give the same"
            " messages each time",
            stage=self._stage,
        )
        self._on_outcome()


class Dialogue(Round):
    """
    One exchange between a caller and a worker; it counts as one message.

    Args:
        on_change: Called when something has come, or was taken, and at the end.
        event: The event that is requested; empty: as the stage has it.
        max_waiting: Bytes that may wait in either direction; beyond that, nothing is
            read from the worker, or the caller is to send no more.

    """

    def __init__(
        self, on_change: Callable[[], None], event: str, *, max_waiting: int
    ) -> None:
        super().__init__(on_change, b"", max_unread=max_waiting)
        self.event = event
        self.ended: bool = False
        """The caller has ended its input."""
        self.expired: bool = False
        """It took too long and was cancelled; its worker lives on."""
        self.undelivered: EtlstageError | None = None
        """Why the worker did not get all input; a reply to the rest is no success."""
        self._input: list[bytes] = []
        self._cost = 0  # bytes of memory that these take
        self._taken = False
        self._end_taken = False

    @property
    def repeatable(self) -> bool:
        """Whether another worker may be given it: input that was taken is gone."""
        return super().repeatable and not self._taken

    @property
    def full(self) -> bool:
        """Whether the caller is to wait before it adds more."""
        return self._cost > self.max_unread and not self.over

    @property
    def over(self) -> bool:
        """Whether what the caller adds is dropped."""
        return self.finished or self.abandoned

    @property
    def has_input(self) -> bool:
        """Whether there is something for the worker."""
        return bool(self._input) or (self.ended and not self._end_taken)

    def write(self, chunk: bytes) -> None:
        """Add to the input of the worker; drop it if the exchange has ended."""
        if not self.over:
            self._input.append(chunk)
            self._cost += cost_of([chunk])

    def end(self) -> None:
        """End the input."""
        self.ended = True

    def take_input(self) -> tuple[list[bytes], bool]:
        """Return, once, what the worker is to get, and whether that was all."""
        chunks, self._input, self._cost = self._input, [], 0
        self._taken, self._end_taken = True, self.ended
        self._on_outcome()
        return chunks, self.ended

    def deliver(self, outcome: Outcome) -> None:
        """Take the end; it is an error if some input was not delivered."""
        super().deliver(outcome._replace(error=outcome.error or self.undelivered))

    def abandon(self) -> None:
        """Drop all that waits, and wake the task that waits for it."""
        super().abandon()
        self._input, self._cost = [], 0
        self._on_outcome()


@runtime_checkable
class _Knows(Protocol):
    """A run, such as a column, that computes the checksum without being taken apart."""

    def fingerprint(self, before: tuple[int, int]) -> tuple[int, int]:
        """Return a checksum of these messages, continued from ``before``."""


def _fingerprint(messages: Run, before: tuple[int, int]) -> tuple[int, int]:
    """Return a checksum of these messages, continued from ``before``."""
    if isinstance(messages, _Knows):
        return messages.fingerprint(before)
    sizes = array("i", list(map(len, messages)))  # faster than from an iterator
    return crc32(sizes, before[0]), crc32(b"".join(messages), before[1])
