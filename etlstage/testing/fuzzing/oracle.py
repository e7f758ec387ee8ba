"""
Cases (scripted conversations with a worker), and oracles that judge the replies.

Every worker has to answer, keep to the protocol, and exit cleanly when its input ends;
oracles decide what else is required.

A report shows a failed case as one call that reproduces it::

    verify(["./worker"], Case([Step([b"a"]), Step([b"a"])]), stateless=True)
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from importlib import import_module
from typing import Any, Final, Literal, NoReturn, Self, TypeAlias

import anyio

from etlstage.errors import ConfigError, InvalidMessage
from etlstage.messages import StageKind, counted
from etlstage.protocol.base import Dialect, Shape
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import ReplyContract, Stage
from etlstage.stage.contract import is_json
from etlstage.supervisor.contract import checker_of
from etlstage.testing.fuzzing.steps import (
    Saying,
    UnderTest,
    shown_steps,
    step_of,
    under_test,
)
from etlstage.testing.replies import Reply
from etlstage.testing.transcript import WorkerMisbehaved
from etlstage.transport.base import describe_status

__all__ = (
    "Case",
    "CaseFailed",
    "FailureKind",
    "Open",
    "Oracles",
    "SessionCase",
    "compare",
    "converse",
    "end",
    "fail",
    "judge",
    "model_of",
    "modelled",
    "named",
    "verify",
)

_VALUES: Final = re.compile(r"b?'[^']*'|b?\"[^\"]*\"|[0-9,]+|:.*", re.DOTALL)
_SURPLUS: Final = re.compile(r"too many|more than its reply")
_ENDED: Final = re.compile(r"status [0-9]+|SIG[A-Z]+")
_RAISED: Final = re.compile(r"^ {20}([A-Za-z_.]+)(?=:|$)", re.MULTILINE)


class FailureKind(StrEnum):
    """How a worker fails; the value is its text in a report."""

    HANGS = "it hangs"
    CRASHES = "it crashes"
    BREAKS = "it breaks the protocol"
    OUTPUTS = "it does not give one output for each message"
    JSON = "it writes output that is not JSON"
    EXPECT = "its reply breaks expect"
    IDEMPOTENT = "it changes its own output"
    ORDER_FREE = "its replies depend on the order of the messages"
    STATELESS = "its replies depend on earlier messages"
    MODEL = "it differs from the model"

    @property
    def of_any(self) -> bool:
        """Whether this is a failure for any worker, whatever its task."""
        return self in (FailureKind.HANGS, FailureKind.CRASHES, FailureKind.BREAKS)

    @property
    def label(self) -> str:
        """The form used in file names."""
        return self.name.lower().replace("_", "-")


class CaseFailed(WorkerMisbehaved):
    """
    Raised when a case makes a worker fail.

    Attributes:
        kind: How it fails.

    """

    def __init__(self, kind: FailureKind, what: str, transcript: str) -> None:
        super().__init__(what, transcript)
        self.kind = kind

    @property
    def signature(self) -> tuple[str, ...]:
        """
        The key by which failures count as the same bug.

        Apart from the kind, for a crash it has how the worker exited and the last
        exception in its output; for a protocol error, its text without the data.
        """
        if self.kind is FailureKind.BREAKS:
            surplus = _SURPLUS.search(self.what)
            return self.kind, "surplus" if surplus else _VALUES.sub("", self.what)
        if self.kind is not FailureKind.CRASHES:
            return (self.kind,)
        ended = _ENDED.findall(self.what)
        raised = _RAISED.findall(self.transcript)
        return self.kind, *ended, *raised[-1:]


AnsweredSteps: TypeAlias = list[tuple[Saying, list[Reply]]]
"""Each step that was sent, with the replies to it."""


@dataclass(frozen=True)
class Case:
    """A conversation with a worker, from its start to its end."""

    steps: Sequence[Saying]
    """Each a :class:`Step`; :class:`Calls` in a dialect with named exchanges, and
    :class:`Records` in one whose workers checkpoint."""
    markers: Markers = field(default_factory=Markers)
    """The markers, in a dialect that has them."""

    def __repr__(self) -> str:
        steps = shown_steps(self.steps)
        default = Markers()
        given = zip(Markers._fields, self.markers, default, strict=True)
        marked = ", ".join(f"{n}={mine!r}" for n, mine, usual in given if mine != usual)
        return f"Case({steps}, Markers({marked}))" if marked else f"Case({steps})"

    @property
    def count(self) -> int:
        """Number of messages."""
        return sum(len(step.messages) for step in self.steps)

    @property
    def fresh(self) -> bool:
        """Whether it requires a process that has received nothing before."""
        return any(step.fresh for step in self.steps)

    def on(self, stage: Stage) -> Stage:
        """Return the stage with the case's markers, if its dialect has markers."""
        if not isinstance(stage.dialect, MarkerDialect):
            return stage
        return replace(stage, dialect=replace(stage.dialect, markers=self.markers))

    def having(self, steps: Sequence[Saying]) -> Self:
        """Return a copy with other steps."""
        return replace(self, steps=(*steps,))

    def written(self, dialect: Dialect) -> Iterator[str]:
        """Yield what is written for each step, as text, and then how the case ends."""
        first = 1
        for step in self.steps:
            yield step.shown(dialect, first)
            first += step.exchanges
        if dialect.shape is Shape.COMMITTED:
            yield "the end of the shard"
            return
        connected = dialect.connection is not None
        yield "a terminate" if connected else "the end of the input"

    def imports(self) -> Iterator[str]:
        """Yield the imports of a program that contains the case's repr."""
        names = {"Case", "verify"}.union(*(step.names() for step in self.steps))
        if self.markers != Markers():
            yield "from etlstage.protocol.marker import Markers"
        yield f"from etlstage.testing import {', '.join(sorted(names))}"

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain JSON, for :meth:`from_plain`."""
        steps = [step.to_plain() for step in self.steps]
        return {"steps": steps, "markers": self.markers.to_text()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Build from plain JSON."""
        steps = tuple(map(step_of, plain["steps"]))
        return cls(steps, Markers.from_text(**plain.get("markers", {})))


