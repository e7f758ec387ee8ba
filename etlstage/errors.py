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
    * :class:`StageError`: one stage can't continue
        * :class:`WorkerStartFailed`
        * :class:`WorkerLost`
        * :class:`WorkerRefusal`: a worker rejected one message
        * :class:`NotCommitted`: a worker ended without committing a message
        * :class:`Overloaded`: too many messages wait for their results
        * :class:`StageFailed`: all workers failed
        * :class:`RepliesDoubtful`: replies may belong to other messages
        * :class:`SourceFailed`
        * :class:`InputDamaged`: a part of the input was skipped
        * :class:`SinkFailed`
    * :class:`InvalidState`: a supervisor is used outside its block
    * :class:`StateUnusable`: the state directory can't be used
    * :class:`BlockDamaged`: messages on a disk are not what was written
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
    "NotCommitted",
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
    "StateUnusable",
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
heartbeat; showed that no other would succeed."""


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
    """The failure of a worker, whether it held messages or not."""

    time: str
    """When: ISO 8601, UTC."""
    worker: str
    what: str


class Faults(NamedTuple):
    """Restarts and failures of a stage's workers."""

    restarts: int = 0
    """Processes that were started to replace another."""
    failures: int = 0
    """Workers that were found at fault, or died."""
    last: tuple[WorkerFailure, ...] = ()
    """The last failures."""


class Excerpt(NamedTuple):
    """A line of a file in which something is wrong."""

    line: str
    number: int
    """Number of the line, counted from 1."""
    column: int
    """Column in the line, counted from 1."""


class EtlstageError(Exception):
    """
    Base of all errors that etlstage raises on purpose.

    The text is one line: what happened, and the remedy where it can be guessed.

    Attributes:
        story: What led to the error, in lines: what the worker wrote to stderr, what
            happened to it, its command. A terminal shows them below the text.
        word: The last line of the worker's stderr, if it failed by itself; the text
            begins with it.
        attempts: For the error of a message: every worker that failed at it, in order;
            the text is about the last one.
        place: For the error of a message that ends a run: the index of the message in
            the stage's input, counted from 0.

    """

    story: tuple[str, ...] = ()
    word: str = ""
    attempts: tuple[Attempt, ...] = ()
    place: int | None = None

    def __reduce__(self) -> tuple[object, ...]:
        """Return how to copy or unpickle the error."""
        # Exception would pass its text alone to __init__, which may require more.
        return type(self).__new__, (type(self), *self.args), self.__dict__


class ConfigError(EtlstageError):
    """
    Raised when a pipeline file or an argument is wrong.

    Attributes:
        problems: One line for each thing that is wrong, all of them at once.
        excerpts: For each problem the line of the file that it is about, or None.

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
    """Base of violations of a protocol, by either side."""


class LocalProtocolError(ProtocolError):
    """Raised when *we* try to send what the protocol forbids: a bug in the caller."""


class InvalidMessage(LocalProtocolError):
    """
    Raised when a message can't be sent: it contains a marker, or is too long.

    Nothing of the run that holds the message has been sent.

    Attributes:
        index: Index of the message in the run.

    """

    def __init__(self, text: str, *, index: int) -> None:
        super().__init__(text)
        self.index = index


class InvalidState(EtlstageError):
    """
    Raised when a supervisor is used outside its ``async with`` block.

    That is before the block was entered, after it ended, or by entering it again. Use
    in an event loop or thread other than the supervisor's own counts as outside, too.
    """


class RemoteProtocolError(ProtocolError):
    """
    Raised when the *peer* sent what the protocol forbids.

    Attributes:
        found: The first of the forbidden bytes, if it is known which they are.

    """

    found: bytes = b""


class ContractBroken(RemoteProtocolError):
    """
    Raised when a reply is not what its stage expects.

    Attributes:
        promise: The key of ``expect`` that the reply breaks.
        ends_run: Whether the stage has ``on_mismatch: fail``.

    """

    promise: str = ""
    ends_run: bool = False


class PayloadTooBig(RemoteProtocolError):
    """Raised when the peer sent more bytes than a limit allows."""


class StageError(EtlstageError):
    """
    Base of errors that keep one stage from continuing.

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
    Raised when a worker rejected a message, and kept running.

    Attributes:
        code: The code that the worker gave.
        reason: The reason that the worker gave.
        category: The kind of the code, in a dialect that has several; else 0.

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
    Raised when a worker ended without committing a position that covers a message.

    The worker may have processed the message; the next run sends it again.
    """


class Overloaded(StageError):
    """Raised when more messages would wait for their results than are allowed."""


class StageFailed(StageError):
    """Raised when a stage has no worker left and does not start another."""


class RepliesDoubtful(StageError):
    """
    Raised when replies that were passed on may belong to other messages.

    Their worker wrote a reply too many or too few, which was detected only afterwards.
    Or it failed soon after them with no message that could explain it, as one does that
    still processes a message to which an earlier, surplus reply was assigned.

    Args:
        count: Number of the messages.
        stage: Name of the stage.
        failed: The worker and its failure, if that is the only fault.

    """

    def __init__(self, count: int, *, stage: str, failed: str = "") -> None:
        messages = "1 message" if count == 1 else f"{count:,} messages"
        what = f"results of {messages} may be mismatched"
        if failed:
            text = f"{failed} soon after its last reply; {what}"
        else:
            why = "a worker sent an unsolicited reply after they were released"
            text = f"stage {stage}: {what}: {why}"
        super().__init__(f"{text}; see: etlstage help pairing", stage=stage)


class SourceFailed(StageError):
    """Raised when the extract stage can't read its input."""


class InputDamaged(StageError):
    """
    Stands for a part of the input that is not a message, and was skipped.

    Attributes:
        data: The bytes of that part, or as many as are kept.

    """

    def __init__(self, text: str, *, stage: str, data: bytes) -> None:
        super().__init__(text, stage=stage)
        self.data = data


class SinkFailed(StageError):
    """Raised when the load stage can't write, or a message does not fit its schema."""


class StateUnusable(EtlstageError):
    """Raised when another run holds the state directory, or it can't be used."""


class BlockDamaged(EtlstageError):
    """Raised when messages on a disk are not what was written."""


class SparkUnavailable(EtlstageError):
    """Raised when PySpark, a usable Java or the session is not available."""


class LedgerImbalance(EtlstageError):
    """Raised when a message ended a run without an outcome, or with two."""


MAX_GUESSED: Final = 100
"""Maximum length of a word for which similar words are looked up."""


def os_reason(error: OSError) -> str:
    """Return the system's error text, as a part of a sentence."""
    return (error.strerror or str(error)).lower()


def guess(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'this'?)``, or nothing if no known word is close."""
    # Comparing takes quadratic time in the length of a word, which a file may repeat.
    return _guess(word, tuple(known)) if len(word) <= MAX_GUESSED else ""


@lru_cache(maxsize=1024)
def _guess(word: str, known: tuple[str, ...]) -> str:
    import difflib  # costs a worker's start more than all the rest of this module

    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
