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
reads ``/dev/null``; what was printed to an unbuffered stdout *before* the call is gone
to the supervisor, which will not understand it.

A function may return a list, be a generator, or give any other iterable of bytes. It
works through its messages one after the other; each reply goes out when no more
input is there, after 0.05 seconds, or when so much has been collected.

The markers are, in this order, those of ``markers=``, of the command line
(``-e``/``--end-of-message``, ``-E``/``--end-of-process``, ``--end-of-batch``,
``--batch-not-complete``, ``--end-of-refusal``, each with a text such as ``\n``), of
the environment (``ETLSTAGE_EOM``, ``..._EOP``, ``..._EOB``, ``..._BNC``,
``..._ERR``), or the defaults. ``sys.argv`` is left as it is; with ``markers=`` it is
not looked at.

A function that can't process a message, or batch, rejects it by ``raise
worker.Refuse("no date")``: it is refused for that reason, and the worker goes on. What
becomes of any other exception is set by ``on_error``:

``refuse``
    It refuses, too: its name and text are the reason. Of all exceptions of one kind
    from one line the first one's traceback goes to stderr.
``skip``
    The message is answered without messages, and counted by the supervisor as skipped;
    each traceback goes to stderr.
``exit``
    The worker ends with status 1 and the traceback on stderr; what it has answered
    before is passed on.

A supervisor that gives no marker ERR can't be refused anything: then ``refuse`` is
``exit``. An output that contains a marker counts as raised, though this is noticed
only when it is sent: the function may have seen more messages by then. Of a large
reply some outputs may have been sent when the function raises: if it refuses, they
count for nothing, and if it skips, they can't be called back.

A supervisor that waits for a worker to be ready, or for its heartbeat, gets both
from here: when the first message is about to be read, and while none is there. Load
what takes its time, such as a model, before the call. A function that needs long for
one message reports how far it is by ``worker.progress(0.4)``, which gives it more time;
``worker.count("rows_dropped", 3)`` adds to a metric.

A test imports the module, and calls the function in its own process::

    assert worker.run(shout, [b"one", b"two"]) == [[b"ONE"], [b"TWO"]]

A worker starts at every spawn and restart, so nothing here imports more than it
must.
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

_OFFSETS = b'{"offsets"'  # begins a request for an offset, and none for a range


def transform(
    f: Callable[[bytes], Iterable[bytes]],
    *,
    on_error: OnError = "refuse",
    markers: Markers | None = None,
) -> None:
    """
    Answer each message with what ``f`` makes of it; return at the end of input.

    Args:
        f: Takes a message; gives none, one or many.
        on_error: What becomes of a message for which ``f`` raises.
        markers: Those of the session, when they are not to be looked for.

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
    Answer each batch with what ``f`` makes of it; return at the end of input.

    ``f`` is not called for an empty batch, except where ``eop`` is ``eom`` and only
    it can make the message that is due. A batch that is open at the end of input is
    answered.

    Args:
        f: Takes the messages of a batch; gives none, one or many.
        driver: Who decides when a batch is full.
        size: With ``driver="worker"``, messages to ask for.
        on_error: What becomes of a batch for which ``f`` raises.
        markers: Those of the session, when they are not to be looked for.

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
        on_error: What becomes of a message for which ``f`` raises.
        markers: Those of the session, when they are not to be looked for.

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
    an empty one. A batch that is open at the end of input is loaded.

    Args:
        f: Takes the messages of a batch; returns None.
        driver: Who decides when a batch is full.
        size: With ``driver="worker"``, messages to ask for.
        on_error: What becomes of a batch for which ``f`` raises.
        markers: Those of the session, when they are not to be looked for.

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
    Pass on all that ``f`` gives, as it comes, and return; stdin is not read.

    Args:
        f: Gives messages.
        markers: Those of the session, when they are not to be looked for.

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
    Answer each request with what ``f`` gives, as it comes; return at the end of input.

    ``raise Refuse("...")`` refuses a request, and with it what was extracted for it.
    A function that raises anything else ends the worker: were it skipped, the
    supervisor would take the range for extracted.

    Args:
        f: Gives messages. With ``offsets="worker"`` it takes nothing and knows by
            itself how far it got; the next request is the receipt for its last reply.
            With ``offsets="supervisor"`` it takes the start and the end of a range,
            and remembers nothing.
        offsets: Who keeps the offsets.
        parse: Takes a request and gives the arguments of ``f``, where the supervisor
            writes its requests otherwise than ``{"start": ..., "end": ...}``.
        latest: Gives the offset behind all that can be extracted now, for a supervisor
            that asks for it: by ``{"offsets": "latest"}``. Without it such a request is
            answered with nothing, and the supervisor wants to be given an end.
        initial: Gives the offset of the first message that there is, likewise.
        markers: Those of the session, when they are not to be looked for.

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
    Call ``f`` here, for a test; return for each message what a supervisor would get.

    ::

        worker.run(shout, [b"one", b""])  # [[b"ONE"], Refuse("empty")]
        worker.run(join, [[b"a", b"b"], [b"c"]])  # batches
        worker.run(store, [b"one"], kind="load")  # [[]]
        worker.run(lines, [(0, 3), (3, 6)], kind="extract")  # ranges; [()] for plain

    What a refusal hides is its ``__cause__``. An exception that ends the worker is
    raised.

    Args:
        f: As for the call that makes a worker of it.
        messages: What it is asked, one after the other: messages, or batches, or the
            arguments for an extraction.
        kind: Which call that is.
        on_error: What becomes of a message for which ``f`` raises; no matter for an
            extraction.
        markers: Those of the stage.

    Raises:
        InvalidMessage: If no supervisor would send one of ``messages``.

    """
    from etlstage.worker.rehearsal import Rehearsal  # no worker waits for it

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
            " use parse= for another"
        ) from None


def _offset(
    request: bytes, ends: Mapping[str, Callable[[], int] | None]
) -> list[bytes]:
    """Return the offset that is asked for; no reply: it is not known."""
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
