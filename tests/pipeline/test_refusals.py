"""Workers that reject or skip messages, in a whole pipeline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage.errors import StageError, WorkerRefusal
from etlstage.messages import StageKind
from etlstage.pipeline import DeadLetters, Pipeline, Report, WorkerSink, WorkerSource
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, ErrorBudget, ErrorPolicy, OffsetPolicy, Stage
from etlstage.testing import MemorySink, MemorySource
from tests.patience import HANG

pytestmark = pytest.mark.process

Made = Callable[..., Stage]
ALL = ErrorPolicy(budget=ErrorBudget(share=1))
REFUSES = """
    def f(message):
        if message.startswith(b"bad"):
            raise ValueError("no date")
        return [message.upper()]
    worker.transform(f)
"""


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Return a function that makes a stage from the source code of a worker."""

    def made(source: str, name: str = "clean", **settings: object) -> Stage:
        script = tmp_path / f"{name}.py"
        script.write_text("from etlstage import worker\n" + dedent(source))
        given: dict[str, object] = {"on_error": ALL} | settings
        return Stage(name=name, worker=(sys.executable, str(script)), **given)  # type: ignore[arg-type]

    return made


async def run(
    stage: Stage, messages: list[bytes], letters: DeadLetters | None = None
) -> tuple[Report, list[bytes]]:
    """Return the report of a pipeline with one stage, and the loaded messages."""
    sink = MemorySink()
    source = MemorySource([messages])
    with anyio.fail_after(HANG):
        report = await Pipeline(
            name="p", source=source, stages=[stage], sink=sink, dead_letters=letters
        ).run()
    return report, list(sink.messages)


async def test_refused_messages_are_dead_lettered(made: Made, tmp_path: Path) -> None:
    """With the worker's own reason; it is started once, and all others pass."""
    messages = [b"bad %d" % n if n % 10 == 3 else b"m%d" % n for n in range(500)]
    letters = DeadLetters(tmp_path, pipeline="p")
    with capture_logs() as logs:
        report, arrived = await run(made(REFUSES), messages, letters)

    assert report.error is None
    assert arrived == [m.upper() for m in messages if m.startswith(b"m")]
    account = report.ledger[1]
    assert (account.received, account.done, account.dead) == (500, 450, 50)
    found = list(letters.letters())
    assert [x.message for x in found] == [m for m in messages if m.startswith(b"b")]
    assert {x.kind for x in found} == {"WorkerRefusal"}
    for letter in found:
        assert letter.error.endswith(") refused the message: ValueError: no date")
        (attempt,) = letter.attempts
        assert attempt.error == "refused the message: ValueError: no date"
        assert attempt.worker == "clean-1"
        # The place in its code: written to stderr once, kept in each letter (issue 26).
        *_, place, code, raised = attempt.stderr
        assert place.endswith('clean.py", line 5, in f')
        assert code.strip() == 'raise ValueError("no date")'
        assert raised == "ValueError: no date"
    news = [log["event"] for log in logs if log["log_level"] != "debug"]
    assert not {"worker failed", "worker exited"} & {*news}
    letters.close()


async def test_refusals_are_within_the_budget(made: Made, tmp_path: Path) -> None:
    """Rejected messages count like other dead letters."""
    letters = DeadLetters(tmp_path, pipeline="p")
    policy = ErrorPolicy(budget=ErrorBudget(count=2, share=None))
    stage = made(REFUSES, on_error=policy)
    report, _ = await run(stage, [b"bad"] * 5, letters)
    letters.close()

    assert isinstance(report.error, StageError)
    assert "on_error.budget allows 2 messages; the last one: " in str(report.error)
    assert "refused the message: ValueError: no date" in str(report.error)


async def test_refusal_ends_a_run_without_dead_letters(made: Made) -> None:
    """The error has its reason; the message counts as failed, not as unprocessed."""
    report, _ = await run(made(REFUSES), [b"a", b"bad", b"b"])
    assert isinstance(report.error, WorkerRefusal)
    assert (report.error.reason, report.error.place) == ("ValueError: no date", 1)
    assert report.ledger[1].failed == 1


async def test_what_came_before_the_refusal_that_ends_a_run_has_arrived(
    made: Made,
) -> None:
    """Although the replies came together with the refusal (issue 10)."""
    messages = [b"m%d" % n for n in range(400)] + [b"bad", b"behind"]
    report, arrived = await run(made(REFUSES), messages)
    assert isinstance(report.error, WorkerRefusal)
    assert report.error.place == 400
    account = report.ledger[1]
    assert arrived == [m.upper() for m in messages[:400]]
    assert (account.done, account.failed, account.unprocessed) == (400, 1, 1)


