"""Pipelines (E -> T* -> L) of sources, stages and sinks."""

from __future__ import annotations

from etlstage.pipeline.dead_letter.letter import DeadLetter as DeadLetter
from etlstage.pipeline.dead_letter.store import DeadLetters as DeadLetters
from etlstage.pipeline.interfaces import DeadLetterSink as DeadLetterSink
from etlstage.pipeline.interfaces import Sink as Sink
from etlstage.pipeline.interfaces import Source as Source
from etlstage.pipeline.pipeline import Pipeline as Pipeline
from etlstage.pipeline.report import Report as Report
from etlstage.pipeline.worker_sink import WorkerSink as WorkerSink
from etlstage.pipeline.worker_source import WorkerSource as WorkerSource

__all__ = (
    "DeadLetter",
    "DeadLetterSink",
    "DeadLetters",
    "Pipeline",
    "Report",
    "Sink",
    "Source",
    "WorkerSink",
    "WorkerSource",
)
