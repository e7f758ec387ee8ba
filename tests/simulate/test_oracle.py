"""What a simulation asserts of a run, and the messages of its violations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from etlstage.errors import LedgerImbalance, RepliesDoubtful, SourceFailed
from etlstage.messages import StageKind
from etlstage.pipeline import DeadLetter, Report
from etlstage.pipeline.interfaces import Output
from etlstage.pipeline.ledger import Account, Ledger
from etlstage.pipeline.report import Status
from etlstage.stage import Order, Stage
from tests.simulate import Scenario
from tests.simulate.oracle import Oracle, Violation

pytestmark = pytest.mark.core

NOW = datetime.now(UTC)


def twice(message: bytes) -> Iterable[bytes]:
    """Return the outputs of a message, or refuse it."""
    if message == b"bad":
        raise ValueError
    return [message, message.upper()]


def scenario(*messages: bytes, order: Order = Order.TOTAL, **given: Any) -> Scenario:  # noqa: ANN401
    """Return a pipeline of one stage."""
    stage = Stage(
        name="t",
        worker=("x",),
        order=order,
        key="/0" if order is Order.KEY else None,
    )
    return Scenario(
        messages=messages or (b"a", b"b"), stages=[stage], work={"t": twice}, **given
    )


def letter(message: bytes, place: int) -> DeadLetter:
    """Return a dead letter of the stage."""
    return DeadLetter(
        id="1",
        time="",
        pipeline="p",
        run="r",
        stage="t",
        place=place,
        message=message,
        error="",
        kind="",
        attempts=(),
        config={},
    )


def report(
    made: Scenario,
    loaded: Sequence[bytes],
    dead: int = 0,
    *,
    status: Status = "done",
    error: Exception | None = None,
) -> Report:
    """Return a report whose ledger balances."""
    ledger = Ledger.of_pipeline("source", ["t"], Account("sink", StageKind.LOAD))
    ledger[0].produced = ledger[1].received = len(made.messages)
    ledger[1].done, ledger[1].dead = len(made.messages) - dead, dead
    ledger[1].produced = ledger[2].received = ledger[2].done = len(loaded)
    return Report(
        name="p",
        run="r",
        status=status,
        error=error,
        started=NOW,
        ended=NOW,
        seconds=0.0,
        ledger=ledger,
        landed="",
        output=Output("", ""),
    )


def judge(
    made: Scenario,
    *loaded: bytes,
    letters: Sequence[DeadLetter] = (),
    committed: int | None = None,
    processed: Sequence[bytes] = (),
    **given: Any,  # noqa: ANN401
) -> None:
    """Judge a run that loaded these messages."""
    oracle = Oracle(made)
    position = len(made.messages) if committed is None else committed
    if position:
        oracle.check_commit(position, loaded, letters)
    oracle.check_run(
        report(made, loaded, len(letters), **given),
        loaded,
        letters,
        {"t": {message: turn for turn, message in enumerate(processed)}},
    )


def found(made: Scenario, *loaded: bytes, **given: Any) -> str:  # noqa: ANN401
    """Return the violation found in a run that loaded these messages."""
    with pytest.raises(Violation) as violation:
        judge(made, *loaded, **given)
    return str(violation.value)


def test_run_that_keeps_its_promises() -> None:
    """Each message is loaded, or dead-lettered."""
    judge(scenario(), b"a", b"A", b"b", b"B")
    judge(scenario(), b"b", b"B", letters=[letter(b"a", 0)])
    judge(scenario(b"a", b"a"), b"a", b"A", letters=[letter(b"a", 1)])
    judge(scenario(b"bad", b"b"), b"b", b"B", letters=[letter(b"bad", 0)])
    judge(scenario(fatal={"t": [b"a"]}), b"b", b"B", letters=[letter(b"a", 0)])


def test_message_that_is_missing() -> None:
    """It is neither loaded nor dead-lettered."""
    said = found(scenario(), b"a", b"A", b"b", committed=0)
    assert said == "b'B' is lost: neither loaded nor dead-lettered"
    said = found(scenario(), b"a", committed=0)
    assert said == "b'A' (and 2 more) is lost: neither loaded nor dead-lettered"


def test_message_too_many() -> None:
    """It was made by no stage, or is dead-lettered as well."""
    said = found(scenario(), b"a", b"A", b"b", b"B", b"B")
    assert said == "b'B' is loaded too often, or by mistake"
    said = found(scenario(), b"a", b"A", b"b", b"B", letters=[letter(b"a", 0)])
    assert said == "b'A' (and 1 more) is loaded too often, or by mistake"


def test_order() -> None:
    """The order is only checked where it is promised."""
    wrong = (b"b", b"B", b"a", b"A")
    assert found(scenario(), *wrong) == "order: b'b' is loaded before b'a'"
    judge(scenario(order=Order.NONE), *wrong)


def test_order_by_key() -> None:
    """Messages with the same key must be loaded in order."""
    first, other, second = b"[1,1]", b"[2,2]", b"[1,3]"
    keyed = scenario(first, other, second, order=Order.KEY)
    judge(keyed, other, other, first, first, second, second)
    said = found(keyed, second, first, other, other, first, second)
    assert said == "order: b'[1,3]' is loaded before b'[1,1]'"


def test_message_whose_letter_can_not_be_kept() -> None:
    """The run fails, and messages after it may be loaded nevertheless (issue 12)."""
    made = scenario(may_fail=True, broken="letters")
    failed: dict[str, Any] = {"committed": 0, "status": "failed", "error": OSError()}
    judge(made, b"b", b"B", **failed)
    said = found(made, b"B", b"b", **failed)
    assert said == "order: b'B' is loaded before b'b'"


def test_position_too_early() -> None:
    """A position is too early if something before it is not durable."""
    oracle = Oracle(scenario())
    with pytest.raises(
        Violation, match="position 1 is stored, but b'A' is not durable"
    ):
        oracle.check_commit(1, [b"a"], [])
    oracle = Oracle(scenario())
    oracle.check_commit(1, [], [letter(b"a", 0)])
    with pytest.raises(Violation, match="position 1 is stored behind position 1"):
        oracle.check_commit(1, [], [letter(b"a", 0)])


def test_last_position_is_missing() -> None:
    """A run that is done must have stored it."""
    said = found(scenario(), b"a", b"A", b"b", b"B", committed=1)
    assert said == "the run is done, but the last position stored is 1"


def test_dead_letter_of_another_message() -> None:
    """A letter's place must be that of its message, and occur once."""
    said = found(scenario(), b"a", b"A", letters=[letter(b"b", 0)])
    assert (
        said
        == "stage t: b'b' is dead-lettered as number 0, where the stage was given [b'a']"
    )
    both = [letter(b"a", 0), letter(b"a", 0)]
    said = found(scenario(), b"b", b"B", letters=both)
    assert said == "stage t: a message is dead-lettered twice"


