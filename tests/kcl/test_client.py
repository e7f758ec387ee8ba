"""
The published Python clients with their samples, unmodified.

A client pauses 5 s between two tries of a checkpoint; where that matters the pause is a
processor's own.
"""

from __future__ import annotations

import pytest

from etlstage.errors import RemoteProtocolError
from etlstage.messages import AnnotatedRun
from etlstage.protocol.events import Farewell, FarewellReason, Opened
from etlstage.protocol.kcl.lines import Version
from etlstage.protocol.kcl.session import State
from tests.kcl.client import CURRENT, OLD
from tests.kcl.conftest import Sample
from tests.kcl.recipes import ERRORS, quick
from tests.patience import HANG

pytestmark = pytest.mark.process

SECOND = "49590338271490256608559692538361571095921575989136588898"
RECORDS = AnnotatedRun(
    [b"meow", b"\xff" * 1000],
    sequence=["49590338271490256608559692538361571095921575989136588898"] * 2,
    sub=[0, 1],
    partition=["cat", "k\u00e4tzchen"],
    arrival=[1476889707000, 1476889707001],
    behind=[0, 0],
)
BUFFERING = """\
from amazon_kclpy import kcl
from amazon_kclpy.v{v} import processor

class Buffering(processor.RecordProcessorBase):
    seen = 0

    def initialize(self, given):
        print("initialized", given.shard_id)

    def process_records(self, given):
        for record in given.records:
            self.seen += 1
            if self.seen % 4 == 0:
                given.checkpointer.checkpoint(record.sequence_number)
            if self.seen == 10:
                raise SystemExit(3)

    def {lost}(self, given):
        pass

    def shard_ended(self, given):
        pass

    def shutdown_requested(self, given):
        try:
            given.checkpointer.checkpoint()
        except kcl.CheckpointError as error:
            print("refused", error.value)
            given.checkpointer.checkpoint()

kcl.KCLProcess(Buffering()).run()
"""


def test_life_of_the_current_client(current: Sample) -> None:
    """It checkpoints its first batch at once, by number and sub-sequence number."""
    with current() as driver:
        driver.send(Opened(1, RECORDS))
        assert driver.asked == [(SECOND, 1)]
        assert driver.ended == 2
        driver.send(Opened(3, [b"next"]))
        assert driver.session.uncommitted == 1
        assert driver.part(Farewell(why=FarewellReason.LOST)) == 0
    assert driver.session.uncommitted == 1


def test_end_of_a_shard(current: Sample) -> None:
    """It checkpoints without a number."""
    with current() as driver:
        driver.send(Opened(1, RECORDS))
        assert driver.part(Farewell(why=FarewellReason.ENDED)) == 0
        assert driver.asked[-1] == ("SHARD_END", 0)


@pytest.mark.parametrize("error", [*ERRORS, "NullPointerException"])
def test_end_of_a_shard_that_is_not_stored(current: Sample, error: str) -> None:
    """The client answers without another try; a real daemon would then hang."""
    with current() as driver:
        driver.errors = [error]
        driver.session.send(Farewell(why=FarewellReason.ENDED), 0.0)
        driver.until(lambda: False)
        assert driver.failed is not None
        assert isinstance(driver.failed.error, RemoteProtocolError)
        assert f"again after {error}" in str(driver.failed.error)


@pytest.mark.parametrize(
    ("error", "asked"),
    [(error, 1 if error == "ShutdownException" else 5) for error in ERRORS],
)
def test_checkpoints_of_the_sample_that_fail(
    script: Sample, error: str, asked: int
) -> None:
    """It prints what it does, tries five times in all, and answers its action."""
    with script(quick(CURRENT), client=CURRENT) as driver:
        driver.errors = [error] * asked
        driver.send(Opened(1, RECORDS))
        assert driver.asked == [(SECOND, 1)] * asked
        said = b"\n".join(driver.noise)
        assert {
            "ThrottlingException": b"Was throttled while checkpointing, will attempt",
            "ShutdownException": b"Encountered shutdown exception, skipping checkpoint",
        }.get(error, b"") in said
        assert driver.part(Farewell(why=FarewellReason.LOST)) == 0
    assert (driver.ended, driver.session.uncommitted) == (0, 2)


@pytest.mark.parametrize(
    ("error", "asked", "ended"),
    [("ThrottlingException", 2, 2), ("ShutdownException", 1, 0)],
)
def test_last_checkpoint_of_the_old_sample_that_fails(
    script: Sample, error: str, asked: int, ended: int
) -> None:
    """It retries a throttled checkpoint, and no other."""
    with script(quick(OLD), Version.V1, OLD) as driver:
        driver.send(Opened(1, RECORDS))
        driver.errors = [error]
        driver.session.send(Farewell(why=FarewellReason.ENDED), 0.0)
        driver.until(lambda: driver.session.state is State.ENDED)
        assert driver.asked == [("SHARD_END", 0)] * asked
        assert driver.ended == ended
        assert (driver.failed is None) == bool(ended)


def test_end_of_stdin_in_place_of_an_answer(script: Sample) -> None:
    """The client still answers its action after the end, and exits with status 0."""
    with script(quick(CURRENT), client=CURRENT) as driver:
        driver.session.send(Farewell(why=FarewellReason.ENDED), 0.0)
        child, wire = driver.child, driver.session.data_to_send()
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"".join(wire))
        child.stdin.close()
        said = child.stdout.read()
        assert b'"responseFor": "shardEnded"' in said
        assert b'"action": "checkpoint"' in said
        assert child.wait(HANG) == 0


