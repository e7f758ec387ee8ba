"""
What may stand in a pipeline file.

Each model is one mapping of the file; what its keys say *together* is in
``rules.py``, where several can be wrong at once. Defaults that have a home in
:mod:`etlstage.supervisor.stage` are not repeated: a key that was not written is not
passed on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

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
from etlstage.errors import ConfigError
from etlstage.pipeline.worker_source import OffsetPolicy
from etlstage.protocol.marker import Markers

__all__ = (
    "BatchKeys",
    "BudgetKeys",
    "DeadLetterKeys",
    "EpochKeys",
    "ErrorKeys",
    "ExtractKeys",
    "FedStageKeys",
    "LimitKeys",
    "LoadKeys",
    "MarkerKeys",
    "OffsetKeys",
    "PipelineKeys",
    "RecycleKeys",
    "RestartKeys",
    "SessionKeys",
    "SparkLetterKeys",
    "SparkSinkKeys",
    "SparkSourceKeys",
    "TimeoutKeys",
    "TransformKeys",
    "WorkerKeys",
    "WorkerStageKeys",
)


def _without_nul(text: str) -> str:
    if "\0" in text:
        context = {"text": "can't hold a NUL byte"}
        raise PydanticCustomError("refused", "{text}", context)
    return text


def _variable(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        context = {"text": "is not a name for a variable"}
        raise PydanticCustomError("refused", "{text}", context)
    return name


def _server(url: str) -> str:
    if not url.startswith("sc://"):
        wanted = "a Spark Connect server such as sc://host:15002"
        raise PydanticCustomError("expected", "{text}", {"text": wanted})
    return url


def _list_of_arguments(value: object) -> object:
    if isinstance(value, str):
        wanted = "a list such as [python, clean.py]"
        raise PydanticCustomError("expected", "{text}", {"text": wanted})
    return value


@contextmanager
def _as_problem(kind: str) -> Iterator[None]:
    """Turn what a class of the library says of its values into a problem here."""
    try:
        yield
    except ConfigError as error:
        context = {"text": str(error)}
        raise PydanticCustomError(kind, "{text}", context) from None


def _not_empty(command: tuple[str, ...]) -> tuple[str, ...]:
    if not command or not command[0]:
        wanted = "a program and its arguments"
        raise PydanticCustomError("expected", "{text}", {"text": wanted})
    return command


Argument = Annotated[str, AfterValidator(_without_nul)]
Command = Annotated[
    tuple[Argument, ...],
    BeforeValidator(_list_of_arguments),
    # A minimal length would also count the arguments that were refused.
    AfterValidator(_not_empty),
]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]{0,63}$")]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Processes = Annotated[int, Field(ge=1, le=1000)]
Status = Annotated[int, Field(ge=0, le=255)]
Niceness = Annotated[int, Field(ge=-20, le=19)]
Ordering = Annotated[
    Literal["none", "key", "total"],
    BeforeValidator(one_of("order", "none", "key", "total")),
]


class Keys(BaseModel):
    """Base of all mappings: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def given(self, *names: str) -> dict[str, Any]:
        """Return the keys that were written, of ``names`` or of all."""
        wanted = names or tuple(type(self).model_fields)
        return {n: getattr(self, n) for n in wanted if n in self.model_fields_set}


class MarkerKeys(Keys):
    r"""Markers that differ from the defaults; ``\n`` and the like are read."""

    eom: str | None = None
    eop: str | None = None
    eob: str | None = None
    bnc: str | None = None

    @model_validator(mode="after")
    def _fit(self) -> MarkerKeys:
        with _as_problem("markers"):
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
    env: dict[Annotated[str, AfterValidator(_variable)], Argument] = {}
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


class OffsetKeys(Keys):
    """Who remembers how far an extract stage has read."""

    by: Annotated[
        Literal["worker", "supervisor"],
        BeforeValidator(one_of("keeper of offsets", "worker", "supervisor")),
    ]
    start: int | None = None
    step: Count | None = None
    end: int | None = None
    template: str | None = None

    @model_validator(mode="after")
    def _fit(self) -> OffsetKeys:
        with _as_problem("offsets"):
            self.policy()
        return self

    def policy(self) -> OffsetPolicy:
        """Return the policy; raises ConfigError for offsets that lead nowhere."""
        values = self.given().items()
        return OffsetPolicy(**{n: v for n, v in values if v is not None})


class SparkSourceKeys(Keys):
    """A DataFrame to read, and the message that a row becomes."""

    format: str | None = None
    path: Argument | None = None
    table: str | None = None
    options: dict[str, str] = {}
    schema_: str | None = Field(default=None, alias="schema")
    message: str | None = None
    key: str | None = None
    spool: Argument | None = None


class EpochKeys(Keys):
    """How much is written to a DataFrame at once."""

    messages: Count | None = None
    bytes: Size | None = None


class SparkSinkKeys(Keys):
    """A DataFrame to write."""

    format: str | None = None
    path: Argument | None = None
    table: str | None = None
    options: dict[str, str] = {}
    mode: Annotated[
        Literal["append", "overwrite", "error"],
        BeforeValidator(one_of("mode", "append", "overwrite", "error")),
    ] = "error"
    schema_: str | None = Field(default=None, alias="schema")
    partition_by: tuple[str, ...] = ()
    epoch: EpochKeys = EpochKeys()


class ExtractKeys(WorkerStageKeys):
    """Where messages come from: a DataFrame or a worker."""

    spark: SparkSourceKeys | None = None
    worker: WorkerKeys | None = None
    mode: Annotated[
        Literal["plain", "cyclic"], BeforeValidator(one_of("mode", "plain", "cyclic"))
    ] = "plain"
    offsets: OffsetKeys | None = None
    every: Duration | None = None


class LoadKeys(FedStageKeys):
    """Where messages end: a DataFrame or a worker."""

    spark: SparkSinkKeys | None = None
    worker: WorkerKeys | None = None


class SparkLetterKeys(Keys):
    """A DataFrame to which the dead letters of each run are appended."""

    format: str | None = None
    path: Argument | None = None
    table: str | None = None
    options: dict[str, str] = {}


class DeadLetterKeys(Keys):
    """Where dead letters go besides their files."""

    spark: SparkLetterKeys


class SessionKeys(Keys):
    """The Spark session; without it a local one on all cores."""

    master: str | None = None
    remote: Annotated[str, AfterValidator(_server)] | None = None
    config: dict[str, str] = {}


class PipelineKeys(Keys):
    """The whole file."""

    name: Name
    engine: Annotated[
        Literal["local"],
        BeforeValidator(one_of("engine", "local", later=("spark", "streaming"))),
    ] = "local"
    delivery: Annotated[
        Literal["at-least-once"],
        BeforeValidator(
            one_of("delivery", "at-least-once", later=("at-most-once", "exactly-once"))
        ),
    ] = "at-least-once"
    state: Argument | None = None
    spark: SessionKeys = SessionKeys()
    extract: ExtractKeys
    transform: tuple[TransformKeys, ...] = ()
    load: LoadKeys
    dead_letters: DeadLetterKeys | None = None
