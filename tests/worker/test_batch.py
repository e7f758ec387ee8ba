from __future__ import annotations

import pytest

from tests.worker.conftest import Start

JOIN = """
    def f(messages):
        assert type(messages) is list
        return [b"+".join(messages), b"%d" % len(messages)]
"""
SUPERVISOR = f"{JOIN}    worker.transform_batch(f)\n"
WORKER = f"{JOIN}    worker.transform_batch(f, driver='worker', size=3)\n"


def test_supervisor_closes_the_batch(start: Start) -> None:
    """Nothing is answered before EOB."""
    stage = start(SUPERVISOR)
    stage.write(b"a\n")
    stage.write(b"b\n")
    stage.ask(b"\x17", b"a+b\n2\n\0")
    stage.ask(b"c\n\x17", b"c\n1\n\0")
    assert stage.finish() == (b"", 0)


def test_batches_written_ahead_are_answered_in_order(start: Start) -> None:
    """The k-th EOP answers the k-th batch; the open one waits."""
    stage = start(SUPERVISOR)
    stage.ask(b"a\n\x17b\nc\n\x17d\n", b"a\n1\n\0b+c\n2\n\0")
    stage.ask(b"\x17", b"d\n1\n\0")
    assert stage.finish() == (b"", 0)


def test_many_small_batches_in_one_write(start: Start) -> None:
    """Each batch gets its EOP, also if it is empty."""
    stage = start("worker.transform_batch(lambda messages: messages)")
    wire = b"".join(b"m%d\n" % n + b"\x17" * (n % 3) for n in range(6000))
    stage.write(wire)
    stage.expect(wire.replace(b"\x17", b"\0"))
    assert stage.finish() == (b"", 0)


def test_function_is_spared_an_empty_batch(start: Start) -> None:
    """An empty batch is answered by EOP without a call of the function."""
    stage = start(SUPERVISOR)
    stage.ask(b"\x17\x17", b"\0\0")
    stage.ask(b"a\n\x17", b"a\n1\n\0")
    assert stage.finish() == (b"", 0)


def test_empty_batch_needs_a_message_when_eop_is_eom(start: Start) -> None:
    """Only the function can make that message."""
    stage = start(
        "worker.transform_batch(lambda messages: [b'%d' % len(messages)])",
        *("-E", r"\n"),
    )
    stage.ask(b"\x17a\nb\n\x17", b"0\n2\n")
    assert stage.finish() == (b"", 0)


def test_end_of_input_closes_an_open_batch(start: Start) -> None:
    """A pipe in a shell writes no EOB at the end."""
    stage = start(SUPERVISOR)
    stage.write(b"a\nb\n")
    assert stage.finish() == (b"a+b\n2\n\0", 0)


def test_worker_asks_until_its_batch_is_full(start: Start) -> None:
    """There is no BNC after the message that fills the batch."""
    stage = start(WORKER)
    for _ in range(2):
        stage.ask(b"a\n", b"\x05")
        stage.ask(b"b\n", b"\x05")
        stage.ask(b"c\n", b"a+b+c\n3\n\0")
    assert stage.finish() == (b"", 0)


def test_eob_ends_a_batch_that_the_worker_fills(start: Start) -> None:
    """EOB means that the supervisor has no more messages for now."""
    stage = start(WORKER)
    stage.ask(b"a\n", b"\x05")
    stage.ask(b"\x17", b"a\n1\n\0")
    stage.ask(b"\x17", b"\0")
    stage.ask(b"b\n", b"\x05")
    assert stage.finish() == (b"b\n1\n\0", 0)


def test_eom_after_eob_is_no_message(start: Start) -> None:
    """If the stage writes one (issue 22)."""
    stage = start(SUPERVISOR, env={"ETLSTAGE_EOB_THEN_EOM": "true"})
    stage.ask(b"a\n\x17\n", b"a\n1\n\0")
    stage.ask(b"b\nc\n\x17", b"b+c\n2\n\0")
    stage.write(b"\n")
    assert stage.finish() == (b"", 0)


@pytest.mark.parametrize("echo", [b"", b"\x05"])
def test_eom_after_eob_is_answered_if_the_stage_wants_that(
    start: Start, echo: bytes
) -> None:
    """With a BNC after the EOP (issue 22)."""
    env = {"ETLSTAGE_EOB_THEN_EOM": "true", "ETLSTAGE_MODE": "worker-driven batch"}
    if echo:
        env["ETLSTAGE_BNC_AFTER_EOB"] = "true"
    stage = start(WORKER, env=env)
    for _ in range(2):
        stage.ask(b"a\n", b"\x05")
        stage.ask(b"\x17\n", b"a\n1\n\0" + echo)
    assert stage.finish() == (b"", 0)


def test_worker_does_not_end_full_batches_itself(start: Start) -> None:
    """It would wait for an EOB that the stage does not write (issue 22)."""
    stage = start(SUPERVISOR, env={"ETLSTAGE_EOB_AFTER_FULL": "false"})
    assert stage.read_to_end() == (b"", 2)
    assert "the stage has eob_after_full: false" in stage.stderr


def test_worker_does_not_ask_after_the_last_message(start: Start) -> None:
    """The stage would take its request for another message for that (issue 22)."""
    env = {"ETLSTAGE_BNC_AFTER_LAST": "true", "ETLSTAGE_MODE": "worker-driven batch"}
    stage = start(WORKER, env=env)
    assert stage.read_to_end() == (b"", 2)
    assert stage.stderr.endswith(
        "the stage has bnc_after_last: true, this worker writes no BNC after the last"
        " message of its batch: remove that key of its dialect\n"
    )


def test_batch_of_one_needs_no_bnc(start: Start) -> None:
    """The first message fills it."""
    stage = start("worker.transform_batch(lambda m: m, driver='worker', size=1)")
    stage.ask(b"a\n", b"a\n\0")
    assert stage.finish() == (b"", 0)


def test_load_batch(start: Start) -> None:
    """An open batch is loaded at the end of input."""
    stage = start("""
        import sys
        def f(messages):
            sys.stderr.write(f"loaded {b'+'.join(messages).decode()}.")
        if sys.argv[1:]:
            worker.load_batch(f, driver="worker", size=2)
        else:
            worker.load_batch(f)
    """)
    stage.ask(b"a\nb\n\x17", b"\0")
    stage.write(b"c\n")
    assert stage.finish() == (b"\0", 0)
    assert stage.stderr == "loaded a+b.loaded c."


def test_load_batch_that_the_worker_fills(start: Start) -> None:
    """It asks, and answers with EOP alone."""
    stage = start("worker.load_batch(lambda m: None, driver='worker', size=2)")
    stage.ask(b"a\n", b"\x05")
    stage.ask(b"b\n", b"\0")
    assert stage.finish() == (b"", 0)


def test_multi_byte_markers(start: Start) -> None:
    """Markers may be whole words, and may arrive in pieces."""
    words = ("--end-of-batch", "EOB", "--batch-not-complete=BNC", "-e", "|", "-E", "#")
    stage = start(WORKER, *words)
    stage.write(b"a")
    stage.ask(b"|", b"BNC")
    stage.write(b"EO")
    stage.ask(b"B", b"a|1|#")
    assert stage.finish() == (b"", 0)
