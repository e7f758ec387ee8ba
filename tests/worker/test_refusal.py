"""Workers that refuse a message and continue."""

from __future__ import annotations

import pytest

from etlstage.protocol.marker import Markers
from etlstage.worker.refusal import Refuse, Traces, reason_of
from tests.worker.conftest import Fence, Start

ERR = {"ETLSTAGE_ERR": r"\025"}
REFUSES = """
    import sys
    def f(message):
        if message == b"bad":
            raise worker.Refuse("no date")
        if message == b"worse":
            raise ValueError("no such thing")
        return [message]
    worker.transform(f, **({"on_error": sys.argv[1]} if sys.argv[1:] else {}))
"""


def test_function_refuses(start: Start) -> None:
    """Refusals are sent in order among the replies, without a traceback."""
    stage = start(REFUSES, env=ERR)
    stage.ask(
        b"a\nbad\nb\nbad\nbad\nc\n",
        b"a\n\0no date\x15b\n\0" + b"no date\x15" * 2 + b"c\n\0",
    )
    stage.ask(b"bad\n", b"no date\x15")
    assert stage.finish() == (b"", 0)
    assert stage.stderr == ""


def test_exception_refuses_by_default(start: Start) -> None:
    """The exception's name and text are the reason; its traceback is printed once."""
    stage = start(REFUSES, env=ERR)
    stage.ask(
        b"a\nworse\nworse\nb\n",
        b"a\n\0" + b"ValueError: no such thing\x15" * 2 + b"b\n\0",
    )
    stage.ask(b"worse\n", b"ValueError: no such thing\x15")
    assert stage.finish() == (b"", 0)
    assert stage.stderr.count("Traceback") == 1
    assert 'raise ValueError("no such thing")' in stage.stderr
    assert (
        "in transform function 'f', message 2 of this worker, 5 bytes" in stage.stderr
    )


@pytest.mark.parametrize(
    ("on_error", "rest"), [("skip", (b"\0", 0)), ("exit", (b"", 1))]
)
def test_refusal_is_one_whatever_becomes_of_others(
    start: Start, on_error: str, rest: tuple[bytes, int]
) -> None:
    """``on_error`` is only about other exceptions."""
    stage = start(REFUSES, on_error, env=ERR)
    stage.write(b"bad\nworse\n")
    answer, status = stage.finish()
    assert (answer.removeprefix(b"no date\x15"), status) == rest


@pytest.mark.parametrize("message", [b"bad", b"worse"])
def test_worker_that_was_given_no_err_ends(start: Start, message: bytes) -> None:
    """The supervisor would take the reason for output; replies made before are sent."""
    stage = start(REFUSES)
    stage.write(b"a\n" + message + b"\nb\n")
    assert stage.read_to_end() == (b"a\n\0", 1)
    assert "message 2 of this worker" in stage.stderr
    assert stage.stderr.endswith(
        "this worker exits: it can't refuse, as its supervisor gave it no marker err"
        " (ETLSTAGE_ERR)\n"
    )


def test_batch_is_refused(start: Start) -> None:
    """A batch is refused as a whole, whichever side fills it."""
    source = """
        import sys
        def f(messages):
            if b"bad" in messages:
                raise worker.Refuse("no date")
        worker.load_batch(f, driver=sys.argv[1], size=2)
    """
    stage = start(source, "supervisor", env=ERR)
    stage.ask(b"a\n\x17b\nbad\n\x17c\n\x17", b"\0no date\x15\0")
    assert stage.finish() == (b"", 0)
    stage = start(source, "worker", env=ERR)
    stage.ask(b"bad\n", b"\x05")
    stage.ask(b"b\n", b"no date\x15")
    assert stage.finish() == (b"", 0)


def test_refusal_where_eop_is_eom(start: Start) -> None:
    """Each message is answered by one message or one reason."""
    stage = start(REFUSES, "refuse", "-E", r"\n", "--end-of-refusal", "!")
    stage.ask(b"a\nbad\nb\n", b"a\nno date!b\n")
    assert stage.finish() == (b"", 0)


