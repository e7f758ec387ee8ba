"""The messages that wait for workers, and which worker may take them."""

from __future__ import annotations

from etlstage.errors import WorkerLost
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.exchange import Exchange, Outcome
from etlstage.supervisor.exchange.submission import Submission

LOST = WorkerLost("lost", stage="t")


def submission(*messages: bytes) -> Submission:
    """Return a submission whose messages wait."""
    made = Submission(lambda: None)
    made.feed(list(messages), 0.0)
    return made


def backlog(*submissions: Submission, workers: int = 1) -> Backlog:
    """Return a backlog for ``workers`` workers, numbered from 0."""
    made = Backlog()
    for number in range(workers):
        made.join(number)
    for item in submissions:
        made.open(item)
    return made


def suspect(of: Submission) -> Exchange:
    """Return a message whose worker was lost."""
    return of.take(1, 100)


def test_life_of_workers_that_are_lost() -> None:
    """Recent losses count most; workers that were given nothing don't (issue 13)."""
    waiting, lives = backlog(), []
    for messages in (100, 0, 10, 1):
        waiting.record_loss(messages)
        lives.append(waiting.life)
    assert lives == [100, 100, 55, 28]


def test_suspect_is_handed_out_once() -> None:
    """And counts as waiting until then."""
    one = submission(b"a", b"b")
    waiting = backlog(one)
    lost = suspect(one)
    waiting.suspects.append(lost)

    assert waiting.messages == 2
    assert waiting.has_suspect(0)
    assert waiting.take_suspect(0) is lost
    assert waiting.take_suspect(0) is None
    assert not waiting.has_suspect(0)


def test_suspects_of_a_caller_that_is_gone_are_forgotten() -> None:
    """Those of other callers stay."""
    one, two = submission(b"a"), submission(b"b")
    waiting = backlog(one, two)
    kept = suspect(two)
    waiting.suspects += [suspect(one), kept]

    waiting.drop(one)

    assert list(waiting.suspects) == [kept]
    assert one.abandoned
    assert waiting.in_turn(0) == []


def test_everything_fails_when_no_worker_is_left() -> None:
    """Suspects, waiting messages, and those submitted later."""
    one, later = submission(b"a", b"b"), submission(b"c")
    waiting = backlog(one)
    waiting.suspects.append(suspect(one))

    waiting.fail(LOST)
    waiting.open(later)

    assert waiting.messages == 0
    assert [c.error for c in one.collect() if isinstance(c, Outcome)] == [LOST, LOST]
    assert [c.error for c in later.collect() if isinstance(c, Outcome)] == [LOST]


def test_worker_that_is_missed_leaves_orphans() -> None:
    """A worker that was not needed any more does not."""
    waiting = backlog(workers=2)

    waiting.leave(0, failed=False)
    assert not waiting.orphaned
    waiting.leave(1)
    assert waiting.orphaned


def keyed() -> Submission:
    """Return a lane: messages that keep their order."""
    lane = Submission(lambda: None, keyed=True)
    lane.feed([b"a", b"b"], 0.0)
    return lane


def test_lane_of_a_worker_that_is_gone_has_an_heir() -> None:
    """Messages in flight do not tie the lane to the dead worker."""
    lane = keyed()
    waiting = backlog(lane, workers=2)
    owner = 0 if waiting.in_turn(0) else 1
    lane.take(1, 100)

    assert waiting.in_turn(1 - owner) == []
    waiting.leave(owner)
    assert waiting.in_turn(1 - owner) == [lane]


def test_demand_is_what_one_more_worker_might_take() -> None:
    """Not the keys of a busy worker, nor another worker's only lane (issue 12)."""
    waiting = Backlog()
    lanes = [Submission(lambda: None, keyed=True) for _ in range(2)]
    for lane in lanes:
        waiting.open(lane)
        lane.feed([b"a", b"b", b"c"], 0.0)
    assert waiting.demand == 6

    waiting.join(0)
    assert waiting.in_turn(0)
    lost = suspect(lanes[0])
    waiting.suspects.append(lost)
    assert waiting.demand == 3
    waiting.join(1)
    assert waiting.in_turn(1) == [lanes[1]]
    assert waiting.demand == 0
    assert waiting.messages == 6


def test_demand_without_keys_is_all_that_waits() -> None:
    """Including what is to be tried again."""
    one = submission(b"a", b"b")
    waiting = backlog(one)
    waiting.suspects.append(suspect(one))
    assert waiting.demand == 2


def test_pending_is_what_has_not_ended() -> None:
    """With a worker or waiting; results that are not collected yet don't count."""
    one = submission(b"a", b"b")
    waiting = backlog(one)
    taken = one.take(1, 100)
    assert waiting.pending == 2

    one.deliver(Outcome(taken.start, taken.messages, [()], 1, 0))
    assert waiting.pending == 1
    waiting.drop(one)
    assert waiting.pending == 0
    assert not waiting.occupied


def test_suspect_of_a_lane_is_for_its_owner() -> None:
    """Other workers try other messages, not those after it, or nothing."""
    lane, other = keyed(), submission(b"c")
    waiting = backlog(lane, other, workers=2)
    owner = 0 if lane in waiting.in_turn(0) else 1
    theirs, mine = suspect(lane), suspect(other)
    waiting.suspects += [theirs, mine]

    assert waiting.take_suspect(1 - owner) is mine
    assert waiting.take_suspect(1 - owner) is None
    assert waiting.take_suspect(owner) is theirs
