"""
What a stage with a worker may say: its program, its batches, its failures.

Defaults that have a home in :mod:`etlstage.stage.stage` are not repeated: a key
that was not written is not passed on. Where such a stage stands in the file is in
``model.py``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from etlstage.config.mapping import Argument, Count, Keys, Name, as_problem
from etlstage.config.quantity import (
    Budget,
    Duration,
    Mask,
    Pointer,
    Seconds,
    Share,
    Size,
    SizeOrZero,
    Window,
    one_of,
)
from etlstage.protocol.marker import Markers

__all__ = (
    "BatchKeys",
    "BudgetKeys",
    "ErrorKeys",
    "FedStageKeys",
    "LimitKeys",
    "MarkerKeys",
    "RecycleKeys",
    "RestartKeys",
    "TimeoutKeys",
    "TransformKeys",
    "WorkerKeys",
    "WorkerStageKeys",
)


def _variable(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        context = {"text": "is not a name for a variable"}
        raise PydanticCustomError("refused", "{text}", context)
    return name


def _list_of_arguments(value: object) -> object:
    if isinstance(value, str):
        wanted = "a list such as [python, clean.py]"
        raise PydanticCustomError("expected", "{text}", {"text": wanted})
    return value


def _not_empty(command: tuple[str, ...]) -> tuple[str, ...]:
    if not command or not command[0]:
        wanted = "a program and its arguments"
        raise PydanticCustomError("expected", "{text}", {"text": wanted})
    return command


Command = Annotated[
    tuple[Argument, ...],
    BeforeValidator(_list_of_arguments),
    # A minimal length would also count the arguments that were refused.
    AfterValidator(_not_empty),
]
Variable = Annotated[str, AfterValidator(_variable)]
CountOrZero = Annotated[int, Field(ge=0)]
Processes = Annotated[int, Field(ge=1, le=1000)]
Status = Annotated[int, Field(ge=0, le=255)]
Niceness = Annotated[int, Field(ge=-20, le=19)]
Ordering = Annotated[
    Literal["none", "key", "total"],
    BeforeValidator(one_of("order", "none", "key", "total")),
]


class MarkerKeys(Keys):
    r"""Markers that differ from the defaults; ``\n`` and the like are read."""

    eom: str | None = None
    eop: str | None = None
    eob: str | None = None
    bnc: str | None = None

    @model_validator(mode="after")
    def _fit(self) -> MarkerKeys:
        with as_problem("markers"):
            self.markers()
        return self

    def markers(self) -> Markers:
        """Return the markers; raises ConfigError for what can't be told apart."""
        texts = self.given().items()
        return Markers.from_text(**{n: t for n, t in texts if t is not None})


class LimitKeys(Keys):
    """What a worker's process may use; ``null`` is no limit of ours."""

    memory: Size | None = None
    cpu: Seconds | None = None
    open_files: Count | None = None
    core: SizeOrZero | None = None
    nice: Niceness | None = None


class WorkerKeys(Keys):
    """The program of a stage."""

    command: Command
    dialect: Annotated[
        Literal["marker"],
        BeforeValidator(one_of("dialect", "marker", later=("kcl", "cocaine"))),
    ] = "marker"
    markers: MarkerKeys = MarkerKeys()
    env: dict[Variable, Argument] = Field(default_factory=dict)
    cwd: Argument | None = None
    limits: LimitKeys = LimitKeys()
    user: Argument | None = None
    group: Argument | None = None
    umask: Mask | None = None
    ready: bool | None = None


class BatchKeys(Keys):
    """When a batch is closed, and by whom."""

    driver: Annotated[
        Literal["worker", "supervisor"],
        BeforeValidator(one_of("driver", "worker", "supervisor")),
    ] = "supervisor"
    size: Count | None = None
    bytes: Size | None = None
    seconds: Duration | None = None
    eob_then_eom: bool = False
    bnc_after_last: bool = False


class TimeoutKeys(Keys):
    """How long a worker may take; ``null`` waits for ever, but never with ``stop``."""

    start: Duration | None = None
    message: Duration | None = None
    heartbeat: Duration | None = None
    stop: Duration = 5.0


class RestartKeys(Keys):
    """When a worker is started again."""

    policy: Annotated[
        Literal["permanent", "transient", "temporary"],
        BeforeValidator(one_of("policy", "permanent", "transient", "temporary")),
    ] = "permanent"
    max: CountOrZero = 0
    within: Duration = 0
    delay: Duration = 0
    max_delay: Duration = 0
    never_on: tuple[Status, ...] = ()


class BudgetKeys(Keys):
    """How many messages may be put aside; both hold where both are written."""

    count: CountOrZero | None = None
    share: Share | None = None


class ErrorKeys(Keys):
    """What becomes of a message that can't be processed."""

    retries: CountOrZero = 0
    then: Annotated[
        Literal["dead_letter", "fail"],
        BeforeValidator(one_of("end of a message", "dead_letter", "fail")),
    ] = "dead_letter"
    budget: Annotated[BudgetKeys, Budget] = BudgetKeys()


class RecycleKeys(Keys):
    """When a worker is replaced although nothing is wrong; ``null`` is never."""

    max_messages: Count | None = None
    max_age: Duration | None = None
    max_rss: Size | None = None
    variance: Share = 0


class WorkerStageKeys(Keys):
    """What all stages with a worker have in common."""

    name: Name | None = None
    timeout: TimeoutKeys = TimeoutKeys()
    restart: RestartKeys = RestartKeys()
    max_message: Size | None = None
    max_reply: Size | None = None


class FedStageKeys(WorkerStageKeys):
    """What stages have in common whose workers are fed with messages."""

    workers: Processes = 1
    order: Ordering | None = None
    key: Pointer | None = None
    window: Window = None
    batch: BatchKeys | None = None
    on_error: ErrorKeys = ErrorKeys()
    recycle: RecycleKeys = RecycleKeys()


class TransformKeys(FedStageKeys):
    """One transform stage."""

    worker: WorkerKeys
