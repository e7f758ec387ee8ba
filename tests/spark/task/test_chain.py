"""The code that the tasks of engine ``spark`` run, without Spark."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from etlstage.errors import (
    RepliesDoubtful,
    SourceFailed,
    StageError,
    WorkerRefusal,
    WorkerStartFailed,
)
from etlstage.pipeline import DeadLetter, DeadLetters
from etlstage.pipeline.ledger import COUNTS
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.spark.task import chain as chain_module
from etlstage.spark.task import rows as rows_module
from etlstage.spark.task.chain import Chain, TaskEnd
from etlstage.stage import (
    BatchPolicy,
    ErrorBudget,
    ErrorPolicy,
    Order,
    RestartPolicy,
    Stage,
)
from tests.planted import AGAIN

pytestmark = pytest.mark.process

SDK = "import os, sys; from etlstage import worker; worker.{}({})"


def stage(
    function: str, name: str = "t", call: str = "transform", **more: object
) -> Stage:
    """Return a stage whose worker replies with ``function`` of ``m``."""
    command = (sys.executable, "-c", SDK.format(call, function))
    quick = {"restart": RestartPolicy(delay=0.01), **more}
    return Stage(name=name, worker=command, **quick)  # type: ignore[arg-type]


def passed(
    stages: Sequence[Stage], *batches: pa.RecordBatch
) -> tuple[list[tuple[int, bytes]], list[DeadLetter], TaskEnd]:
    """Return the resulting messages with their places, the letters, and the outcome."""
    chain = Chain("extract", stages, DeadLetters(Path("nowhere"), pipeline="p"))
    messages: list[tuple[int, bytes]] = []
    letters: list[DeadLetter] = []
    outcomes: list[TaskEnd] = []
    for batch in chain.run(iter(batches)):
        for row in batch.to_pylist():
            assert row["partition"] == 0
            if row["note"] is None:
                messages.append((row["place"], row["value"]))
            elif row["place"] is None:
                outcomes.append(TaskEnd.from_note(0, row["note"]))
            else:
                assert row["place"] == 0
                letters.append(DeadLetter.from_line(row["note"].encode()))
    (outcome,) = outcomes
    assert outcome.letters == len(letters)
    return messages, letters, outcome


def given(*messages: bytes | None) -> pa.RecordBatch:
    """Return a batch as Spark passes it."""
    return pa.record_batch({"message": pa.array(messages, pa.binary())})


def numbers(count: int) -> list[bytes]:
    """Return messages that can be distinguished."""
    return [b"%d" % n for n in range(count)]


def counts(**some: int) -> list[int]:
    """Return the counts of an account; those not given are 0."""
    return [some.get(name, 0) for name in COUNTS]


def test_messages_pass_all_stages_in_order() -> None:
    """With none, one or many results, and batches; each stage has its account."""
    stages = [
        stage("lambda m: [m] * (int(m) % 3)", "a"),
        stage(
            "lambda ms: ms",
            "b",
            "transform_batch",
            dialect=MarkerDialect(mode=Mode.BATCH_SUPERVISOR),
        ),
        stage("lambda m: (m + b'!',)", "c", workers=2),
    ]
    messages = numbers(25_000)
    batches = [given(*messages[at : at + 4000]) for at in range(0, 25_000, 4000)]
    made, letters, outcome = passed(stages, *batches)
    expected = [m + b"!" for n, m in enumerate(messages) for _ in range(n % 3)]
    assert made == list(enumerate(expected))
    out = len(expected)
    assert not letters
    assert outcome == TaskEnd(
        0,
        [
            counts(produced=25_000),
            counts(received=25_000, done=25_000, produced=out),
            counts(received=out, done=out, produced=out),
            counts(received=out, done=out, produced=out),
            counts(received=out, done=out),
        ],
        0,
        None,
    )


def test_nothing_gives_an_empty_account() -> None:
    """A partition without rows has its account, too."""
    made, _, outcome = passed([stage("lambda m: (m,)")])
    assert not made
    assert outcome.accounts == [[0] * len(COUNTS)] * 3
    assert passed([stage("lambda m: (m,)")], given())[2] == outcome


def test_message_that_is_dead_lettered_leaves_in_a_note() -> None:
    """The note has its place and attempts; the other messages pass."""
    dying = stage("lambda m: os._exit(3) if m == b'5' else (m,)")
    stages = [dying, stage("lambda m: (m,)", "u")]
    made, (letter,), outcome = passed(stages, given(*numbers(9)))
    assert [m for _, m in made] == [m for m in numbers(9) if m != b"5"]
    assert (letter.message, letter.place) == (b"5", 5)
    assert (letter.stage, letter.kind) == ("t", "WorkerLost")
    assert len(letter.attempts) == 3
    assert not outcome.error
    # The first death, if earlier messages were unanswered, is a failure but no attempt.
    died = outcome.accounts[1][COUNTS.index("failures")]
    assert died in (3, 4)
    assert outcome.accounts[1:3] == [
        counts(received=9, done=8, dead=1, produced=8, restarts=died, failures=died),
        counts(received=8, done=8, produced=8),
    ]


def test_message_that_ends_the_run_is_in_the_outcome() -> None:
    """If nothing is dead-lettered, the outcome has the error and what was lost."""
    policy = ErrorPolicy(retries=0, then="fail")
    dying = stage("lambda m: os._exit(3) if m == b'5' else (m,)", on_error=policy)
    batches = [given(*numbers(9))] * 20
    _, letters, outcome = passed([dying], *batches)
    assert not letters
    assert "exited with status 3" in str(outcome.error)
    received, done, dead, failed, lost, *_ = outcome.accounts[1]
    assert received == done + dead + failed + lost
    assert lost


def test_budget_is_judged_of_many() -> None:
    """A part of the input may be worse than the whole, but only up to a limit."""
    refusing = [given(*[b"a\nb"] * 60, b"ok")]
    made, letters, _ = passed([stage("lambda m: (m,)")], *refusing)
    assert [m for _, m in made] == [b"ok"]
    assert [letter.place for letter in letters] == list(range(60))
    policy = ErrorPolicy(budget=ErrorBudget(count=3))
    *_, outcome = passed([stage("lambda m: (m,)", on_error=policy)], *refusing)
    assert "4 of 61 messages could not be processed" in str(outcome.error)


def test_error_keeps_its_class_and_text() -> None:
    """As if it had been raised in the driver."""
    *_, outcome = passed([stage("lambda m: (m,)")], given(b"a", None, b"b"))
    assert isinstance(outcome.error, SourceFailed)
    assert str(outcome.error).startswith(
        "extract: message is null in 1 of 3 rows of a batch: filter these rows"
    )
    assert outcome.error.stage == "extract"
    note = '{"accounts": [], "letters": 0, "error": {"kind": "InvalidMessage", "text": "x", "about": {}}}'
    error = TaskEnd.from_note(3, note).error
    assert type(error) is StageError


def test_error_keeps_what_is_its_own() -> None:
    """Even if its class takes other arguments than a text (issue 10)."""
    policy = ErrorPolicy(then="fail")
    *_, outcome = passed([stage("lambda m: [][0]", on_error=policy)], given(b"a"))
    assert isinstance(outcome.error, WorkerRefusal)
    assert "refused the message" in str(outcome.error)
    assert outcome.error.reason == "IndexError: list index out of range"
    assert outcome.error.stage == "t"
    *_, outcome = passed([Stage(name="t", worker=AGAIN)], given(b"a"))
    assert isinstance(outcome.error, RepliesDoubtful)
    assert "stage t: results of 1 message may be mismatched" in str(outcome.error)
    assert outcome.accounts[1][COUNTS.index("doubtful")] == 1


def test_program_that_is_not_there_fails_the_task() -> None:
    """Spark may retry the task on another machine that has it."""
    with pytest.raises(WorkerStartFailed, match="there is no program"):
        passed([Stage(name="t", worker=("no-such-program",))], given(*numbers(9)))


def test_keys_keep_their_order() -> None:
    """Keys are the second column."""
    keys = [n % 3 for n in range(3000)]
    batch = pa.record_batch(
        {
            "message": pa.array(numbers(3000), pa.binary()),
            "key": pa.array(keys, pa.int64()),
        }
    )
    made, *_ = passed([stage("lambda m: (m,)", workers=2, order=Order.KEY)], batch)
    found = [int(m) for _, m in made]
    for key in range(3):
        assert [n for n in found if n % 3 == key] == list(range(key, 3000, 3))
    assert len(found) == 3000


@pytest.mark.parametrize("bound", ["_BYTES", "_ROWS"])
def test_rows_are_cut_into_batches(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    """Places continue from one batch to the next."""
    module = chain_module if bound == "_ROWS" else rows_module
    monkeypatch.setattr(module, bound, 1)
    chain = Chain(
        "extract",
        [stage("lambda m: (m,)", batch=BatchPolicy())],
        DeadLetters(Path("nowhere"), pipeline="p"),
    )

    def batches() -> Iterator[pa.RecordBatch]:
        for _ in range(6):
            yield given(*numbers(100))

    made = list(chain.run(batches()))
    assert len(made) > 2
    places = [p for batch in made for p in batch.column(1).to_pylist()]
    assert places == [*range(600), None]


def test_letters_are_cut_into_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver reads one page after the other; batches do not matter."""
    batches = [given(*[b"a\nb"] * 10)] * 4
    for size, pages in ((10_000_000, [0] * 40), (1, [*range(40)])):
        monkeypatch.setattr(chain_module, "_PAGE", size)
        chain = Chain(
            "extract", [stage("lambda m: (m,)")], DeadLetters(Path("x"), pipeline="p")
        )
        made = [p for b in chain.run(iter(batches)) for p in b.column(1).to_pylist()]
        assert made == [*pages, None]