async def test_refused_message_is_tried_again_if_it_may_be(
    made: Made, tmp_path: Path
) -> None:
    """A worker may need more time; each refusal is an attempt."""
    source = """
        tries = {}
        def f(message):
            tries[message] = tries.get(message, 0) + 1
            if tries[message] <= int(message):
                raise worker.Refuse("not yet")
            return [b"%s after %d" % (message, tries[message])]
        worker.transform(f)
    """
    letters = DeadLetters(tmp_path, pipeline="p")
    stage = made(source, on_error=replace(ALL, retries_refused=2))
    report, arrived = await run(stage, [b"0", b"2", b"3", b"1"], letters)
    (letter,) = letters.letters()
    letters.close()

    assert report.error is None
    assert arrived == [b"0 after 1", b"2 after 3", b"1 after 2"]
    assert letter.message == b"3"
    assert len(letter.attempts) == 3


@pytest.mark.parametrize("driver", ["supervisor", "worker"])
async def test_of_a_refused_batch_only_the_culprits_are_dead_lettered(
    made: Made, tmp_path: Path, driver: str
) -> None:
    """No worker is restarted to find them."""
    source = f"""
        import os
        def f(messages):
            if any(m.startswith(b"bad") for m in messages):
                raise worker.Refuse("no date")
            return [b"%d " % os.getpid() + m for m in messages]
        worker.transform_batch(f, driver={driver!r}, size=50)
    """
    mode = Mode.BATCH_WORKER if driver == "worker" else Mode.BATCH_SUPERVISOR
    messages = [b"bad %d" % n if n % 60 == 3 else b"m%d" % n for n in range(300)]
    letters = DeadLetters(tmp_path, pipeline="p")
    stage = made(source, dialect=MarkerDialect(mode=mode), batch=BatchPolicy(size=50))
    report, arrived = await run(stage, messages, letters)

    assert report.error is None
    assert [m.split()[1] for m in arrived] == [
        m for m in messages if m.startswith(b"m")
    ]
    assert len({m.split()[0] for m in arrived}) == 1
    assert [x.message for x in letters.letters()] == [
        b"bad %d" % n for n in range(3, 300, 60)
    ]
    letters.close()


async def test_refused_request_ends_the_run_with_its_reason(made: Made) -> None:
    """It is unknown which part of the range is missing."""
    source = """
        def f(start, end):
            if start:
                raise worker.Refuse("no such table")
            return [b"%d" % n for n in range(start, end)]
        worker.extract_cycle(f, offsets="supervisor")
    """
    stage = made(
        source,
        kind=StageKind.EXTRACT,
        dialect=MarkerDialect(mode=Mode.CYCLIC),
        on_error=ErrorPolicy(),
    )
    offsets = OffsetPolicy(by="supervisor", step=2, end=6)
    sink = MemorySink()
    with anyio.fail_after(HANG):
        report = await Pipeline(
            name="p", source=WorkerSource(stage, offsets=offsets), sink=sink
        ).run()
    assert str(report.error).endswith(") refused the request: no such table")
    assert "worker clean-1 (pid " in str(report.error)


SKIPS = """
    def f(message):
        if message.startswith(b"BAD"):
            raise ValueError("no date")
        {}
    worker.{}(f, on_error="skip")
"""


async def test_skipped_messages_are_in_the_ledger(made: Made) -> None:
    """They count as done, as the worker reported, and as skipped (issue 10)."""
    messages = [b"BAD" if n % 50 == 7 else b"%d" % n for n in range(1000)]
    passing = made(SKIPS.format("return [message]", "transform"), workers=2)
    report, arrived = await run(passing, messages)
    assert report.error is None
    assert len(arrived) == 980
    assert (report.ledger[1].done, report.ledger[1].skipped) == (1000, 20)
    assert report.to_dict()["stages"][1]["skipped"] == 20


async def test_skipped_messages_of_a_load_are_in_the_ledger(made: Made) -> None:
    """They have not reached the destination (issue 10)."""
    loading = made(SKIPS.format("pass", "load"), "load", kind=StageKind.LOAD)
    sink = WorkerSink(loading)
    with anyio.fail_after(HANG):
        report = await Pipeline(
            name="p", source=MemorySource([[b"BAD", b"a"]]), sink=sink
        ).run()
    assert report.error is None
    assert (report.ledger[1].done, report.ledger[1].skipped) == (2, 1)
