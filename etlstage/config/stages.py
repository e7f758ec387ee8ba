"""
From the keys of a stage to the stage.

Paths are relative to the file's folder, which is also where workers run. As the
first word of a command, ``python`` and ``python3`` are the interpreter that runs
etlstage, so that a worker finds ``etlstage.worker`` whatever the PATH says.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from etlstage.config.model import ExtractKeys, LoadKeys
from etlstage.config.worker import (
    BatchKeys,
    ErrorKeys,
    FedStageKeys,
    TransformKeys,
    WorkerKeys,
    WorkerStageKeys,
)
from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import (
    BatchPolicy,
    ErrorBudget,
    ErrorPolicy,
    Order,
    RecyclePolicy,
    ResourceLimits,
    RestartPolicy,
    Stage,
    Timeouts,
)
from etlstage.stage.stage import PYTHONS

__all__ = (
    "error_policy",
    "extract_stage",
    "load_stage",
    "located",
    "transform_stage",
)

SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


def extract_stage(keys: ExtractKeys, name: str, folder: Path) -> Stage:
    """Return the stage of an extract worker."""
    worker = _worker(keys.worker)
    mode = Mode.CYCLIC if keys.mode == "cyclic" else Mode.PLAIN
    dialect = MarkerDialect(mode=mode, markers=worker.markers.markers())
    common = _common(keys, worker, name, folder)
    return Stage(kind=StageKind.EXTRACT, dialect=dialect, **common)


def transform_stage(keys: TransformKeys, name: str, folder: Path) -> Stage:
    """Return a transform stage."""
    common = _common(keys, keys.worker, name, folder)
    return Stage(kind=StageKind.TRANSFORM, **common, **_feeding(keys, keys.worker))


def load_stage(keys: LoadKeys, name: str, folder: Path) -> Stage:
    """Return the stage of a load worker."""
    worker = _worker(keys.worker)
    common = _common(keys, worker, name, folder)
    return Stage(kind=StageKind.LOAD, **common, **_feeding(keys, worker))


def located(path: str, folder: Path) -> str:
    """Return ``path`` seen from the file's folder; one with a scheme is as it is."""
    return path if SCHEME.match(path) else str(folder / path)


def error_policy(keys: ErrorKeys) -> ErrorPolicy:
    """Return the policy that the keys describe."""
    values = keys.given("retries", "then")
    if "budget" in keys.model_fields_set:
        values["budget"] = ErrorBudget(count=keys.budget.count, share=keys.budget.share)
    return ErrorPolicy(**values)


def _worker(keys: WorkerKeys | None) -> WorkerKeys:
    if keys is None:
        raise AssertionError("unreachable: a stage without a worker")
    return keys


def _common(
    keys: WorkerStageKeys, worker: WorkerKeys, name: str, folder: Path
) -> dict[str, Any]:
    values = {
        "name": name,
        "command": _command(worker.command, folder),
        "timeout": Timeouts(**keys.timeout.given()),
        "restart": _restart(keys),
        "ready": worker.ready,
        "limits": ResourceLimits(**worker.limits.given()),
        "user": worker.user,
        "group": worker.group,
        "umask": worker.umask,
        "env": worker.env,
        "cwd": folder / (worker.cwd or ""),
        "max_message_bytes": keys.max_message,
        "max_reply_bytes": keys.max_reply,
    }
    return _without_none(values)


def _command(command: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    program, *arguments = command
    if program in PYTHONS:
        program = sys.executable
    elif "/" in program:
        program = str(folder / program)
    return (program, *arguments)


def _restart(keys: WorkerStageKeys) -> RestartPolicy:
    values = keys.restart.given()
    if "never_on" in values:
        values["never_on"] = frozenset(values["never_on"])
    return RestartPolicy(**values)


def _feeding(keys: FedStageKeys, worker: WorkerKeys) -> dict[str, Any]:
    values: dict[str, Any] = {
        "workers": keys.workers,
        "window": keys.window,
        "on_error": error_policy(keys.on_error),
        "recycle": RecyclePolicy(**keys.recycle.given()),
    }
    if keys.order is not None:
        values["order"] = Order(keys.order)
    if keys.key is not None:
        values["key"] = keys.key
    mode, reading = Mode.SINGLE, {}
    if keys.batch is not None:
        mode = (
            Mode.BATCH_WORKER
            if keys.batch.driver == "worker"
            else Mode.BATCH_SUPERVISOR
        )
        values["batch"] = _policy(keys.batch)
        reading = keys.batch.given("eob_then_eom", "bnc_after_last")
    values["dialect"] = MarkerDialect(
        mode=mode, markers=worker.markers.markers(), **reading
    )
    return values


def _policy(keys: BatchKeys) -> BatchPolicy:
    values = keys.model_dump(
        exclude={"driver", "eob_then_eom", "bnc_after_last"}, exclude_unset=True
    )
    return BatchPolicy(**_without_none(values))


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