SessionCase: TypeAlias = Case
"""The former name of :class:`Case` for sessions."""


async def converse(worker: UnderTest, steps: Iterable[Saying]) -> AnsweredSteps:
    """
    Send the steps of a case, and return the replies to each.

    Raises:
        CaseFailed: If the worker hangs, crashes or breaks the protocol.

    """
    replies: AnsweredSteps = []
    for step in steps:
        # The worker may have broken the protocol after its last reply.
        await _classified(worker, worker.until(lambda: not worker.broken, ""))
        given = await _classified(worker, step.exchange(worker))
        replies.append((step, given))
    return replies


async def end(worker: UnderTest) -> None:
    """
    Close a worker, and wait for its exit.

    Raises:
        CaseFailed: If it does not exit, or not cleanly.

    """
    status = await _classified(worker, worker.close())
    # A worker that connects is asked to terminate, and may exit with any status.
    if status < 0 or (status and worker.stage.dialect.connection is None):
        what = f"the worker {describe_status(status)} at the end of its input"
        fail(worker, FailureKind.CRASHES, what)


async def _classified(worker: UnderTest, doing: Awaitable[Any]) -> Any:  # noqa: ANN401
    try:
        return await doing
    except CaseFailed:
        raise
    except WorkerMisbehaved as failed:
        broken = worker.broken
        kind = FailureKind.HANGS if worker.status is None else FailureKind.CRASHES
        raise CaseFailed(
            FailureKind.BREAKS if broken else kind, failed.what, failed.transcript
        ) from None


def fail(worker: UnderTest, kind: FailureKind, what: str) -> NoReturn:
    """Raise :class:`CaseFailed` with the transcript."""
    try:
        worker.fail("")
    except WorkerMisbehaved as failed:
        raise CaseFailed(kind, what, failed.transcript) from None


Open: TypeAlias = Callable[[], AbstractAsyncContextManager[UnderTest]]
"""Starts a fresh process to talk to."""

_MODES: Final = {
    None: Mode.SINGLE,
    "supervisor": Mode.BATCH_SUPERVISOR,
    "worker": Mode.BATCH_WORKER,
}
_OF_OUTPUTS: Final = ("outputs", "JSON", "idempotent")  # not for load workers
_LONG: Final = 60  # characters of a message in an error


