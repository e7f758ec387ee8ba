"""The contract of a stage, from its schema's file to its counts."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from etlstage import AsyncSupervisor, ContractBroken, ReplyContract
from etlstage.errors import Attempt, ConfigError
from etlstage.stage import ErrorPolicy
from etlstage.stage.contract import Checker
from etlstage.supervisor.contract import checker_of, with_schema
from etlstage.telemetry.prometheus import PrometheusMeter
from etlstage.testing import ScriptedLaunch, ScriptedWorker
from tests.staged import staged

pytestmark = [pytest.mark.core, pytest.mark.virtual]


def test_schema_is_read_from_its_file(tmp_path: Path) -> None:
    """Relative to a folder; a mapping, or none, is left as it is (issue 26)."""
    (tmp_path / "out.json").write_text('{"type": "object"}')
    stage = staged(("a",), expect=ReplyContract(schema=Path("out.json")))
    read = with_schema(stage, tmp_path)
    assert read.expect.schema == {"type": "object"}
    assert with_schema(read) is read
    checker = checker_of(read)
    assert isinstance(checker, Checker)
    assert checker([b"[]"]) is not None
    assert checker_of(staged(("a",))) is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, r"expect.schema: there is no file .*/out.json"),
        ("{", r"expect.schema: .*/out.json is not a JSON document: "),
        ("[]", r"expect.schema: .*/out.json is not a JSON object"),
        ('{"type": 1}', r"expect.schema is not a JSON Schema: type: 1 is not"),
    ],
)
def test_schema_that_can_not_be_used(
    tmp_path: Path, text: str | None, error: str
) -> None:
    """The error names the stage and the reason (issue 26)."""
    if text is not None:
        (tmp_path / "out.json").write_text(text)
    contract = ReplyContract(schema=tmp_path / "out.json")
    with pytest.raises(ConfigError, match=f"^stage t: {error}"):
        AsyncSupervisor(staged(("a",), expect=contract))
    folder = ReplyContract(schema=tmp_path)
    with pytest.raises(ConfigError, match=r"expect.schema: .*: Is a directory"):
        checker_of(staged(("a",), expect=folder))


async def dozing(worker: ScriptedWorker) -> None:
    """Answer each message with itself, after that many seconds."""
    async for message in worker.messages():
        await anyio.sleep(float(message))
        await worker.reply(message)


async def test_slow_reply_is_a_mismatch() -> None:
    """Replies that waited for it are not slow; mismatches count by name (issue 26)."""
    meter = PrometheusMeter()
    contract = ReplyContract(max_seconds=2, where="this < 9")
    run = staged(("a",), expect=contract, window=9)
    launch = ScriptedLaunch(dozing)
    async with AsyncSupervisor(run, launch=launch, meter=meter) as supervisor:
        results = await supervisor.submit([b"1", b"3", b"0", b"2", b"9.5", b"1"])
        assert supervisor.mismatches == {"max_seconds": 1, "where": 1}
    errors = [result.error for result in results]
    assert [type(error) for error in errors] == [
        *(type(None), ContractBroken, type(None), type(None), ContractBroken),
        type(None),
    ]
    assert (
        "the reply breaks expect.max_seconds: took 3 s, expected no more than 2 s"
        in str(errors[1])
    )
    assert 'etlstage_mismatches_total{expect="where",stage="t"} 1.0' in meter.render()


async def forgetful(worker: ScriptedWorker) -> int:
    """Die of the first message; later, answer it with nothing."""
    async for _ in worker.messages():
        if worker.start == 1:
            return 3
        await worker.reply()
    return 0


async def test_error_has_who_broke_the_contract() -> None:
    """After the attempts before it; it is the last, as that worker lives (issue 26)."""
    policy = ErrorPolicy(retries=2, retries_refused=2)
    run = staged(("a",), expect=ReplyContract(outputs=1), on_error=policy)
    async with AsyncSupervisor(run, launch=ScriptedLaunch(forgetful)) as supervisor:
        (result, other) = await supervisor.submit([b"a", b"b"])
    assert isinstance(result.error, ContractBroken)
    first, last = result.error.attempts
    assert first.worker == "t-1"
    assert "exited with status 3" in first.error
    fate = "the reply breaks expect.outputs: 0 outputs, not 1"
    assert last == Attempt("t-1", last.pid, fate, last.story)
    assert last.story[-1].startswith(f"started (pid {last.pid}, start 2)")
    assert last.pid > first.pid
    assert isinstance(other.error, ContractBroken)
    assert other.error.attempts[-1][:3] == last[:3]


async def test_mismatches_that_are_only_counted() -> None:
    """The outputs are passed on (issue 26)."""
    contract = ReplyContract(outputs=2)
    run = staged(("a",), expect=contract, on_mismatch="count")
    async with AsyncSupervisor(run, launch=ScriptedLaunch(dozing)) as supervisor:
        (result,) = await supervisor.submit([b"0"])
        assert supervisor.mismatches == {"outputs": 1}
    assert result.outputs == (b"0",)
