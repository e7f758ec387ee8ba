"""A dialogue that a caller keeps open, without a worker; see also ``test_named.py``."""

from __future__ import annotations

import pytest

from etlstage.errors import WorkerLost
from etlstage.messages import OVERHEAD
from etlstage.supervisor.exchange.exchange import Outcome
from etlstage.supervisor.exchange.round import Dialogue


def opened(calls: list[int] | None = None) -> Dialogue:
    """Return a dialogue that a worker has taken; its callbacks append to ``calls``."""
    noted: list[int] = [] if calls is None else calls
    dialogue = Dialogue(lambda: noted.append(1), "chat", max_waiting=2 * OVERHEAD)
    dialogue.take(1, 9)
    noted.clear()
    return dialogue


def end(dialogue: Dialogue, *group: bytes, error: WorkerLost | None = None) -> None:
    """End its exchange."""
    groups = [] if error else [group]
    dialogue.deliver(Outcome(0, [b""], groups, 0, error=error))


def test_caller_waits_when_too_much_does() -> None:
    """The caller is notified when there is room."""
    calls: list[int] = []
    dialogue = opened(calls)
    dialogue.write(b"one")
    assert not dialogue.full
    dialogue.write(b"")
    assert (dialogue.full, calls) == (True, [])
    assert dialogue.take_input() == ([b"one", b""], False)
    assert (dialogue.full, calls) == (False, [1])


def test_end_is_sent_once() -> None:
    """With the remaining messages, or alone."""
    dialogue = opened()
    assert not dialogue.has_input
    dialogue.write(b"x")
    dialogue.end()
    assert dialogue.has_input
    assert dialogue.take_input() == ([b"x"], True)
    dialogue.end()
    assert not dialogue.has_input


@pytest.mark.parametrize("error", [None, WorkerLost("died", stage="t")])
def test_nothing_is_sent_behind_the_end(error: WorkerLost | None) -> None:
    """Nor does a caller wait until it could be."""
    dialogue = opened()
    dialogue.write(b"x" * OVERHEAD * 3)
    assert dialogue.full
    end(dialogue, b"last", error=error)
    assert (dialogue.over, dialogue.full) == (True, False)
    dialogue.take_input()
    dialogue.write(b"y")
    assert dialogue.take_input() == ([], False)
    assert dialogue.outputs() == ([] if error else [[b"last"]])
    assert dialogue.error is error


def test_reply_to_a_part_of_the_input_is_an_error() -> None:
    """Its outputs are passed on before; another error counts more (issue 22)."""
    for error in (None, WorkerLost("died", stage="t")):
        dialogue = opened()
        dialogue.undelivered = undelivered = WorkerLost("ended", stage="t")
        end(dialogue, b"last", error=error)
        assert dialogue.outputs() == ([] if error else [[b"last"]])
        assert dialogue.error is (error or undelivered)


def test_who_waits_for_it_hears_that_it_is_forgotten() -> None:
    """Messages that were to be sent are dropped."""
    calls: list[int] = []
    dialogue = opened(calls)
    dialogue.write(b"x" * OVERHEAD * 3)
    dialogue.abandon()
    assert (dialogue.over, dialogue.full, dialogue.has_input) == (True, False, False)
    assert calls == [1]


@pytest.mark.parametrize("passed", ["nothing", "in", "out", "end"])
def test_another_worker_is_asked_if_nothing_has_passed(passed: str) -> None:
    """Messages that were sent are gone, and outputs can't be taken back."""
    dialogue = opened()
    if passed == "in":
        dialogue.write(b"x")
    if passed == "end":
        dialogue.end()
    if passed == "out":
        dialogue.pass_on([b"y"])
    elif passed != "nothing":
        dialogue.take_input()
    assert dialogue.repeatable is (passed == "nothing")
