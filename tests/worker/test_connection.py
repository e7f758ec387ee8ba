"""When answers are written: in time, in bulk, and within bounds."""

from __future__ import annotations

import os

import pytest

from etlstage.protocol.base import Side
from etlstage.protocol.events import Farewell, Opened
from etlstage.protocol.marker import MarkerProtocol, Mode
from etlstage.worker.connection import Connection
from tests.worker.conftest import Fence, Start

WAITS = """
    import sys
    def f(message):
        if message == b"wait":
            open(sys.argv[1]).read()
        return [message]
    worker.transform(f)
"""


def test_reply_does_not_wait_for_the_next_message(start: Start, fence: Fence) -> None:
    """The function is stuck in message two; the reply to message one is there."""
    stage = start(WAITS, fence)
    stage.ask(b"a\nwait\nb\n", b"a\n\0")
    fence.open()
    stage.expect(b"wait\n\0b\n\0")
    assert stage.finish() == (b"", 0)


def test_reply_does_not_wait_later_on_either(start: Start, fence: Fence) -> None:
    """The thread that watches the clock wakes up again after the input ran dry."""
    stage = start(WAITS, fence)
    for _ in range(3):
        stage.ask(b"a\nwait\nb\n", b"a\n\0")
        fence.open()
        stage.expect(b"wait\n\0b\n\0")
        stage.ask(b"lock-step\n", b"lock-step\n\0")
    assert stage.finish() == (b"", 0)


def test_thread_sleeps_while_there_is_nothing_to_do() -> None:
    """It wakes up when there is work, so an idle worker costs nothing."""
    (reading, to_worker), (from_worker, writing) = os.pipe(), os.pipe()
    protocol = MarkerProtocol(Side.WORKER, Mode.SINGLE)
    connection = Connection(
        protocol, (reading, writing), lambda refusal: None, groups=True
    )
    events = connection.events()
    for first in (1, 3, 5):
        os.write(to_worker, b"a\nb\n")
        assert next(events) == Opened(first, [b"a", b"b"])
        while connection._awake:  # it goes to sleep before long
            os.sched_yield()
        connection.watch()
        connection.pending.append((b"A",))
        assert os.read(from_worker, 99) == b"A\n\0"
        connection.pending.append((b"B",))
        assert os.read(from_worker, 99) == b"B\n\0"
    os.close(to_worker)
    assert list(events) == [Farewell()]
    connection.close()
    assert os.read(from_worker, 99) == b""
    os.close(from_worker)


def test_batch_reply_does_not_wait_for_the_next_batch(
    start: Start, fence: Fence
) -> None:
    """The same for batches written ahead."""
    stage = start(
        """
        import sys
        def f(messages):
            if b"wait" in messages:
                open(sys.argv[1]).read()
            return messages
        worker.transform_batch(f)
        """,
        fence,
    )
    stage.ask(b"a\nb\n\x17wait\n\x17", b"a\nb\n\0")
    fence.open()
    stage.expect(b"wait\n\0")
    assert stage.finish() == (b"", 0)


def test_what_was_answered_survives_a_crash_in_the_next_message(
    start: Start, fence: Fence
) -> None:
    """Only the message that kills the worker is lost with it."""
    stage = start(
        """
        import os, sys
        def f(message):
            if message == b"crash":
                open(sys.argv[1]).read()
                os.abort()
            return [message]
        worker.transform(f)
        """,
        fence,
    )
    stage.ask(b"a\ncrash\nb\n", b"a\n\0")
    fence.open()
    assert stage.read_to_end() == (b"", -6)


def test_lock_step_needs_no_thread(start: Start) -> None:
    """A worker that forks should have no second thread, if possible."""
    stage = start("""
        import os
        worker.transform(lambda message: [b"%d" % len(os.listdir("/proc/self/task"))])
    """)
    for _ in range(3):
        stage.ask(b"\n", b"1\n\0")
    stage.ask(b"\n\n", b"2\n\0" * 2)
    assert stage.finish() == (b"", 0)


def test_replies_under_load_are_written_in_bulk(start: Start) -> None:
    """A write per message would cost more than the messages."""
    stage = start("""
        import os, sys
        from etlstage.worker import connection
        writes, write = [], connection.write
        def counting(target, data):
            writes.append(len(data))
            write(target, data)
        connection.write = counting
        worker.transform(lambda message: [message])
        sys.stderr.write(f"{len(writes)} {sum(writes)}")
    """)
    messages = b"x" * 107 + b"\n"
    stage.write(messages * 20000)
    stage.discard(109 * 20000)
    assert stage.finish() == (b"", 0)
    writes, size = map(int, stage.stderr.split())
    assert size == 109 * 20000
    assert writes < 2000


