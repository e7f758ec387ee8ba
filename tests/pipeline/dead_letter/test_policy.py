from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import structlog
from structlog.testing import capture_logs

from etlstage.errors import (
    EtlstageError,
    MessageRefused,
    PayloadTooBig,
    RemoteProtocolError,
    SinkFailed,
    StageError,
    StageFailed,
    WorkerLost,
    WorkerStartFailed,
)
from etlstage.pipeline.dead_letter.policy import Refusals, config_of
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import ErrorBudget, ErrorPolicy, ResourceLimits, RestartPolicy
from etlstage.stage import Stage as Configured

OF_A_MESSAGE = [
    MessageRefused("r", index=0),
    RemoteProtocolError("p"),
    PayloadTooBig("b"),
    WorkerLost("l", stage="s"),
    SinkFailed("f", stage="s"),
]
OF_A_STAGE = [
    StageFailed("f", stage="s"),
    WorkerStartFailed("w", stage="s"),
    StageError("e", stage="s"),
    EtlstageError("x"),
    ValueError("bug"),
]


@pytest.fixture
def letters(tmp_path: Path) -> Iterator[DeadLetters]:
    """Give a place for dead letters."""
    made = DeadLetters(tmp_path, pipeline="p")
    yield made
    made.close()


def refusals(
    letters: DeadLetters | None, *, policy: ErrorPolicy | None = None
) -> Refusals:
    """Return the account of a stage."""
    budget = ErrorBudget(count=2, share=None)
    return Refusals("s", policy or ErrorPolicy(budget=budget), {"name": "s"}, letters)


@pytest.mark.parametrize("error", OF_A_MESSAGE, ids=repr)
async def test_message_is_put_aside(letters: DeadLetters, error: Exception) -> None:
    """Each one of a run, with its own place."""
    account = refusals(letters)
    await account.settle(error, [b"a", b"b"], place=5, received=9)
    assert (account.dead, account.failed) == (2, 0)
    found = list(letters.letters())
    assert [(x.message, x.place, x.stage) for x in found] == [
        (b"a", 5, "s"),
        (b"b", 6, "s"),
    ]
    assert {x.kind for x in found} == {type(error).__name__}


async def test_message_that_is_put_aside_is_logged(letters: DeadLetters) -> None:
    """In a line: which message, where it is now, and why in short."""
    account = refusals(letters)
    text = "stage s: worker s-1 (pid 7) was killed by SIGSEGV; command: c; nothing"
    with capture_logs() as logs:
        await account.settle(WorkerLost(text, stage="s"), [b"a"], place=5, received=9)
        await account.settle(RemoteProtocolError(), [b"b"], place=6, received=9)
    (first, second) = letters.letters()
    assert logs[0] == {
        "event": "message dead-lettered",
        "log_level": "warning",
        "stage": "s",
        "place": 5,
        "id": first.id,
        "error": "was killed by SIGSEGV",
    }
    assert (logs[1]["id"], logs[1]["error"]) == (second.id, "RemoteProtocolError")


async def test_log_that_is_gone(letters: DeadLetters) -> None:
    """The message is dead-lettered, and counted, all the same."""

    def fail(*_: object) -> NoReturn:
        raise BrokenPipeError

    structlog.configure(processors=[fail])
    try:
        account = refusals(letters)
        await account.settle(RemoteProtocolError("p"), [b"a"], place=0, received=9)
    finally:
        structlog.reset_defaults()
    assert (account.dead, letters.count) == (1, 1)


@pytest.mark.parametrize("error", OF_A_STAGE, ids=repr)
async def test_what_ails_the_stage_ends_the_run(
    letters: DeadLetters, error: Exception
) -> None:
    """Without workers every message would be a dead letter."""
    account = refusals(letters)
    with pytest.raises(type(error)) as caught:
        await account.settle(error, [b"a"], place=0, received=1)
    assert caught.value is error
    assert (account.dead, account.failed, letters.count) == (0, 0, 0)


@pytest.mark.parametrize("error", OF_A_MESSAGE, ids=repr)
async def test_first_failure_may_end_the_run(
    letters: DeadLetters, error: Exception
) -> None:
    """If that is wanted, or there is no place to put anything aside."""
    strict = ErrorPolicy(then="fail")
    for account in (refusals(letters, policy=strict), refusals(None)):
        assert not account.put_aside
        with pytest.raises(type(error)) as caught:
            await account.settle(error, [b"a"], place=0, received=1)
        assert caught.value is error
        assert account.dead == 0
        # What is lost is what has no other outcome in the end.
        assert account.failed == (0 if isinstance(error, WorkerLost) else 1)
    assert letters.count == 0


async def test_budget_that_is_spent_ends_the_run(letters: DeadLetters) -> None:
    """It says all that an operator asks next; nothing is lost by it."""
    account = refusals(letters)
    error = WorkerLost("stage s: worker s-1 died", stage="s")
    for n in range(2):
        await account.settle(error, [b"x"], place=n, received=40)
    with pytest.raises(StageError) as caught:
        await account.settle(error, [b"x"], place=2, received=40)
    assert str(caught.value) == (
        "stage s: 3 of 40 messages could not be processed, on_error.budget allows"
        " 2 messages; the last one: stage s: worker s-1 died; they are kept, see"
        f" {letters.look}"
    )
    assert caught.value.__cause__ is error
    assert (account.dead, letters.count) == (3, 3)


async def test_budget_of_a_share(letters: DeadLetters) -> None:
    """Of what came in so far."""
    account = refusals(letters, policy=ErrorPolicy(budget=ErrorBudget(share=0.01)))
    error = WorkerLost("l", stage="s")
    await account.settle(error, [b"x"], place=0, received=1)
    await account.settle(error, [b"x"], place=1, received=200)
    with pytest.raises(StageError, match=r"3 of 299 .*budget allows 1%"):
        await account.settle(error, [b"x"], place=2, received=299)


async def test_letter_that_can_not_be_written(tmp_path: Path) -> None:
    """The message is then a failed one, and the run ends."""
    (tmp_path / "dead_letters").write_text("")
    account = refusals(DeadLetters(tmp_path, pipeline="p"))
    with pytest.raises(StageError, match="can't write dead letters"):
        await account.settle(
            RemoteProtocolError("p"), [b"a", b"b"], place=0, received=2
        )
    assert (account.dead, account.failed) == (0, 2)


def test_stage_as_plain_json() -> None:
    """All it takes to run a message again, but no values of the environment."""
    config = config_of(
        Configured(
            name="s",
            command=("a", "b"),
            env={"TOKEN": "hunter2", "A": "b"},
            cwd=Path("/w"),
            restart=RestartPolicy(never_on=frozenset({3})),
            limits=ResourceLimits(memory=5),
        )
    )
    assert json.loads(json.dumps(config)) == config
    assert "hunter2" not in json.dumps(config)
    wanted = {
        "name": "s",
        "kind": "transform",
        "command": ["a", "b"],
        "env": ["A", "TOKEN"],
        "cwd": "/w",
        "dialect": MarkerDialect().plain(),
    }
    assert {name: config[name] for name in wanted} == wanted
    assert config["restart"]["never_on"] == [3]
    assert config["limits"]["memory"] == 5
