"""A worker that is asked for nothing, and its round."""

from __future__ import annotations

from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.round import Round
from etlstage.supervisor.exchange.streaming import StreamDispatcher
from tests.supervisor.exchange.test_dispatch import stage


def test_round_of_a_program_ends_with_it() -> None:
    """If there is one: a program may end before anybody wants what it writes."""
    backlog = Backlog()
    run = stage(Mode.PLAIN, kind=StageKind.EXTRACT)
    dispatcher = StreamDispatcher(run, backlog)
    dispatcher.passed([b"too early"])
    dispatcher.finish(0.0)
    asked = Round(lambda: None, b"", max_unread=99)
    backlog.open(asked)
    assert dispatcher.stalled
    assert dispatcher.next(0.0, 0, 1) == ()
    assert (dispatcher.stalled, dispatcher.held) == (False, 0)
    dispatcher.passed([b"1"])
    assert not asked.finished
    dispatcher.finish(0.0)
    dispatcher.release()

    assert (asked.finished, asked.outputs()) == (True, [[b"1"]])
