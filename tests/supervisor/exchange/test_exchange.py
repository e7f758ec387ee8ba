"""One exchange: what is taken from it, what is left, how it ends."""

from __future__ import annotations

import pytest

from etlstage.errors import Attempt
from etlstage.supervisor.exchange.exchange import Exchange, Outcome
from etlstage.supervisor.exchange.submission import Submission

DIED = Attempt("t-1", 1, "died")


def exchange(*messages: bytes) -> Exchange:
    """Return an exchange of a submission of its own, which has more before it."""
    submission = Submission(lambda: None)
    size = sum(map(len, messages))
    return Exchange(submission, 4, list(messages), size, (DIED,), 1)


def test_first_messages_are_taken_from_the_rest() -> None:
    """Their places stay what they were."""
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
    """Each was in the hands of who died."""
    first, second = exchange(b"a", b"bb", b"ccc").split(1)

    assert (first.start, first.messages, first.size) == (4, [b"a"], 1)
    assert (second.start, second.messages, second.size) == (5, [b"bb", b"ccc"], 5)
    assert first.attempts == second.attempts == (DIED,)
    assert first.tries == second.tries == 1


def test_what_is_done_with_is_not_split() -> None:
    """Its places would be wrong."""
    whole = exchange(b"a", b"b")
    whole.take(1, 1)

    with pytest.raises(AssertionError, match="what is done with can't be split"):
        whole.split(1)


def test_outcome_of_a_batch_belongs_to_its_last_message() -> None:
    """Those before it have no output."""
    outcome = Outcome(0, [b"a", b"b"], [(b"ab",)], 2)

    assert list(outcome.replies) == [(), (b"ab",)]


def test_outcome_of_single_messages_is_what_the_worker_made_of_them() -> None:
    """One reply each."""
    groups: list[tuple[bytes, ...]] = [(b"a",), ()]

    assert Outcome(0, [b"a", b"b"], groups, 2).replies is groups