@dataclass(frozen=True)
class Oracles:
    """Properties that a worker's replies must have; by default none."""

    one_output: bool = False
    """Each message has one output; each batch, one per message."""
    json_out: bool = False
    """Each output is a JSON document."""
    idempotent: bool = False
    """An output that is sent back as a message is returned unchanged."""
    order_free: bool = False
    """Messages have the same outputs when sent in reverse order."""
    stateless: bool = False
    """A message, or batch, has the same outputs as in a fresh process."""
    model: str = ""
    """The worker gives the same outputs as this function, ``module:function``, which is
    written for ``worker.transform``, ``worker.transform_batch`` or ``worker.load``."""

    def joined(self, contract: ReplyContract) -> Oracles:
        """Return a copy that also checks what a stage promises of its replies."""
        return replace(
            self,
            one_output=self.one_output or contract.outputs == 1,
            json_out=self.json_out or contract.json,
            order_free=self.order_free or contract.order_free,
            stateless=self.stateless or contract.stateless,
        )

    def left_out(self, kind: StageKind) -> list[str]:
        """Return the names of oracles that apply to that kind, and are off."""
        named = {
            "outputs": self.one_output,
            "JSON": self.json_out,
            "idempotent": self.idempotent,
            "order-free": self.order_free,
            "stateless": self.stateless,
            "model": self.model,
        }
        without = _OF_OUTPUTS if kind is StageKind.LOAD else ()
        return [name for name, on in named.items() if not on and name not in without]

    @property
    def given(self) -> dict[str, Any]:
        """The oracles that are on, as arguments."""
        return {name: value for name, value in asdict(self).items() if value}


def verify(
    command: Sequence[str] | Stage,
    case: Case,
    *,
    batch: Literal["supervisor", "worker"] | None = None,
    kind: Literal["transform", "load"] = "transform",
    timeout: float = 10.0,
    **oracles: Any,  # noqa: ANN401 - checked by the class
) -> None:
    """
    Run a case against a worker.

    Args:
        command: Program and arguments; or a stage, whose markers the case replaces.
        case: The conversation.
        batch: For a command, who closes a batch; None: it answers single messages.
        kind: For a command, the kind of its stage.
        timeout: How long each reply, and the exit, may take, in seconds.
        oracles: Fields of :class:`Oracles`, such as ``stateless=True``.

    Raises:
        CaseFailed: If the worker fails.

    """
    if not isinstance(command, Stage):
        command = Stage(
            name="worker",
            kind=StageKind(kind),
            worker=command,
            dialect=MarkerDialect(mode=_MODES[batch]),
        )
    stage = case.on(command)

    def start() -> UnderTest:
        return under_test(stage, timeout=timeout)

    anyio.run(judge, start, case, Oracles(**oracles))


async def judge(start: Open, case: Case, oracles: Oracles) -> AnsweredSteps:
    """
    Run a case in fresh processes, and return its steps and replies.

    Raises:
        CaseFailed: If a worker fails.

    """
    async with start() as worker:
        replies = await converse(worker, case.steps)
        await compare(start, worker, replies, oracles)
        await end(worker)
        return replies


async def compare(
    start: Open, worker: UnderTest, exchanged: AnsweredSteps, oracles: Oracles
) -> None:
    """
    Check the replies with the oracles.

    Raises:
        CaseFailed: If an oracle finds a failure.

    """
    batches = worker.stage.dialect.shape.batches
    exchanges = _single(exchanged, batches=batches)
    oracles = oracles.joined(worker.stage.expect)
    checker = checker_of(worker.stage)
    for step, replies in exchanges:
        outputs = _outputs(replies)
        if outputs is None:
            continue
        # A stage never opens a session with another number of messages, so the right
        # outputs for one are unknown.
        usual = batches or len(step.messages) == 1
        if oracles.one_output and usual and len(outputs) != len(step.messages):
            what = f"gave {counted(len(outputs), 'output')} for {_asked(step)}"
            fail(worker, FailureKind.OUTPUTS, what)
        if oracles.json_out:
            for output in outputs:
                if not is_json(output):
                    what = f"wrote {_shown(output)}, which is not JSON"
                    fail(worker, FailureKind.JSON, what)
        if checker is not None and usual and (flaw := checker(outputs)) is not None:
            what = f"gave {_shown(outputs)} for {_asked(step)}, which {flaw}"
            fail(worker, FailureKind.EXPECT, what)
    if oracles.model:
        _follow(worker, model_of(oracles.model), exchanges, batches=batches)
    if oracles.stateless:
        for step, replies in exchanges:
            alone = await _alone(start, step)
            if _outputs(alone) != _outputs(replies):
                _differ(worker, FailureKind.STATELESS, step, replies, alone, "alone")
    if oracles.order_free:
        await _turn_round(start, worker, exchanges)
    if oracles.idempotent:
        await _repeat(worker, exchanges)


def _single(exchanged: AnsweredSteps, *, batches: bool) -> AnsweredSteps:
    return [
        single
        for step, replies in exchanged
        for single in step.alone(replies, batches=batches)
    ]


def _outputs(replies: Sequence[Reply]) -> list[bytes] | None:
    """Return all outputs; None if a reply is a refusal."""
    if any(reply.refused is not None for reply in replies):
        return None
    return [output for reply in replies for output in reply.outputs]


