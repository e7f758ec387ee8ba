"""
Describe what a pipeline file would run; nothing is started for it.

The memory that may be held is the sum of the table in docs/explanation/limits.md.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Final, NamedTuple

from etlstage.config.build import hidden_texts, state_folder
from etlstage.config.document import Document
from etlstage.config.end import Site, located
from etlstage.config.model import ExtractKeys, LoadKeys, PipelineKeys
from etlstage.config.parts import parts_of
from etlstage.config.stages import command_at, stage_of
from etlstage.messages import StageKind, counted
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.folder import JOURNALS, edge_folder
from etlstage.pipeline.secret import Secrets
from etlstage.protocol.base import Dialect, Shape
from etlstage.settings.problem import Loc
from etlstage.shard.table import without_password
from etlstage.stage import Stage
from etlstage.supervisor.process import on_path, search_path, substituted

__all__ = ("Edge", "Part", "Plan", "plan_of")

MiB: Final = 1024 * 1024
AHEAD: Final = 2 * MiB  # sent ahead of replies, to each worker
HELD: Final = 8 * MiB  # replies that are held back, of each worker
STDERR: Final = 72 * 1024  # of each worker
STREAM: Final = 2 * 64 * MiB  # read but not passed on, by each stage
EXTRACTED: Final = MiB  # on their way from a source
TASK: Final = 72 * MiB  # what Spark gives to a task, and a batch of its rows


class Part(NamedTuple):
    """A stage."""

    name: str
    kind: StageKind
    what: str
    """Its command, or its DataFrame."""
    about: list[tuple[str, str]]
    """Facts about it, as pairs of a heading and a text."""
    dead_letters: bool
    """Whether it may have any."""


class Edge(NamedTuple):
    """What connects two stages, by their names."""

    start: str
    end: str
    how: str
    durable: bool = False
    """Whether messages wait there in journals, also between runs."""


class Plan(NamedTuple):
    """A pipeline that could be run."""

    name: str
    engine: str
    parts: list[Part]
    edges: list[Edge]
    about: list[tuple[str, str]]


def plan_of(keys: PipelineKeys, document: Document) -> Plan:
    """Return the plan of a pipeline file, without secrets."""
    made = _Plan(keys, document)
    conceal = Secrets(hidden_texts(keys, document)).conceal
    parts = [
        part._replace(
            what=conceal(part.what), about=[(k, conceal(v)) for k, v in part.about]
        )
        for part in made.parts()
    ]
    about = [(k, conceal(v)) for k, v in made.about()]
    return Plan(keys.name, keys.engine, parts, list(made.edges()), about)


class _Plan:
    """Describes the parts of a pipeline."""

    def __init__(self, keys: PipelineKeys, document: Document) -> None:
        self._keys = keys
        self._document = document
        self._folder = document.folder
        letters = DeadLetters(state_folder(document), pipeline=keys.name)
        self._site = Site(keys, document.folder, letters)
        self._workers = [
            stage_of(stage, self._folder)
            for _, stage in keys.stages()
            if stage.stage is not None
        ]

    def parts(self) -> Iterator[Part]:
        """Yield the stages."""
        workers = {stage.name: stage for stage in self._workers}
        for loc, stage in self._keys.stages():
            name = stage.name
            dead = stage.kind is not StageKind.EXTRACT
            dead = dead and stage.on_error.then == "dead_letter"
            if name in workers:
                about = list(self._worker(loc, workers[name]))
                if isinstance(stage, LoadKeys) and (shards := _shards(self._keys)):
                    about.insert(0, ("shards", shards))
                if isinstance(stage, ExtractKeys | LoadKeys):
                    about += stage.end.about(stage, self._site)
                what = shlex.join(self._document.written(self._command(loc)))
            else:
                assert isinstance(stage, ExtractKeys | LoadKeys)
                about = list(stage.end.about(stage, self._site))
                what = stage.end.text()
            yield Part(name, stage.kind, what, about, dead)

    def edges(self) -> Iterator[Edge]:
        """Yield the edges between the stages."""
        names = [stage.name for _, stage in self._keys.stages()]
        engine = self._keys.engine
        within = "in memory, one run of messages (about 1 MiB) or one reply"
        staged = "a folder on disk, all messages of the run"
        if engine == "streaming":
            staged = "a folder on disk, all messages of a batch"
        durable = {
            stage.name: stage.durable
            for stage in self._keys.transform
            if stage.durable is not None
        }
        for i, (start, end) in enumerate(pairwise(names)):
            if start in durable:
                folder = edge_folder(str(self._site.state), start)
                how = f"{durable[start].text()} in {folder}/{JOURNALS}"
                yield Edge(start, end, how, durable=True)
                continue
            first, last = i == 0, i == len(names) - 2
            how = within
            if engine != "local" and last:
                how = staged
            elif engine != "local" and first:
                how = "in memory, what Spark gives a task at once (64 MiB)"
            elif engine == "local" and first:
                extract = self._keys.extract
                how = extract.end.edge(extract, self._site) or within
            yield Edge(start, end, how)

    def about(self) -> Iterator[tuple[str, str]]:
        """Yield facts about the whole pipeline."""
        keys = self._keys
        if self._needs_spark:
            yield "Spark", self._spark()
        yield "delivery", _guarantee(keys)
        state = state_folder(self._document)
        holds = "positions and dead letters" if keys.state else "dead letters only"
        if keys.engine == "streaming":
            holds = "the checkpoint, positions and dead letters"
        yield "state", f"{state}: {holds}"
        yield "memory", self._memory()

    # --- a stage --------------------------------------------------------------------

    def _worker(self, loc: Loc, stage: Stage) -> Iterator[tuple[str, str]]:
        secret = self._document.secret(self._command(loc))
        words = substituted(stage)
        if not secret:
            yield "runs", shlex.join((self._program(stage, words[0]), *words[1:]))
            if words[0] == sys.executable:
                yield "python", platform.python_version()
        yield "in", str(stage.program.cwd)
        if stage.kind is not StageKind.EXTRACT:
            each = " in each task" if self._keys.engine != "local" else ""
            yield "workers", f"{stage.pool}{each}; order {stage.order.value}"
            yield "answers", _exchanges(stage)
            yield "errors", stage.on_error.text()
        yield "restarts", str(stage.restart)
        yield "timeouts", str(stage.timeout)
        yield "dialect", _dialect(stage.dialect)
        if stage.program.env:
            yield "env", ", ".join(sorted(stage.program.env))

    def _command(self, loc: Loc) -> Loc:
        return command_at(self._document, loc)

    def _program(self, stage: Stage, program: str) -> str:
        here = self._keys.engine == "local" or self._keys.spark.here
        if os.sep in program or stage.program.cwd is None or not here:
            return program
        path = stage.program.env.get("PATH", search_path())
        return on_path(program, stage.program.cwd, path) or program

    # --- the whole ------------------------------------------------------------------

    @property
    def _needs_spark(self) -> bool:
        keys = self._keys
        ends = keys.extract.end.needs_spark or keys.load.end.needs_spark
        return keys.engine != "local" or ends or keys.dead_letters is not None

    def _spark(self) -> str:
        keys = self._keys.spark
        try:
            spark = f"PySpark {version('pyspark')}"
        except PackageNotFoundError:
            spark = "PySpark is not installed"
        settings = "".join(f"; {k}={v}" for k, v in sorted(keys.config.items()))
        if keys.staging:
            settings += f"; staging in {located(keys.staging, self._folder)}"
        sent = [*keys.files, *keys.archives]
        if sent and self._keys.engine != "local":
            settings += f"; sent to the executors: {', '.join(sent)}"
        return f"{keys.remote or keys.master or 'local[*]'}, {spark}{settings}"

    def _memory(self) -> str:
        held, keys = EXTRACTED, self._keys
        shards = keys.load.shards
        for stage in self._workers:
            loads = stage.kind is StageKind.LOAD and shards is not None
            alike = shards.count if loads and shards is not None else 1
            if stage.kind is StageKind.EXTRACT:
                continue
            if keys.engine == "local" or stage.kind is StageKind.TRANSFORM:
                ahead = AHEAD
                if stage.dialect.shape.batches:
                    ahead = max(AHEAD, stage.batch.bytes)
                each = ahead + HELD + STDERR + stage.dialect.holds
                held += alike * (STREAM + stage.pool.max * each)
        if keys.engine != "local":
            return f"{_MiB(held + TASK)} in each Spark task; {_beyond(self._workers)}"
        for part in parts_of(keys):
            held += part.extract.end.held(keys.engine) + part.load.end.held(keys.engine)
        spark = ", beside Spark's" if self._needs_spark else ""
        return f"{_MiB(held)}{spark}; {_beyond(self._workers)}"


def _MiB(size: int) -> str:  # noqa: N802 - the unit
    return f"up to {-(-size // MiB):,} MiB"


def _beyond(stages: list[Stage]) -> str:
    if not stages:
        return "plus one long message"
    message = max(stages, key=lambda stage: stage.max_message).shown("max_message")
    reply = max(stages, key=lambda stage: stage.max_reply).shown("max_reply")
    return (
        f"plus a long message (up to {message}) and a long reply (up to {reply})"
        " in each worker"
    )


def _exchanges(stage: Stage) -> str:
    """Return how much a worker is sent at once, and how much ahead of its replies."""
    most = counted(stage.batch.size, "message")
    if stage.dialect.shape is Shape.COMMITTED:
        return f"up to {most} at a time; each is done when its worker commits it"
    batches = stage.dialect.shape.batches
    given = f"batches of {stage.batch}" if batches else "one message at a time"
    if stage.dialect.connection is not None:
        return given  # the bound is among the settings of the dialect
    alone = stage.kind is StageKind.LOAD or stage.dialect.shape is Shape.ASKED_BATCH
    return f"{given}; sent ahead: {'1' if alone else stage.shown('window')}"


def _dialect(dialect: Dialect) -> str:
    """Return the name of a dialect, and the settings that are its own."""
    settings = dialect.plain()
    # How messages are exchanged is shown elsewhere, in terms common to all dialects.
    for key in ("name", "mode", "batches"):
        settings.pop(key, None)
    for key, value in [*settings.items()]:
        if isinstance(value, dict):
            del settings[key]
            settings |= value
    text = (
        f"{key} {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in settings.items()
    )
    return "  ".join((dialect.name, *text))


def _shards(keys: PipelineKeys) -> str:
    """Return which shards there are, why their workers end, and how they are shared."""
    shards = keys.load.shards
    if keys.extract.end.sharded:
        text = "those of the stream, a worker for each"
        if shards is None or shards.leases is None:
            kept = "the state" if keys.state else "memory"
            return f"{text}; checkpoints in {kept}"
    elif shards is None:
        return ""
    else:
        by = f"by {shards.key}" if shards.key else "by a hash of the message"
        by += f", numbers at {shards.sequence}" if shards.sequence else ""
        ends = shards.at_end == "shard_ended"
        end = "each shard ends" if ends else "workers shut down"
        text = f"{shards.count}, {by}, a worker for each; at the end of the input {end}"
    if shards.leases is None:
        return text
    where = without_password(shards.leases)
    return f"{text}; shared by leases in {where}, failover {shards.failover:g} s"


def _guarantee(keys: PipelineKeys) -> str:
    """Return how often a message may be loaded with this engine and sink, and why."""
    promise = keys.load.end.promise(keys.load, keys)
    if promise is not None:
        return promise
    shards = keys.load.shards
    leased = shards is not None and shards.leases is not None
    if leased or (keys.state and keys.extract.end.goes_on(keys.extract)):
        begins = "a run that is repeated resumes after what is known to be loaded, and"
    else:
        begins = "a run that is repeated reads everything again, and"
    return f"at least once: {begins} {keys.load.end.again(keys.engine)}"
