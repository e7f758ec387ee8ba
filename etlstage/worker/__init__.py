r"""
SDK for workers: a function and one call.

.. code-block:: python

    from etlstage import worker

    def shout(message: bytes) -> list[bytes]:
        return [message.upper()]

    if __name__ == "__main__":
        worker.transform(shout)

Each call takes over stdin and stdout, answers until stdin ends, and returns. From
then on ``print()``, C libraries and child processes write to stderr, and ``sys.stdin``
reads ``/dev/null``; anything printed to an unbuffered stdout *before* the call has gone
to the supervisor, which will not understand it.

A function may return a list, be a generator, or return any other iterable of bytes.
Messages are processed one after the other; replies are sent when there is no more
input, after 0.05 seconds, or when enough of them have been collected.

The markers are those of the first of these that names them: ``markers=``, the command
line (``-e``/``--end-of-message``, ``-E``/``--end-of-process``, ``--end-of-batch``,
``--batch-not-complete``, ``--end-of-refusal``, each with a text such as ``\n``), the
environment (``ETLSTAGE_EOM``, ``..._EOP``, ``..._EOB``, ``..._BNC``, ``..._ERR``), or
the defaults. ``sys.argv`` is not changed; with ``markers=`` it is not read.

A function that can't process a message, or batch, rejects it with ``raise
worker.Refuse("no date")``: it is refused for that reason, and the worker continues.
``on_error`` decides what any other exception does:

``refuse``
    It refuses the message, too, with its name and text as the reason. The traceback of
    the first exception of each type from each line goes to stderr.
``skip``
    The message is answered without messages, and counted by the supervisor as skipped;
    each traceback goes to stderr.
``exit``
    The worker ends with status 1 and the traceback on stderr; its earlier answers are
    passed on.

If the supervisor gives no marker ERR, nothing can be refused: then ``refuse`` acts like
``exit``. An output that contains a marker is treated like an exception, but detected
only when it is sent: the function may have seen more messages by then. When a function
raises, some outputs of a large reply may have been sent already: if the message is
refused, they are discarded; if it is skipped, they can't be taken back.

A worker reports to the supervisor that it is ready when the first message is about to
be read, and sends heartbeats while there is none, if the supervisor wants that. Load
what takes long, such as a model, before the call. A function that takes long for one
message reports its progress with ``worker.progress(0.4)``, which gives it more time;
``worker.count("rows_dropped", 3)`` adds to a metric.

A test imports the module, and calls the function in its own process::

    assert worker.run(shout, [b"one", b"two"]) == [[b"ONE"], [b"TWO"]]

This module is imported whenever a worker starts, so it imports no more than it must.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

from etlstage.protocol.marker import Markers as Markers
from etlstage.protocol.marker import Mode
from etlstage.worker.answering import Answering
from etlstage.worker.extraction import Extraction
from etlstage.worker.function import Function
from etlstage.worker.opening import open_session
from etlstage.worker.refusal import Refuse as Refuse
from etlstage.worker.status import count as count
from etlstage.worker.status import progress as progress

__all__ = (
    "Markers",
    "Refuse",
    "count",
    "extract",
    "extract_cycle",
    "load",
    "load_batch",
    "progress",
    "run",
    "transform",
    "transform_batch",
)

Driver: TypeAlias = Literal["supervisor", "worker"]
OnError: TypeAlias = Literal["refuse", "skip", "exit"]

_OFFSETS = b'{"offsets"'  # begins requests for an offset, but not those for a range


def transform(
    f: Callable[[bytes], Iterable[bytes]],
    *,
    on_error: OnError = "refuse",
    markers: Markers | None = None,
) -> None:
    """
    Answer each message with the outputs of ``f``; return at the end of input.

    Args:
        f: Takes a message; returns none, one or many.
        on_error: What happens to a message for which ``f`` raises.
        markers: The markers of the session; by default they are looked up.

    """
    function = Function(f, "transform")
    skips = _check(on_error) == "skip"
    session = open_session(Mode.SINGLE, markers, makes_one=not skips)
    answering = Answering(function, *session, on_error=on_error)
    _until_interrupted(answering.answer_messages, f)


def transform_batch(
    f: Callable[[list[bytes]], Iterable[bytes]],
    *,
    driver: Driver = "supervisor",
    size: int = 100,
    on_error: OnError = "refuse",
    markers: Markers | None = None,
) -> None:
    """
    Answer each batch with the outputs of ``f``; return at the end of input.

    ``f`` is not called for an empty batch, unless ``eop`` is ``eom``, so that the reply
    must be one message. A batch that is open at the end of input is answered.

    Args:
        f: Takes the messages of a batch; returns none, one or many.
        driver: The side that decides when a batch is full.
        size: With ``driver="worker"``, the number of messages to ask for.
        on_error: What happens to a batch for which ``f`` raises.
        markers: The markers of the session; by default they are looked up.

    """
    function = Function(f, "transform")
    mode = _mode(driver, size)
    skips = _check(on_error) == "skip"
    session = open_session(mode, markers, makes_one=not skips)
    answering = Answering(function, *session, on_error=on_error)
    _until_interrupted(answering.answer_batches, f, size)


def load(
    f: Callable[[bytes], None],
    *,
    on_error: OnError = "refuse",
    markers: Markers | None = None,
) -> None:
    """
    Have ``f`` load each message; return at the end of input.

    When ``f`` returns, the supervisor may forget the message.

    Args:
        f: Takes a message; returns None.
        on_error: What happens to a message for which ``f`` raises.
        markers: The markers of the session; by default they are looked up.

    """
    function = Function(f, "load")
    _check(on_error)
    session = open_session(Mode.SINGLE, markers, makes_one=False)
    answering = Answering(function, *session, on_error=on_error)
    _until_interrupted(answering.answer_messages, function.load)


def load_batch(
    f: Callable[[list[bytes]], None],
    *,
    driver: Driver = "supervisor",
    size: int = 100,
    on_error: OnError = "refuse",
    markers: Markers | None = None,
) -> None:
    """
    Have ``f`` load each batch; return at the end of input.

    When ``f`` returns, the supervisor may forget the batch. ``f`` is not called for
    an empty batch. A batch that is open at the end of input is loaded.

    Args:
        f: Takes the messages of a batch; returns None.
        driver: The side that decides when a batch is full.
        size: With ``driver="worker"``, the number of messages to ask for.
        on_error: What happens to a batch for which ``f`` raises.
        markers: The markers of the session; by default they are looked up.

    """
    function = Function(f, "load")
    mode = _mode(driver, size)
    _check(on_error)
    session = open_session(mode, markers, makes_one=False)
    answering = Answering(function, *session, on_error=on_error)
    _until_interrupted(answering.answer_batches, function.load, size)


def extract(
    f: Callable[[], Iterable[bytes]], *, markers: Markers | None = None
) -> None:
    """
    Pass on the messages of ``f`` as they come, and return; stdin is not read.

    Args:
        f: Returns messages.
        markers: The markers of the session; by default they are looked up.

    """
    function = Function(f, "extract")
    extraction = Extraction(function, *open_session(Mode.PLAIN, markers))
    _until_interrupted(extraction.pass_all, f)


def extract_cycle(
    f: Callable[..., Iterable[bytes]],
    *,
    offsets: Literal["worker", "supervisor"] = "worker",
    parse: Callable[[bytes], Iterable[Any]] | None = None,
    latest: Callable[[], int] | None = None,
    initial: Callable[[], int] | None = None,
    markers: Markers | None = None,
) -> None:
    """
    Answer each request with the messages of ``f``, until the end of input.

    Messages are sent as they come. ``raise Refuse("...")`` refuses a request, and
    discards what was extracted for it. A function that raises anything else ends the
    worker: if the range were skipped, the supervisor would take it for extracted.

    Args:
        f: Returns messages. With ``offsets="worker"`` it takes no arguments and keeps
            its own offset; the next request acknowledges its last reply. With
            ``offsets="supervisor"`` it takes the start and the end of a range, and
            remembers nothing.
        offsets: The side that keeps the offsets.
        parse: Takes a request and returns the arguments of ``f``, if the supervisor
            writes its requests in another form than ``{"start": ..., "end": ...}``.
        latest: Returns the offset after everything that can be extracted now; the
            supervisor asks for it with ``{"offsets": "latest"}``. Without this function
            the answer has no message, and the supervisor must be given an end.
        initial: Returns the offset of the first message that exists, likewise.
        markers: The markers of the session; by default they are looked up.

    """
    function = Function(f, "extract")
    if offsets not in ("worker", "supervisor"):
        raise ValueError(f"offsets is {offsets!r}, expected 'worker' or 'supervisor'")
    if parse is None:
        parse = _range_of if offsets == "supervisor" else _nothing_of
    if offsets == "worker" and (latest or initial):
        raise ValueError("latest and initial need offsets='supervisor'")
    ends = {"latest": latest, "initial": initial}

    def call(request: bytes) -> Iterable[bytes]:
        if request.startswith(_OFFSETS) and offsets == "supervisor":
            return _offset(request, ends)
        return f(*parse(request))

    protocol, descriptors = open_session(Mode.CYCLIC, markers)
    if protocol.markers.eop == protocol.markers.eom:
        # A reply is one message, so no part of it can be passed on before.
        answering = Answering(function, protocol, descriptors)
        _until_interrupted(answering.answer_messages, call)
    else:
        extraction = Extraction(function, protocol, descriptors)
        _until_interrupted(extraction.answer_requests, call)


def run(
    f: Callable[..., Iterable[bytes] | None],
    messages: Iterable[bytes | list[bytes] | tuple[Any, ...]],
    *,
    kind: Literal["transform", "load", "extract"] = "transform",
    on_error: OnError = "refuse",
    markers: Markers | None = None,
) -> list[list[bytes] | Refuse]:
    """
    Call ``f`` in this process, for a test; return what a supervisor would get.

    ::

        worker.run(shout, [b"one", b""])  # [[b"ONE"], Refuse("empty")]
        worker.run(join, [[b"a", b"b"], [b"c"]])  # batches
        worker.run(store, [b"one"], kind="load")  # [[]]
        worker.run(lines, [(0, 3), (3, 6)], kind="extract")  # ranges; [()] for plain

    The result has an item for each message. The exception behind a refusal is its
    ``__cause__``. An exception that would end the worker is raised.

    Args:
        f: As for the function that runs it as a worker.
        messages: The inputs, in order: messages, batches, or tuples of arguments for an
            extraction.
        kind: Which of these functions that is.
        on_error: What happens to a message for which ``f`` raises; it has no effect on
            an extraction.
        markers: The markers of the stage.

    Raises:
        InvalidMessage: If no supervisor would send one of ``messages``.

    """
    from etlstage.worker.rehearsal import Rehearsal  # not needed by a worker

    if kind not in ("transform", "load", "extract"):
        raise ValueError(f"kind is {kind!r}, expected 'transform', 'load' or 'extract'")
    rehearsal = Rehearsal(f, kind, _check(on_error), markers or Markers())
    return [rehearsal.ask(asked) for asked in messages]


def _nothing_of(request: bytes) -> tuple[()]:
    if request:
        raise ValueError(
            f"request is {len(request)} bytes long, expected it to be empty:"
            " the supervisor keeps the offsets; use offsets='supervisor'"
        )
    return ()


def _range_of(request: bytes) -> tuple[Any, Any]:
    import json

    if not request:
        raise ValueError(
            "request is empty, expected a range: the supervisor keeps no offsets;"
            " use offsets='worker'"
        )
    try:
        asked = json.loads(request)
        return asked["start"], asked["end"]
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            'can\'t read the request, expected {"start": ..., "end": ...};'
            " use parse= for another form"
        ) from None


def _offset(
    request: bytes, ends: Mapping[str, Callable[[], int] | None]
) -> list[bytes]:
    """Return the requested offset as a reply; empty if there is no function for it."""
    import json

    give = ends.get(json.loads(request)["offsets"])
    return [b"%d" % give()] if give is not None else []


def _mode(driver: str, size: int) -> Mode:
    if driver not in ("supervisor", "worker"):
        raise ValueError(f"driver is {driver!r}, expected 'supervisor' or 'worker'")
    if size < 1:
        raise ValueError(f"size must be at least one, got {size}")
    return Mode.BATCH_WORKER if driver == "worker" else Mode.BATCH_SUPERVISOR


def _check(on_error: str) -> str:
    if on_error not in ("refuse", "skip", "exit"):
        raise ValueError(
            f"on_error is {on_error!r}, expected 'refuse', 'skip' or 'exit'"
        )
    return on_error


def _until_interrupted(work: Callable[..., None], *arguments: object) -> None:
    try:
        work(*arguments)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
