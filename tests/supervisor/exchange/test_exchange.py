"""One exchange: what is taken from it, what remains, and how it ends."""

from __future__ import annotations

from typing import Literal

import pytest

from etlstage.errors import Attempt, ContractBroken, WorkerRefusal
from etlstage.stage import ReplyContract, Stage
from etlstage.stage.contract import Checker
from etlstage.supervisor.exchange.exchange import Exchange, Outcome, Refusals
from etlstage.supervisor.exchange.submission import Submission
from tests.supervisor.refusing import refusing

DIED = Attempt("t-1", 1, "died")
NO, NEVER = (WorkerRefusal(text, stage="t", code=0, reason=text) for text in "nN")


def exchange(*messages: bytes) -> Exchange:
    """Return an exchange from the middle of its own submission."""
    submission = Submission(lambda: None)
    size = sum(map(len, messages))
    return Exchange(submission, 4, list(messages), size, (DIED,), 1)


def test_first_messages_are_taken_from_the_rest() -> None:
    """They keep their places in the submission."""
    whole = exchange(b"a", b"bb", b"ccc")
    first = whole.take(2, 100)

    assert (first.start, first.messages, first.size) == (4, [b"a", b"bb"], 3)
    assert (whole.next, whole.left, whole.size) == (6, 1, 3)
    rest = whole.rest()
    assert (rest.start, rest.messages, rest.size) == (6, [b"ccc"], 3)
    assert (rest.attempts, rest.tries) == ((DIED,), 1)


def test_nothing_larger_is_taken_than_asked_for_but_one_message() -> None:
    """A message is never cut."""
    whole = exchange(*[b"xx"] * 8)

    assert len(whole.take(8, 5).messages) == 2
    assert len(whole.take(8, 1).messages) == 1
    assert whole.left == 5


def test_whole_exchange_is_its_own_rest() -> None:
    """Nothing is copied."""
    whole = exchange(b"a")

    assert whole.rest() is whole


def test_parts_have_the_history_of_the_whole() -> None:
    """All of them were with the worker that died."""
    first, second = exchange(b"a", b"bb", b"ccc").split(1)

    assert (first.start, first.messages, first.size) == (4, [b"a"], 1)
    assert (second.start, second.messages, second.size) == (5, [b"bb", b"ccc"], 5)
    assert first.attempts == second.attempts == (DIED,)
    assert first.tries == second.tries == 1


def test_what_is_done_with_is_not_split() -> None:
    """Its places would be wrong."""
    whole = exchange(b"a", b"b")
    whole.take(1, 1)

    with pytest.raises(AssertionError, match="a partly answered exchange can't be"):
        whole.split(1)


def test_outcome_of_a_batch_belongs_to_its_last_message() -> None:
    """Those before it have no output."""
    outcome = Outcome(0, [b"a", b"b"], [(b"ab",)], 2)

    assert list(outcome.replies) == [(), (b"ab",)]


def test_outcome_of_single_messages_is_what_the_worker_made_of_them() -> None:
    """One reply for each message."""
    groups: list[tuple[bytes, ...]] = [(b"a",), ()]

    assert Outcome(0, [b"a", b"b"], groups, 2).replies is groups


def answered() -> Outcome:
    """Return the outcome of five messages, the first and the fourth refused."""
    messages = [b"a", b"b", b"c", b"d", b"e"]
    groups = [(), (b"B",), (b"C", b"C"), (), (b"E",)]
    return Outcome(7, messages, groups, 11, 22, refused=refusing([(0, NO), (3, NEVER)]))


def test_outcome_knows_which_messages_were_refused() -> None:
    """Each has its own error, the others have none."""
    outcome = answered()

    assert (outcome.failed, list(outcome.errors)) == (2, [NO, None, None, NEVER, None])
    lost = Outcome(0, [b"a", b"b"], (), 2, error=NO)
    assert (lost.failed, list(lost.errors)) == (2, [NO, NO])
    assert list(Outcome(0, [b"a"], [(b"A",)], 1).errors) == [None]


def test_parts_of_an_outcome_are_answered_or_refused() -> None:
    """Places, replies and errors stay with their messages, and the sizes add up."""
    parts = list(answered().parts())

    assert [(p.start, p.messages, p.groups, p.error) for p in parts] == [
        (7, [b"a"], (), NO),
        (8, [b"b", b"c"], [(b"B",), (b"C", b"C")], None),
        (10, [b"d"], (), NEVER),
        (11, [b"e"], [(b"E",)], None),
    ]
    assert not any(part.refused for part in parts)
    assert sum(part.size for part in parts) == 11
    assert sum(part.reply_size for part in parts) == 22


def test_outcome_without_refusals_is_one_part() -> None:
    """Nothing is copied."""
    outcome = Outcome(0, [b"a"], [(b"A",)], 1)

    assert list(outcome.parts()) == [outcome]
    last = Outcome(0, [b"a", b"b"], [(b"A",), ()], 2, refused=refusing([(1, NO)]))
    assert [part.error for part in last.parts()] == [None, NO]


