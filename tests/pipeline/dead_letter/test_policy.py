from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import NoReturn

import anyio
import anyio.lowlevel
import pytest
import structlog
from structlog.testing import capture_logs

from etlstage.errors import (
    ContractBroken,
    EtlstageError,
    InvalidMessage,
    PayloadTooBig,
    RemoteProtocolError,
    SinkFailed,
    StageError,
    StageFailed,
    WorkerLost,
    WorkerRefusal,
    WorkerStartFailed,
)
from etlstage.messages import StageKind
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.policy import (
    DeadLetterPolicy,
    check_budget,
    config_of,
)
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.ledger import Account
from etlstage.pipeline.pipeline import _flushed
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import (
    ErrorBudget,
    ErrorPolicy,
    ResourceLimits,
    RestartPolicy,
    WorkerProgram,
)
from etlstage.stage import Stage as Configured
from etlstage.supervisor.diagnostic import Throttle
from etlstage.supervisor.exchange.exchange import Outcome
from tests.supervisor.refusing import refusing

OF_A_MESSAGE = [
    InvalidMessage("r", index=0),
    WorkerRefusal("n", stage="s", code=0, reason="n"),
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
    """Give an empty store for dead letters."""
    made = DeadLetters(tmp_path, pipeline="p")
    yield made
    made.close()


@pytest.fixture
def account() -> Account:
    """Give the account of a stage that has taken in 40 messages."""
    return Account("s", StageKind.TRANSFORM, received=40)


def made(
    account: Account,
    letters: DeadLetters | None,
    *,
    policy: ErrorPolicy | None = None,
    judged_of: int = 0,
) -> DeadLetterPolicy:
    """Return the policy of a stage."""
    policy = policy or ErrorPolicy(budget=ErrorBudget(count=2, share=None))
    return DeadLetterPolicy(
        account, policy, {"name": "s"}, letters, judged_of=judged_of
    )


@pytest.mark.parametrize("error", OF_A_MESSAGE, ids=repr)
async def test_message_is_dead_lettered(
    account: Account, letters: DeadLetters, error: Exception
) -> None:
    """Each message of a run becomes a letter of its own, with its own place."""
    policy = made(account, letters)
    await policy.settle(error, [b"a", b"b"], place=5)
    assert (account.dead, account.failed) == (2, 0)
    found = list(letters.letters())
    assert [(x.message, x.place, x.stage) for x in found] == [
        (b"a", 5, "s"),
        (b"b", 6, "s"),
    ]
    assert {x.kind for x in found} == {type(error).__name__}


async def test_message_that_is_dead_lettered_is_logged(
    account: Account, letters: DeadLetters
) -> None:
    """One log line names the message, its letter's id and the error in short."""
    policy = made(account, letters)
    text = "stage s: worker s-1 (pid 7) was killed by SIGSEGV; command: c; nothing"
    with capture_logs() as logs:
        await policy.settle(WorkerLost(text, stage="s"), [b"a"], place=5)
        await policy.settle(RemoteProtocolError(), [b"b"], place=6)
    (first, second) = letters.letters()
    assert logs[0] == {
        "event": "message dead-lettered",
        "log_level": "warning",
        "stage": "s",
        "message": 6,
        "id": first.id,
        "error": "was killed by SIGSEGV",
    }
    assert (logs[1]["id"], logs[1]["error"]) == (second.id, "RemoteProtocolError")


async def test_dead_letters_are_logged_by_cause(
    account: Account, letters: DeadLetters
) -> None:
    """The first of each cause, then the count at powers of ten (issue 26)."""
    account.received = 10**6
    policy = made(account, letters, policy=ErrorPolicy(budget=ErrorBudget(share=0.5)))
    with capture_logs() as logs:
        for n in range(250):
            error = RemoteProtocolError(f"no date in row {n}")
            await policy.settle(error, [b"a"], place=n)
        await policy.settle(RemoteProtocolError("no name"), [b"a"], place=250)
    seen = [(x["message"], x["error"], x.get("of_this_cause")) for x in logs]
    assert seen == [
        (1, "no date in row 0", None),
        (10, "no date in row 9", 10),
        (100, "no date in row 99", 100),
        (251, "no name", None),
    ]
    assert letters.count == 251


async def test_log_that_is_gone(account: Account, letters: DeadLetters) -> None:
    """A failing log keeps no message from being dead-lettered and counted."""

    def fail(*_: object) -> NoReturn:
        raise BrokenPipeError

    structlog.configure(processors=[fail])
    try:
        policy = made(account, letters)
        await policy.settle(RemoteProtocolError("p"), [b"a"], place=0)
    finally:
        structlog.reset_defaults()
    assert (account.dead, letters.count) == (1, 1)


@pytest.mark.parametrize("error", OF_A_STAGE, ids=repr)
async def test_what_ails_the_stage_ends_the_run(
    account: Account, letters: DeadLetters, error: Exception
) -> None:
    """Otherwise, without workers, every message would become a dead letter."""
    policy = made(account, letters)
    with pytest.raises(type(error)) as caught:
        await policy.settle(error, [b"a"], place=0)
    assert caught.value is error
    assert (account.dead, account.failed, letters.count) == (0, 0, 0)


@pytest.mark.parametrize("error", OF_A_MESSAGE, ids=repr)
async def test_first_failure_may_end_the_run(
    account: Account, letters: DeadLetters, error: Exception
) -> None:
    """If the policy asks for it, or if there is no store for dead letters."""
    strict = ErrorPolicy(then="fail")
    first, second = replace(account), replace(account)
    for account, policy in (
        (first, made(first, letters, policy=strict)),
        (second, made(second, None)),
    ):
        assert not policy.keeps
        with pytest.raises(type(error)) as caught:
            await policy.settle(error, [b"a"], place=0)
        assert caught.value is error
        assert account.dead == 0
        # A message without an outcome at the end of a run is unprocessed, not failed.
        assert account.failed == (0 if isinstance(error, WorkerLost) else 1)
    assert letters.count == 0


async def test_error_that_ends_the_run_names_message_and_setting(
    account: Account, letters: DeadLetters
) -> None:
    """In its story, as it may be raised elsewhere with the same text (issue 22)."""
    strict = made(account, letters, policy=ErrorPolicy(then="fail"))
    refused = WorkerRefusal("stage s: no date", stage="s", code=0, reason="no date")
    story: tuple[str, ...] = ("command: x",)
    refused.story = story
    unsendable = InvalidMessage("stage s: a NUL (message 12 of its input)", index=0)
    broken = ContractBroken("stage s: the reply is no JSON (message 1)")
    broken.ends_run = True
    failed = StageFailed("all workers failed", stage="s")
    unkept = SinkFailed("f", stage="s")
    for policy, error in (
        (strict, refused),
        (strict, unsendable),
        (made(account, letters), broken),
        (strict, failed),
        (made(account, None), unkept),
    ):
        with pytest.raises(EtlstageError):
            await policy.settle(error, [b"a"], place=11)
        assert error.place == 11
    assert refused.story == (
        "message 12 of stage s ended the run: on_error.then is fail",
        "command: x",
    )
    assert unsendable.story == (
        "the message of stage s ended the run: on_error.then is fail",
    )
    assert broken.story == ("message 12 of stage s ended the run: on_mismatch is fail",)
    assert failed.story == ()
    assert unkept.story == (
        "message 12 of stage s ended the run: no dead letters are kept",
    )


async def test_budget_that_is_spent_ends_the_run(
    account: Account, letters: DeadLetters
) -> None:
    """The error has all an operator needs next, and every message is kept."""
    policy = made(account, letters)
    error = WorkerLost("stage s: worker s-1 died", stage="s")
    for n in range(2):
        await policy.settle(error, [b"x"], place=n)
    with pytest.raises(StageError) as caught:
        await policy.settle(error, [b"x"], place=2)
    assert str(caught.value) == (
        "stage s: 3 of 40 messages could not be processed, on_error.budget allows"
        " 2 messages; the last one: stage s: worker s-1 died; they are kept, see"
        f" {letters.look}"
    )
    assert caught.value.__cause__ is error
    assert (account.dead, letters.count) == (3, 3)


async def test_budget_of_a_share(account: Account, letters: DeadLetters) -> None:
    """The share is of the messages received so far."""
    share = ErrorPolicy(budget=ErrorBudget(share=0.01))
    policy = made(account, letters, policy=share)
    error = WorkerLost("l", stage="s")
    account.received = 1
    await policy.settle(error, [b"x"], place=0)
    account.received = 200
    await policy.settle(error, [b"x"], place=1)
    account.received = 299
    with pytest.raises(StageError, match=r"3 of 299 .*budget allows 1%"):
        await policy.settle(error, [b"x"], place=2)


async def test_budget_of_a_part_of_the_input(
    account: Account, letters: DeadLetters
) -> None:
    """A task sees only its own part of the input, which may be worse than the whole."""
    share = ErrorPolicy(budget=ErrorBudget(share=0.01))
    policy = made(account, letters, policy=share, judged_of=400)
    await policy.settle(RemoteProtocolError("p"), [b"x"] * 4, place=0)
    with pytest.raises(StageError, match="5 of 40 messages"):
        await policy.settle(RemoteProtocolError("p"), [b"x"], place=4)


def test_budget_without_a_place_for_letters(account: Account) -> None:
    """Without kept letters, the error names no command to look at them."""
    account.dead = 1
    check_budget(account, ErrorBudget(count=1, share=None), last="no")
    account.dead = 2
    with pytest.raises(StageError) as caught:
        check_budget(account, ErrorBudget(count=1, share=None), last="no")
    assert str(caught.value) == (
        "stage s: 2 of 40 messages could not be processed, on_error.budget allows"
        " 1 message; the last one: no"
    )
    account.received, account.dead = 1, 1
    with pytest.raises(StageError, match="stage s: 1 of 1 message could not be"):
        check_budget(account, ErrorBudget(count=0, share=None), last="no")


class Counted(DeadLetters):
    """Dead letters that record how many were kept in each call."""

    kept: list[int]

    async def keep(self, letters: Sequence[DeadLetter]) -> None:
        """Keep letters."""
        self.kept.append(len(letters))
        await super().keep(letters)


async def test_many_at_once_are_written_together(
    account: Account, tmp_path: Path
) -> None:
    """The first is written at once, the others when there are enough, or on a flush."""
    account.received = 100_000
    letters = Counted(tmp_path, pipeline="p")
    letters.kept = []
    everything = ErrorPolicy(budget=ErrorBudget(share=1))
    policy = made(account, letters, policy=everything)
    error = RemoteProtocolError("p")
    for place in range(1000):
        await policy.hold(error, [b"%d" % place], place=place)
    assert letters.kept[0] == 1
    assert account.dead == letters.count == sum(letters.kept)
    await policy.flush()
    await policy.flush()
    assert account.dead == 1000
    assert len(letters.kept) < 1000
    assert [x.place for x in letters.letters()] == list(range(1000))
    letters.close()


def refused(count: int) -> Outcome:
    """Return the outcome of ``count`` messages, every third of them refused."""
    no = WorkerRefusal("n", stage="s", code=0, reason="n")
    messages = [b"%d" % n for n in range(count)]
    places = range(0, count, 3)
    groups = [()] * count
    noes = refusing((place, no) for place in places)
    return Outcome(10, messages, groups, count, refused=noes)


async def test_what_was_refused_in_one_run_is_written_together(
    account: Account, tmp_path: Path
) -> None:
    """Only refused messages, with their places, in several batches (issue 10)."""
    account.received = 100_000
    letters = Counted(tmp_path, pipeline="p")
    letters.kept = []
    policy = made(account, letters, policy=ErrorPolicy(budget=ErrorBudget(share=1)))
    await policy.hold_refused(refused(3000))
    await policy.flush()
    assert account.dead == letters.count == 1000
    assert max(letters.kept) < 1000
    assert len(letters.kept) < 20
    found = [(x.place, x.message) for x in letters.letters()]
    assert found == [(10 + n, b"%d" % n) for n in range(0, 3000, 3)]
    await policy.hold_refused(Outcome(0, [b"a"], [(b"A",)], 1))
    assert letters.count == 1000
    letters.close()


async def test_refusals_of_one_run_are_within_the_budget(
    account: Account, letters: DeadLetters
) -> None:
    """The message that exceeds the budget is the last dead-lettered one (issue 10)."""
    policy = made(account, letters)
    with pytest.raises(StageError, match="budget allows 2 messages"):
        await policy.hold_refused(refused(100))
    assert account.dead == letters.count == 3


async def test_what_is_held_is_within_the_budget(
    account: Account, letters: DeadLetters
) -> None:
    """The message that exceeds the budget ends the run at once, without a flush."""
    policy = made(account, letters)
    error = RemoteProtocolError("p")
    for place in range(2):
        await policy.hold(error, [b"x"], place=place)
    with pytest.raises(StageError, match="budget allows 2 messages"):
        await policy.hold(error, [b"x"], place=2)
    assert account.dead == letters.count == 3


async def test_what_is_held_is_kept_before_the_stage_fails(
    account: Account, letters: DeadLetters
) -> None:
    """Its messages had an outcome already."""
    policy = made(account, letters)
    for place in range(2):
        await policy.hold(RemoteProtocolError("p"), [b"x"], place=place)
    with pytest.raises(StageFailed):
        await policy.hold(StageFailed("f", stage="s"), [b"y"], place=2)
    assert account.dead == letters.count == 2


@pytest.mark.parametrize("end", ["error", "cancel"])
async def test_what_is_held_is_kept_when_the_run_ends_otherwise(
    account: Account, letters: DeadLetters, end: str
) -> None:
    """Held messages had an outcome already, whatever ends the run."""
    policy = made(account, letters)
    with anyio.CancelScope() as scope, suppress(KeyError):
        async with _flushed(policy):
            for place in range(2):
                await policy.hold(RemoteProtocolError("p"), [b"x"], place=place)
            if end == "error":
                raise KeyError
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert account.dead == letters.count == 2


async def test_what_is_being_written_is_kept_when_the_run_is_stopped(
    account: Account, letters: DeadLetters
) -> None:
    """Each is written once, and booked (issue 23)."""
    policy = made(account, letters)
    with anyio.CancelScope() as scope:
        async with _flushed(policy):
            for place in range(2):
                await policy.hold(RemoteProtocolError("p"), [b"x"], place=place)
            scope.cancel()
            await policy.flush()
    assert [letter.place for letter in letters.letters()] == [0, 1]
    assert account.dead == letters.count == 2


async def test_flood_of_letters_does_not_flood_the_log(
    account: Account, letters: DeadLetters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many causes the first are logged; causes are bounded, too (issue 26)."""
    # Nothing more may be logged, however long 5000 letters take.
    monkeypatch.setattr("etlstage.pipeline.dead_letter.policy._RATE", 1e-6)
    account.received = 100_000
    policy = made(account, letters, policy=ErrorPolicy(budget=ErrorBudget(share=1)))
    names = islice(product("abcdefghijk", repeat=4), 5000)
    with capture_logs() as logs:
        for place, name in enumerate(names):
            error = RemoteProtocolError("".join(name))
            await policy.hold(error, [b"x"], place=place)
        await policy.flush()
        assert len(logs) == 100
        policy._throttle = Throttle(rate=1e-6, burst=1)
        for place in range(6000):
            await policy.hold(RemoteProtocolError("p"), [b"x"], place=5000 + place)
        await policy.flush()
    # Due before were 1000 causes, and the others' 1st, 10th, 100th and 1000th letter.
    (last,) = logs[100:]
    assert last["of_this_cause"] == 10_000
    assert last["not_logged_before"] == 900 + 4
    assert letters.count == 11_000


async def test_letter_that_can_not_be_written(account: Account, tmp_path: Path) -> None:
    """The message counts as failed, and the run ends."""
    (tmp_path / "dead_letters").write_text("")
    policy = made(account, DeadLetters(tmp_path, pipeline="p"))
    with pytest.raises(StageError, match="can't write dead letters"):
        await policy.settle(RemoteProtocolError("p"), [b"a", b"b"], place=0)
    assert (account.dead, account.failed) == (0, 2)
    # So do messages that were held to be written later.
    policy = made(account, DeadLetters(tmp_path, pipeline="p"))
    policy._kept_at = math.inf
    await policy.hold(RemoteProtocolError("p"), [b"a"], place=0)
    with pytest.raises(StageError, match="can't write dead letters"):
        await policy.flush()
    assert (account.dead, account.failed) == (0, 3)


def test_stage_as_plain_json() -> None:
    """Everything needed to process a message again, but no environment values."""
    config = config_of(
        Configured(
            name="s",
            worker=WorkerProgram(
                command=("a", "b"),
                env={"TOKEN": "hunter2", "A": "b"},
                cwd=Path("/w"),
                limits=ResourceLimits(memory=5),
            ),
            restart=RestartPolicy(never_on=frozenset({3})),
        )
    )
    assert json.loads(json.dumps(config)) == config
    assert "hunter2" not in json.dumps(config)
    wanted = {
        "name": "s",
        "kind": "transform",
        "dialect": MarkerDialect().plain(),
    }
    assert {name: config[name] for name in wanted} == wanted
    assert config["restart"]["never_on"] == [3]
    worker = config["worker"]
    assert (worker["command"], worker["cwd"]) == (["a", "b"], "/w")
    assert (worker["env"], worker["limits"]["memory"]) == (["A", "TOKEN"], 5)
