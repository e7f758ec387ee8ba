"""A dispatcher and its worker: suspects, doubtful replies, and idle workers."""

from __future__ import annotations

from etlstage.errors import Attempt
from etlstage.messages import Position, StageKind
from etlstage.protocol.events import Ended, Opened
from etlstage.protocol.marker import Mode
from etlstage.stage import BatchPolicy, ErrorPolicy
from etlstage.supervisor.exchange.retry import Loss
from etlstage.supervisor.exchange.round import Round
from etlstage.supervisor.exchange.submission import Submission
from tests.supervisor.exchange.test_dispatch import LOST, Line, outcome, stage


def begun(*messages: bytes, window: int = 1) -> tuple[Line, Submission]:
    """Return a line, and a caller whose first messages were given to the worker."""
    line = Line(stage(window=window))
    line.backlog.join(0)
    caller = line.submission()
    caller.feed(list(messages), 0.0)
    assert line.give(0.0)
    return line, caller


def answer(line: Line) -> None:
    """Answer the worker's only message."""
    line.answer(())


def opened(messages: list[bytes], number: int = 2) -> Opened:
    """Return the event that opens exchanges after the first."""
    return Opened(number, messages)


def test_batches_that_were_answered_count_in_messages() -> None:
    """Two of three batches were answered: with two messages, and with one."""
    line = Line(stage(Mode.BATCH_SUPERVISOR, batch=BatchPolicy(size=2)))
    caller = line.submission()
    caller.feed([b"1", b"2", b"3"], 0.0)
    caller.mark(Position(1))
    caller.feed([b"4"], 0.0)
    caller.close()
    for owed in range(3):
        assert line.dispatcher.next(0.0, owed, 9)

    assert [line.dispatcher.answered(owed) for owed in (3, 2, 1)] == [0, 2, 3]


def test_no_one_waits_for_the_rounds_of_who_is_gone() -> None:
    """Nor are outputs read that no one takes; an idle worker has neither."""
    line = Line(stage(Mode.CYCLIC, kind=StageKind.EXTRACT))
    assert (line.dispatcher.stalled, line.dispatcher.abandoned) == (False, False)
    asked = Round(lambda: None, b"ask", max_unread=1)
    line.backlog.open(asked)
    assert line.give(0.0)
    line.dispatcher.added(1, [b"12"])
    assert (line.dispatcher.stalled, line.dispatcher.abandoned) == (True, False)
    line.backlog.drop(asked)

    assert line.dispatcher.abandoned


# --- a suspect -----------------------------------------------------------------------


def test_suspect_is_tried_alone_by_an_idle_worker() -> None:
    """A busy worker is drained first, if no fresh worker may be started."""
    line, caller = begun(b"1", b"2", b"3")
    suspect = caller.take(1, 99)
    line.backlog.suspects.append(suspect)
    line.backlog.orphaned = True
    assert not line.give(0.0)
    answer(line)

    assert line.dispatcher.next(0.0, 0, 9) == opened([b"2"])
    assert line.dispatcher.next(0.0, 1, 9) is None
    answer(line)
    assert line.dispatcher.next(0.0, 0, 9) == opened([b"3"], 3)


def test_suspect_waits_for_what_was_answered_to_be_proven() -> None:
    """So that the worker can't die of anything else then."""
    line, caller = begun(b"1", window=9)
    caller.feed([b"2"], 0.0)
    line.backlog.suspects.append(caller.take(1, 99))
    line.backlog.orphaned = True

    assert line.dispatcher.next(0.0, 0, 9) is None
    answer(line)
    assert line.dispatcher.next(0.0, 0, 9) == opened([b"2"])


def test_suspect_of_a_lane_keeps_no_one_else() -> None:
    """The lane's owner tries it; a fresh worker takes other messages."""
    line = Line(stage())
    lane = Submission(lambda: None, keyed=True)
    line.backlog.open(lane)
    lane.feed([b"1"], 0.0)
    line.backlog.join(7)
    assert line.backlog.in_turn(7) == [lane]
    line.backlog.suspects.append(lane.take(1, 99))
    line.submission().feed([b"2"], 0.0)

    assert line.dispatcher.next(0.0, 0, 9) == opened([b"2"], 1)


def test_worker_that_is_to_go_tries_nothing() -> None:
    """It only completes what it has."""
    line, caller = begun(b"1", b"2")
    answer(line)
    line.backlog.suspects.append(caller.take(1, 99))
    line.backlog.orphaned = line.dispatcher.giving.retiring = True

    assert line.dispatcher.next(0.0, 0, 9) is None


def test_nothing_is_tried_when_no_one_is_left() -> None:
    """Nor halves of a batch, which would wait forever (issue 12)."""
    line, caller = begun(b"1")
    line.backlog.fail(LOST)

    assert lose(line).failed == 1
    assert not line.backlog.suspects
    assert caller.in_flight == 0


# --- a count that is wrong -----------------------------------------------------------


def lose(line: Line, owed: int = 1, mispaired: int | None = None) -> Loss:
    """Lose a line's worker, with ``owed`` exchanges that it has not answered."""
    died = Attempt("t-1", 1, "died")
    return line.dispatcher.lose(
        died, lambda _: LOST, owed=owed, untouched=False, mispaired=mispaired
    )


def test_replies_that_do_not_add_up_are_nobodys_fault() -> None:
    """The whole block goes back, and proceeds in lock-step; no try counts (issue 9)."""
    line, caller = begun(b"1", b"2", b"3", window=3)

    assert lose(line, mispaired=2) == Loss(3, retried=3, failed=0, tries=0)
    assert not line.backlog.suspects
    assert line.backlog.in_step
    assert (caller.waiting, caller.collect()) == (3, [])


def test_lone_message_with_a_wrong_count_is_to_blame() -> None:
    """Messages given after it are not."""
    line = Line(stage(window=2, on_error=ErrorPolicy(retries=0)))
    caller = line.submission()
    caller.feed([b"1", b"2"], 0.0)
    line.pump()

    assert lose(line, mispaired=1) == Loss(2, retried=1, failed=1, tries=0)
    assert [m for m, _, failed in outcome(caller.collect()) if failed] == [b"1"]
    assert caller.waiting == 1


def test_what_was_answered_is_not_to_blame_for_a_death() -> None:
    """It goes back to its caller; the unanswered message is tried alone."""
    line, caller = begun(b"1", b"2", b"3", window=3)

    assert line.dispatcher.answered(1) == 2
    assert lose(line) == Loss(3, retried=3, failed=0, tries=1)
    assert [list(s.messages) for s in line.backlog.suspects] == [[b"3"]]
    assert caller.waiting == 2


def test_round_of_a_program_ends_with_it() -> None:
    """If there is one: a program may end before anyone wants its output."""
    line = Line(stage(Mode.PLAIN, kind=StageKind.EXTRACT))
    dispatcher = line.dispatcher
    dispatcher.added(1, [b"too early"])
    assert dispatcher.stalled
    asked = Round(lambda: None, b"", max_unread=99)
    line.backlog.open(asked)
    assert dispatcher.next(0.0, 0, 1) == Opened(1, (), each=False)
    assert (dispatcher.stalled, dispatcher.held) == (False, 0)
    dispatcher.added(1, [b"1"])
    assert not asked.finished
    dispatcher.ended(Ended(1, [()]), 0)

    assert (asked.finished, asked.outputs()) == (True, [[b"1"]])
