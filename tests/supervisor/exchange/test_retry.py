"""What happens to the messages that a lost worker held."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from etlstage.errors import Attempt, WorkerRefusal
from etlstage.supervisor.exchange.exchange import Exchange, Outcome
from etlstage.supervisor.exchange.retry import Judgement, judge, refused
from etlstage.supervisor.exchange.submission import Submission
from tests.supervisor.refusing import refusing

DIED = Attempt("t-1", 1, "died")
BEFORE = Attempt("t-1", 0, "died before")


def taken(start: int, *messages: bytes) -> Exchange:
    """Return messages as a worker holds them."""
    return Exchange(SUBMISSION, start, list(messages), sum(map(len, messages)))


def tried(exchange: Exchange, *attempts: Attempt, tries: int = 0) -> Exchange:
    """Return an exchange whose workers were lost."""
    return replace(exchange, attempts=attempts, tries=tries)


SUBMISSION = Submission(lambda: None)


def test_idle_worker_held_nothing() -> None:
    """No message is affected by its end."""
    found = judge([], DIED, retries=2, batches=False, first=True)

    assert found == Judgement([], [], [])


def test_oldest_message_is_suspect() -> None:
    """The others are given again; nothing is decided."""
    held = [taken(4, b"a", b"bb"), taken(6, b"c")]
    found = judge(held, DIED, retries=0, batches=False, first=True)

    assert found == Judgement(
        [tried(taken(4, b"a"), DIED, tries=1)], [taken(5, b"bb"), taken(6, b"c")], []
    )


def test_lone_message_is_tried_again() -> None:
    """It may have been bad luck."""
    found = judge([taken(0, b"a")], DIED, retries=1, batches=False, first=True)

    assert found == Judgement([tried(taken(0, b"a"), DIED, tries=1)], [], [])


def test_lone_message_fails_at_last() -> None:
    """It had its retries, and the last time nothing else can have been at fault."""
    suspect = tried(taken(0, b"a"), BEFORE, tries=1)
    found = judge([suspect], DIED, retries=1, batches=False, first=True)

    assert found == Judgement([], [], [tried(taken(0, b"a"), BEFORE, DIED, tries=2)])


def test_message_does_not_fail_for_the_age_of_its_worker() -> None:
    """The process had answered something before: a fresh one must confirm it."""
    suspect = tried(taken(0, b"a"), BEFORE, tries=1)
    found = judge([suspect], DIED, retries=0, batches=False, first=False)

    assert found == Judgement([tried(taken(0, b"a"), BEFORE, DIED, tries=2)], [], [])


def test_message_does_not_fail_for_what_its_batches_did() -> None:
    """Batches with it were lost twice, but it was lost on its own only once."""
    suspect = tried(taken(0, b"a"), BEFORE, BEFORE, tries=0)
    found = judge([suspect], DIED, retries=1, batches=True, first=True)

    assert found == Judgement(
        [tried(taken(0, b"a"), BEFORE, BEFORE, DIED, tries=1)], [], []
    )


def test_batch_is_halved() -> None:
    """The first half gets the odd message; both keep the history."""
    found = judge(
        [taken(3, b"a", b"b", b"c")], DIED, retries=0, batches=True, first=True
    )

    assert found == Judgement(
        [tried(taken(3, b"a", b"b"), DIED), tried(taken(5, b"c"), DIED)],
        [],
        [],
    )


def test_batch_with_others_behind_is_tried_whole() -> None:
    """What was sent in advance goes back; a mere suspicion does not halve the batch."""
    held = [taken(0, b"a", b"b"), taken(2, b"c", b"d")]
    found = judge(held, DIED, retries=0, batches=True, first=True)

    assert found == Judgement(
        [tried(taken(0, b"a", b"b"), DIED)], [taken(2, b"c", b"d")], []
    )


def test_all_exchanges_under_way_are_suspects() -> None:
    """A worker with several at once may have died of any of them."""
    held = [taken(0, b"a"), taken(1, b"b")]
    found = judge(held, DIED, retries=0, batches=False, first=True, concurrent=True)

    assert found == Judgement(
        [tried(taken(0, b"a"), DIED, tries=1), tried(taken(1, b"b"), DIED, tries=1)],
        [],
        [],
    )
    (alone, _) = found.suspects
    found = judge([alone], DIED, retries=0, batches=False, first=True, concurrent=True)
    assert found.failed == [tried(taken(0, b"a"), DIED, DIED, tries=2)]


def no(exchange: Exchange, *places: int) -> Outcome:
    """Return the outcome of an exchange refused as a whole, or at some places."""
    errors = [WorkerRefusal("no", stage="t", code=0, reason="no") for _ in places]
    for error in errors:
        error.attempts = (DIED,)
    outcome = Outcome(exchange.start, exchange.messages, (), exchange.size)
    if places:
        groups = [(m,) for m in exchange.messages]
        refusals = refusing(zip(places, errors, strict=True))
        return outcome._replace(groups=groups, refused=refusals)
    error = WorkerRefusal("no", stage="t", code=0, reason="no")
    error.attempts = (DIED,)
    return outcome._replace(error=error)


def test_refused_message_is_tried_as_often_as_it_may_be() -> None:
    """Each refusal counts; other failures do not."""
    before = tried(taken(0, b"a"), BEFORE, tries=1)
    ended, (once,) = refused(before, no(before), retries=1)
    assert ended == []
    assert (once.attempts, once.tries, once.refusals) == ((BEFORE, DIED), 1, 1)
    (twice,), again = refused(once, no(once), retries=1)
    assert again == []
    assert isinstance(twice.error, WorkerRefusal)
    assert twice.error.attempts == (BEFORE, DIED, DIED)


def test_refused_batch_is_halved() -> None:
    """Even without retries, as it is unknown which message is at fault."""
    batch = taken(3, b"a", b"b", b"c")
    ended, halves = refused(batch, no(batch), retries=0)
    assert ended == []
    assert halves == [tried(taken(3, b"a", b"b"), DIED), tried(taken(5, b"c"), DIED)]


def test_what_was_answered_with_a_refused_message_is_not_tried_again() -> None:
    """The refused messages are, each by itself, in order."""
    run = tried(taken(3, b"a", b"b", b"c", b"d"), BEFORE)
    ended, again = refused(run, no(run, 0, 2), retries=1)
    assert [(part.start, part.messages, part.error) for part in ended] == [
        (4, [b"b"], None),
        (6, [b"d"], None),
    ]
    assert [(e.start, e.messages, e.refusals) for e in again] == [
        (3, [b"a"], 1),
        (5, [b"c"], 1),
    ]
    assert {e.attempts for e in again} == {(BEFORE, DIED)}


def test_refusals_of_a_run_that_are_not_tried_again_stay_in_it() -> None:
    """Each error has all attempts."""
    run = tried(taken(3, b"a", b"b", b"c"), BEFORE)
    outcome = no(run, 0, 2)
    (ended,), again = refused(run, outcome, retries=0)
    assert (ended._replace(refused=outcome.refused), again) == (outcome, [])
    told = [(place, error.attempts) for place, error in ended.refused]
    assert told == [(0, (BEFORE, DIED)), (2, (BEFORE, DIED))]


@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    batches=st.booleans(),
    retries=st.integers(0, 3),
    first=st.booleans(),
    concurrent=st.booleans(),
)
def test_every_message_has_one_place(
    counts: list[int], batches: bool, retries: int, first: bool, concurrent: bool
) -> None:
    """Suspect, innocent or failed: none is dropped, and none appears twice."""
    held, start = [], 0
    for count in counts:
        held.append(taken(start, *[b"%d" % n for n in range(count)]))
        start += count
    found = judge(
        held,
        DIED,
        retries=retries,
        batches=batches or concurrent,
        first=first,
        concurrent=concurrent,
    )
    places = [
        place
        for part in [
            *found.suspects,
            *found.innocent,
            *found.failed,
        ]
        for place in range(part.start, part.start + len(part.messages))
    ]

    assert sorted(places) == list(range(start))
    assert all(len(s.messages) == 1 for s in found.failed)
    assert not (found.failed and (found.innocent or not first))