@pytest.mark.parametrize("error", [None, "ThrottlingException"])
def test_shutdown_requested(current: Sample, error: str | None) -> None:
    """It checkpoints once, and then loses the lease."""
    with current(position=["5", 0]) as driver:
        driver.session.send(Opened(1, [b"x"]), 0.0)
        driver.errors = [None, error]
        assert driver.part(Farewell(why=FarewellReason.DRAIN)) == 0
        assert driver.session.uncommitted == 0


def test_first_batch_is_empty(current: Sample) -> None:
    """The sample asks to checkpoint the text None: that is refused, but no failure."""
    with current() as driver:
        driver.session.send(Opened(1, []), 0.0)
        driver.until(lambda: b"IllegalArgumentException" in driver.sent)
        assert driver.asked == []
        assert driver.failed is None
        assert driver.child.poll() is None


def test_life_of_the_old_client(old: Sample) -> None:
    """Its log lines are plain text, and count as noise."""
    with old() as driver:
        driver.send(Opened(1, RECORDS))
        assert driver.session.uncommitted == 2
        assert driver.part(Farewell(why=FarewellReason.DRAIN)) == 0
    assert driver.noise == [b"Shutting down due to failover. Will not checkpoint."]


def test_end_of_a_shard_with_the_old_client(old: Sample) -> None:
    """It is asked to terminate."""
    with old() as driver:
        driver.send(Opened(1, RECORDS))
        assert driver.part(Farewell(why=FarewellReason.ENDED)) == 0
        assert driver.asked == [("SHARD_END", 0)]
        assert driver.ended == 2


@pytest.mark.parametrize(
    ("client", "version", "module"),
    [(CURRENT, Version.V2, 3), (CURRENT, Version.V2, 2), (OLD, Version.V1, 2)],
)
def test_processor_that_buffers_loses_nothing(
    script: Sample, client: str, version: Version, module: int
) -> None:
    """Records in its buffer at its exit are open, even of an action it has answered."""
    lost = "lease_lost" if module == 3 else "shutdown"
    source = BUFFERING.format(v=module, lost=lost)
    with script(source, version, client) as driver:
        assert driver.noise == [b"initialized shardId-000000000000"]
        driver.send(Opened(1, [b"x"] * 5))
        assert (driver.ended, driver.session.uncommitted) == (4, 1)
        driver.session.send(Opened(6, [b"x"] * 5), 0.0)
        driver.until(lambda: False)
        assert driver.child.wait(HANG) == 3
    assert "expected its status for processRecords" in driver.closed
    assert (driver.ended, driver.session.uncommitted) == (8, 2)


@pytest.mark.parametrize(
    ("client", "version", "module"), [(CURRENT, Version.V2, 3), (OLD, Version.V1, 2)]
)
def test_checkpoint_that_fails_once(
    script: Sample, client: str, version: Version, module: int
) -> None:
    """The error's name reaches the processor, which asks again."""
    lost = "lease_lost" if module == 3 else "shutdown"
    with script(BUFFERING.format(v=module, lost=lost), version, client) as driver:
        driver.send(Opened(1, [b"x"]))
        driver.errors = ["ThrottlingException"]
        assert driver.part(Farewell(why=FarewellReason.DRAIN)) == 0
        assert b"refused ThrottlingException" in driver.noise
        assert driver.asked == [("1", 0), ("1", 0)]


def test_shard_end_that_a_processor_ignores(script: Sample) -> None:
    """The error names it at once."""
    with script(BUFFERING.format(v=3, lost="lease_lost"), client=CURRENT) as driver:
        driver.session.send(Farewell(why=FarewellReason.ENDED), 0.0)
        driver.until(lambda: False)
        assert driver.failed is not None
        assert "without a checkpoint" in str(driver.failed.error)


def test_lines_of_14_megabytes(script: Sample) -> None:
    """A processor that prints gets 10,000 records of 1 KB in one action."""
    with script(BUFFERING.format(v=3, lost="lease_lost"), client=CURRENT) as driver:
        driver.session.send(Opened(1, [b"x" * 1024] * 10_000), 0.0)
        driver.until(lambda: False)
        assert driver.child.wait(HANG) == 3
        assert driver.asked == [("4", 0), ("8", 0)]


@pytest.mark.parametrize("version", Version)
def test_processor_of_the_sdk(script: Sample, version: Version) -> None:
    """It works with each version; what it prints does not reach us."""
    source = """\
from etlstage.worker import kcl

class Printing(kcl.Processor):
    def process_records(self, records, checkpointer):
        print("records", len(records))
        checkpointer.checkpoint(records[0])

kcl.run(Printing())
"""
    with script(source, version) as driver:
        driver.send(Opened(1, [b"a", b"b"]))
        assert driver.ended == 1
        assert driver.part(Farewell(why=FarewellReason.ENDED)) == 0
        assert driver.ended == 2
    assert driver.noise == []


def test_processor_of_the_sdk_that_raises(script: Sample) -> None:
    """It exits with status 1, and the batch gets no status."""
    source = """\
from etlstage.worker import kcl

kcl.run(kcl.Processor())
"""
    with script(source) as driver:
        driver.session.send(Opened(1, [b"a"]), 0.0)
        driver.until(lambda: False)
        assert driver.child.wait(HANG) == 1
        assert driver.session.uncommitted == 1
