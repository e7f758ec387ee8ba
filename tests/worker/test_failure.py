"""What happens when a worker's function fails."""

from __future__ import annotations

import pytest

from tests.worker.conftest import Fence, Start

FAILS = """
    import sys
    def f(message):
        if message == b"bad":
            raise ValueError("no such thing")
        return [message]
    worker.transform(f, on_error=sys.argv[1])
"""


def test_exit_passes_on_what_was_answered_before(start: Start) -> None:
    """The failed message gets no EOP, and those after it are not processed."""
    stage = start(FAILS, "exit")
    stage.write(b"a\nb\nbad\nc\n")
    assert stage.read_to_end() == (b"a\n\0b\n\0", 1)
    assert stage.stderr.startswith("Traceback (most recent call last):\n")
    assert 'raise ValueError("no such thing")' in stage.stderr
    assert stage.stderr.endswith(
        "ValueError: no such thing\n"
        "in transform function 'f', message 3 of this worker, 3 bytes long\n"
    )


def test_skip_answers_without_messages(start: Start) -> None:
    """The traceback is printed, and the next message is answered."""
    stage = start(FAILS, "skip")
    stage.ask(b"a\nbad\nb\nbad\n", b"a\n\0\0b\n\0\0")
    stage.ask(b"bad\n", b"\0")
    assert stage.finish() == (b"", 0)
    assert stage.stderr.count("ValueError: no such thing\n") == 3
    assert stage.stderr.count("Traceback") == 3
    for number in 2, 4, 5:
        assert f"message {number} of this worker, 3 bytes long" in stage.stderr


def test_skipped_batch(start: Start) -> None:
    """A batch fails as a whole."""
    stage = start("""
        def f(messages):
            if b"bad" in messages:
                raise ValueError("no such thing")
            return messages
        worker.transform_batch(f, on_error="skip")
    """)
    stage.ask(b"a\n\x17b\nbad\n\x17bad\n\x17c\n\x17", b"a\n\0\0\0c\n\0")
    assert stage.finish() == (b"", 0)
    for number, size in (2, "2 messages"), (3, "1 message"):
        assert f"batch {number} of this worker, {size} long\n" in stage.stderr


def test_skip_drops_what_the_failed_reply_had(start: Start) -> None:
    """Half a reply is not a reply."""
    stage = start("""
        def f(message):
            yield message
            if message == b"bad":
                raise ValueError("no such thing")
        worker.transform(f, on_error="skip")
    """)
    stage.ask(b"a\nbad\nb\n", b"a\n\0\0b\n\0")
    assert stage.finish() == (b"", 0)


def test_skip_can_not_call_back_what_has_left(start: Start) -> None:
    """Parts of a large reply have been sent already; its EOP is sent all the same."""
    stage = start("""
        def f(message):
            yield b"x" * 200_000
            raise ValueError("no such thing")
        worker.transform(f, on_error="skip")
    """)
    stage.ask(b"a\n", b"x" * 200_000 + b"\n\0")
    assert stage.finish() == (b"", 0)


def test_skipped_load(start: Start) -> None:
    """The same for a function that makes no messages."""
    stage = start("""
        def f(message):
            raise OSError("disk on fire")
        worker.load(f, on_error="skip")
    """)
    stage.ask(b"a\nb\n", b"\0\0")
    assert stage.finish() == (b"", 0)
    assert stage.stderr.count("OSError: disk on fire") == 2


def test_message_with_a_marker_ends_the_worker(start: Start) -> None:
    """It would be read as two messages, or as an early end of the reply."""
    stage = start("""
        def f(message):
            return [b"fine", b"not\\0fine"] if message == b"bad" else [message]
        worker.transform(f)
    """)
    stage.write(b"a\n\nbad\nb\n")
    assert stage.read_to_end() == (b"a\n\0\n\0", 1)
    assert (
        " at offset 3; choose other markers, or encode the message\n"
        "in transform function 'f', message 3 of this worker\n" in stage.stderr
    )
    assert stage.stderr.count("Traceback") == 1