@pytest.mark.parametrize("size", [1, 200_000])
def test_refusal_behind_outputs(start: Start, size: int) -> None:
    """Outputs that were sent can't be taken back; the reason follows them."""
    stage = start(
        f"""
        def f(message):
            yield b"x" * {size}
            raise worker.Refuse("no date")
        worker.transform(f)
        """,
        env=ERR,
    )
    before = b"x" * size + b"\n" if size > 1 else b""
    stage.ask(b"a\n", before + b"no date\x15")
    assert stage.finish() == (b"", 0)


@pytest.mark.parametrize("size", [0, 200_000])
def test_output_with_a_marker_refuses_its_message(start: Start, size: int) -> None:
    """Its neighbours are answered, even if replies are large."""
    stage = start(
        f"""
        def f(message):
            yield b"x" * {size}
            yield b"not\\0fine" if message == b"bad" else message
        worker.transform(f)
        """,
        env=ERR,
    )
    large = b"x" * size + b"\n"
    left = large if size else b""
    no = (
        left + rb"InvalidMessage: message contains marker eop '\000' at offset 3;"
        b" choose other markers, or encode the message\x15"
    )
    stage.ask(b"a\nbad\nbad\nb\n", large + b"a\n\0" + no * 2 + large + b"b\n\0")
    assert stage.finish() == (b"", 0)
    assert stage.stderr.count("Traceback") == 1


def test_refused_request(start: Start) -> None:
    """Messages extracted before are sent; the reason ends the request."""
    stage = start(
        """
        def f(start, end):
            yield b"1"
            if start:
                raise worker.Refuse("no such table")
        worker.extract_cycle(f, offsets="supervisor")
        """,
        env=ERR,
    )
    stage.ask(b'{"start": 0, "end": 1}\n', b"1\n\0")
    stage.ask(b'{"start": 1, "end": 2}\n', b"1\nno such table\x15")
    assert stage.finish() == (b"", 0)


def test_refusal_does_not_wait_for_the_next_message(start: Start, fence: Fence) -> None:
    """Neither do the replies around it, and the order is kept."""
    stage = start(
        """
        import sys
        def f(message):
            if message == b"wait":
                open(sys.argv[1]).read()
            if message == b"bad":
                raise worker.Refuse("no")
            return [message]
        worker.transform(f)
        """,
        fence,
        env=ERR,
    )
    stage.ask(b"a\nbad\nb\nbad\nwait\nbad\n", b"a\n\0no\x15b\n\0no\x15")
    fence.open()
    stage.expect(b"wait\n\0no\x15")
    assert stage.finish() == (b"", 0)


class Mute(Exception):
    """An exception whose text can't be made."""

    def __str__(self) -> str:
        raise OSError


@pytest.mark.parametrize(
    ("error", "markers", "reason"),
    [
        (Refuse("no date"), Markers(), "no date"),
        (Refuse(), Markers(), ""),
        (KeyError("id"), Markers(), "KeyError: 'id'"),
        (ValueError(), Markers(), "ValueError"),
        (Mute(), Markers(), "Mute"),
        (Refuse("two\nlines,\0a \x15 and\t\x7f"), Markers(), "two lines, a and"),
        (Refuse("a lone \ud800"), Markers(), "a lone"),
        (Refuse("x" * 5000), Markers(), "x" * 1000),
        (ValueError("x" * 5000), Markers(), "ValueError: " + "x" * 988),
        (ValueError("the END"), Markers(eop=b"END"), "ValueError"),
        (ValueError("the END"), Markers(eop=b"END", bnc=b"Val"), ""),
        (Refuse("no!"), Markers(err=b"!!"), "Refuse"),
    ],
)
def test_reason_can_be_sent(error: Exception, markers: Markers, reason: str) -> None:
    """A reason is one line without a marker, and is cut if it is long."""
    assert reason_of(error, markers) == reason


def test_traces_distinguish_places() -> None:
    """The same kind of exception from another line is new."""
    caught = []
    for key in "aab":
        try:
            if key == "a":
                int(key)
            int(key + key)
        except ValueError as error:
            caught.append(error)
    traces = Traces()
    assert [traces.new(error) for error in caught] == [True, False, True]
    assert traces.new(KeyError())


def test_traces_do_not_grow_for_ever() -> None:
    """A hundred places are enough to see that something is wrong."""
    kinds = [type(f"E{n}", (Exception,), {}) for n in range(200)]
    traces = Traces()
    assert sum(traces.new(kind()) for kind in kinds) == 100
