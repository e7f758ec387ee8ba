"""
The definition of a stage: the program of its workers, and how to run it.

The classes are plain data, checked on creation. The YAML loader builds them, and so do
programs that embed :class:`~etlstage.AsyncSupervisor`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.protocol.base import Dialect, Shape
from etlstage.protocol.registry import default_dialect
from etlstage.settings.definition import Definition, Place, Section, broken, settings_of
from etlstage.settings.kind import Noun, Schema
from etlstage.settings.problem import Problem, dotted
from etlstage.settings.units import (
    COMMAND,
    Argument,
    Command,
    Folder,
    Mask,
    Name,
    Pointer,
    Size,
    Variables,
    Window,
)
from etlstage.stage.contract import ReplyContract
from etlstage.stage.policy import (
    BatchPolicy,
    ErrorPolicy,
    Order,
    PoolPolicy,
    RecyclePolicy,
    ResourceLimits,
    RestartPolicy,
    Timeouts,
)

__all__ = ("PYTHONS", "Stage", "WorkerProgram")

MiB: Final = 1024 * 1024

PYTHONS: Final = ("python", "python3")
"""Programs that stand for the interpreter that runs etlstage, in a written command."""

_NOWHERE: Final = Place(0)
_PROGRAM: Final = Place.WORKER | Place.OPTION
_NOT_COMMITTED: Final = {
    "order": "its worker gets messages in their order; remove order",
    "key": "its worker gets messages in their order; remove key",
    "window": "its worker gets one action at a time, of up to batch.size messages",
    "workers": "one worker gets its whole share of the input, and commits it; remove"
    " workers",
}
"""Keys that contradict a worker which commits, and what to do instead."""
_EXTRACTOR: Final = PoolPolicy(min=0, max=1, grow_at=1, idle=math.inf)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class WorkerProgram(Definition):
    """The program of a stage's workers, and how its process is to run."""

    label: ClassVar[tuple[str, ...]] = ("worker",)
    command: Command
    """Program and its arguments; no shell. Names in braces are replaced by values of
    the dialect, such as ``{eom}`` by that marker, escaped."""
    ready: bool = False
    """Whether the worker reports when it is ready, in the file that ``ETLSTAGE_STATUS``
    names; it receives nothing before that."""
    limits: ResourceLimits = field(default_factory=ResourceLimits)
    """Resource limits of a worker's process, enforced by the kernel."""
    env: Variables = field(default_factory=dict)
    """Variables added to the worker's environment."""
    cwd: Folder | None = None
    """Working directory of the worker; by default that of etlstage."""
    user: Argument | None = None
    """User that the worker runs as, by name or number; by default the user running
    etlstage."""
    group: Argument | None = None
    """Group that the worker runs as, by name or number; by default the user's, or that
    of etlstage. A group without a user has no supplementary groups."""
    umask: Mask | None = None
    """File mode mask of the worker; by default that of etlstage."""

    @classmethod
    def unfold(cls, value: Any) -> Any:
        """Return a command as the mapping that it stands for."""
        if isinstance(value, Mapping) or value is None:
            return value
        return {"command": COMMAND.read(value)}

    @classmethod
    def short_forms(cls) -> list[Schema]:
        """Describe a command."""
        return [COMMAND.schema()]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Stage(Definition):
    """
    One stage: what to run and how.

    Raises:
        ConfigError: If a value is wrong, or contradicts another; all are reported.

    """

    name: Name
    """Name of the stage in reports, logs and errors."""
    worker: Annotated[
        WorkerProgram | Sequence[str], Section.of(WorkerProgram), _PROGRAM
    ]
    """The program and how its process runs, or its command alone."""
    kind: Annotated[StageKind, _NOWHERE] = StageKind.TRANSFORM
    """What it does with messages."""
    dialect: Annotated[Dialect, _NOWHERE] = field(default_factory=default_dialect)
    """The dialect of the worker, with its settings."""
    batch: Annotated[BatchPolicy, Place.FED | Place.WRITE] = field(
        default_factory=BatchPolicy
    )
    """When a batch is closed, for workers that answer batches."""
    workers: Annotated[int | PoolPolicy, Section.of(PoolPolicy), Place.FED] = field(
        default_factory=PoolPolicy
    )
    """Number of processes that share the work, or how it follows the load."""
    order: Annotated[Order, Place.FED] = Order.TOTAL
    """Order in which replies are passed on: that of the messages (total), that of the
    messages for each key (key), or as soon as they are ready (none)."""
    key: Annotated[Pointer | None, Place.FED] = None
    """For order: key, a JSON pointer (RFC 6901) to the key in each message; by default
    the key that the source provides with the message."""
    window: Annotated[Window, Place.FED | Place.WRITE] = None
    """Maximum number of exchanges sent ahead of their replies. Automatic: 1 for a load
    stage, else as many as the worker answers in a moment. A load worker with markers,
    or one that requests each message with BNC, gets one at a time, whatever the number;
    with cocaine, ``dialect.concurrency`` is the number instead."""
    timeout: Annotated[Timeouts, _PROGRAM] = field(default_factory=Timeouts)
    """How long a worker may take for each of its tasks."""
    restart: Annotated[RestartPolicy, _PROGRAM] = field(default_factory=RestartPolicy)
    """When a worker is restarted."""
    on_error: Annotated[ErrorPolicy, Place.FED | Place.SINK | Place.OPTION] = field(
        default_factory=ErrorPolicy
    )
    """What becomes of a message that can't be processed."""
    expect: Annotated[ReplyContract, Place.TRANSFORM] = field(
        default_factory=ReplyContract
    )
    """What each reply must satisfy; any other reply is a mismatch."""
    on_mismatch: Annotated[
        Literal["dead_letter", "fail", "count"],
        Noun("outcome"),
        Place.TRANSFORM,
    ] = "dead_letter"
    """What happens if a reply does not satisfy expect: the message counts as one that
    can't be processed, and is not retried, see ``on_error`` (dead_letter), the run
    fails (fail), or the outputs are passed on and the mismatch is only counted
    (count)."""
    recycle: Annotated[RecyclePolicy, Place.FED | Place.WRITE] = field(
        default_factory=RecyclePolicy
    )
    """When a healthy worker is replaced."""
    max_message: Annotated[Size, _PROGRAM] = 64 * MiB
    """Maximum length of a message, in either direction, in bytes."""
    max_reply: Annotated[Size, _PROGRAM] = 256 * MiB
    """Maximum memory that a reply to one message or batch takes, in bytes: the length of
    all its outputs, and some bytes more for each."""

    def __post_init__(self) -> None:
        Definition.__post_init__(self)
        problem = self.dialect.problem(self.kind)
        if problem is not None:
            raise ConfigError(f"stage {self.name}: {problem}")

    @property
    def program(self) -> WorkerProgram:
        """The program, in whatever form ``worker`` was given."""
        assert isinstance(self.worker, WorkerProgram)
        return self.worker

    @property
    def pool(self) -> PoolPolicy:
        """How many workers there are; an extractor runs when it is asked."""
        if self.kind is StageKind.EXTRACT:
            return _EXTRACTOR
        assert isinstance(self.workers, PoolPolicy)
        return self.workers

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield contradictions between settings."""
        if "key" in given and given.get("order") is not Order.KEY:
            yield broken(("key",), "needs order: key")
        dialect = given.get("dialect")
        if isinstance(dialect, Dialect) and dialect.shape is Shape.COMMITTED:
            for key, instead in _NOT_COMMITTED.items():
                default = settings_of(cls)[key].default
                if given.get(key, default) != default:
                    yield broken(
                        (key,), f"is not for dialect {dialect.name}: {instead}"
                    )
        expect = given.get("expect")
        chosen = given.get("on_mismatch", "dead_letter") != "dead_letter"
        if chosen and not getattr(expect, "given", False):
            yield broken(
                ("on_mismatch",), "needs expect, with what a reply must satisfy"
            )
        if isinstance(expect, ReplyContract) and not expect.empty:
            kind = given.get("kind", StageKind.TRANSFORM)
            batches = isinstance(dialect, Dialect) and dialect.shape.batches
            if kind is not StageKind.TRANSFORM:
                yield broken(("expect",), f"is not for a {kind.value} stage")
            elif batches and expect.given:
                text = "is not for workers that answer a batch as a whole"
                yield broken(("expect",), text)
        timeout, extracts = given.get("timeout"), given.get("kind") is StageKind.EXTRACT
        if extracts and isinstance(timeout, Timeouts) and timeout.heartbeat is not None:
            text = "is not for an extract stage, whose idle worker is not watched"
            yield broken(("timeout", "heartbeat"), text)

    def _line(self, problem: Problem) -> str:
        stage = f"stage {self.name}" if self.name else "stage"
        return f"{stage}: {dotted(problem.loc)}: {problem.shown()}"