def test_marker_is_found_in_front_of_a_large_reply(start: Start) -> None:
    """The message whose reply is being made when it is found is not blamed."""
    stage = start("""
        def f(message):
            yield b"not\\0fine" if message == b"bad" else b"x" * 200_000
        worker.transform(f)
    """)
    stage.write(b"bad\nlarge\n")
    assert stage.read_to_end() == (b"", 1)
    assert "in transform function 'f', message 1 of this worker\n" in stage.stderr
    assert stage.stderr.count("Traceback") == 1


@pytest.mark.parametrize("size", [0, 200_000])
def test_messages_with_markers_are_skipped(start: Start, size: int) -> None:
    """Each is reported, and its neighbours are answered, even if replies are large."""
    stage = start(f"""
        def f(message):
            yield b"x" * {size}
            yield b"not\\0fine" if message == b"bad" else message
        worker.transform(f, on_error="skip")
    """)
    large = b"x" * size + b"\n"
    left = large if size else b""
    stage.ask(
        b"a\nbad\nbad\nb\nbad\n",
        large + b"a\n\0" + (left + b"\0") * 2 + large + b"b\n\0" + left + b"\0",
    )
    assert stage.finish() == (b"", 0)
    assert stage.stderr.count("message contains marker eop ") == 3
    for number in 2, 3, 5:
        assert f"in transform function 'f', message {number} of" in stage.stderr


def test_marker_found_while_the_function_works(start: Start, fence: Fence) -> None:
    """The flushing thread sends valid replies; the main thread handles the error."""
    stage = start(
        """
        import sys
        def f(message):
            if message == b"wait":
                open(sys.argv[1]).read()
            return [b"not\\0fine"] if message == b"bad" else [message]
        worker.transform(f, on_error="skip")
        """,
        fence,
    )
    stage.ask(b"a\nbad\nb\nwait\nc\n", b"a\n\0")
    assert stage.stderr == ""
    fence.open()
    stage.expect(b"\0b\n\0wait\n\0c\n\0")
    assert stage.finish() == (b"", 0)
    assert "in transform function 'f', message 2 of this worker" in stage.stderr


def test_system_exit_has_its_status(start: Start) -> None:
    """``sys.exit()`` ends the worker, after the replies made before are sent."""
    stage = start("""
        import sys
        def f(message):
            if message == b"stop":
                sys.exit(42)
            return [message]
        worker.transform(f, on_error="skip")
    """)
    stage.write(b"a\nstop\nb\n")
    assert stage.read_to_end() == (b"a\n\0", 42)
    assert stage.stderr == ""


def test_interrupt_while_waiting_for_input(start: Start) -> None:
    """Ctrl-C is not a failure, so nothing is printed."""
    stage = start("worker.transform(lambda message: [message])")
    stage.ask(b"a\n", b"a\n\0")
    stage.interrupt()
    assert stage.read_to_end() == (b"", 130)
    assert stage.stderr == ""


