"""
The composition root: the only place that knows all the parts of a pipeline.

Nothing is started here. A pipeline that was built and never run leaves no trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from etlstage.config.document import Document
from etlstage.config.end import Site
from etlstage.config.ends.journal import EdgeSinkKeys
from etlstage.config.ends.spark import digest
from etlstage.config.fault import StageFaultKeys
from etlstage.config.loader import examine, load
from etlstage.config.model import PipelineKeys
from etlstage.config.parts import parts_of
from etlstage.config.reading import UNCHANGED, Changes
from etlstage.config.stages import command_at, stage_of
from etlstage.config.variant import DryRun
from etlstage.errors import ConfigError, guess
from etlstage.pipeline.dead_letter.retry import Retry
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.interfaces import DeadLetterSink, Epochs, Sink
from etlstage.pipeline.pipeline import Pipeline
from etlstage.pipeline.runner import Runner
from etlstage.settings.problem import Invalid
from etlstage.stage import Stage
from etlstage.telemetry import Meter
from etlstage.transport import Launch, launch_worker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from etlstage.spark import Session
    from etlstage.spark.engine.stage_job import Origin
    from etlstage.spark.sink import SparkSink

__all__ = (
    "WHOLE",
    "Builder",
    "Only",
    "hidden_texts",
    "pipeline_from_here",
    "pipeline_from_yaml",
    "state_folder",
)


class Only(NamedTuple):
    """The part of a pipeline to run: that between the durable edges of two stages."""

    before: str | None = None
    """The stage in whose journals the part ends."""
    behind: str | None = None
    """The stage with whose journals the part begins."""

    def span(self, stages: Sequence[str]) -> tuple[int, int]:
        """
        Return the numbers of the first and the last part.

        Args:
            stages: The stages that have durable edges.

        Raises:
            ConfigError: If a named stage has no durable edge, or nothing lies between.

        """
        first, last = 0, len(stages)
        for option, name in (("before", self.before), ("behind", self.behind)):
            if name is not None and name not in stages:
                known = f", expected one of {', '.join(stages)}" if stages else ""
                close = guess(name, stages) or known
                raise ConfigError(
                    f"--only-{option}: no stage {name!r} has a durable edge{close}"
                )
        if self.before is not None:
            last = stages.index(self.before)
        if self.behind is not None:
            first = stages.index(self.behind) + 1
        if first > last:
            raise ConfigError(
                f"--only-behind {self.behind} --only-before {self.before}: nothing lies"
                " between"
            )
        return first, last


WHOLE: Final = Only()


def pipeline_from_yaml(
    path: str | Path,
    changes: Changes = UNCHANGED,
    *,
    spark: SparkSession | None = None,
    trial: DryRun | None = None,
) -> Runner:
    """
    Build the runner of a pipeline file.

    Args:
        path: The file.
        changes: What is laid over it.
        spark: A session to use in place of the file's own; it is not stopped.
        trial: Replaces settings of the file, so that nothing is loaded.

    Raises:
        ConfigError: If anything in the file is wrong; one line for each problem.
        SparkUnavailable: If the file names Spark and PySpark is not installed.

    """
    keys, document = load(path, changes)
    _refuse_faults(keys, document)
    if trial is not None:
        keys = trial.keys(keys)
    return _runner(keys, document, spark=spark, trial=trial)


def pipeline_from_here(
    path: str | Path,
    changes: Changes = UNCHANGED,
    *,
    meter: Meter | None = None,
    launch: Callable[[Sequence[StageFaultKeys], Mapping[str, str]], Launch]
    | None = None,
    faults: bool = False,
    trial: DryRun | None = None,
    limit: int | None = None,
    only: Only = WHOLE,
) -> Runner:
    """
    Build the runner once everything the file names is found on this machine.

    Args:
        path: The file.
        changes: What is laid over it.
        meter: Where to count what happens in its stages.
        launch: Given the faults in the file and the dialects of its stages, returns the
            function that starts the workers; None: the usual function.
        faults: Whether the file's faults are wanted; otherwise they are an error.
        trial: Replaces settings of the file, so that nothing is loaded.
        limit: Maximum number of messages to extract; None: all.
        only: The part to run of a pipeline with durable edges.

    Raises:
        ConfigError: If anything is wrong or missing; if there is a ``launch``, but
            Spark's executors start the workers; if there is a ``limit``, but the engine
            or delivery needs the whole input; or if there is no such edge.

    """
    keys, document = examine(path, changes, loads=trial is None)
    if not faults:
        _refuse_faults(keys, document)
    elif not keys.faults:
        raise ConfigError(f"--faults: {document.path} has no key faults")
    if launch is not None and keys.engine != "local":
        raise ConfigError(
            f"{document.where(('engine',))}: engine {keys.engine} starts workers in"
            " Spark's executors, where they can't be recorded or given faults; add"
            " --set engine=local"
        )
    starts = None
    if launch is not None:
        try:
            starts = launch(keys.faults, _dialects(keys))
        except Invalid as error:
            for problem in error.problems:
                document.complain(problem.loc, problem.shown())
            document.check()
    if trial is not None:
        keys = trial.keys(keys)
    if limit is not None:
        _check_limit(keys, document)
    given = {"trial": trial, "meter": meter, "launch": starts}
    return _runner(keys, document, only, limit=limit, **given)


def _runner(
    keys: PipelineKeys,
    document: Document,
    only: Only = WHOLE,
    *,
    limit: int | None = None,
    **given: Any,  # noqa: ANN401 - arguments of Builder
) -> Runner:
    """Return the runner of a pipeline, divided into parts at durable edges."""
    durable = [stage.name for stage in keys.transform if stage.durable is not None]
    first, last = only.span(durable)
    if not durable:
        return Builder(keys, document, limit=limit, **given).runner()
    from etlstage.pipeline.divided import DividedPipeline  # few need Arrow
    from etlstage.pipeline.edge import DurableEdge

    parts: list[Pipeline] = []
    edges: list[DurableEdge] = []
    shared: Session | None = None
    for number, part in enumerate(parts_of(keys)):
        most = limit if number == first else None
        builder = Builder(part, document, limit=most, shared=shared, **given)
        parts.append(builder.pipeline())
        shared = builder.site.shared
        if isinstance(end := part.load.end, EdgeSinkKeys):
            assert builder.site.state is not None
            name = durable[len(edges)]
            edges.append(end.durable(name, document.folder, builder.site.state))
    release = shared.release if shared is not None else None
    return DividedPipeline(
        keys.name, parts, edges, first=first, last=last, release=release
    )


def _check_limit(keys: PipelineKeys, document: Document) -> None:
    """Raise ConfigError if the engine or the delivery needs the whole input."""
    for key, wanted in (("engine", "local"), ("delivery", "at-least-once")):
        if (found := getattr(keys, key)) != wanted:
            raise ConfigError(
                f"{document.where((key,))}: {key} {found} needs the whole input, which"
                f" --limit cuts; add --set {key}={wanted}, or --until to load nothing"
            )


def _dialects(keys: PipelineKeys) -> dict[str, str]:
    """Return the name of the dialect of each stage."""
    stages = [stage.stage for _, stage in keys.stages() if stage.stage is not None]
    return {stage.name: stage.dialect.name for stage in stages}


def _refuse_faults(keys: PipelineKeys, document: Document) -> None:
    if keys.faults:
        raise ConfigError(
            f"{document.where(('faults',))}: faults are only for etlstage run --faults:"
            " they make workers fail on purpose"
        )


def state_folder(document: Document) -> Path:
    """
    Return a pipeline's state directory; it need not exist.

    Args:
        document: A pipeline file, of which only the name and the state need be valid.

    """
    state, name = document.data.get("state"), document.data.get("name")
    if not isinstance(state, str):
        state = f".etlstage/{name}"
    return document.folder / state


def hidden_texts(keys: PipelineKeys, document: Document) -> dict[str, str]:
    """Return the texts of a file that must not be shown, with their substitutes."""
    variables = {
        value: f"${name}"
        for _, stage in keys.stages()
        if stage.stage is not None
        for name, value in stage.stage.program.env.items()
    }
    return {**variables, **document.hidden}


class Builder:
    """Makes the parts of one pipeline."""

    def __init__(
        self,
        keys: PipelineKeys,
        document: Document,
        spark: SparkSession | None = None,
        trial: DryRun | None = None,
        meter: Meter | None = None,
        launch: Launch | None = None,
        shared: Session | None = None,
        limit: int | None = None,
    ) -> None:
        self._keys = keys
        self._limit = limit
        self._document = document
        self._trial = trial
        self.site: Site = Site(
            keys,
            document.folder,
            self._dead_letters(),
            meter=meter,
            launch=launch or launch_worker,
            spark=spark,
            shared=shared,
        )
        """The site that is passed to the ends."""

    def runner(self) -> Runner:
        """Return the runner of the pipeline."""
        if self._keys.engine == "spark":
            return self._on_executors(self._stages())
        if self._keys.engine == "streaming":
            return self._on_a_stream(self._stages())
        pipeline = self.pipeline()
        shared = self.site.shared
        pipeline.release = shared.release if shared is not None else None
        return pipeline

    def pipeline(self) -> Pipeline:
        """Return the pipeline for engine local; it does not release the session."""
        keys, site = self._keys, self.site
        source = keys.extract.end.source(keys.extract, site)
        sink, letters = self._sink(), self._letter_sink()
        return Pipeline(
            name=keys.name,
            source=source,
            stages=self._stages(),
            sink=sink,
            dead_letters=site.letters,
            dead_letter_sink=letters,
            meter=site.meter,
            launch=site.launch,
            delivery=self._delivery(),
            limit=self._limit,
            drain_limit=keys.drain,
        )

    def retrying(self, retry: Retry, first: int, epochs: Epochs) -> Pipeline:
        """Return the pipeline that retries dead letters from stage ``first`` on."""
        new = self.site.letters.of_run(token_hex(4))
        self.site.letters = new.kept_by(retry.keep, {}, retry.known)
        return Pipeline(
            name=self._keys.name,
            source=retry.source,
            stages=self._stages()[first:],
            sink=self.retry_sink(epochs),
            dead_letters=self.site.letters,
            flush_every=math.inf,  # one epoch
            note=lambda: retry.note,
        )

    def retry_sink(self, epochs: Epochs) -> Sink:
        """Return the sink for retried messages."""
        keys = self._keys.load
        sink = keys.end.retry_sink(keys, self.site, epochs.done + 1)
        # A retry knows neither whether the output is complete nor whether it was.
        sink.keeps_mark = True
        if self._keys.delivery == "exactly-once":
            sink.begin(epochs)
        return sink

    def _stages(self) -> list[Stage]:
        return [stage_of(keys, self.site.folder) for keys in self._keys.transform]

    def _on_executors(self, stages: Sequence[Stage]) -> Runner:
        from etlstage.spark.engine.batch_run import ExecutorPipeline

        keys, site = self._keys, self.site
        sink: SparkSink
        if self._trial is not None:
            from etlstage.spark.engine.capture import StagedCapture

            sink = StagedCapture(self._trial.sink)
        else:
            sink = keys.load.end.spark_sink(keys.load, site)
        return ExecutorPipeline(
            name=keys.name,
            origin=self._origin(),
            session=site.session(),
            stages=stages,
            sink=sink,
            dead_letters=site.letters,
            dead_letter_sink=self._letter_sink(),
            staging=keys.spark.staging,
            shipment=site.shipment(),
            delivery=self._delivery(),
            of=digest({"of": [keys.extract, *keys.transform]}),
            drain_limit=keys.drain,
        )

    def _on_a_stream(self, stages: Sequence[Stage]) -> Runner:
        from etlstage.spark.engine.stream_run import StreamingPipeline

        keys, site = self._keys, self.site
        return StreamingPipeline(
            name=keys.name,
            origin=self._origin(),
            session=site.session(),
            stages=stages,
            sink=keys.load.end.spark_sink(keys.load, site),
            dead_letters=site.letters,
            state=state_folder(self._document),
            exactly_once=keys.delivery == "exactly-once",
            every=keys.extract.every,
            staging=keys.spark.staging,
            shipment=site.shipment(),
            drain_limit=keys.drain,
        )

    def _origin(self) -> Origin:
        keys = self._keys.extract
        return keys.end.origin(keys, self.site)

    def _delivery(self) -> Delivery | None:
        # Without state only dead letters outlive a run, and runs may share those.
        if self.site.state is None:
            return None
        once, end = self._keys.delivery == "exactly-once", self._keys.load.end
        return Delivery(
            self.site.state, exactly_once=once, bounds=end.bounds(self._keys.load)
        )

    def _sink(self) -> Sink:
        if self._trial is not None:
            return self._trial.sink
        keys = self._keys.load
        return keys.end.sink(keys, self.site)

    def _letter_sink(self) -> DeadLetterSink | None:
        keys = self._keys.dead_letters
        return None if keys is None else keys.spark.sink(self.site)

    def _dead_letters(self) -> DeadLetters:
        document, trial = self._document, self._trial
        changed = len(document.sources) > 1
        state = self._keys.state  # that of a part differs from the file's
        folder = document.folder / state if state else state_folder(document)
        return DeadLetters(
            folder if trial is None else trial.state,
            pipeline=self._keys.name,
            # Without the changes, the file may name another state.
            shown=str(state_folder(document) if changed else document.path),
            commands={
                stage.name: document.written(at)
                for loc, stage in self._keys.stages()
                if document.secret(at := command_at(document, loc))
            },
            hidden=hidden_texts(self._keys, document),
        )
