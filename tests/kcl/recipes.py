"""
Scenarios of the published clients as load workers of a pipeline.

Each recipe is a client's sample with faults of its checkpoints, which the sample
retries, gives up or skips in its own way. The eight records are one action; they count
as loaded once a checkpoint covers them, and not before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from etlstage.messages import StageKind
from etlstage.pipeline import Report
from etlstage.protocol.events import FarewellReason
from etlstage.protocol.kcl.lines import Version
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.stage import BatchPolicy, RestartPolicy, Stage, WorkerProgram
from etlstage.testing import Fault, FaultKind, FaultPlan, FaultyLaunch
from etlstage.testing.fault import Moment
from etlstage.transport import launch_worker
from tests.kcl.client import CURRENT, OLD, downloaded

__all__ = ("COUNT", "ERRORS", "RECIPES", "SHARD", "Recipe", "quick")

COUNT: Final = 8
"""Records."""
ERRORS: Final = (
    "ThrottlingException",
    "ShutdownException",
    "InvalidStateException",
    "KinesisClientLibDependencyException",
    "IllegalArgumentException",
)
SHARD: Final = "shardId-000000000000"
WORKER: Final = f"{SHARD}-1"
QUICK: Final = """\
import sys
sys.path.insert(0, {folder!r})
from amazon_kclpy import kcl
from sample_kclpy_app import RecordProcessor

processor = RecordProcessor()
processor._SLEEP_SECONDS = 0.01
kcl.KCLProcess(processor).run()
"""


def quick(client: str) -> str:
    """Return the sample of a client, with a pause of 0.01 s between tries, not 5 s."""
    return QUICK.format(folder=str(downloaded(client) / "samples"))


class Recipe(NamedTuple):
    """
    A scenario, and its results.

    Attributes:
        name: What happens.
        faults: Faults that are injected into each process.
        happens: How many faults happen.
        client: Version of the client.
        prints: Beginnings of the lines that it writes to stdout beside the protocol.
        lives: Number of processes that its shard has.
        error: Words of the error with which the run fails; empty: it loads all.
        why: What happens to the shard after the last record.

    """

    name: str
    faults: tuple[Fault, ...] = ()
    happens: int = 0
    client: str = CURRENT
    prints: tuple[str, ...] = ()
    lives: int = 1
    error: str = ""
    why: FarewellReason = FarewellReason.ENDED

    def stage(self, folder: Path) -> Stage:
        """Return the load stage; its program is put into a folder."""
        file = folder / "processor.py"
        file.write_text(quick(self.client))
        return Stage(
            name="load",
            kind=StageKind.LOAD,
            worker=WorkerProgram(
                command=(sys.executable, os.fspath(file)),
                env={"PYTHONPATH": os.fspath(downloaded(self.client))},
            ),
            dialect=KclDialect(version=VERSIONS[self.client]),
            batch=BatchPolicy(size=COUNT),
            restart=RestartPolicy(delay=0.01, max=2),
        )

    def launch(self) -> FaultyLaunch:
        """Return a launcher that injects the faults."""
        return FaultyLaunch(launch_worker, {"load": FaultPlan.of(*self.faults)})

    def check(
        self,
        report: Report,
        launch: FaultyLaunch,
        log: Sequence[Mapping[str, Any]],
    ) -> None:
        """Assert that a run has the results of this recipe."""

        def events(text: str) -> list[Mapping[str, Any]]:
            return [e for e in log if (e["event"], e.get("worker")) == (text, WORKER)]

        lines = [event["line"] for event in events("unexpected output ignored")]
        happened = [each for each in launch.happened if each.worker == WORKER]
        assert [line.partition(" in ")[0] for line in lines] == [*self.prints]
        assert len(happened) == self.happens
        assert len(events("worker started")) == self.lives
        if self.error:
            assert (report.status, report.ledger[-1].done) == ("failed", 0)
            assert self.error in str(report.error)
        else:
            assert (report.error, report.ledger[-1].done) == (None, COUNT)


def fails(error: str, number: int = 1, times: int = 1) -> tuple[Fault, ...]:
    """Return a fault: ``times`` checkpoints of a process fail, from ``number`` on."""
    kind, data = FaultKind.FAIL_CHECKPOINT, error.encode()
    return (Fault(kind, number=number, times=times, data=data),)


def drained(*recipes: Recipe) -> list[Recipe]:
    """Return recipes for a shard that continues after the last record."""
    return [recipe._replace(why=FarewellReason.DRAIN) for recipe in recipes]


VERSIONS: Final = {CURRENT: Version.V2, OLD: Version.V1}
THROTTLED: Final = "Was throttled while checkpointing, will attempt again"
SKIPPED: Final = "Encountered shutdown exception, skipping checkpoint"
TERMINATED: Final = "Was told to terminate, will attempt to checkpoint."
REVOKED: Final = "Shutting down due to failover. Will not checkpoint."
NEXT_RUN: Final = f"had not committed {COUNT} messages that it had answered"
RECIPES: Final = (
    Recipe("first batch, and end"),
    Recipe("throttled", fails(ERRORS[0], 1, 5), 5, prints=(THROTTLED,) * 4),
    Recipe("lease is gone", fails(ERRORS[1]), 1, prints=(SKIPPED,)),
    *(Recipe(f"five times {error}", fails(error, 1, 5), 5) for error in ERRORS[2:]),
    *(
        Recipe(f"{error} at the end", fails(error, 2), 1, lives=2)
        for error in (*ERRORS, "NullPointerException")
    ),
    Recipe(
        "nothing is ever stored",
        fails(ERRORS[0], 1, 100),
        18,
        prints=(THROTTLED,) * 12,
        lives=3,
        error="answered shardEnded without a checkpoint",
    ),
    Recipe(
        "no answer to its last checkpoint",
        (Fault(FaultKind.END_INPUT, at=Moment.CHECKPOINT, number=2),),
        1,
        lives=2,
    ),
    Recipe("end of the old client", client=OLD, prints=(TERMINATED,)),
    Recipe(
        "old client, throttled at the end",
        fails(ERRORS[0]),
        1,
        OLD,
        (TERMINATED, THROTTLED),
    ),
    Recipe(
        "old client, lease is gone at the end",
        fails(ERRORS[1]),
        3,
        OLD,
        (TERMINATED, SKIPPED) * 3,
        lives=3,
        error="answered shutdown without a checkpoint",
    ),
    *drained(
        Recipe("drained", fails(ERRORS[0], 1, 5), 5, prints=(THROTTLED,) * 4),
        Recipe(
            "drained, and nothing stored",
            fails(ERRORS[0], 1, 6),
            6,
            prints=(THROTTLED,) * 4,
            error=NEXT_RUN,
        ),
        Recipe("old client, drained", (), 0, OLD, (REVOKED,), error=NEXT_RUN),
    ),
)