def test_interrupt_while_the_function_works(start: Start) -> None:
    """Replies made before are sent."""
    # It is a busy loop: a system call that begins just after Python has noticed the
    # signal would not be interrupted.
    stage = start("""
        import sys
        def f(message):
            if message == b"wait":
                sys.stderr.write("waiting\\n")
                while True:
                    pass
            return [message]
        worker.transform(f, on_error="skip")
    """)
    stage.write(b"a\nwait\nb\n")
    stage.wait_for_stderr("waiting")
    stage.interrupt()
    assert stage.read_to_end() == (b"a\n\0", 130)
    assert stage.stderr == "waiting\n"


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (
            "transform(lambda m: m)",
            (
                "TypeError: transform function '<lambda>' returned a single bytes object,"
                " expected an iterable of bytes: yield it, or return [..]"
            ),
        ),
        ("transform(lambda m: b'')", "returned a single bytes object"),
        ("transform(lambda m: 'a')", "returned a single str object"),
        (
            "transform(lambda m: None)",
            (
                "returned NoneType, expected an iterable of bytes: yield each message, or"
                " return a list; [] for none"
            ),
        ),
        ("transform(lambda m: 3)", "returned int, expected an iterable of bytes"),
        ("transform(lambda m: ['a'])", "gave str, expected bytes; use .encode()"),
        ("transform(lambda m: [m, None])", "gave NoneType, expected bytes\n"),
        ("transform(lambda m: [bytearray(m)])", "gave bytearray, expected bytes\n"),
        (
            "load(lambda m: [])",
            (
                "TypeError: load function '<lambda>' returned list, expected None: a load"
                " stage emits no messages"
            ),
        ),
        ("load_batch(lambda m: m)", "returned list, expected None"),
        ("extract(lambda: b'a')", "returned a single bytes object"),
        ("extract(lambda: ['a'])", "gave str, expected bytes; use .encode()"),
        ("extract_cycle(lambda: None)", "extract function '<lambda>' returned None"),
    ],
)
def test_wrong_replies_are_reported(start: Start, call: str, complaint: str) -> None:
    """Some look like right ones: a bytes object is iterable, and b'' is empty."""
    stage = start(f"worker.{call}")
    stage.write(b"\n\x17" if "batch" in call else b"\n")
    assert stage.finish() == (b"", 1)
    assert complaint in stage.stderr


@pytest.mark.parametrize("role", ["transform", "load", "load_batch", "extract_cycle"])
def test_coroutine_is_reported_and_closed(start: Start, role: str) -> None:
    """Only the error is shown, not that nothing awaited it (issue 26)."""
    stage = start(f"async def f(*_): pass\nworker.{role}(f)")
    stage.write(b"\n\x17" if "batch" in role else b"\n")
    assert stage.finish() == (b"", 1)
    assert "returned coroutine, expected" in stage.stderr
    assert "never awaited" not in stage.stderr


@pytest.mark.parametrize(
    ("reply", "count"),
    [("[]", "no"), ("[m, m]", "several"), ("(m for _ in m)", "several")],
)
def test_reply_must_be_one_message_when_eop_is_eom(
    start: Start, reply: str, count: str
) -> None:
    """There is no other way to mark the end of a reply."""
    stage = start(f"worker.transform(lambda m: {reply})", "-E", r"\n")
    stage.write(b"aa\n")
    assert stage.finish() == (b"", 1)
    assert f"gave {count} messages, expected exactly one: eop is eom" in stage.stderr


def test_endless_reply_is_noticed_when_eop_is_eom(start: Start) -> None:
    """It would never be complete."""
    stage = start(
        "import itertools\nworker.transform(lambda m: itertools.repeat(m))",
        *("-E", r"\n"),
    )
    stage.write(b"a\n")
    assert stage.finish() == (b"", 1)
    assert "gave several messages" in stage.stderr


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (
            "transform(f, on_error='ignore')",
            "on_error is 'ignore', expected 'refuse', 'skip' or 'exit'",
        ),
        ("load_batch(f, driver='me')", "driver is 'me', expected 'supervisor' or"),
        ("transform_batch(f, driver='worker', size=0)", "size must be at least one"),
        ("extract_cycle(f, offsets='me')", "offsets is 'me', expected 'worker' or"),
        ("transform(f(b''))", "transform takes a function, got list: pass the"),
    ],
)
def test_wrong_arguments_are_reported(start: Start, call: str, complaint: str) -> None:
    """They are the author's mistake, so a traceback shows where it is."""
    stage = start(f"def f(m):\n    return []\nworker.{call}")
    assert stage.read_to_end() == (b"", 1)
    assert "Traceback" in stage.stderr
    assert complaint in stage.stderr