async def _alone(start: Open, step: Saying) -> list[Reply]:
    async with start() as worker:
        ((_, replies),) = await converse(worker, [step])
        return replies


async def _turn_round(start: Open, worker: UnderTest, exchanged: AnsweredSteps) -> None:
    """Compare with the replies in reverse order: of steps, and within each step."""
    turned = [step.turned() for step, _ in exchanged[::-1]]
    async with start() as other:
        again = await converse(other, turned)
    for (step, replies), (_, others) in zip(exchanged, again[::-1], strict=True):
        first, second = _outputs(replies), _outputs(others)
        if (first is None) != (second is None) or Counter(first) != Counter(second):
            how = "in the opposite order"
            _differ(worker, FailureKind.ORDER_FREE, step, replies, others, how)


async def _repeat(worker: UnderTest, exchanged: AnsweredSteps) -> None:
    batches = worker.stage.dialect.shape.batches
    for asked, replies in exchanged:
        outputs = _outputs(replies)
        if not outputs:
            continue
        step = asked.of(outputs, batches=batches)
        # Some outputs may not be sent as messages.
        with suppress(InvalidMessage):
            ((_, again),) = await converse(worker, [step])
            if _outputs(again) != outputs:
                same = [Reply((output,)) for output in outputs]
                _differ(worker, FailureKind.IDEMPOTENT, step, again, same, "before")


def _follow(
    worker: UnderTest,
    model: Callable[..., Iterable[bytes] | None],
    exchanged: AnsweredSteps,
    *,
    batches: bool,
) -> None:
    stage = worker.stage
    loads = stage.kind is StageKind.LOAD
    for step, replies in exchanged:
        if not batches and len(step.messages) != 1:
            continue  # no stage opens such a session
        asked = [*step.messages] if batches else step.messages[0]
        try:
            wanted = modelled(stage.dialect, model, asked, loads=loads)
        except Exception as error:
            text = f"the model failed for {_asked(step)}: {error!r}"
            raise ConfigError(text) from error
        if _outputs(replies) != _outputs([wanted]):
            _differ(worker, FailureKind.MODEL, step, replies, [wanted], "in the model")


def modelled(
    dialect: Dialect,
    model: Callable[..., Iterable[bytes] | None],
    asked: bytes | list[bytes],
    *,
    loads: bool = False,
) -> Reply:
    """
    Return the reply of a worker's model.

    Args:
        dialect: The dialect of the worker.
        model: Returns the outputs.
        asked: A message; in a stage with batches, a list of them.
        loads: Whether the model is a load function, which returns None.

    Raises:
        InvalidMessage: If an output can't be written with the dialect's markers.
        TypeError: If the model returns something else.

    """
    from etlstage import worker as sdk  # only this needs it

    try:
        if dialect.connection is not None:
            return Reply((*(model(asked) or ()),))  # no markers: any outputs will do
        (result,) = sdk.run(
            model,
            [asked],
            kind="load" if loads else "transform",
            on_error="exit",
            markers=getattr(dialect, "markers", None),
        )
        if isinstance(result, sdk.Refuse):
            raise result
    except sdk.Refuse as no:  # sdk.run raises it, too, if there is no marker err
        return Reply((), str(no))
    return Reply((*result,))


def model_of(name: str) -> Callable[..., Iterable[bytes] | None]:
    """Import the function named ``module:function``; see :func:`named`."""
    found: Callable[..., Iterable[bytes] | None] = named(name, "model", "function")
    return found


def named(name: str, what: str, kind: str = "name") -> Any:  # noqa: ANN401
    """
    Import the object named ``module:name``; ``what`` is the option for errors.

    Raises:
        ConfigError: If there is no such object.

    """
    module, _, own = name.partition(":")
    if not module or not own:
        raise ConfigError(f"{what} is {name!r}, expected module:{kind}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # 'python -m' searches the current directory, too
    try:
        return getattr(import_module(module), own)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{what} {name}: {error}") from None


def _differ(
    worker: UnderTest,
    kind: FailureKind,
    step: Saying,
    replies: Sequence[Reply],
    others: Sequence[Reply],
    how: str,
) -> NoReturn:
    what = f"gave {_replied(replies)} for {_asked(step)}, but {_replied(others)} {how}"
    fail(worker, kind, what)


def _asked(step: Saying) -> str:
    messages = [*step.messages]
    return f"batch {_shown(messages)}" if len(messages) != 1 else _shown(messages[0])


def _replied(replies: Sequence[Reply]) -> str:
    outputs = _outputs(replies)
    return "a refusal" if outputs is None else _shown(outputs)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONG else f"{text[: _LONG - 20]} ... {text[-15:]}"
