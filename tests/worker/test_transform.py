from __future__ import annotations

import pytest

from tests.worker.conftest import Start

UPPER = """
    def f(message):
        return [message.upper()]
    worker.transform(f)
"""
WORDS = """
    def f(message):
        yield from message.split()
    worker.transform(f)
"""


def test_each_message_is_answered_in_lock_step(start: Start) -> None:
    """With window 1 nothing more comes until we have answered: we must flush."""
    stage = start(UPPER)
    for _ in range(3):
        stage.ask(b"one\n", b"ONE\n\0")
    assert stage.finish() == (b"", 0)
    assert stage.stderr == ""


def test_messages_written_ahead_are_answered_in_order(start: Start) -> None:
    """The k-th EOP answers the k-th message."""
    stage = start(UPPER)
    stage.write(b"".join(b"m%d\n" % n for n in range(5000)))
    stage.expect(b"".join(b"M%d\n\0" % n for n in range(5000)))
    assert stage.finish() == (b"", 0)


def test_no_input_is_no_output(start: Start) -> None:
    """There is no unsolicited EOP."""
    assert start(UPPER).finish() == (b"", 0)


def test_generator_gives_none_one_or_many(start: Start) -> None:
    """Any iterable will do."""
    stage = start(WORDS)
    for message, reply in (
        (b"", b"\0"),
        (b"a", b"a\n\0"),
        (b"a b c", b"a\nb\nc\n\0"),
        (b" ", b"\0"),
    ):
        stage.ask(message + b"\n", reply)
    assert stage.finish() == (b"", 0)


def test_any_iterable_of_bytes_is_a_reply(start: Start) -> None:
    """Empty messages are messages; here each is an expression for its reply."""
    stage = start("worker.transform(eval)")
    for reply, wire in (
        (b"[]", b"\0"),
        (b"()", b"\0"),
        (b"[b'']", b"\n\0"),
        (b"[b'', b'']", b"\n\n\0"),
        (b"(b'a', b'b')", b"a\nb\n\0"),
        (b"iter([b'a'])", b"a\n\0"),
        (b"{b'a': 1}", b"a\n\0"),
        (b"map(bytes, [b'a', b'b'])", b"a\nb\n\0"),
        (b"[type('Name', (bytes,), {})(b'a')]", b"a\n\0"),
    ):
        stage.ask(reply + b"\n", wire)
        stage.ask((reply + b"\n") * 2, wire * 2)
    assert stage.finish() == (b"", 0)


def test_message_may_come_in_pieces(start: Start) -> None:
    """Two messages and a half are two for now."""
    stage = start(UPPER)
    stage.ask(b"one\ntwo\nth", b"ONE\n\0TWO\n\0")
    stage.ask(b"ree\n", b"THREE\n\0")
    assert stage.finish() == (b"", 0)


def test_multi_byte_markers_may_be_cut(start: Start) -> None:
    """Half a marker is not a marker."""
    stage = start(UPPER, "-e", "<eom>", "-E", "<eop>")
    stage.write(b"one<eo")
    stage.ask(b"m>two<eom>", b"ONE<eom><eop>TWO<eom><eop>")
    stage.ask(b"<eo>m<eom>", b"<EO>M<eom><eop>")
    assert stage.finish() == (b"", 0)


@pytest.mark.parametrize("size", [10_000_000, 70_000_000])
def test_message_may_be_as_large_as_the_supervisor_lets_it(
    start: Start, size: int
) -> None:
    """The supervisor sets the limit; the dialect's default doesn't apply here."""
    stage = start("worker.transform(lambda message: [message])")
    message = b"0123456789" * (size // 10) + b"\n"
    stage.ask(message, message + b"\0")
    assert stage.finish() == (b"", 0)


def test_one_to_one(start: Start) -> None:
    """With ``eop == eom`` the EOM of the only message ends the reply."""
    stage = start(UPPER, "-E", r"\n")
    stage.ask(b"one\ntwo\n", b"ONE\nTWO\n")
    assert stage.finish() == (b"", 0)


def test_large_one_to_one(start: Start) -> None:
    """Such a reply is not sent in parts."""
    stage = start("worker.transform(lambda m: (m * n for n in [9]))", "-E", r"\n")
    stage.ask(b"x" * 99_999 + b"\n", b"x" * 899_991 + b"\n")
    assert stage.finish() == (b"", 0)


def test_load_answers_with_eop_alone(start: Start) -> None:
    """A load stage makes no messages."""
    stage = start("""
        import sys
        def f(message):
            sys.stderr.write(f"loaded {message.decode()}.")
        worker.load(f)
    """)
    stage.ask(b"one\n", b"\0")
    stage.ask(b"two\nthree\n", b"\0\0")
    assert stage.finish() == (b"", 0)
    assert stage.stderr == "loaded one.loaded two.loaded three."


def test_call_returns_at_the_end_of_input(start: Start) -> None:
    """The output is closed; the program may continue with something else."""
    stage = start("""
        import sys
        worker.transform(lambda message: [message])
        sys.stderr.write("bye")
        sys.exit(7)
    """)
    stage.ask(b"a\n", b"a\n\0")
    assert stage.finish() == (b"", 7)
    assert stage.stderr == "bye"
