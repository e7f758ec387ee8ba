"""
What a pipeline file would have run, in words; nothing is started for it.

How much may be held is the sum of README's table, "What a run may hold".
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Final, NamedTuple

from etlstage.config.build import hidden_texts, state_folder
from etlstage.config.document import Document
from etlstage.config.model import (
    LoadKeys,
    PipelineKeys,
    SparkSinkKeys,
    SparkSourceKeys,
)
from etlstage.config.presence import executors_here, on_path, search_path
from etlstage.config.rules import stage_names
from etlstage.config.stages import StageKeys, located, stage_of
from etlstage.messages import StageKind, counted
from etlstage.pipeline.secret import Secrets
from etlstage.settings.definition import settings_of
from etlstage.settings.problem import Loc
from etlstage.settings.units import of_files
from etlstage.stage import BatchPolicy, ErrorPolicy, RestartPolicy, Stage, Timeouts
from etlstage.supervisor.spawn import substituted

__all__ = ("Edge", "Part", "Plan", "plan_of")

MiB: Final = 1024 * 1024
AHEAD: Final = 2 * MiB  # sent ahead of replies, to each worker
HELD: Final = 8 * MiB  # replies that are held back, of each worker
STDERR: Final = 72 * 1024  # of each worker
STREAM: Final = 2 * 64 * MiB  # read and not handed on, by each stage
EXTRACTED: Final = MiB  # on their way from a source
TASK: Final = 72 * MiB  # what Spark gives to a task, and a batch of its rows


class Part(NamedTuple):
    """A stage."""

    name: str
    kind: StageKind
    what: str
    """Its command, or its DataFrame."""
    about: list[tuple[str, str]]
    """What there is to know of it, by what it is about."""
    dead_letters: bool
    """Whether it may have any."""


class Edge(NamedTuple):
    """What connects two stages, by their names."""

    start: str
    end: str
    how: str


class Plan(NamedTuple):
    """A pipeline that could be run."""

    name: str
    engine: str
    parts: list[Part]
    edges: list[Edge]
    about: list[tuple[str, str]]


def plan_of(keys: PipelineKeys, document: Document) -> Plan:
    """Return what a pipeline file would have run; without secrets."""
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
    """Finds the words."""

    def __init__(self, keys: PipelineKeys, document: Document) -> None:
        self._keys = keys
        self._document = document
        self._folder = document.folder
        self._names = dict(stage_names(document.data))
        self._workers = [
            stage_of(stage, self._names[loc], self._folder)
            for loc, stage in self._stages()
            if stage.written.get("worker")
        ]

    def _stages(self) -> Iterator[tuple[Loc, StageKeys]]:
        keys = self._keys
        yield ("extract",), keys.extract
        for i, stage in enumerate(keys.transform):
            yield ("transform", i), stage
        yield ("load",), keys.load

    def parts(self) -> Iterator[Part]:
        """Yield the stages."""
        workers = {stage.name: stage for stage in self._workers}
        for loc, stage in self._stages():
            name = self._names[loc]
            dead = stage.kind is not StageKind.EXTRACT
            dead = dead and stage.on_error.then == "dead_letter"
            if name in workers:
                about = list(self._worker(loc, workers[name]))
                shown = self._document.written((*loc, "worker", "command"))
                yield Part(name, stage.kind, shlex.join(shown), about, dead)
            elif isinstance(stage, LoadKeys):
                about = list(self._sink(stage))
                yield Part(name, stage.kind, _frame(stage.spark, "to"), about, dead)
            else:
                about = list(self._source())
                yield Part(
                    name,
                    stage.kind,
                    _frame(self._keys.extract.spark, "from"),
                    about,
                    dead,
                )

    def edges(self) -> Iterator[Edge]:
        """Yield what is between the stages."""
        names, engine = list(self._names.values()), self._keys.engine
        within = "in memory, one run of messages (about 1 MiB) or one reply"
        staged = "a folder on disk, all messages of the run"
        if engine == "streaming":
            staged = "a folder on disk, all messages of a batch"
        for i, (start, end) in enumerate(pairwise(names)):
            first, last = i == 0, i == len(names) - 2
            how = within
            if engine != "local" and last:
                how = staged
            elif engine != "local" and first:
                how = "in memory, what Spark gives a task at once (64 MiB)"
            elif engine == "local" and first and self._keys.extract.spark is not None:
                spool = self._keys.extract.spark.spool
                where = self._folder / spool if spool else "the temporary directory"
                how = f"a spool on disk in {where}, all messages"
            yield Edge(start, end, how)

    def about(self) -> Iterator[tuple[str, str]]:
        """Yield what is to be known of the whole."""
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
        secret = self._document.secret((*loc, "worker", "command"))
        words = substituted(stage)
        if not secret:
            yield "runs", shlex.join((self._program(stage, words[0]), *words[1:]))
            if words[0] == sys.executable:
                yield "python", platform.python_version()
        yield "in", str(stage.cwd)
        if stage.kind is not StageKind.EXTRACT:
            each = " in each task" if self._keys.engine != "local" else ""
            yield "workers", f"{stage.pool}{each}; order {stage.order.value}"
            yield "answers", _exchanges(stage)
            yield "errors", _errors(stage.on_error)
        yield "restarts", _restarts(stage.restart)
        yield "timeouts", _timeouts(stage.timeout)
        said = stage.dialect.placeholders()
        yield "markers", "  ".join(f"{name} {text}" for name, text in said.items())
        if stage.env:
            yield "env", ", ".join(sorted(stage.env))

    def _program(self, stage: Stage, program: str) -> str:
        here = self._keys.engine == "local" or executors_here(self._document)
        if os.sep in program or stage.cwd is None or not here:
            return program
        path = stage.env.get("PATH", search_path())
        return on_path(program, stage.cwd, path) or program

    def _source(self) -> Iterator[tuple[str, str]]:
        frame = self._keys.extract.spark
        assert frame is not None
        if frame.path:
            yield "path", located(frame.path, self._folder)
        by_default = "the only column if it is text or binary, else to_json(struct(*))"
        yield "message", frame.message or by_default
        if frame.key:
            yield "key", frame.key
        if frame.schema_:
            yield "schema", " ".join(frame.schema_.split())

    def _sink(self, keys: LoadKeys) -> Iterator[tuple[str, str]]:
        frame = keys.spark
        assert frame is not None
        if frame.path:
            yield "path", located(frame.path, self._folder)
        yield "mode", frame.mode
        by_default = "value, the message as text"
        yield "columns", " ".join((frame.schema_ or by_default).split())
        if frame.partition_by:
            yield "folders by", ", ".join(frame.partition_by)
        if self._keys.engine == "local":
            size = _written(type(frame.epoch), "bytes", frame.epoch.bytes)
            yield "epoch", f"{counted(frame.epoch.messages, 'message')} or {size}"
        if frame.schema_:
            yield "errors", _errors(keys.on_error, retries=False)

    # --- the whole ------------------------------------------------------------------

    @property
    def _needs_spark(self) -> bool:
        keys = self._keys
        frames = (keys.extract.spark, keys.load.spark, keys.dead_letters)
        return keys.engine != "local" or any(frame is not None for frame in frames)

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
        held, keys = 0, self._keys
        for stage in self._workers:
            if stage.kind is StageKind.EXTRACT:
                held += EXTRACTED
            elif keys.engine == "local" or stage.kind is StageKind.TRANSFORM:
                ahead = AHEAD
                if stage.dialect.shape.batches:
                    ahead = max(AHEAD, stage.batch.bytes)
                held += STREAM + stage.pool.max * (ahead + HELD + STDERR)
        if keys.extract.spark is not None:
            held += EXTRACTED
        if keys.engine != "local":
            return (
                f"{_MiB(held + TASK)} in each task of Spark's; {_beyond(self._workers)}"
            )
        if keys.load.spark is not None:
            held += 2 * keys.load.spark.epoch.bytes
        spark = ", beside Spark's" if self._needs_spark else ""
        return f"{_MiB(held)}{spark}; {_beyond(self._workers)}"


def _frame(frame: SparkSourceKeys | SparkSinkKeys | None, way: str) -> str:
    assert frame is not None
    where = f"table {frame.table}" if frame.table else frame.path
    return f"{frame.format or 'Spark'} {way} {where}" if where else str(frame.format)


def _MiB(size: int) -> str:  # noqa: N802 - the unit
    return f"up to {-(-size // MiB):,} MiB"


def _beyond(stages: list[Stage]) -> str:
    if not stages:
        return "where a message is longer, one more"
    message = max(stages, key=lambda stage: stage.max_message).max_message
    reply = max(stages, key=lambda stage: stage.max_reply).max_reply
    return (
        f"where they are longer, a message (up to {_written(Stage, 'max_message', message)})"
        f" and a reply (up to {_written(Stage, 'max_reply', reply)}) more in each worker"
    )


def _written(model: type, name: str, value: object) -> str:
    """Return a value of a setting as people write it."""
    return (
        "never" if value is None else str(settings_of(model)[name].kind.written(value))
    )


def _exchanges(stage: Stage) -> str:
    batch, ahead = (
        stage.batch,
        str(settings_of(Stage)["window"].kind.written(stage.window)),
    )
    if stage.kind is StageKind.LOAD and stage.window is None:
        ahead = "none"
    if not stage.dialect.shape.batches:
        return f"one message at a time; sent ahead: {ahead}"
    return (
        f"batches of up to {counted(batch.size, 'message')},"
        f" {_written(BatchPolicy, 'bytes', batch.bytes)} or"
        f" {_written(BatchPolicy, 'seconds', batch.seconds)}; sent ahead: {ahead}"
    )


def _errors(policy: ErrorPolicy, *, retries: bool = True) -> str:
    tried = "1 retry" if policy.retries == 1 else f"{policy.retries} retries"
    before = f"{tried}, then " if retries else ""
    if policy.then == "fail":
        return f"{before}the run fails"
    return f"{before}dead-lettered; budget {policy.budget}"


def _restarts(policy: RestartPolicy) -> str:
    within = _written(RestartPolicy, "within", policy.within)
    return f"{policy.policy}, up to {policy.max} without progress in {within}"


def _timeouts(timeouts: Timeouts) -> str:
    names: Mapping[str, str] = {"start": "to be ready", "message": "for an answer"}
    said = [
        f"{_written(Timeouts, name, getattr(timeouts, name))} {what}"
        for name, what in names.items()
    ]
    return f"{', '.join(said)}, {_written(Timeouts, 'stop', timeouts.stop)} to stop"


def _guarantee(keys: PipelineKeys) -> str:
    """Return how often a message may arrive, and why, on this engine in this sink."""
    sink = keys.load.spark
    if keys.engine == "streaming":
        if sink is None or sink.path is None or not of_files(sink.format):
            return (
                "at least once: a batch that is repeated after a crash is loaded again"
            )
        return (
            f"{keys.delivery.replace('-', ' ')}: a batch that is repeated after a crash"
            " replaces its folder epoch=..."
        )
    if keys.load.commit:
        return (
            "exactly once: an epoch that was not recorded before a crash is undone by"
            " load.abort, and loaded again"
        )
    if keys.delivery == "exactly-once" and sink is not None and sink.path is None:
        return (
            "exactly once: an epoch is added in one transaction, with its record, behind"
            " which a run that is repeated goes on"
        )
    if keys.delivery == "exactly-once":
        return (
            "exactly once: an epoch that was not recorded before a crash replaces its"
            " folder epoch=..."
        )
    if keys.state and (keys.extract.offsets is not None or keys.extract.spark):
        begins = "a run that is repeated goes on behind what is known to be loaded, and"
    else:
        begins = "a run that is repeated reads all again, and"
    text = f"at least once: {begins} {_again(sink)}"
    if keys.engine == "local":
        return text
    if sink is None:
        return f"{text}; a load task that is retried may have loaded some already"
    return f"{text}; nothing is loaded of a run that fails before"


def _again(sink: SparkSinkKeys | None) -> str:
    if sink is None or sink.mode == "append":
        return "may load some messages twice"
    if sink.mode == "overwrite":
        return "replaces what was loaded"
    return "is refused while there is output"
