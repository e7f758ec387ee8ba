from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.columns import Column
from etlstage.errors import Attempt, WorkerLost
from etlstage.messages import OVERHEAD, Run, StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import RestartPolicy, Stage
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.dispatch import Dispatcher
from etlstage.supervisor.exchange.exchange import Exchange, Outcome
from etlstage.supervisor.exchange.retry import Loss
from etlstage.supervisor.exchange.round import Repeat, Round

ATTEMPT = Attempt("e-1", 7, "died", (), ())
STAGE = Stage(
    name="e",
    worker=("true",),
    kind=StageKind.EXTRACT,
    dialect=MarkerDialect(mode=Mode.CYCLIC),
)
TEXT = "stage e: a worker was lost when it had given 3 messages of a range; when the"


def ask(repeat: Repeat = Repeat.BEHIND, *, max_unread: int = 100) -> Round:
    """Return a round without callbacks, which a worker has taken."""
    asked = Round(lambda: None, b"ask", max_unread=max_unread, repeat=repeat, stage="e")
    asked.take(1, 9)
    return asked


def end(asked: Round, *group: bytes) -> None:
    """End the round successfully."""
    asked.deliver(Outcome(0, [b"ask"], [group], 3))


def taken(asked: Round) -> list[bytes]:
    """Return the outputs that have come."""
    return [message for run in asked.outputs() for message in run]


def test_outputs_of_a_round_are_there_before_its_end() -> None:
    """Too many of them stall it until they are taken."""
    asked = ask(max_unread=3 + 2 * OVERHEAD)
    asked.pass_on([b"1", b"22"])
    assert (asked.stalled, asked.finished) == (False, False)
    asked.pass_on([b""])
    assert (asked.stalled, asked.over_limit) == (True, True)
    assert asked.outputs() == [[b"1", b"22"], [b""]]
    assert not asked.over_limit
    end(asked)

    assert asked.finished
    assert asked.error is None
    assert asked.outputs() == []


def test_end_of_a_round_may_bring_its_only_message() -> None:
    """Where each request has exactly one reply."""
    asked = ask()
    end(asked, b"one")

    assert asked.outputs() == [[b"one"]]
    assert (asked.finished, asked.held_bytes) == (True, 0)


def test_round_without_outputs_may_always_be_repeated() -> None:
    """The caller has seen none of it."""
    for repeat in Repeat:
        asked = ask(repeat)
        assert asked.repeatable
        assert not asked.rewind()


def test_what_came_before_a_loss_is_left_out() -> None:
    """However outputs are cut the second time (issue 10)."""
    asked = ask()
    asked.pass_on([b"a", b"b"])
    asked.pass_on([b"c"])
    assert asked.repeatable
    assert asked.rewind()
    asked.pass_on([b"a"])
    asked.pass_on([b"b", b"c", b"d"])
    asked.pass_on([b"e"])
    end(asked)

    assert (taken(asked), asked.error) == ([b"a", b"b", b"c", b"d", b"e"], None)


def test_loss_before_what_is_known_is_no_progress() -> None:
    """The next try is compared with the one that got furthest (issue 10)."""
    asked = ask()
    asked.pass_on([b"a", b"b"])
    assert asked.rewind()
    asked.pass_on([b"x"])
    assert not asked.rewind()
    asked.pass_on([b"a", b"b"])
    assert not asked.rewind()
    asked.pass_on([b"a", b"b", b"c"])
    assert asked.rewind()
    asked.pass_on([b"a", b"b", b"c"])
    end(asked)

    assert (taken(asked), asked.error) == ([b"a", b"b", b"c"], None)


@pytest.mark.parametrize(
    "again",
    [
        [[b"a", b"b", b"x"]],
        [[b"a"], [b"b"], [b"x", b"d"]],
        [[b"ab", b"", b"c", b"d"]],
        [[b"c", b"b", b"a"]],
    ],
)
def test_other_messages_than_before_end_the_round(again: list[Run]) -> None:
    """Leaving them out would lose them; nothing more is passed on."""
    asked = ask()
    asked.pass_on([b"a", b"b", b"c"])
    taken(asked)
    asked.rewind()
    for run in [*again, [b"more"]]:
        asked.pass_on(run)

    assert asked.finished
    assert str(asked.error) == (
        f"{TEXT} range was requested again, another worker gave different ones: a range"
        " must give the same messages each time"
    )
    assert taken(asked) == []
    end(asked)
    assert "gave different ones" in str(asked.error)


@pytest.mark.parametrize(
    ("again", "gave"), [([b"a", b"b"], "2 messages"), ([b"a"], "1 message")]
)
def test_fewer_messages_than_before_end_the_round(again: Run, gave: str) -> None:
    """Messages that were passed on are not there any more."""
    asked = ask()
    asked.pass_on([b"a", b"b", b"c"])
    asked.rewind()
    asked.pass_on(again)
    end(asked)

    assert f"another worker gave {gave}, and ended: a range must" in str(asked.error)


