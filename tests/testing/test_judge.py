"""What each oracle of ``fuzz`` reports, of workers in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from etlstage import worker as sdk
from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage
from etlstage.testing import (
    Case,
    ScriptedLaunch,
    ScriptedWorker,
    Step,
    WorkerUnderTest,
    run_virtually,
)
from etlstage.testing.fuzzing.oracle import CaseFailed, FailureKind, Oracles, judge
from etlstage.testing.scripted import Script
from tests.testing.check.answerers import (
    batched,
    brackets,
    each,
    echo,
    ends_with,
    ignores_the_end,
    makes,
)

pytestmark = pytest.mark.core

A = Step((b"a",))
B = Step((b"b",))
AB = Step((b"a", b"b"))


def found(
    script: Script,
    *steps: Step,
    batches: bool = False,
    stage: dict[str, Any] | None = None,
    **oracles: Any,  # noqa: ANN401
) -> tuple[FailureKind, str] | None:
    """Return the kind and the text of the failure that is found, if there is one."""
    dialect = MarkerDialect(mode=Mode.BATCH_SUPERVISOR if batches else Mode.SINGLE)
    given = {"dialect": dialect, **(stage or {})}
    made = Stage(name="w", worker=("w",), **given)
    launch = ScriptedLaunch(script)

    def start() -> WorkerUnderTest:
        return WorkerUnderTest(made, launch=launch)

    try:
        run_virtually(judge, start, Case(steps), Oracles(**oracles))
    except CaseFailed as failed:
        return failed.kind, failed.what
    return None


async def refuse_b(worker: ScriptedWorker, message: bytes) -> None:
    """Refuse one message."""
    await (worker.refuse("no") if message == b"b" else worker.reply(message))


async def count(worker: ScriptedWorker) -> None:
    """Refuse with a new reason each time; oracles must ignore reasons."""
    number = 0
    async for _ in worker.messages():
        number += 1
        await worker.refuse(f"no {number}")


def test_sound_worker_stands_all() -> None:
    """Refused messages have no outputs that could be wrong."""
    every: dict[str, Any] = {"one_output": True, "order_free": True, "idempotent": True}
    for script in (echo, each(refuse_b), count):
        assert found(script, A, AB, stateless=True, **every) is None
    answer = batched(lambda messages: messages)
    assert found(answer, AB, Step(()), B, batches=True, stateless=True, **every) is None


def test_one_output() -> None:
    """No output and two outputs are failures; the error names the message."""
    twice, drop_b = makes(lambda m: [m, m]), makes(lambda m: [m] if m == b"a" else [])
    said = "gave 2 outputs for b'a'"
    assert found(twice, A, one_output=True) == (FailureKind.OUTPUTS, said)
    said = "gave 0 outputs for b'b'"
    assert found(drop_b, AB, one_output=True) == (FailureKind.OUTPUTS, said)


def test_order_free() -> None:
    """It is checked for messages, messages within a batch, and refusals."""

    async def number(worker: ScriptedWorker) -> None:
        at = 0
        async for message in worker.messages():
            at += 1
            await worker.reply(message + b"%d" % at)

    said = "gave [b'a1'] for b'a', but [b'a2'] in the opposite order"
    assert found(number, A, B, order_free=True) == (FailureKind.ORDER_FREE, said)
    first = batched(lambda messages: messages[:1])
    said = "gave [b'a'] for batch [b'a', b'b'], but [b'b'] in the opposite order"
    assert found(first, AB, batches=True, order_free=True) == (
        FailureKind.ORDER_FREE,
        said,
    )

    async def refuse_first(worker: ScriptedWorker) -> None:
        at = 0
        async for _ in worker.messages():
            at += 1
            await (worker.refuse("no") if at == 1 else worker.reply())

    said = "gave a refusal for b'a', but [] in the opposite order"
    assert found(refuse_first, A, B, order_free=True) == (FailureKind.ORDER_FREE, said)


def test_idempotent() -> None:
    """Outputs that can't be sent again are not judged."""
    said = "gave [b'<<a>>'] for b'<a>', but [b'<a>'] before"
    assert found(brackets, A, idempotent=True) == (FailureKind.IDEMPOTENT, said)
    write_marker = makes(lambda message: [message + b"\x17"])
    assert found(write_marker, A, idempotent=True) is None