def test_cut_of_an_outcome_has_its_refusals() -> None:
    """With places counted from the beginning of the cut."""
    part = answered().cut(2, 5)

    assert (part.start, part.messages) == (9, [b"c", b"d", b"e"])
    assert (part.error, list(part.refused)) == (None, [(1, NEVER)])


def test_errors_of_refusals_are_made_when_they_are_looked_at() -> None:
    """Replies in a block stay cheap; each access makes new errors (issue 10)."""
    made: list[str] = []

    def no(reason: str) -> WorkerRefusal:
        made.append(reason)
        return WorkerRefusal(reason, stage="t", code=0, reason=reason)

    outcome = Outcome(0, [b"m"] * 9, [()] * 9, 9).refusing(
        Refusals([2, 5], "ab", no), 0
    )
    part = outcome.cut(3, 9)
    assert (part.failed, list(part.refused.places), made) == (1, [2], [])
    assert part.errors is not part.errors
    assert made == ["b", "b"]


def test_outcome_has_the_history_of_its_exchange() -> None:
    """For when it is tried again."""
    whole = exchange(b"a", b"b")
    (part,) = Outcome(5, [b"b"], (), 1, error=NO).parts()
    again = whole.of(part)

    assert (again.submission, again.start, again.left) == (whole.submission, 5, 1)
    assert (again.attempts, again.tries) == ((DIED,), 1)


def promising(
    expect: ReplyContract,
    on_mismatch: Literal["dead_letter", "fail", "count"] = "dead_letter",
) -> tuple[Checker, Stage]:
    """Return a checker of replies, and its stage."""
    run = Stage(name="s", worker=("a",), expect=expect, on_mismatch=on_mismatch)
    return Checker(run.expect), run


@pytest.mark.parametrize("end", ["dead_letter", "fail"])
def test_replies_that_break_a_contract_are_refused(
    end: Literal["dead_letter", "fail"],
) -> None:
    """In addition to those that the worker refused; others stay (issue 26)."""
    checker, run = promising(ReplyContract(outputs=1), end)
    messages = [b"a", b"b", b"c", b"d"]
    groups = [(b"1",), (), (b"1", b"2"), (b"3",)]
    outcome = Outcome(7, messages, groups, 4, 8, refused=refusing([(1, NO)]))
    checked = outcome.checked(checker, run)
    assert checked.groups == [(b"1",), (), (), (b"3",)]
    (none, no, broken, last) = checked.errors
    assert (none, no, last) == (None, NO, None)
    assert isinstance(broken, ContractBroken)
    assert str(broken) == ("stage s: the reply breaks expect.outputs: 2 outputs, not 1")
    assert (broken.promise, broken.ends_run) == ("outputs", end == "fail")
    assert (checked.start, checked.failed) == (7, 2)
    assert [part.start for part in checked.parts()] == [7, 8, 9, 10]
    assert checker.found == {"outputs": 1}


def test_replies_that_keep_a_contract_are_as_they_were() -> None:
    """Nothing is copied; a failed message has no reply to be checked (issue 26)."""
    checker, run = promising(expect=ReplyContract(outputs=1, json=True))
    kept = Outcome(0, [b"a", b"b"], [(b"1",), (b"2",)], 2)
    assert kept.checked(checker, run) is kept
    lost = Outcome(0, [b"a"], (), 1, error=NO)
    assert lost.checked(checker, run) is lost
    assert not checker.found


def test_reply_to_one_message_breaks_a_contract() -> None:
    """The message is refused as a whole (issue 26)."""
    checker, run = promising(expect=ReplyContract(json=True))
    checked = Outcome(0, [b"a"], [(b"{",)], 1).checked(checker, run)
    assert checked.groups == ()
    assert isinstance(checked.error, ContractBroken)


def test_outcome_that_keeps_its_contract_is_not_copied() -> None:
    """Even if each reply has to be looked at (issue 26)."""
    checker, run = promising(expect=ReplyContract(schema={"type": "integer"}))
    outcome = Outcome(0, [b"a", b"b"], [(b"1",), (b"2",)], 2)
    assert outcome.checked(checker, run) is outcome
    assert not checker.found


def test_mismatches_that_are_only_counted() -> None:
    """The outputs are passed on unchanged (issue 26)."""
    contract = ReplyContract(outputs=1, max_seconds=1)
    checker, run = promising(expect=contract, on_mismatch="count")
    outcome = Outcome(7, [b"a", b"b"], [(), (b"1",)], 2)
    checked = outcome.checked(checker, run, {8: 2.0, 9: 3.0})
    assert checked[:-1] == outcome[:-1]
    assert checked.mismatches == ((0, "outputs"), (1, "max_seconds"))
    assert checker.found == {"outputs": 1, "max_seconds": 1}
    parts = [checked.cut(at, at + 1).mismatches for at in range(2)]
    assert parts == [((0, "outputs"),), ((0, "max_seconds"),)]
