from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.errors import Faults, LedgerImbalance, WorkerFailure
from etlstage.messages import StageKind
from etlstage.pipeline.ledger import Account, JoinedLedger, Ledger


def ledger() -> Ledger:
    """Return a balanced ledger: ten messages, of which a stage makes eleven."""
    made = Ledger.of_pipeline("read", ["split"], Account("write", StageKind.LOAD))
    made[0].produced = 10
    made[1].received = made[1].done = 10
    made[1].produced = 11
    made[2].received = made[2].done = 11
    return made


def imbalance(wrong: Ledger, *, whole: bool = True) -> str:
    """Return why a ledger does not balance."""
    with pytest.raises(LedgerImbalance) as caught:
        wrong.check(whole=whole)
    return str(caught.value)


def test_balanced_ledger_passes() -> None:
    """Each message has an outcome in each stage, and none is left in between."""
    ledger().check()

    assert ledger().undelivered == 0


def test_accounts_are_in_the_order_of_the_stages() -> None:
    """Whether indexed, iterated or counted."""
    made = ledger()

    assert [a.stage for a in made] == ["read", "split", "write"]
    assert made[1].stage == "split"
    assert len(made) == 3


def test_accounts_are_those_that_are_handed_in() -> None:
    """Counting and reporting use the same object."""
    load = Account("write", StageKind.LOAD)
    made = Ledger.of_pipeline("read", ["a", "b"], load)

    assert [(a.stage, a.kind) for a in made] == [
        ("read", StageKind.EXTRACT),
        ("a", StageKind.TRANSFORM),
        ("b", StageKind.TRANSFORM),
        ("write", StageKind.LOAD),
    ]
    assert made[3] is load


def test_message_without_an_outcome_is_an_imbalance() -> None:
    """The error has the stage and its numbers."""
    wrong = ledger()
    wrong[1].done -= 3
    wrong[1].failed = 1

    assert imbalance(wrong) == (
        "stage split: 10 received, but 7 done + 0 dead + 1 failed + 0 unprocessed"
    )


def test_message_with_two_outcomes_is_an_imbalance() -> None:
    """There are more outcomes than messages."""
    wrong = ledger()
    wrong[2].unprocessed = 1

    assert (
        imbalance(wrong)
        == "stage write: 11 received, but 11 done + 0 dead + 0 failed + 1 unprocessed"
    )


def test_message_that_did_not_arrive_is_an_imbalance() -> None:
    """If the run ended by itself; otherwise the message was on its way."""
    wrong = ledger()
    wrong[2].received = wrong[2].done = 9

    assert imbalance(wrong) == "11 left stage split, but 9 reached write"
    assert wrong.undelivered == 2
    wrong.check(whole=False)


@pytest.mark.parametrize("whole", [True, False])
def test_message_out_of_nowhere_is_an_imbalance(*, whole: bool) -> None:
    """However the run ended."""
    wrong = ledger()
    wrong[1].received = wrong[1].done = 12

    assert imbalance(wrong, whole=whole) == "10 left stage read, but 12 reached split"


def test_all_that_is_wrong_is_reported_at_once() -> None:
    """Accounts come first, then the gaps between them."""
    wrong = ledger()
    wrong[1].received = 12
    wrong[2].done = 0

    assert imbalance(wrong).split("; ") == [
        "stage split: 12 received, but 10 done + 0 dead + 0 failed + 0 unprocessed",
        "stage write: 11 received, but 0 done + 0 dead + 0 failed + 0 unprocessed",
        "10 left stage read, but 12 reached split",
    ]


def test_settled_messages_are_lost() -> None:
    """Pending messages become unprocessed, as their workers are gone."""
    made = ledger()
    made[1].done -= 4
    made[1].failed = 1
    made.settle()

    assert made[1] == Account(
        "split",
        StageKind.TRANSFORM,
        received=10,
        done=6,
        failed=1,
        unprocessed=3,
        produced=11,
    )
    assert made[1].pending == 0
    made.check()


counts = st.integers(0, 5)


@given(st.lists(st.tuples(counts, counts, counts, counts, counts), min_size=2))
def test_check_agrees_with_counting(rows: list[tuple[int, ...]]) -> None:
    """Every imbalance is found, and nothing else."""
    made = Ledger(Account(f"s{n}", StageKind.TRANSFORM) for n in range(len(rows)))
    for account, row in zip(made, rows, strict=True):
        account.received, account.done, account.failed, account.unprocessed = row[:4]
        account.produced = row[4]
    sound = all(r[0] == r[1] + r[2] + r[3] for r in rows) and all(
        a[4] == b[0] for a, b in pairwise(rows)
    )
    if sound:
        made.check()
    else:
        assert re.search(r"received, but|left stage", imbalance(made))


def test_accounts_are_added_up() -> None:
    """The counts of tasks are added to an account."""
    account = Account("a", StageKind.TRANSFORM, received=3, done=2, dead=1, produced=9)
    account.add([1, 0, 0, 0, 1, 0, 2, 3, 4, 5, 0, 6, 0, 0, 0])
    assert account.counts == [4, 2, 1, 0, 1, 9, 2, 3, 4, 5, 0, 6, 0, 0, 0]
    account.add_mismatches(["where", "json", "where"])
    assert account.mismatches == {"json": 7, "where": 2}
    assert account.mismatched == 9
    account.add([1])  # from a version with fewer counts
    assert account.received == 5


def test_faults_are_added_up() -> None:
    """Those of all supervisors that a stage had (issue 11)."""
    account, fault = (
        Account("a", StageKind.TRANSFORM),
        WorkerFailure("now", "a-1", "died"),
    )
    account.add_faults(Faults(2, 1, (fault,)))
    account.add_faults(Faults(1, 3))
    assert (account.restarts, account.failures, account.faults) == (3, 4, (fault,))


def test_ledger_moves_when_a_message_was_dealt_with() -> None:
    """A received message without an outcome doesn't move it; an extracted one does."""
    made = Ledger.of_pipeline("read", ["split"], Account("write", StageKind.LOAD))
    made[1].received = 1
    assert not made.moving
    made[1].dead = 1
    assert made.moving
    assert [account.moved for account in ledger()] == [10, 10, 11]


def test_what_a_run_has_left_was_not_processed() -> None:
    """Unprocessed messages count as moved, but not as processed."""
    accounts = ledger()
    accounts[1].unprocessed = 4
    processed = [account.processed for account in accounts]
    assert processed == [10, 10, 11]
    assert accounts[1].moved == 14


def test_what_a_load_stage_made_is_what_it_loaded() -> None:
    """For all other stages it is what they produced."""
    assert [account.made for account in ledger()] == [10, 11, 11]


def test_pipelines_that_are_one_have_the_stages_of_both() -> None:
    """Messages waiting in the journals between them are no gap."""
    behind = Ledger.of_pipeline("journals", ["rate"], Account("file", StageKind.LOAD))
    behind[0].produced, behind[1].received = 4, 3
    behind[1].done = behind[1].produced = behind[2].received = behind[2].done = 3
    joined = JoinedLedger([ledger(), behind])
    assert [a.stage for a in joined] == ["read", "split", "rate", "file"]
    assert joined.gaps == [0, 1, 0]
    assert joined.waiting == joined.undelivered == 1
    joined.check(whole=False)
    assert imbalance(joined) == "4 left stage journals, but 3 reached rate"