def test_stateless() -> None:
    """Each message is also sent alone."""

    async def remember(worker: ScriptedWorker) -> None:
        seen = b""
        async for message in worker.messages():
            seen += message
            await worker.reply(seen)

    said = "gave [b'ab'] for b'b', but [b'b'] alone"
    assert found(remember, A, B, stateless=True) == (FailureKind.STATELESS, said)


def test_json() -> None:
    """Each output is one document."""
    said = "wrote b'a', which is not JSON"
    assert found(echo, A, json_out=True) == (FailureKind.JSON, said)
    assert found(echo, Step((b"[1]",)), json_out=True) is None


@pytest.mark.parametrize("output", [b"NaN", b"[-Infinity]", b"[" * 10**5])
def test_output_that_only_python_reads_as_json(output: bytes) -> None:
    """Other programs refuse it (issue 26)."""
    judged = found(echo, Step((output,)), json_out=True)
    assert judged is not None
    assert judged[0] is FailureKind.JSON


def test_end() -> None:
    """The exit counts, even if all replies were right."""
    said = "the worker was killed by SIGKILL at the end of its input"
    assert found(ends_with(-9), A) == (FailureKind.CRASHES, said)

    said = "the worker did not exit: timed out after 10 seconds"
    assert found(ignores_the_end, A) == (FailureKind.HANGS, said)


def test_more_than_was_asked_for_is_found_at_the_next_step() -> None:
    """However late a surplus reply comes, it is not a crash."""

    async def write_more(worker: ScriptedWorker) -> None:
        await worker.read()
        await worker.reply(b"a")
        await worker.reply()
        await worker.read()

    kind, _ = found(write_more, A, B) or (None, "")
    assert kind is FailureKind.BREAKS


# --- models ---------------------------------------------------------------------------


def same(message: bytes) -> list[bytes]:
    """Return the message; refuse one."""
    if message == b"b":
        raise sdk.Refuse("not for me")
    return [message]


def first(messages: Sequence[bytes]) -> Iterable[bytes]:
    """Return the first of a batch."""
    return messages[:1]


def load(message: bytes) -> None:
    """Load a message."""
    assert message != b"bad"


def test_model() -> None:
    """Outputs must be equal, and so must refusals, whatever their reason."""
    model = f"{__name__}:same"
    assert found(each(refuse_b), A, AB, model=model) is None
    said = "gave [b'b'] for b'b', but a refusal in the model"
    assert found(echo, AB, model=model) == (FailureKind.MODEL, said)
    answer = batched(lambda messages: messages[:1])
    assert found(answer, AB, batches=True, model=f"{__name__}:first") is None


def test_model_has_the_markers_of_the_stage() -> None:
    """Its messages and outputs may contain the usual ones, as the worker's (issue 26)."""
    words = Markers(b"EOM", b"EOP", b"EOB", b"BNC", None)
    own = {"dialect": MarkerDialect(markers=words)}
    lines = Step((b"1\n2\0",))
    assert found(echo, lines, model=f"{__name__}:same", stage=own) is None
    judged = found(echo, B, model=f"{__name__}:same", stage=own)
    assert judged == (
        FailureKind.MODEL,
        "gave [b'b'] for b'b', but a refusal in the model",
    )


def test_model_of_a_load_worker() -> None:
    """It returns nothing; if it raises, the model is wrong, not the worker."""
    loads, answer = {"kind": StageKind.LOAD}, makes(lambda _: [])
    assert found(answer, A, model=f"{__name__}:load", stage=loads) is None
    with pytest.raises(ConfigError, match="the model failed for b'bad': Assertion"):
        found(answer, Step((b"bad",)), model=f"{__name__}:load", stage=loads)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("m:", "model is 'm:', expected module:function"),
        (":f", "model is ':f', expected module:function"),
        ("no_such_module:f", "model no_such_module:f: No module named"),
        (f"{__name__}:nothing", f"model {__name__}:nothing: module"),
    ],
)
def test_model_that_is_not_there(name: str, error: str) -> None:
    """The error names the model, and the reason."""
    with pytest.raises(ConfigError, match=error):
        found(echo, A, model=name)