def test_messages_without_bytes_are_cut_into_batches() -> None:
    """Their overhead counts, too."""
    many = stage("lambda m: [b''] * 10_000")
    chain = Chain("extract", [many], DeadLetters(Path("nowhere"), pipeline="p"))
    rows = [batch.num_rows for batch in chain.run(iter([given(*numbers(600))]))]
    assert sum(rows) == 6_000_001
    assert max(rows) < 3_000_000


def test_errors_hold_no_secrets() -> None:
    """Neither the outcome's, which is staged, nor those that Spark logs."""
    hidden = {"s3cr3t": "${TOKEN}"}
    letters = DeadLetters(Path("nowhere"), pipeline="p", hidden=hidden)
    telling = "lambda m: (sys.stderr.write('s3cr3t'), sys.stderr.flush(), os._exit(3))"
    policy = ErrorPolicy(retries=0, then="fail")
    chain = Chain("extract", [stage(telling, on_error=policy)], letters)
    (batch,) = chain.run(iter([given(b"m")]))
    outcome = TaskEnd.from_note(0, batch.column(3)[0].as_py())
    assert "exited with status 3" in str(outcome.error)
    assert "s3cr3t" not in str(outcome.error)
    chain = Chain("extract", [Stage(name="t", worker=("no-s3cr3t",))], letters)
    with pytest.raises(WorkerStartFailed, match=r"no-\$\{TOKEN\}") as raised:
        list(chain.run(iter([given(b"m")])))
    assert "s3cr3t" not in "".join(traceback.format_exception(raised.value))