def test_who_is_to_be_dead_lettered() -> None:
    """Each message at fault must be dead-lettered, and no other."""
    culprit = scenario(fatal={"t": [b"a"]})
    said = found(culprit, b"a", b"A", letters=[letter(b"b", 1)])
    assert said == "stage t: b'b' is dead-lettered, and is not at fault"
    said = found(culprit, b"a", b"A", b"b", b"B")
    assert said == "stage t: b'a' is not dead-lettered"


def test_run_that_fails() -> None:
    """If a run may fail, what it has loaded must be right nevertheless."""
    error = SourceFailed("no more", stage="source")
    failed: dict[str, Any] = {"status": "failed", "error": error, "committed": 0}
    said = found(scenario(), b"a", **failed)
    assert said == "the run failed: no more"
    judge(scenario(may_fail=True), b"a", b"A", **failed)
    said = found(scenario(may_fail=True), b"A", **failed)
    assert said == "order: b'A' is loaded before b'a'"
    failed["error"] = RepliesDoubtful(1, stage="t")
    judge(scenario(may_fail=True), b"A", **failed)


KEYED = (b'["k",1]', b'["l",2]', b'["k",3]')


def keyed(*processed: int, broken: Any = "", **given: Any) -> None:  # noqa: ANN401
    """Judge a run in which messages with keys were processed in a given order."""
    made = scenario(*KEYED, order=Order.KEY, broken=broken)
    dead = {letter.message for letter in given.get("letters", ())}
    loaded = [out for message in KEYED if message not in dead for out in twice(message)]
    judge(made, *loaded, processed=[KEYED[n] for n in processed], **given)


def test_key_is_processed_in_order() -> None:
    """Other keys don't matter, and a message given up may be missing (issue 12)."""
    keyed(0, 1, 2)
    keyed(1, 0, 2)
    keyed(2, 1, letters=[letter(KEYED[0], 0)])
    keyed(2, 1)
    keyed(2, 1, broken="letters")
    with pytest.raises(Violation, match="is processed before another one with its"):
        keyed(2, 0, 1)


def test_ledger_that_is_wrong() -> None:
    """It doesn't balance, or its count of dead letters is wrong."""
    made = scenario()
    wrong = report(made, [b"a", b"A"], dead=1)
    with pytest.raises(Violation, match="has 1 dead letters, 0 are kept"):
        Oracle(made).check_run(wrong, [b"a", b"A"], [], {})
    wrong.ledger[1].done = 0
    with pytest.raises(LedgerImbalance):
        Oracle(made).check_run(wrong, [b"a", b"A"], [], {})


def test_extraction_that_ends_early() -> None:
    """A run that is done must have extracted all messages."""
    made = scenario()
    short = report(made, [b"a", b"A"])
    short.ledger[0].produced = short.ledger[1].received = short.ledger[1].done = 1
    with pytest.raises(Violation, match="1 of 2 messages were extracted"):
        Oracle(made).check_run(short, [b"a", b"A"], [], {})
