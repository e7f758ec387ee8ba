"""
The errors of one worker: its name, what became of it, and its last stderr lines.

``worker.py`` provides the facts, and decides which message is blamed for the end of a
worker; this module depends on nothing else.
"""

from __future__ import annotations

from typing import Final, TypeVar

import anyio

from etlstage.errors import (
    Attempt,
    EtlstageError,
    RemoteProtocolError,
    RepliesDoubtful,
    WorkerLost,
    WorkerRefusal,
)
from etlstage.messages import StageKind, counted
from etlstage.protocol.events import Refusal
from etlstage.stage.stage import Stage
from etlstage.supervisor.diagnostic import cause_of, traceback_of
from etlstage.supervisor.exchange.retry import LastError
from etlstage.supervisor.lifecycle.worker import WorkerHistory
from etlstage.supervisor.process import command_line
from etlstage.supervisor.stderr import StderrLog
from etlstage.telemetry.terminal import harmless
from etlstage.transport.base import UNKNOWN_STATUS, describe_status

__all__ = ("WorkerErrors",)

_Error = TypeVar("_Error", bound=EtlstageError)

_SHOWN: Final = 5  # events of its history that an error shows
_LONGEST: Final = 160  # characters of a last line that may begin an error
_REFUSALS: Final = 128  # refusals whose texts are cached
_REAPED: Final = (
    "the host process reaps its children: set SIGCHLD to SIG_DFL in it, and let it wait"
    " for no process that it did not start"
)


class WorkerErrors:
    """Makes the errors of one worker; ``history`` has what happened to it."""

    def __init__(
        self,
        stage: Stage,
        name: str,
        pid: int,
        stderr: StderrLog,
        history: WorkerHistory,
    ) -> None:
        self._stage = stage
        self._name = name
        self._pid = pid
        self._stderr = stderr
        self._history = history
        # The text and the attempt, by code, category and reason.
        self._refusal_cache: dict[tuple[int, int, str], tuple[str, tuple[Attempt]]] = {}
        self.status: int | None = None
        """Exit status, negative for a signal, once the process is gone."""
        self.signalled: bool = False
        """We have sent it a signal."""

    def lost(self, fate: str, held: int = 0, tries: int = 1) -> WorkerLost:
        """
        Return the error for messages that the worker held when it failed.

        ``fate`` is a part of a sentence; the messages were tried ``tries`` times.
        """
        what = f" while it held {counted(held, 'message')}" if held else ""
        text = self._describe(f"{fate}{what}", tries)
        return self._with_story(WorkerLost(text, stage=self._stage.name))

    def doubtful(self, fate: str, count: int) -> RepliesDoubtful:
        """Return the error for replies of a worker that failed without a message."""
        failed, name = self._describe(fate, 1), self._stage.name
        return self._with_story(RepliesDoubtful(count, stage=name, failed=failed))

    def breach(self, fate: str, tries: int = 1) -> RemoteProtocolError:
        """Return the error for a worker that broke the protocol."""
        return self._with_story(RemoteProtocolError(self._describe(fate, tries)))

    def refused(self, refusal: Refusal) -> WorkerRefusal:
        """Return the error for a message that the worker refused."""
        # Cached: a bad column is bad in every row, for the same reason.
        key = code, category, reason = refusal[1:]
        if key not in self._refusal_cache:
            if len(self._refusal_cache) == _REFUSALS:
                self._refusal_cache.clear()
            self._refusal_cache[key] = self._describe_refusal(*key)
        text, attempts = self._refusal_cache[key]
        name = self._stage.name
        error = WorkerRefusal(
            text, stage=name, code=code, reason=reason, category=category
        )
        error.attempts = attempts
        return error

    def attempt(self, fate: str) -> Attempt:
        """Return the record of this worker's failure at what it held."""
        self._stderr.drain()
        stderr = tuple(self._stderr.tail)
        error = "; ".join(filter(None, (self.cause, fate)))
        return Attempt(self._name, self._pid, error, self._story(), stderr)

    def cancelled(self, reason: str) -> tuple[Attempt, LastError]:
        """Return the attempt at an overdue exchange, and a function for its error."""

        def last_error(attempts: tuple[Attempt, ...]) -> EtlstageError:
            error = self.lost(reason, tries=len(attempts))
            error.attempts = attempts
            return error

        return self.attempt(reason), last_error

    def end(self) -> str:
        """Return how a worker that was stopped has ended."""
        assert self.status is not None
        if not self.signalled:
            return describe_status(self.status)
        seconds = f"{self._stage.timeout.stop:g} s"
        return (
            f"did not exit within {seconds} of the end of its input and"
            f" {describe_status(self.status)}"
        )

    @property
    def cause(self) -> str:
        """The error that ended it, if its stderr shows it; else empty."""
        # Python exits with status 1 after an uncaught exception. With any other status,
        # a traceback is that of an exception that the worker has survived.
        if self.status != 1 or self.signalled:
            return ""
        return cause_of(self._stderr.tail)

    def _describe_refusal(
        self, code: int, category: int, reason: str
    ) -> tuple[str, tuple[Attempt]]:
        what = "request" if self._stage.kind is StageKind.EXTRACT else "message"
        number = f"code {code}" + f", category {category}" * bool(category)
        given = reason or "it gave no reason"
        if code:
            given = f"{reason} ({number})" if reason else number
        fate = f"refused the {what}: {harmless(' '.join(given.split()))}"
        who = f"stage {self._stage.name}: worker {self._name} (pid {self._pid})"
        # The reason is the worker's own. There may be thousands per second, so stderr
        # is left out: it is in the log.
        trace = self._traceback(reason)
        return f"{who} {fate}", (Attempt(self._name, self._pid, fate, stderr=trace),)

    def _traceback(self, reason: str) -> tuple[str, ...]:
        """
        Return the traceback of a refusal, if its worker has just written it.

        The SDK writes one before it refuses, once per place that an exception comes
        from.
        """
        self._stderr.catch_up()
        return traceback_of(self._stderr.tail, reason)

    def _describe(self, fate: str, tries: int) -> str:
        self._stderr.drain()
        again = f", after {tries} tries" if tries > 1 else ""
        word = f"{self._word}; " if self._word else ""
        who = f"worker {self._name} (pid {self._pid})"
        reaped = self.status == UNKNOWN_STATUS and not self.signalled
        hint = f"; {_REAPED}" if reaped else ""
        return f"stage {self._stage.name}: {word}{who} {fate}{again}{hint}"

    @property
    def _word(self) -> str:
        """Its last line, if it failed by itself: usually that is the cause."""
        tail = self._stderr.tail
        word = self.cause
        if not word and tail and (self.status or 0) > 0 and not self.signalled:
            # An exception that it has survived is not the cause.
            word = "" if cause_of(tail) else tail[-1].strip()
        # A longer line is left out, not cut: secrets are only recognized when whole.
        # The story has it.
        return word if len(word) <= _LONGEST else ""

    def _story(self) -> tuple[str, ...]:
        return self._history.lines(anyio.current_time())

    def _with_story(self, error: _Error) -> _Error:
        """Add to an error what is known of the worker, to be shown below it."""
        stderr = [f"stderr: {line}" for line in self._stderr.tail]
        error.word = self._word
        error.story = (
            *(stderr or ["no stderr output"]),
            *(f"event: {event}" for event in self._story()[-_SHOWN:]),
            f"command: {command_line(self._stage)}",
        )
        return error
