"""Workers as ends: one that extracts, and some that load."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from socket import gethostname
from typing import TYPE_CHECKING, Any, ClassVar, Final
from zlib import crc32

from etlstage.config.end import End, SinkKeys, Site, SourceKeys, one_load, unrecorded
from etlstage.config.ends.row import EpochKeys
from etlstage.config.stages import command_of, stage_of
from etlstage.pipeline.delivery.delivery import Bounds
from etlstage.pipeline.epoch_sink import EpochSink
from etlstage.pipeline.interfaces import Sink
from etlstage.pipeline.worker_sink import CommittingSink, WorkerSink
from etlstage.pipeline.worker_source import WorkerSource
from etlstage.protocol.base import Shape
from etlstage.protocol.events import Assignment, FarewellReason
from etlstage.settings.definition import Place, broken
from etlstage.settings.problem import Problem
from etlstage.settings.units import FILES
from etlstage.shard.cut import Cut
from etlstage.shard.keeper import LeaseKeeper
from etlstage.shard.leased import LeasedSink
from etlstage.shard.sink import CHECKPOINTS_FILE, CheckpointFile, ShardedSink
from etlstage.shard.table import (
    LEASES_FILE,
    LeaseTable,
    MemoryLeases,
    is_url,
    open_leases,
)
from etlstage.stage import Stage
from etlstage.stage.policy import Timeouts

if TYPE_CHECKING:
    from etlstage.config.model import ExtractKeys, LoadKeys, PipelineKeys, ShardKeys
    from etlstage.spark.engine.stage_job import Origin
    from etlstage.spark.sink import SparkSink

__all__ = ("WORKER", "WorkerSinkKeys", "WorkerSourceKeys")

_HAND_OVER: Final = 30.0  # seconds that a worker has to release its shard
_RETRIED: Final = 10**15
"""Retries are numbered from here: above any input, yet exact as a double."""
_OF_A_RETRY: Final = 10**9  # numbers for 10,000 letters, each of many messages
_ALL: Final = ("local", "spark", "streaming")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSourceKeys(SourceKeys):
    """A worker that extracts; its keys are those of the stage."""

    place: ClassVar[Place] = Place.EXTRACT
    engines: ClassVar[Sequence[str]] = _ALL

    def source(self, stage: ExtractKeys, site: Site) -> WorkerSource:
        """Return the source that asks the worker."""
        return WorkerSource(
            stage_of(stage, site.folder),
            offsets=stage.offsets,
            every=stage.every,
            meter=site.meter,
            launch=site.launch,
        )

    def origin(self, stage: ExtractKeys, site: Site) -> Origin:
        """Return a data source whose partitions ask workers for their ranges."""
        from etlstage.spark.datasource.datasource import read_worker
        from etlstage.spark.engine.stage_job import Origin

        read = partial(
            read_worker,
            stage=stage_of(stage, site.folder),
            offsets=stage.offsets,
            streaming=site.pipeline.engine == "streaming",
            place=site.shipment().place,
        )
        # Its rows are messages already.
        return Origin(
            read=site.sent(read),
            message="value",
            key=None,
            name=stage.name,
            input=f"stage {stage.name}",
        )

    def wrong(self, stage: ExtractKeys, pipeline: PipelineKeys) -> Iterator[Problem]:
        """Yield conflicts with the engine, or with other keys of the stage."""
        engine, asked = pipeline.engine, stage.dialect.shape is not Shape.STREAM
        by = stage.offsets.by if stage.offsets is not None else None
        if stage.offsets is not None and not asked:
            yield broken(
                ("extract", "offsets"),
                "needs dialect: {mode: cyclic}, a worker that answers requests",
            )
        message = stage.stage and stage.stage.timeout.message
        if not asked and message not in (None, Timeouts().message):
            yield broken(
                ("extract", "timeout", "message"),
                "is for answers: without dialect: {mode: cyclic} a worker is asked"
                " nothing, and may be silent for any time",
            )
        if stage.every is not None and engine == "spark":
            text = "is only for a worker on engine local, or for engine streaming"
            yield broken(("extract", "every"), text)
        if engine == "local":
            return
        if asked and by != "supervisor":
            text = (
                f"needs offsets: {{by: supervisor}} with engine {engine}: Spark may"
                " request a part of the data again"
            )
            yield broken(("extract", "worker"), text)
        elif engine == "streaming" and not asked:
            text = (
                "needs dialect: {mode: cyclic} and offsets: {by: supervisor} with"
                " engine streaming"
            )
            yield broken(("extract", "worker"), text)

    def not_once(self, stage: ExtractKeys, pipeline: PipelineKeys) -> Iterator[str]:
        """Yield that only the supervisor's offsets allow extraction to resume."""
        by = stage.offsets.by if stage.offsets is not None else None
        if pipeline.engine == "local" and by != "supervisor":
            yield (
                "needs positions from which extraction can resume: use dialect: {mode:"
                " cyclic} and offsets: {by: supervisor}"
            )

    def goes_on(self, stage: ExtractKeys) -> bool:
        """Return whether offsets are kept."""
        return stage.offsets is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSinkKeys(SinkKeys):
    """Workers that load; their keys are those of the stage."""

    place: ClassVar[Place] = Place.LOAD
    engines: ClassVar[Sequence[str]] = _ALL

    def sink(self, stage: LoadKeys, site: Site) -> Sink:
        """Return the sink that feeds workers, in epochs if these can be undone."""
        made = stage_of(stage, site.folder)
        if stage.commit and stage.abort:
            return EpochSink(
                made,
                commit=command_of(stage.commit, made.program.cwd),
                abort=command_of(stage.abort, made.program.cwd),
                dead_letters=site.letters,
                meter=site.meter,
                launch=site.launch,
            )
        extract = site.pipeline.extract
        if extract is not None and extract.end.sharded:
            from etlstage.config.model import ShardKeys  # it imports ends itself

            return _leased(stage.shards or ShardKeys(), made, site)
        if stage.shards is not None:
            cut = _leased if stage.shards.leases is not None else _sharded
            return cut(stage.shards, made, site)
        commits = made.dialect.shape is Shape.COMMITTED
        return (CommittingSink if commits else WorkerSink)(
            made, dead_letters=site.letters, meter=site.meter, launch=site.launch
        )

    def retry_sink(self, stage: LoadKeys, site: Site, number: int) -> Sink:
        """
        Return a sink that also loads messages from before the shards' checkpoints.

        Messages that contain their sequence numbers keep their shards and numbers, and
        where numbers are stored, messages get the next ones. Otherwise the number of a
        message is unknown: retried messages are a shard of their own, numbered after
        all rows and other retries.
        """
        shards, extract = stage.shards, site.pipeline.extract
        made = stage_of(stage, site.folder)
        if shards is not None and shards.sequence is not None:
            # Letters are in the order in which they were written, and a record may
            # have several.
            settings = _settings(shards, site)
            return ShardedSink(made, cut=_cut(shards), unsorted=True, **settings)
        sharded = extract is not None and extract.end.sharded
        stored = shards is not None and shards.leases is None and not sharded
        if stored or made.dialect.shape is not Shape.COMMITTED:
            return self.sink(stage, site)
        begin = [str(_RETRIED + number * _OF_A_RETRY), 0]
        return CommittingSink(
            made,
            dead_letters=site.letters,
            meter=site.meter,
            launch=site.launch,
            assignment=Assignment(made.name, begin),
        )

    def spark_sink(self, stage: LoadKeys, site: Site) -> SparkSink:
        """Return the sink that runs workers in a job, which reads staged messages."""
        from etlstage.spark.engine.load_workers import LoadWorkers

        return LoadWorkers(
            stage_of(stage, site.folder),
            dead_letters=site.letters,
            session=site.session(),
            shipment=site.shipment(),
            staging=site.pipeline.spark.staging,
        )

    def wrong(self, stage: LoadKeys, pipeline: PipelineKeys) -> Iterator[Problem]:
        """Yield unusable shards, an engine that can't commit, and unused programs."""
        commits = stage.dialect.shape is Shape.COMMITTED
        if stage.shards is not None and not commits:
            text = (
                "is only for a worker that commits, such as one of dialect kcl; with"
                " others, set workers and order to share the input"
            )
            yield broken(("load", "shards"), text)
        if stage.shards is not None:
            yield from _unshared(stage.shards, pipeline)
        if commits and pipeline.engine != "local":
            text = (
                f"needs engine local with dialect {stage.dialect.name}: Spark's tasks have"
                " no position that its worker could commit"
            )
            yield broken(("load", "dialect"), text)
        if pipeline.delivery != "exactly-once":
            for key in ("commit", "abort", "epoch"):
                if getattr(stage, key) is not None:
                    yield broken(("load", key), "needs delivery: exactly-once")

    def not_once(self, stage: LoadKeys, pipeline: PipelineKeys) -> Iterator[str]:
        """Yield that only the user's programs can undo what workers loaded."""
        if stage.dialect.shape is Shape.COMMITTED:
            yield (
                "needs a load that can be undone: a worker of dialect"
                f" {stage.dialect.name} commits when it likes, and loads at least once"
            )
            return
        if pipeline.engine != "local":
            yield (
                f"needs load.spark with a path and a format of files ({', '.join(FILES)}),"
                " or format jdbc, or engine local, where a worker may have load.commit and"
                " load.abort"
            )
            yield from unrecorded(pipeline)
            return
        if stage.commit is None or stage.abort is None:
            yield (
                "needs load.commit and load.abort, programs that make an epoch final and"
                " undo it; without them a load worker loads at least once"
            )
        if pipeline.state is None:
            yield "needs state, a folder that records what was loaded"

    def bounds(self, stage: LoadKeys) -> Bounds:
        """Return the bounds of an epoch."""
        return (stage.epoch or EpochKeys()).bounds()

    def about(self, stage: LoadKeys, site: Site) -> Iterator[tuple[str, str]]:
        """Yield how much is committed at once."""
        if stage.commit:
            yield "epoch", (stage.epoch or EpochKeys()).text(site.pipeline)

    def promise(self, stage: LoadKeys, pipeline: PipelineKeys) -> str | None:
        """Return the promise of a stream's batches, or of commit and abort programs."""
        if pipeline.engine == "streaming":
            return (
                "at least once: a batch that is repeated after a crash is loaded again"
            )
        if stage.commit:
            return (
                "exactly once: an epoch that was not recorded before a crash is undone by"
                f" load.abort, and loaded again{one_load(pipeline)}"
            )
        return None

    def again(self, engine: str) -> str:
        """Return that messages may load twice: workers may not detect repeated ones."""
        text = "may load some messages twice"
        if engine == "local":
            return text
        return f"{text}; a load task that is retried may have loaded some already"


