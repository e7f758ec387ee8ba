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
from tests.kcl.client import CURRENT, OLD, downloaded
from tests.kcl.conftest import Sample

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

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


ERRORS = [
    "ThrottlingException",
    "ShutdownException",
    "InvalidStateException",
    "KinesisClientLibDependencyException",
    "IllegalArgumentException",
    "NullPointerException",
]


@pytest.mark.parametrize("error", ERRORS)
def test_end_of_a_shard_that_is_not_stored(current: Sample, error: str) -> None:
    """The client answers all the same, and tries no more: a daemon hangs then."""
    with current() as driver:
        driver.errors = [error]
        driver.session.send(Farewell(why=FarewellReason.ENDED), 0.0)
        driver.until(lambda: False)
        assert driver.failed is not None
        assert isinstance(driver.failed.error, RemoteProtocolError)
        assert f"again after {error}" in str(driver.failed.error)


QUICK = """\
import sys
sys.path.insert(0, {folder!r})
from amazon_kclpy import kcl
from sample_kclpy_app import RecordProcessor

processor = RecordProcessor()
processor._SLEEP_SECONDS = 0.01
{more}
kcl.KCLProcess(processor).run()
"""


def quick(client: str, more: str = "") -> str:
    """Return the sample of a client, with a short pause between its tries."""
    return QUICK.format(folder=str(downloaded(client) / "samples"), more=more)


@pytest.mark.parametrize(
    ("error", "asked"),
    [(error, 1 if error == "ShutdownException" else 5) for error in ERRORS[:-1]],
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
    """It tries again what is throttled, and nothing else."""
    with script(quick(OLD), Version.V1, OLD) as driver:
        driver.send(Opened(1, RECORDS))
        driver.errors = [error]
        driver.session.send(Farewell(why=FarewellReason.ENDED), 0.0)
        driver.until(lambda: driver.session.state is State.ENDED)
        assert driver.asked == [("SHARD_END", 0)] * asked
        assert driver.ended == ended
        assert (driver.failed is None) == bool(ended)


def test_end_of_stdin_in_place_of_an_answer(script: Sample) -> None:
    """The client answers its action all the same, behind the end, and exits well."""
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
        assert child.wait(10) == 0


@pytest.mark.parametrize("error", [None, "ThrottlingException"])
def test_shutdown_requested(current: Sample, error: str | None) -> None:
    """It checkpoints once; then the lease is lost to it."""
    with current(position=["5", 0]) as driver:
        driver.session.send(Opened(1, [b"x"]), 0.0)
        driver.errors = [None, error]
        assert driver.part(Farewell(why=FarewellReason.DRAIN)) == 0
        assert driver.session.uncommitted == 0


def test_first_batch_is_empty(current: Sample) -> None:
    """The sample asks for the text None: that is refused, and no end of its life."""
    with current() as driver:
        driver.session.send(Opened(1, []), 0.0)
        driver.until(lambda: b"IllegalArgumentException" in driver.sent)
        assert driver.asked == []
        assert driver.failed is None
        assert driver.child.poll() is None


def test_life_of_the_old_client(old: Sample) -> None:
    """It logs in plain text what it does: noise."""
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
    """What it had when it exited is open, though an action was answered behind it."""
    lost = "lease_lost" if module == 3 else "shutdown"
    source = BUFFERING.format(v=module, lost=lost)
    with script(source, version, client) as driver:
        assert driver.noise == [b"initialized shardId-000000000000"]
        driver.send(Opened(1, [b"x"] * 5))
        assert (driver.ended, driver.session.uncommitted) == (4, 1)
        driver.session.send(Opened(6, [b"x"] * 5), 0.0)
        driver.until(lambda: False)
        assert driver.child.wait(10) == 3
    assert "expected its status for processRecords" in driver.closed
    assert (driver.ended, driver.session.uncommitted) == (8, 2)


@pytest.mark.parametrize(
    ("client", "version", "module"), [(CURRENT, Version.V2, 3), (OLD, Version.V1, 2)]
)
def test_checkpoint_that_fails_once(
    script: Sample, client: str, version: Version, module: int
) -> None:
    """Its name reaches the processor, which asks again."""
    lost = "lease_lost" if module == 3 else "shutdown"
    with script(BUFFERING.format(v=module, lost=lost), version, client) as driver:
        driver.send(Opened(1, [b"x"]))
        driver.errors = ["ThrottlingException"]
        assert driver.part(Farewell(why=FarewellReason.DRAIN)) == 0
        assert b"refused ThrottlingException" in driver.noise
        assert driver.asked == [("1", 0), ("1", 0)]


def test_shard_end_that_a_processor_ignores(script: Sample) -> None:
    """It is found at once, by name."""
    with script(BUFFERING.format(v=3, lost="lease_lost"), client=CURRENT) as driver:
        driver.session.send(Farewell(why=FarewellReason.ENDED), 0.0)
        driver.until(lambda: False)
        assert driver.failed is not None
        assert "without a checkpoint" in str(driver.failed.error)


def test_lines_of_14_megabytes(script: Sample) -> None:
    """10,000 records of 1 KB an action, through a processor that prints."""
    with script(BUFFERING.format(v=3, lost="lease_lost"), client=CURRENT) as driver:
        driver.session.send(Opened(1, [b"x" * 1024] * 10_000), 0.0)
        driver.until(lambda: False)
        assert driver.child.wait(10) == 3
        assert driver.asked == [("4", 0), ("8", 0)]


@pytest.mark.parametrize("version", Version)
def test_processor_of_the_sdk(script: Sample, version: Version) -> None:
    """Under each version; what it prints does not reach us."""
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
    """It exits with status 1, and the batch has no status."""
    source = """\
from etlstage.worker import kcl

kcl.run(kcl.Processor())
"""
    with script(source) as driver:
        driver.session.send(Opened(1, [b"a"]), 0.0)
        driver.until(lambda: False)
        assert driver.child.wait(10) == 1
        assert driver.session.uncommitted == 1
