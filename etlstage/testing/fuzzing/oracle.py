"""
What must be true of a worker's replies, beside what is asked of every worker.

A case that failed reads as one call::

    verify(["./worker"], Case([Step([b"a"]), Step([b"a"])]), stateless=True)
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any, Final, Literal, NoReturn, TypeAlias

import anyio

from etlstage.errors import ConfigError, InvalidMessage
from etlstage.messages import StageKind, counted
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import ReplyContract, Stage
from etlstage.supervisor.contract import checker_of
from etlstage.testing.fuzzing.case import (
    AnsweredSteps,
    Case,
    FailureKind,
    converse,
    end,
    fail,
)
from etlstage.testing.fuzzing.steps import Saying, UnderTest, under_test
from etlstage.testing.replies import Reply

__all__ = ("Open", "Oracles", "compare", "judge", "model_of", "named", "verify")

Open: TypeAlias = Callable[[], AbstractAsyncContextManager[UnderTest]]
"""Gives a fresh process to talk to."""

_MODES: Final = {
    None: Mode.SINGLE,
    "supervisor": Mode.BATCH_SUPERVISOR,
    "worker": Mode.BATCH_WORKER,
}
_OF_OUTPUTS: Final = ("outputs", "JSON", "idempotent")  # a load worker has none
_LONG: Final = 60  # characters of a message in an error


@dataclass(frozen=True)
class Oracles:
    """What must be true of a worker's replies; nothing, unless it is asked for."""

    one_output: bool = False
    """Each message has one output; each batch as many as it has messages."""
    json_out: bool = False
    """Each output is a JSON document."""
    idempotent: bool = False
    """An output that is sent again comes back as it is."""
    order_free: bool = False
    """The messages have the same outputs when they are sent in the opposite order."""
    stateless: bool = False
    """A message, or batch, has the outputs that it has in a fresh process."""
    model: str = ""
    """The worker does as this function does, ``module:function``, which is one that
    ``worker.transform`` takes, or ``worker.transform_batch``, ``worker.load``."""

    def joined(self, contract: ReplyContract) -> Oracles:
        """Return the same with what a stage promises of its replies."""
        return replace(
            self,
            one_output=self.one_output or contract.outputs == 1,
            json_out=self.json_out or contract.json,
            order_free=self.order_free or contract.order_free,
            stateless=self.stateless or contract.stateless,
        )

    def left_out(self, kind: StageKind) -> list[str]:
        """Return what is not asked of a worker of that kind, and could be."""
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
        """Those that are asked for, as arguments."""
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
    Have a worker stand a case.

    Args:
        command: Program and arguments; or a stage, of which the markers don't count.
        case: The conversation.
        batch: Who closes a batch, if a command answers batches.
        kind: Of the stage, where it is not given.
        timeout: How long each reply, and the exit, may take, in seconds.
        oracles: As :class:`Oracles` has them, such as ``stateless=True``.

    Raises:
        CaseFailed: If it does not.

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
    Have fresh processes stand a case, and return what was sent; see :func:`verify`.

    Raises:
        CaseFailed: If they don't.

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
    Ask the oracles about what was sent.

    Raises:
        CaseFailed: If one finds a failure.

    """
    batches = worker.stage.dialect.shape.batches
    exchanges = _single(exchanged, batches=batches)
    oracles = oracles.joined(worker.stage.expect)
    checker = checker_of(worker.stage)
    for step, replies in exchanges:
        outputs = _outputs(replies)
        if outputs is None:
            continue
        # Of a session that is not as a stage has them it is unknown what is right.
        usual = batches or len(step.messages) == 1
        if oracles.one_output and usual and len(outputs) != len(step.messages):
            what = f"gave {counted(len(outputs), 'output')} for {_asked(step)}"
            fail(worker, FailureKind.OUTPUTS, what)
        if oracles.json_out:
            for output in outputs:
                with suppress(ValueError):
                    json.loads(output)
                    continue
                fail(
                    worker,
                    FailureKind.JSON,
                    f"wrote {_shown(output)}, which is no JSON",
                )
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
        await _turn_round(start, worker, exchanges, batches=batches)
    if oracles.idempotent:
        await _repeat(worker, exchanges)


def _single(exchanged: AnsweredSteps, *, batches: bool) -> AnsweredSteps:
    """Return the exchanges, each by itself."""
    return [
        single
        for step, replies in exchanged
        for single in step.alone(replies, batches=batches)
    ]


def _outputs(replies: Sequence[Reply]) -> list[bytes] | None:
    """Return all outputs, None if something was refused."""
    if any(reply.refused is not None for reply in replies):
        return None
    return [output for reply in replies for output in reply.outputs]


async def _alone(start: Open, step: Saying) -> list[Reply]:
    async with start() as worker:
        ((_, replies),) = await converse(worker, [step])
        return replies


async def _turn_round(
    start: Open, worker: UnderTest, exchanged: AnsweredSteps, *, batches: bool
) -> None:
    """Send the same in the opposite order: within batches, if there are any."""
    turned = [step.turned() for step, _ in exchanged[::-1]]
    async with start() as other:
        again = await converse(other, turned)
    for (step, replies), (_, others) in zip(exchanged, again[::-1], strict=True):
        first, second = _outputs(replies), _outputs(others)
        if (first is None) != (second is None) or Counter(first) != Counter(second):
            how = "in the opposite order"
            _differ(worker, FailureKind.ORDER_FREE, step, replies, others, how)


async def _repeat(worker: UnderTest, exchanged: AnsweredSteps) -> None:
    """Send outputs again."""
    batches = worker.stage.dialect.shape.batches
    for asked, replies in exchanged:
        outputs = _outputs(replies)
        if not outputs:
            continue
        step = asked.of(outputs, batches=batches)
        # What may come from a worker may not always be sent to it.
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
    """Compare with what the model does."""
    for step, replies in exchanged:
        if not batches and len(step.messages) != 1:
            continue  # it is a session that no stage has
        asked = [*step.messages] if batches else step.messages[0]
        try:
            wanted = _modelled(worker, model, asked)
        except Exception as error:
            text = f"the model failed for {_asked(step)}: {error!r}"
            raise ConfigError(text) from error
        if _outputs(replies) != _outputs([wanted]):
            _differ(worker, FailureKind.MODEL, step, replies, [wanted], "in the model")


def _modelled(
    worker: UnderTest,
    model: Callable[..., Iterable[bytes] | None],
    asked: bytes | list[bytes],
) -> Reply:
    from etlstage import worker as sdk  # only this needs it

    if worker.stage.dialect.connection is not None:
        try:
            return Reply((*(model(asked) or ()),))  # no marker is in the way
        except sdk.Refuse as no:
            return Reply((), str(no))
    loads = worker.stage.kind is StageKind.LOAD
    (result,) = sdk.run(
        model, [asked], kind="load" if loads else "transform", on_error="exit"
    )
    if isinstance(result, sdk.Refuse):
        return Reply((), str(result))
    return Reply((*result,))


def model_of(name: str) -> Callable[..., Iterable[bytes] | None]:
    """Return the function that is called ``module:function``; see :func:`named`."""
    found: Callable[..., Iterable[bytes] | None] = named(name, "model", "function")
    return found


def named(name: str, what: str, kind: str = "name") -> Any:  # noqa: ANN401
    """
    Return what is called ``module:name``, for an option ``what``.

    Raises:
        ConfigError: If there is none.

    """
    module, _, own = name.partition(":")
    if not module or not own:
        raise ConfigError(f"{what} is {name!r}, expected module:{kind}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as 'python -m' looks for it
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