def _unshared(keys: ShardKeys, pipeline: PipelineKeys) -> Iterator[Problem]:
    """Yield settings that a stream can't use, and what runners can't share."""
    at = ("load", "shards")
    if pipeline.extract is not None and pipeline.extract.end.sharded:
        for name in keys.given("count", "key", "sequence", "arrival", "at_end"):
            yield broken(
                (*at, name), "is not for a stream, which has shards of its own"
            )
    elif keys.leases is None:
        for name in keys.given("table", "failover", "outage"):
            yield broken((*at, name), "needs leases")
    else:
        end = pipeline.extract.end if pipeline.extract is not None else None
        if end is not None and not (end.numbered or end.repeatable):
            text = (
                "needs extract.files or extract.spark, which every runner can read any"
                " number of times, or a stream, extract.kinesis"
            )
            yield broken((*at, "leases"), text)
        elif end is not None and not end.numbered and keys.sequence is None:
            text = (
                f"needs shards.sequence with {end.text()}: its messages must have the"
                " same numbers for all runners"
            )
            yield broken((*at, "leases"), text)
        if pipeline.transform:
            text = (
                "can't be used with transform stages, whose outputs do not have the"
                " same numbers for all runners: load them into files, and share those"
            )
            yield broken((*at, "leases"), text)
    if keys.leases is not None and pipeline.state is not None:
        yield broken(
            ("state",),
            "can't be used together with shards.leases, which keep the checkpoints",
        )


