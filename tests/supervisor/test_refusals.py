"""Workers that reject a message, and live on."""

from __future__ import annotations

import anyio
import pytest

from etlstage.errors import WorkerRefusal
from etlstage.messages import Result
from etlstage.stage import ErrorPolicy, Stage
from etlstage.supervisor import WorkerStarted, failure
from tests.supervisor.acts import acting
from tests.supervisor.workers import stage

pytestmark = [pytest.mark.core, pytest.mark.virtual]


async def submit(run: Stage, messages: list[bytes]) -> tuple[list[Result], int]:
    """Return the results, and the number of starts."""
    with anyio.fail_after(1000):
        async with acting(run) as supervisor:
            events = supervisor.events()
            results = await supervisor.submit(messages)
        async with events:
            starts = [e async for e in events if isinstance(e, WorkerStarted)]
    assert [r.message for r in results] == messages
    return results, len(starts)


@pytest.mark.parametrize("window", [1, 8, None])
@pytest.mark.parametrize("workers", [1, 3])
async def test_refusal_is_that_message_s_alone(
    window: int | None, workers: int
) -> None:
    """All others are answered, and no worker is restarted."""
    messages = [b"bad %d" % n if n % 7 == 3 else b"%d" % n for n in range(500)]
    run = stage("refuses", "bad", window=window, workers=workers)
    results, starts = await submit(run, messages)

    assert starts == workers
    for result in results:
        if result.message.startswith(b"bad"):
            assert isinstance(result.error, WorkerRefusal)
            assert result.error.reason == result.message.decode()
            assert result.outputs == ()
        else:
            assert (result.outputs, result.error) == ((result.message,), None)


async def test_refusals_for_one_reason_are_errors_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many reasons there are, of which only some are cached (issue 10)."""
    monkeypatch.setattr(failure, "_REFUSALS", 3)
    run = stage("refuses", "bad", on_error=ErrorPolicy(retries_refused=1), window=1)
    results, _ = await submit(run, [b"bad %d" % (n % 5) for n in range(20)])
    errors = [result.error for result in results]
    assert len(set(map(id, errors))) == 20
    for n, error in enumerate(errors):
        assert isinstance(error, WorkerRefusal)
        assert error.reason == f"bad {n % 5}"
        said = [f"refused the message: bad {n % 5}"] * 2
        assert [attempt.error for attempt in error.attempts] == said


async def test_refusal_names_stage_worker_and_reason() -> None:
    """Which worker rejected it, and why."""
    ((result,), _) = await submit(stage("refuses", "bad"), [b"bad"])
    text = str(result.error)
    assert text.startswith("stage t: worker t-1 (pid ")
    assert text.endswith(") refused the message: bad")
