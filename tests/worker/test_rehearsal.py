"""A worker's function in this process: ``worker.run()``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from etlstage import worker
from etlstage.errors import InvalidMessage
from etlstage.protocol.base import Side
from etlstage.protocol.events import Ended, Opened
from etlstage.protocol.marker import MarkerProtocol, Markers, Mode
from tests.worker.conftest import ENVIRONMENT

ONE_TO_ONE = Markers(eop=b"\n")
ERR = {"ETLSTAGE_ERR": r"\025"}


def answers(message: bytes) -> Any:  # noqa: ANN401 - as it is reported
    """Do what the message asks for; the choices cover what may go wrong."""
    match message:
        case b"none":
            return []
        case b"two":
            return iter((b"1", b"2"))
        case b"no":
            raise worker.Refuse("not  this\none")
        case b"wrong":
            raise ValueError("no such thing")
        case b"nothing":
            return None
        case b"text":
            return ["text"]
        case b"single":
            return b"single"
        case b"marker":
            return [b"sound", b"a\0b"]
        case b"late":
            return late()
    return [message.upper()]


def late() -> Iterator[bytes]:
    """Fail after a first message."""
    yield b"early"
    raise KeyError("late")


def join(messages: list[bytes]) -> list[bytes]:
    """Join a batch, or fail."""
    if b"wrong" in messages:
        raise ValueError(f"{len(messages)} of them")
    return [b"-".join(messages)]


def store(message: bytes) -> None:
    """Load a message, refuse it, or wrongly return it."""
    if message == b"no":
        raise worker.Refuse("it is there already")
    if message == b"give":
        return message  # type: ignore[return-value]
    return None


ASKED = [
    *(b"one", b"none", b"two", b"no", b"wrong", b"wrong", b"nothing", b"text"),
    *(b"single", b"marker", b"late", b"", b"\x15"),
]


def process(call: str, asked: list[Any], markers: Markers) -> list[Any]:
    """Return the results of a worker process."""
    mode = Mode.BATCH_SUPERVISOR if "batch" in call else Mode.SINGLE
    ours = MarkerProtocol(Side.SUPERVISOR, mode, markers)
    for number, one in enumerate(asked, 1):
        batch = isinstance(one, list)
        ours.send(Opened(number, one if batch else [one], each=not batch))
    code = f"from etlstage import worker\nfrom {__name__} import *\nworker.{call}"
    eop = {"ETLSTAGE_EOP": r"\n"} if markers == ONE_TO_ONE else {}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        input=b"".join(ours.data_to_send()),
        env=ENVIRONMENT | ERR | eop,
        capture_output=True,
        check=True,
    )
    ours.receive_data(ended.stdout)
    results: list[Any] = []
    for event in ours.events_received():
        assert isinstance(event, Ended), event
        reasons = {refusal.place: refusal.reason for refusal in event.refusals}
        for place, group in enumerate(event.groups):
            reason = reasons.get(place)
            results.append(list(group) if reason is None else worker.Refuse(reason))
    assert len(results) == len(asked)
    return results


@pytest.mark.parametrize(
    ("call", "asked", "options"),
    [
        ("transform(answers)", ASKED, {}),
        ("transform(answers, on_error='skip')", ASKED, {"on_error": "skip"}),
        ("transform(answers)", ASKED, {"markers": ONE_TO_ONE}),
        ("transform_batch(join)", [[b"a", b"b"], [], [b"wrong"], [b"c"]], {}),
        ("load(store)", [b"one", b"no", b"give"], {"kind": "load"}),
    ],
)
def test_same_as_a_process(
    call: str, asked: list[Any], options: dict[str, Any]
) -> None:
    """``run()`` gives the same outputs, and reasons word for word (issue 12)."""
    functions = {"answers": answers, "join": join, "store": store}
    f: Any = functions[call.partition("(")[2].rstrip(")").partition(",")[0]]
    expected = process(call, asked, options.get("markers", Markers()))
    assert worker.run(f, asked, **options) == expected


def test_what_was_raised_is_the_cause_of_the_refusal() -> None:
    """It shows where the mistake is (issue 12)."""
    (refusal,) = worker.run(answers, [b"wrong"])
    assert refusal == worker.Refuse("ValueError: no such thing")
    assert isinstance(refusal, worker.Refuse)
    assert isinstance(refusal.__cause__, ValueError)
    assert len({refusal, worker.Refuse("ValueError: no such thing")}) == 1


@pytest.mark.parametrize(
    "options", [{"on_error": "exit"}, {"markers": Markers(err=None)}]
)
def test_exception_that_ends_the_worker_is_raised(options: dict[str, Any]) -> None:
    """It is unchanged; without a marker err every exception is raised (issue 12)."""
    with pytest.raises(ValueError, match="no such thing"):
        worker.run(answers, [b"one", b"wrong"], **options)


def test_extraction() -> None:
    """Requests are tuples of arguments: a range, or nothing (issue 12)."""

    def lines(start: int, end: int) -> Iterator[bytes]:
        if start > 5:
            raise worker.Refuse("there are five")
        yield from (b"%d" % n for n in range(start, min(end, 5)))

    assert worker.run(lines, [(0, 3), (3, 6), (6, 9)], kind="extract") == [
        [b"0", b"1", b"2"],
        [b"3", b"4"],
        worker.Refuse("there are five"),
    ]
    assert worker.run(lambda: [b"a"], [()], kind="extract") == [[b"a"]]
    with pytest.raises(InvalidMessage, match="contains marker eop"):
        worker.run(lambda: [b"a\0"], [()], kind="extract")
    with pytest.raises(TypeError, match="takes a tuple of arguments, got b'a'"):
        worker.run(lines, [b"a"], kind="extract")


def test_what_no_supervisor_sends() -> None:
    """Requests that could not be sent to a worker are errors (issue 12)."""
    with pytest.raises(InvalidMessage, match="contains marker eom"):
        worker.run(answers, [b"one\n"])
    with pytest.raises(TypeError, match="expected a message, or a list of them, got s"):
        worker.run(answers, ["one"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="kind is 'e', expected 'transform', 'load'"):
        worker.run(answers, [], kind="e")  # type: ignore[arg-type]


def test_reply_that_never_ends_where_there_must_be_one() -> None:
    """It is not read to its end (issue 12)."""

    def endless(message: bytes) -> Iterator[bytes]:
        while True:
            yield message

    assert worker.run(endless, [b"a"], markers=ONE_TO_ONE) == [
        worker.Refuse(
            "ValueError: transform function 'test_reply_that_never_ends_where_there"
            "_must_be_one.<locals>.endless' gave several messages, expected exactly one:"
            " eop is eom"
        )
    ]