def test_round_of_a_worker_that_keeps_the_offsets_comes_anew() -> None:
    """Its outputs may be new: better twice than never."""
    asked = ask(Repeat.AGAIN)
    asked.pass_on([b"a"])
    assert asked.repeatable
    assert not asked.rewind()
    asked.pass_on([b"a", b"b"])
    end(asked)

    assert (taken(asked), asked.error) == ([b"a", b"a", b"b"], None)


def test_round_of_a_program_that_has_written_is_not_repeated() -> None:
    """All of its output would come twice."""
    asked = ask(Repeat.NEVER)
    asked.pass_on([b"a"])
    assert not asked.repeatable


def lists(run: list[bytes]) -> Run:
    """Return a run as a list."""
    return run


def columns(run: list[bytes]) -> Run:
    """Return a run as an Arrow column."""
    return Column(pa.array(run, pa.binary()))


@settings(deadline=None)
@given(
    st.lists(st.binary(max_size=4), max_size=20),
    st.integers(0, 20),
    st.lists(st.integers(1, 5), min_size=20, max_size=20),
    st.sampled_from([lists, columns]),
    st.sampled_from([lists, columns]),
)
def test_every_message_comes_once(
    messages: list[bytes],
    lost_at: int,
    cuts: list[int],
    first: Callable[[list[bytes]], Run],
    second: Callable[[list[bytes]], Run],
) -> None:
    """Wherever the worker is lost, and however the messages are held and cut."""
    asked = ask()
    asked.pass_on(first(messages[:lost_at]))
    asked.rewind()
    at = 0
    for cut in cuts:
        asked.pass_on(second(messages[at : at + cut]))
        at += cut
    end(asked)

    assert (taken(asked), asked.error) == (messages, None)


def test_exchange_of_a_round_is_its_request() -> None:
    """It waits from the start, and nothing follows it."""
    asked = Round(lambda: None, b"ask", max_unread=1)
    assert asked.closed
    exchange = asked.take(1, 9)
    assert isinstance(exchange, Exchange)
    assert exchange.messages == [b"ask"]


# --- and their workers --------------------------------------------------------------


def lose_round(
    asked: Round, outputs: list[list[bytes]], *, restarts: int = 1
) -> list[Loss]:
    """Lose a worker after each of these outputs of a round."""
    run = replace(STAGE, restart=RestartPolicy(max=restarts))
    backlog = Backlog()
    backlog.open(asked)
    losses = []
    for some in outputs:
        d = Dispatcher(run, backlog)
        assert d.next(0.0, 0, 1) is not None
        if some:
            d.added(1, some)
        losses.append(
            d.lose(
                ATTEMPT,
                lambda a: WorkerLost(f"{len(a)}", stage="t"),
                owed=1,
                untouched=False,
            )
        )
    return losses


def test_round_is_asked_again_as_often_as_it_got_further() -> None:
    """A loss without progress counts, up to the number of restarts (issue 10)."""
    asked = Round(lambda: None, b"ask", max_unread=9, repeat=Repeat.BEHIND)
    losses = lose_round(asked, [[b"a"], [b"a", b"b"], [b"a", b"b"]], restarts=2)
    assert losses == [
        Loss(1, retried=1, progress=True),
        Loss(1, retried=1, progress=True),
        Loss(1, retried=1),
    ]
    assert asked.error is None
    assert asked.outputs() == [[b"a"], [b"b"]]

    losses = lose_round(asked, [[b"a"]], restarts=2)
    assert losses == [Loss(1, retried=0, failed=1)]
    assert str(asked.error) == "3"


def gone(_: object) -> WorkerLost:
    """Return the error of a round whose worker was lost."""
    return WorkerLost("x", stage="t")


def test_round_that_was_not_read_is_not_counted() -> None:
    """Its worker was lost for another reason."""
    asked = Round(lambda: None, b"ask", max_unread=9, repeat=Repeat.BEHIND)
    backlog = Backlog()
    backlog.open(asked)
    for _ in range(3):
        d = Dispatcher(STAGE, backlog)
        d.next(0.0, 0, 1)
        loss = d.lose(ATTEMPT, gone, owed=1, untouched=True)
        assert loss == Loss(1, retried=1)


def test_round_that_no_one_wants_is_not_asked_again() -> None:
    """No restart is made for it, and none is counted."""
    asked = Round(lambda: None, b"ask", max_unread=9, repeat=Repeat.BEHIND)
    backlog = Backlog()
    backlog.open(asked)
    d = Dispatcher(STAGE, backlog)
    d.next(0.0, 0, 1)
    asked.abandon()
    loss = d.lose(ATTEMPT, gone, owed=1, untouched=False)
    assert loss.retried == 0


def test_round_of_a_program_that_has_written_fails() -> None:
    """All of its output would come twice."""
    asked = Round(lambda: None, b"ask", max_unread=9)
    assert lose_round(asked, [[b"a"]]) == [Loss(1, retried=0, failed=1)]
    assert str(asked.error) == "1"
