"""A recorded epoch, and everything it relies on, outlives a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from etlstage.pipeline import Pipeline
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.testing import Fault, FaultKind, FaultPlan, hostile_worker
from tests.crash.power import Disk

pytestmark = pytest.mark.process

ENDS = {
    "csv": "files: {path: out, format: csv, schema: n INT, epoch: {messages: 20}}",
    "parquet": "files: {path: out, format: parquet, partition_by: [k],"
    " schema: 'n INT, k INT', missing: 'null', epoch: {messages: 20}}",
    "journals": "journal: {path: out, partitions: 2}",
}
REFUSES = hostile_worker(FaultPlan.of(Fault(FaultKind.REFUSE, contains=b"7}")))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Return a record of what becomes durable during the test."""
    made = Disk()
    monkeypatch.setattr(os, "fsync", made.fsync)
    return made


def written(folder: Path, load: str, delivery: str, durable: str = "") -> Path:
    """Write a pipeline, some of whose messages are dead-lettered."""
    (folder / "in").mkdir()
    for part in range(3):
        lines = "".join(f'{{"n":{n}}}\n' for n in range(part * 20, part * 20 + 20))
        (folder / "in" / f"{part}.ndjson").write_text(lines)
    path = folder / "p.yaml"
    path.write_text(f"""\
name: p
state: state
delivery: {delivery}
extract:
  files: {{path: "in/*.ndjson", format: ndjson}}
transform:
  - name: clean
    worker: {[*REFUSES]}
    on_error: {{budget: {{share: 100%}}}}
    {durable}
load:
  {load}
""")
    return path


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
@pytest.mark.parametrize("end", ENDS)
async def test_epoch_is_on_the_disk_when_it_is_recorded(
    end: str, delivery: str, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are its messages and dead letters, the record, and the names of folders."""
    monkeypatch.chdir(tmp_path)
    lost, keep = list[list[str]](), Delivery.keep

    def kept(self: Delivery, record: CommitRecord) -> None:
        keep(self, record)
        lost.append([*disk.lost(tmp_path / "state", tmp_path / "out")])

    monkeypatch.setattr(Delivery, "keep", kept)
    report = await Pipeline.from_yaml(written(tmp_path, ENDS[end], delivery)).run()
    assert (report.status, report.dead_letters.messages) == ("done", 6)
    assert lost
    assert [one for one in lost if one] == []


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
async def test_durable_edge_is_on_the_disk(
    delivery: str, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes its journals, their folders, and the records of both halves."""
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, ENDS["csv"], delivery, "durable: true")
    again = path.read_text().replace(
        "load:\n", f"  - name: next\n    worker: {[*REFUSES]}\nload:\n"
    )
    path.write_text(again)
    report = await Pipeline.from_yaml(path).run()
    assert (report.status, report.dead_letters.messages) == ("done", 6)
    assert [*disk.lost(tmp_path / "state", tmp_path / "out")] == []