MEMORY = """
    import resource
    limit = 300 * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""


@pytest.mark.parametrize(
    ("call", "request_", "end"),
    [
        ("transform(lambda message: f())", b"\n", b"\0"),
        ("transform_batch(lambda messages: f())", b"\n\x17", b"\0"),
        ("extract_cycle(f)", b"\n", b"\0"),
        ("extract(f)", b"", b""),
    ],
)
def test_reply_may_be_larger_than_memory(
    start: Start, call: str, request_: bytes, end: bytes
) -> None:
    """Parts of a reply are written as they are made."""
    stage = start(f"""{MEMORY}
    def f():
        message = b"x" * 999
        for _ in range(400_000):
            yield message
    worker.{call}
    """)
    stage.write(request_)
    stage.discard(400_000 * 1000 + len(end))
    assert stage.finish() == (b"", 0)


@pytest.mark.parametrize(
    ("call", "request_"), [("transform", b"\n"), ("transform_batch", b"\n\x17")]
)
def test_replies_to_one_read_may_be_larger_than_memory(
    start: Start, call: str, request_: bytes
) -> None:
    """Many exchanges, each with a large reply, none of them too large by itself."""
    stage = start(f"""{MEMORY}
    worker.{call}(lambda asked: [b"x" * 99_998])
    """)
    stage.write(request_ * 4000)
    stage.discard(4000 * 100_000)
    assert stage.finish() == (b"", 0)


def test_unterminated_tail_is_dropped(start: Start) -> None:
    """Without EOM it may not be a whole message."""
    stage = start("worker.transform(lambda message: [message])")
    stage.ask(b"a\nb", b"a\n\0")
    assert stage.finish() == (b"", 0)
    assert stage.stderr == (
        "etlstage.worker: dropped the last 1 byte of the input: no EOM follows\n"
    )


def test_unterminated_tail_of_a_batch_is_dropped(start: Start) -> None:
    """The complete messages before it are a batch."""
    stage = start("worker.transform_batch(lambda messages: messages)")
    stage.write(b"a\nbc")
    assert stage.finish() == (b"a\n\0", 0)
    assert "dropped the last 2 bytes" in stage.stderr


def test_eob_in_single_mode_is_refused(start: Start) -> None:
    """One line shows what is wrong, and no traceback hides it."""
    stage = start("worker.transform(lambda message: [message])")
    stage.ask(b"a\n", b"a\n\0")
    stage.write(b"\x17")
    assert stage.finish() == (b"", 1)
    assert stage.stderr == (
        "etlstage.worker: stdin: can't handle EOB in state IDLE: there are no batches"
        " in single mode (offset 2, found 17)\n"
    )


def test_supervisor_that_is_gone(start: Start) -> None:
    """No one is left to whom an error could be reported."""
    stage = start("worker.transform(lambda message: [message])")
    stage.ask(b"a\n", b"a\n\0")
    stage.stop_reading()
    stage.write_blindly(b"a\n")
    assert stage.wait() == 1
    assert stage.stderr == ""


def test_supervisor_that_goes_while_the_function_works(
    start: Start, fence: Fence
) -> None:
    """The flushing thread notices it, and leaves the error to the main thread."""
    stage = start(
        """
        import os, sys
        from etlstage.worker import connection
        def f(message):
            if message == b"wait":
                open(sys.argv[1]).read()
            return [message]
        write = connection.write
        def telling(target, data):
            try:
                write(target, data)
            finally:
                os.write(2, b"tried\\n")
        connection.write = telling
        worker.transform(f)
        """,
        fence,
    )
    stage.stop_reading()
    stage.write_blindly(b"a\nwait\n")
    stage.wait_for_stderr("tried")
    fence.open()
    assert stage.wait() == 1
    assert stage.stderr == "tried\n"


def test_forked_child_holds_nothing(start: Start, fence: Fence) -> None:
    """
    A child that outlives the worker does not keep the supervisor waiting.

    It doesn't write replies again that were pending at the time of the fork, either.
    """
    stage = start(
        """
        import atexit, os, sys, warnings
        warnings.simplefilter("ignore")  # of a fork beside the thread that flushes
        atexit.register(os.write, 2, b"ended\\n")
        def f(message):
            if message == b"fork" and not os.fork():
                open(sys.argv[1]).read()
                sys.exit(3)
            return [message]
        worker.transform(f)
        """,
        fence,
    )
    stage.ask(b"a\nfork\n", b"a\n\0fork\n\0")
    assert stage.finish() == (b"", 0)
    fence.open()
    stage.wait_for_stderr("ended\nended\n")
    assert stage.stderr == "ended\nended\n"
