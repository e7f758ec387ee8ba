"""What is told of a worker in errors."""

from __future__ import annotations

import pytest

from etlstage.supervisor.lifecycle.events import WorkerExited
from etlstage.supervisor.lifecycle.story import History, failure, fate_of, named


def test_history_is_told_from_now() -> None:
    """Oldest first."""
    history = History()
    history.note(1.0, "started")
    history.note(2.5, "ready")

    assert history.tell(3.0) == ("started 2.00 s ago", "ready 0.50 s ago")


def test_history_forgets_what_is_long_ago() -> None:
    """Sixteen events: five starts that fail."""
    history = History()
    for number in range(20):
        history.note(0.0, f"event {number}")

    story = history.tell(0.0)
    assert len(story) == 16
    assert story[-1] == "event 19 0.00 s ago"


def test_worker_is_named_with_its_process() -> None:
    """If it has one."""
    assert named("t-1", 7) == "worker t-1 (pid 7)"
    assert named("t-1", None) == "worker t-1"


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (WorkerExited("t-1", 7, 3, lost=0), "ended with status 3"),
        (WorkerExited("t-1", 7, -9, lost=2, fate="died"), "died, 2 held"),
        (
            WorkerExited("t-1", 7, 0, lost=0, answered=1),
            "ended with status 0, 1 message",
        ),
    ],
)
def test_fate_tells_what_was_answered_and_what_was_not(
    event: WorkerExited, text: str
) -> None:
    """As far as there was anything."""
    assert fate_of(event).startswith(text)


def test_failure_ends_with_the_story() -> None:
    """What happened last is what helps."""
    error = failure("t", "worker t-1 died", ("started", "failed"))
    assert error.stage == "t"
    assert str(error) == "stage t: worker t-1 died; not restarted again"
    assert error.story == ("event: started", "event: failed")
