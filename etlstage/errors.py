"""
Everything that etlstage raises.

* :class:`EtlstageError`
    * :class:`ConfigError`: the pipeline file or an argument is wrong (exit 2)
    * :class:`ProtocolError`
        * :class:`LocalProtocolError`: we broke the protocol, a bug in the caller
            * :class:`InvalidMessage`
        * :class:`RemoteProtocolError`: the peer broke the protocol
            * :class:`PayloadTooBig`
            * :class:`ContractBroken`
    * :class:`StageError`: one stage can't go on
        * :class:`WorkerStartFailed`
        * :class:`WorkerLost`
        * :class:`WorkerRefusal`: it rejected one message
        * :class:`Overloaded`: too many messages wait for their results
        * :class:`StageFailed`: all workers failed
        * :class:`RepliesDoubtful`: which reply is whose is not known
        * :class:`SourceFailed`
        * :class:`InputDamaged`: a place of the input was passed over
        * :class:`SinkFailed`
    * :class:`InvalidState`: a supervisor is used outside its block
    * :class:`SparkUnavailable`: no usable Java, no PySpark, no session
    * :class:`LedgerImbalance`: a message has no outcome, or two

This module is a leaf: a worker imports it at every start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, Literal, NamedTuple, TypeAlias

__all__ = (
    "Attempt",
    "BlockDamaged",
    "ConfigError",
    "ContractBroken",
    "EtlstageError",
    "Excerpt",
    "FailureCause",
    "Faults",
    "InputDamaged",
    "InvalidMessage",
    "InvalidState",
    "LedgerImbalance",
    "LocalProtocolError",
    "Overloaded",
    "PayloadTooBig",
    "ProtocolError",
    "RemoteProtocolError",
    "RepliesDoubtful",
    "SinkFailed",
    "SourceFailed",
    "SparkUnavailable",
    "StageError",
    "StageFailed",
    "WorkerFailure",
    "WorkerLost",
    "WorkerRefusal",
    "WorkerStartFailed",
    "guess",
    "os_reason",
)

FailureCause: TypeAlias = Literal[
    "died", "silent", "protocol", "pairing", "start", "heartbeat", "abnormal"
]
"""Why a worker failed: it ended by itself; did not answer in time; broke the protocol;
wrote unsolicited output; could not be started or was not ready in time; missed its
heartbeat; reported that no other would succeed."""


class Attempt(NamedTuple):
    """One worker's failure at a message."""

    worker: str
    pid: int
    error: str
    """What happened, in one line."""
    story: tuple[str, ...] = ()
    """The last things that happened to the worker, oldest first."""
    stderr: tuple[str, ...] = ()
    """The last lines that it wrote to stderr."""


class WorkerFailure(NamedTuple):
    """A worker that failed, whatever it held."""

    time: str
    """When: ISO 8601, UTC."""
    worker: str
    what: str


class Faults(NamedTuple):
    """Restarts and failures of a stage's workers."""

    restarts: int = 0
    """Processes that were started in place of one that was gone."""
    failures: int = 0
    """Workers that were found at fault, or died."""
    last: tuple[WorkerFailure, ...] = ()
    """The last failures."""


class Excerpt(NamedTuple):
    """A line of a file in which something is wrong."""

    line: str
    number: int
    """Of the line, counted from 1."""
    column: int
    """Where in it, counted from 1."""


class EtlstageError(Exception):
    """
    Base of all errors that etlstage raises on purpose.

    The text is one line: what happened, and the remedy where it can be guessed.

    Attributes:
        story: What led to it, a line each: what the worker wrote to stderr, what
            happened to it, its command. A terminal shows it below the text.
        word: The last line of the worker's stderr, if it failed by itself; the text begins
            with it.
        attempts: For the error of a message: every worker that failed at it, in
            order; the last one is what the text is about.
        place: For the error of a message that ends a run: where the message stands
            in the stage's input, counted from 0.

    """

    story: tuple[str, ...] = ()
    word: str = ""
    attempts: tuple[Attempt, ...] = ()
    place: int | None = None


class ConfigError(EtlstageError):
    """
    Raised when a pipeline file or an argument is wrong.

    Attributes:
        problems: One line for each thing that is wrong, all of them at once.
        excerpts: For each of them the line of the file, where it is about one.

    """

    def __init__(
        self,
        problems: Sequence[str] | str,
        excerpts: Sequence[Excerpt | None] | None = None,
    ) -> None:
        self.problems: tuple[str] | tuple[str, ...] = (
            (problems,) if isinstance(problems, str) else tuple(problems)
        )
        self.excerpts: tuple[Excerpt | None, ...] = (
            (None,) * len(self.problems) if excerpts is None else tuple(excerpts)
        )
        super().__init__("\n".join(self.problems))


