from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from etlstage import Pipeline
from etlstage.errors import SourceFailed
from etlstage.messages import Position
from etlstage.pipeline import DeadLetter
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.stage import ErrorBudget, ErrorPolicy
from etlstage.testing import (
    MemoryDeadLetters,
    MemoryEpochs,
    MemoryEpochSink,
    MemorySink,
    MemorySource,
    ScriptedLaunch,
    ScriptedWorker,
)
from tests.supervisor.workers import stage

words = stage("words", name="words")


async def test_stage_between_two_ends_in_memory() -> None:
    """The ends have the messages and positions, and the report has the counts."""
    source = MemorySource([[b"a b"], Position(1), [b"c"], Position(2)])
    sink = MemorySink()
    report = await Pipeline(name="p", source=source, stages=[words], sink=sink).run()

    assert report.status == "done"
    assert sink.messages == [b"a", b"b", b"c"]
    assert sink.finished == 1
    assert source.acknowledged[-1] == 2
    assert report.landed == "3 messages in memory"
    assert [account.stage for account in report.ledger] == ["source", "words", "sink"]


async def test_source_that_fails() -> None:
    """The error is in the report, and the output is not finished."""
    failure = SourceFailed("no more", stage="read")
    source = MemorySource([[b"a"], Position(1), failure], name="read")
    sink = MemorySink(name="write")
    report = await Pipeline(name="p", source=source, sink=sink).run()

    assert (report.status, report.error) == ("failed", failure)
    assert sink.finished == 0
    assert [account.stage for account in report.ledger] == ["read", "write"]


@pytest.mark.parametrize("durable", [True, False])
async def test_sink_that_is_durable_when_it_is_flushed(*, durable: bool) -> None:
    """Messages count as done only when they are durable."""
    sink = MemorySink(durable=durable)
    await sink.write([b"a", b"b"])
    assert (sink.account.received, sink.account.done) == (2, 2 if durable else 0)
    await sink.flush()
    assert sink.account.done == 2


async def test_epochs_of_other_loads_are_kept(tmp_path: Path) -> None:
    """A load removes only its own unrecorded epochs, as a sink of files (issue 26)."""
    epochs = MemoryEpochs()
    for name, message in (("orders", b"a"), ("clicks", b"b")):
        pipeline = Pipeline(
            name=name,
            source=MemorySource([[message], Position(1)]),
            sink=MemoryEpochSink(epochs),
            dead_letters=MemoryDeadLetters(),
            delivery=Delivery(tmp_path / name, exactly_once=True),
        )
        assert (await pipeline.run()).error is None
    assert epochs.messages == [b"a", b"b"]


async def test_dead_letters_in_memory() -> None:
    """They are like those of a file, and durable when they are synced."""
    letters = MemoryDeadLetters()
    refuses = replace(words, on_error=ErrorPolicy(budget=ErrorBudget(share=1)))

    async def script(worker: ScriptedWorker) -> None:
        async for message in worker.messages():
            await worker.refuse(f"no {message.decode()}")

    pipeline = Pipeline(
        name="p",
        source=MemorySource([[b"a", b"b"]]),
        stages=[refuses],
        sink=MemorySink(),
        dead_letters=letters,
        launch=ScriptedLaunch(script),
    )
    report = await pipeline.run()

    assert report.error is None
    assert [letter.message for letter in pipeline.letters()] == [b"a", b"b"]
    assert [letter.stage for letter in letters.kept] == ["words", "words"]
    assert report.dead_letters.messages == letters.durable == letters.count == 2
    assert not letters.folder.exists()


async def test_source_reads_on() -> None:
    """It resumes after the position that was recorded (issue 14)."""
    source = MemorySource([[b"a"], Position(1), [b"b"], Position(2), [b"c"]])
    source.resume(1)
    assert [item async for item in source.runs()] == [[b"b"], Position(2), [b"c"]]


async def test_letters_of_a_start_that_broke_off() -> None:
    """The recorded number of each stage is kept; new letters get new ids (issue 14)."""
    letters = MemoryDeadLetters()

    def letter(stage: str, message: bytes) -> DeadLetter:
        return letters.letter(stage, 0, message, ValueError("no"), config={}, time="")

    await letters.keep([letter("x", b"1"), letter("y", b"2")])
    await letters.keep([letter("x", b"3"), letter("x", b"4")])
    assert (letters.size("x"), letters.size("z"), letters.durable) == (3, 0, 0)
    assert letters.sizes() == {"x": 3, "y": 1}

    letters = MemoryDeadLetters(kept=letters.kept)
    letters.resume("again", {"x": 2})
    assert [kept.message for kept in letters.kept] == [b"1", b"3"]
    assert (letters.count, letters.durable, letters.run) == (2, 2, "again")
    assert letter("x", b"5").id == "again-4"
