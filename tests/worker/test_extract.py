from __future__ import annotations

from tests.worker.conftest import Fence, Start

RANGE = """
    def f(start, end):
        for n in range(start, end):
            yield b"%d" % n
    worker.extract_cycle(f, offsets="supervisor")
"""


def test_plain_passes_on_everything_and_ends(start: Start) -> None:
    """Mode plain has no EOP: the end of output is the end."""
    stage = start("worker.extract(lambda: [b'a', b'', b'b'])")
    assert stage.read_to_end() == (b"a\n\nb\n", 0)


def test_plain_ends_its_output_when_all_is_passed_on(start: Start) -> None:
    """The supervisor does not wait for what the program does afterwards."""
    stage = start("""
        import sys
        worker.extract(lambda: [b"a"])
        sys.stderr.write("bye")
    """)
    assert stage.read_to_end() == (b"a\n", 0)
    assert stage.stderr == "bye"


def test_plain_may_find_nothing(start: Start) -> None:
    """No output, and no failure."""
    assert start("worker.extract(lambda: [])").read_to_end() == (b"", 0)


def test_cycle_with_offsets_of_the_worker(start: Start) -> None:
    """An empty message asks for the next round."""
    stage = start("""
        from itertools import count
        rounds = count(1)
        def f():
            n = next(rounds)
            return [b"%d" % n] * n
        worker.extract_cycle(f)
    """)
    stage.ask(b"\n", b"1\n\0")
    stage.ask(b"\n\n", b"2\n2\n\x003\n3\n3\n\0")
    assert stage.finish() == (b"", 0)


def test_cycle_with_offsets_of_the_supervisor(start: Start) -> None:
    """The request names the range."""
    stage = start(RANGE)
    stage.ask(b'{"start": 0, "end": 3}\n', b"0\n1\n2\n\0")
    stage.ask(b'{"end": 3, "start": 3, "more": []}\n', b"\0")
    assert stage.finish() == (b"", 0)


def test_cycle_with_requests_of_another_form(start: Start) -> None:
    """The worker decides how to read them."""
    stage = start("""
        worker.extract_cycle(
            lambda *words: words, offsets="supervisor", parse=lambda m: m.split(b"..")
        )
    """)
    stage.ask(b"1..5\n", b"1\n5\n\0")
    assert stage.finish() == (b"", 0)


def test_cycle_reports_its_offsets(start: Start) -> None:
    """Offsets are asked for between ranges, in one form, and found anew each time."""
    stage = start("""
        from itertools import count
        worker.extract_cycle(
            lambda *words: words, offsets="supervisor", parse=lambda m: m.split(b".."),
            latest=count(7).__next__, initial=lambda: -1,
        )
    """)
    stage.ask(b'{"offsets": "initial"}\n', b"-1\n\0")
    stage.ask(b'{"offsets": "latest"}\n', b"7\n\0")
    stage.ask(b"1..5\n", b"1\n5\n\0")
    stage.ask(b'{"offsets": "latest"}\n', b"8\n\0")
    assert stage.finish() == (b"", 0)


def test_cycle_that_does_not_know_its_offsets_reports_it(start: Start) -> None:
    """An unknown offset is answered by a reply without a number."""
    stage = start(RANGE)
    stage.ask(b'{"offsets": "latest"}\n', b"\0")
    stage.ask(b'{"start": 4, "end": 5}\n', b"4\n\0")
    assert stage.finish() == (b"", 0)
    stage = start("worker.extract_cycle(lambda: [], latest=lambda: 1)")
    assert stage.finish() == (b"", 1)
    assert "latest and initial need offsets='supervisor'" in stage.stderr


def test_cycle_with_one_message_per_request(start: Start) -> None:
    """With ``eop == eom`` each request has exactly one message."""
    stage = start(RANGE, "--end-of-process", r"\n")
    stage.ask(b'{"start": 4, "end": 5}\n', b"4\n")
    stage.write(b'{"start": 4, "end": 6}\n')
    assert stage.finish() == (b"", 1)
    assert "gave several messages, expected exactly one: eop is eom" in stage.stderr