def _leased(keys: ShardKeys, stage: Stage, site: Site) -> LeasedSink:
    cut = None if site.pipeline.extract.end.sharded else _cut(keys)

    host = gethostname()
    name, alone = f"{host}-{os.getpid()}", False
    if keys.leases is None and site.state is not None:
        # Only the runner that holds the lock of the state directory uses its leases.
        digest = crc32(os.fsencode(site.state.resolve()))
        name, alone = f"{host}-{digest:08x}", True

    def opened(of: str) -> LeaseTable:
        if keys.leases is not None:
            remote = is_url(keys.leases)
            where = keys.leases if remote else str(site.folder / keys.leases)
        elif site.state is not None:
            site.state.mkdir(mode=0o700, parents=True, exist_ok=True)
            where = str(site.state / LEASES_FILE)
        else:
            return MemoryLeases()
        return open_leases(
            where,
            site.pipeline.name,
            table=keys.table,
            made={**(cut.made if cut else {}), "input": of},
        )

    return LeasedSink(
        stage,
        cut=cut,
        keeper=LeaseKeeper(
            name,
            token_hex(4),
            alone=alone,
            failover=keys.failover,
            outage=keys.outage,
            hand_over=max(_HAND_OVER, stage.timeout.farewell or 0.0),
        ),
        leases=opened,
        **_settings(keys, site),
    )


def _cut(keys: ShardKeys) -> Cut:
    return Cut(keys.count, keys.key, sequence=keys.sequence, arrival=keys.arrival)


def _settings(keys: ShardKeys, site: Site) -> dict[str, Any]:
    ends = keys.at_end == "shard_ended"
    return {
        "why": FarewellReason.ENDED if ends else FarewellReason.DRAIN,
        "dead_letters": site.letters,
        "meter": site.meter,
        "launch": site.launch,
    }


def _sharded(keys: ShardKeys, stage: Stage, site: Site) -> ShardedSink:
    path = None if site.state is None else site.state / CHECKPOINTS_FILE
    cut = _cut(keys)
    return ShardedSink(
        stage,
        cut=cut,
        checkpoints=CheckpointFile(path, cut.made),
        **_settings(keys, site),
    )


WORKER: Final = End("worker", WorkerSourceKeys, WorkerSinkKeys)
"""A program of the user's."""