class ProtocolError(EtlstageError):
    """Base of what breaks a protocol, on either side."""


class LocalProtocolError(ProtocolError):
    """Raised when *we* try to send what the protocol forbids: a bug in the caller."""


class InvalidMessage(LocalProtocolError):
    """
    Raised when a message can't be sent: it contains a marker, or is too long.

    Nothing of the run that holds the message has been sent.

    Attributes:
        index: Place of the message in the run.

    """

    def __init__(self, text: str, *, index: int) -> None:
        super().__init__(text)
        self.index = index


class InvalidState(EtlstageError):
    """
    Raised when a supervisor is used outside its ``async with`` block.

    That is before it was entered, or behind its end; or it is entered once more. In
    another thread than that of its event loop it is used outside, too.
    """


class RemoteProtocolError(ProtocolError):
    """
    Raised when the *peer* sent what the protocol forbids.

    Attributes:
        found: The first bytes of it, where it is known which they are.

    """

    found: bytes = b""


class ContractBroken(RemoteProtocolError):
    """
    Raised when a reply is not what its stage expects.

    Attributes:
        promise: The key of ``expect`` that it breaks.
        ends_run: Whether the stage has ``on_mismatch: fail``.

    """

    promise: str = ""
    ends_run: bool = False


class PayloadTooBig(RemoteProtocolError):
    """Raised when the peer sent more bytes than a limit allows."""


class StageError(EtlstageError):
    """
    Base of what keeps one stage from going on.

    Attributes:
        stage: Name of the stage, as the user wrote it.

    """

    def __init__(self, text: str, *, stage: str) -> None:
        super().__init__(text)
        self.stage = stage


class WorkerStartFailed(StageError):
    """Raised when a worker's program can't be started."""


class WorkerLost(StageError):
    """Raised when a worker died, or was killed, while it held messages."""


class WorkerRefusal(StageError):
    """
    Raised when a worker rejected a message, and lived on.

    Attributes:
        code: As the worker gave it.
        reason: The worker's own words.
        category: What the code counts, in a dialect that knows several kinds; else 0.

    """

    def __init__(
        self, text: str, *, stage: str, code: int, reason: str, category: int = 0
    ) -> None:
        super().__init__(text, stage=stage)
        self.code = code
        self.reason = reason
        self.category = category


class NotCommitted(StageError):
    """
    Raised when a worker has ended and committed no position that covers a message.

    It may have processed the message; the next run gives it again.
    """


class Overloaded(StageError):
    """Raised when more messages would wait for their results than may."""


class StageFailed(StageError):
    """Raised when a stage has no worker left and starts none any more."""


class RepliesDoubtful(StageError):
    """
    Raised when replies were passed on that may be those of other messages.

    Their worker wrote one too many, or too few, and it showed when they were gone.
    """

    def __init__(self, count: int, *, stage: str) -> None:
        messages = "1 message" if count == 1 else f"{count:,} messages"
        super().__init__(
            f"stage {stage}: results of {messages} may be mismatched: a worker sent an"
            " unsolicited reply after they were released; see: etlstage help pairing",
            stage=stage,
        )


class SourceFailed(StageError):
    """Raised when the extract stage can't read its input."""


class InputDamaged(StageError):
    """
    Stands for a place of the input that is no message, and was passed over.

    Attributes:
        data: Its bytes, or as many as are kept.

    """

    def __init__(self, text: str, *, stage: str, data: bytes) -> None:
        super().__init__(text, stage=stage)
        self.data = data


class SinkFailed(StageError):
    """Raised when the load stage can't write, or a message does not fit its schema."""


class StateUnusable(EtlstageError):
    """Raised when another run has the state directory, or it can't be ours."""


class BlockDamaged(EtlstageError):
    """Raised when messages on a disk are not what was written."""


class SparkUnavailable(EtlstageError):
    """Raised when PySpark, a usable Java or the session can't be had."""


class LedgerImbalance(EtlstageError):
    """Raised when a message ended a run without an outcome, or with two."""


MAX_GUESSED: Final = 100
"""Characters of a word for which others are looked up."""


def os_reason(error: OSError) -> str:
    """Return what the system reports, as a part of a sentence."""
    return (error.strerror or str(error)).lower()


def guess(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'this'?)``, or nothing if no known word is close."""
    # Comparing takes time with the square of a word, which a file may repeat.
    return _guess(word, tuple(known)) if len(word) <= MAX_GUESSED else ""


@lru_cache(maxsize=1024)
def _guess(word: str, known: tuple[str, ...]) -> str:
    import difflib  # costs a worker's start more than all the rest of this module

    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