def test_request_for_the_other_kind_of_offsets_is_refused(start: Start) -> None:
    """Ignoring the range would lose it."""
    stage = start("worker.extract_cycle(lambda: [])")
    stage.write(b'{"start": 0, "end": 1}\n')
    assert stage.finish() == (b"", 1)
    assert (
        "ValueError: request is 22 bytes long, expected it to be empty: the supervisor"
        " keeps the offsets; use offsets='supervisor'\n"
        "in extract function '<lambda>', after 0 messages" in stage.stderr
    )


def test_empty_request_is_refused_where_a_range_must_come(start: Start) -> None:
    """It has neither start nor end."""
    stage = start(RANGE)
    stage.write(b"\n")
    assert stage.finish() == (b"", 1)
    assert "the supervisor keeps no offsets; use offsets='worker'" in stage.stderr


def test_request_that_is_no_range_is_refused(start: Start) -> None:
    """Not JSON, not an object, not complete."""
    for request in b"1..5", b"[1, 5]", b'{"start": 1}':
        stage = start(RANGE)
        stage.write(request + b"\n")
        assert stage.finish() == (b"", 1)
        assert "can't read the request, expected {" in stage.stderr
        assert "use parse= for another form" in stage.stderr


def test_failure_keeps_what_was_passed_on_but_is_no_end(start: Start) -> None:
    """Without EOP the supervisor knows that the range is not complete."""
    stage = start("""
        def f():
            yield b"a"
            yield b"b"
            raise OSError("disk on fire")
        worker.extract_cycle(f)
    """)
    stage.write(b"\n")
    assert stage.finish() == (b"a\nb\n", 1)
    assert stage.stderr.endswith(
        "OSError: disk on fire\nin extract function 'f', after 2 messages\n"
    )


def test_failure_of_plain(start: Start) -> None:
    """What came before it is passed on."""
    stage = start("""
        def f():
            yield b"a"
            raise OSError("disk on fire")
        worker.extract(f)
    """)
    assert stage.read_to_end() == (b"a\n", 1)
    assert "OSError: disk on fire" in stage.stderr


def test_message_with_a_marker(start: Start) -> None:
    """Valid messages before it are passed on, and nothing after it."""
    stage = start("worker.extract(lambda: [b'a', b'b\\nc', b'd'])")
    assert stage.read_to_end() == (b"a\n", 1)
    assert (
        " at offset 1; choose other markers, or encode the message\n"
        "in extract function '<lambda>', after 1 message" in stage.stderr
    )
    assert "InvalidMessage: message contains marker eom " in stage.stderr
    assert stage.stderr.count("Traceback") == 1


def test_message_with_a_marker_in_front_of_many(start: Start) -> None:
    """The marker is noticed once enough has been collected, and reported once."""
    stage = start("worker.extract(lambda: [b'a', b'b\\nc', *[b'd' * 999] * 999])")
    assert stage.read_to_end() == (b"a\n", 1)
    assert "in extract function '<lambda>', after 1 message\n" in stage.stderr
    assert stage.stderr.count("Traceback") == 1


def test_message_with_a_marker_in_a_cycle(start: Start) -> None:
    """The marker is noticed when the round ends, and the round gets no EOP."""
    stage = start("worker.extract_cycle(lambda: [b'a', b'\\0'])")
    stage.write(b"\n")
    assert stage.finish() == (b"a\n", 1)
    assert "marker eop" in stage.stderr


def test_messages_leave_while_more_is_searched(start: Start, fence: Fence) -> None:
    """The first messages of a reply that takes hours arrive at once."""
    stage = start(
        """
        import sys
        def f():
            yield b"first"
            open(sys.argv[1]).read()
            yield b"second"
        worker.extract_cycle(f)
        """,
        fence,
    )
    stage.ask(b"\n", b"first\n")
    fence.open()
    stage.expect(b"second\n\0")
    assert stage.finish() == (b"", 0)


def test_plain_messages_leave_while_more_is_searched(
    start: Start, fence: Fence
) -> None:
    """The same without requests."""
    stage = start(
        """
        import sys
        def f():
            yield b"first"
            open(sys.argv[1]).read()
            yield b"second"
        worker.extract(f)
        """,
        fence,
    )
    stage.expect(b"first\n")
    fence.open()
    assert stage.read_to_end() == (b"second\n", 0)
