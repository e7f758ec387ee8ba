"""What the tasks of engine ``spark`` run, without Spark."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from etlstage.errors import SourceFailed, StageError, WorkerStartFailed
from etlstage.pipeline import DeadLetters
from etlstage.protocol.marker import Mode
from etlstage.spark.executor import chain as chain_module
from etlstage.spark.executor.chain import Chain, Note, read_note
from etlstage.supervisor import (
    BatchPolicy,
    ErrorBudget,
    ErrorPolicy,
    Order,
    RestartPolicy,
    Stage,
)

SDK = "import os, sys; from etlstage import worker; worker.{}({})"


def stage(
    function: str, name: str = "t", call: str = "transform", **more: object
) -> Stage:
    """Return a stage whose worker answers with ``function`` of ``m``."""
    command = (sys.executable, "-c", SDK.format(call, function))
    quick = {"restart": RestartPolicy(delay=0.01), **more}
    return Stage(name=name, command=command, **quick)  # type: ignore[arg-type]


def passed(
    stages: Sequence[Stage], *batches: pa.RecordBatch
) -> tuple[list[tuple[int, bytes]], list[Note]]:
    """Return the messages that left, each with its place, and the notes."""
    chain = Chain("extract", stages, DeadLetters(Path("nowhere"), pipeline="p"))
    messages: list[tuple[int, bytes]] = []
    notes: list[Note] = []
    for batch in chain.run(iter(batches)):
        for row in batch.to_pylist():
            assert row["partition"] == 0
            if row["note"] is None:
                messages.append((row["place"], row["value"]))
            else:
                notes.append(read_note(0, row["note"]))
    return messages, notes


def given(*messages: bytes | None) -> pa.RecordBatch:
    """Return a batch as Spark gives it."""
    return pa.record_batch({"message": pa.array(messages, pa.binary())})


def numbers(count: int) -> list[bytes]:
    """Return messages that can be told apart."""
    return [b"%d" % n for n in range(count)]


def test_messages_pass_all_stages_in_order() -> None:
    """None, one and many; batches; and the account of each stage."""
    stages = [
        stage("lambda m: [m] * (int(m) % 3)", "a"),
        stage("lambda ms: ms", "b", "transform_batch", mode=Mode.BATCH_SUPERVISOR),
        stage("lambda m: (m + b'!',)", "c", workers=2),
    ]
    messages = numbers(25_000)
    batches = [given(*messages[at : at + 4000]) for at in range(0, 25_000, 4000)]
    made, notes = passed(stages, *batches)
    expected = [m + b"!" for n, m in enumerate(messages) for _ in range(n % 3)]
    assert made == list(enumerate(expected))
    out = len(expected)
    assert notes == [
        Note(
            0,
            None,
            [
                [0, 0, 0, 0, 0, 25_000],
                [25_000, 25_000, 0, 0, 0, out],
                [out, out, 0, 0, 0, out],
                [out, out, 0, 0, 0, out],
                [out, out, 0, 0, 0, 0],
            ],
            None,
        )
    ]


def test_nothing_gives_an_empty_account() -> None:
    """A partition without rows has its account, too."""
    made, notes = passed([stage("lambda m: (m,)")])
    assert not made
    assert [note.accounts for note in notes] == [[[0] * 6] * 3]
    assert passed([stage("lambda m: (m,)")], given())[1] == notes


def test_message_put_aside_leaves_in_a_note() -> None:
    """With its place and its attempts; the others go on."""
    dying = stage("lambda m: os._exit(3) if m == b'5' else (m,)")
    made, notes = passed([dying, stage("lambda m: (m,)", "u")], given(*numbers(9)))
    assert [m for _, m in made] == [m for m in numbers(9) if m != b"5"]
    letter, account = notes
    assert letter.letter is not None
    assert (letter.letter.message, letter.letter.place) == (b"5", 5)
    assert (letter.letter.stage, letter.letter.kind) == ("t", "WorkerLost")
    assert len(letter.letter.attempts) == 3
    assert not account.error
    assert account.accounts[1:3] == [[9, 8, 1, 0, 0, 8], [8, 8, 0, 0, 0, 8]]


def test_message_that_ends_the_run_is_the_last_note() -> None:
    """Where nothing is put aside, the account tells the error, and what was lost."""
    policy = ErrorPolicy(retries=0, then="fail")
    dying = stage("lambda m: os._exit(3) if m == b'5' else (m,)", on_error=policy)
    batches = [given(*numbers(9))] * 20
    _, notes = passed([dying], *batches)
    (account,) = notes
    assert "exited with status 3" in str(account.error)
    received, done, dead, failed, lost, _ = account.accounts[1]
    assert received == done + dead + failed + lost
    assert lost


def test_budget_is_judged_of_many() -> None:
    """A part of the input may be worse than the whole; but not without end."""
    refusing = [given(*[b"a\nb"] * 60, b"ok")]
    made, notes = passed([stage("lambda m: (m,)")], *refusing)
    assert [m for _, m in made] == [b"ok"]
    assert [n.letter is not None for n in notes] == [True] * 60 + [False]
    policy = ErrorPolicy(budget=ErrorBudget(count=3))
    _, notes = passed([stage("lambda m: (m,)", on_error=policy)], *refusing)
    assert "4 of 61 messages could not be processed" in str(notes[-1].error)


def test_error_keeps_its_class_and_text() -> None:
    """As if it had been raised on the driver."""
    _, (account,) = passed([stage("lambda m: (m,)")], given(b"a", None, b"b"))
    assert isinstance(account.error, SourceFailed)
    assert str(account.error).startswith(
        "extract: message is null in 1 of 3 rows of a batch: filter these rows"
    )
    assert account.error.stage == "extract"
    note = '{"accounts": [], "error": {"kind": "MessageRefused", "text": "x", "stage": null}}'
    error = read_note(3, note).error
    assert type(error) is StageError


def test_program_that_is_not_there_fails_the_task() -> None:
    """Spark may find it on another machine."""
    with pytest.raises(WorkerStartFailed, match="there is no program"):
        passed([Stage(name="t", command=("no-such-program",))], given(*numbers(9)))


def test_keys_keep_their_order() -> None:
    """They come as the second column."""
    keys = [n % 3 for n in range(3000)]
    batch = pa.record_batch(
        {
            "message": pa.array(numbers(3000), pa.binary()),
            "key": pa.array(keys, pa.int64()),
        }
    )
    made, _ = passed([stage("lambda m: (m,)", workers=2, order=Order.KEY)], batch)
    found = [int(m) for _, m in made]
    for key in range(3):
        assert [n for n in found if n % 3 == key] == list(range(key, 3000, 3))
    assert len(found) == 3000


@pytest.mark.parametrize("bound", ["_BYTES", "_ROWS"])
def test_rows_are_cut_into_batches(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    """Places count on from one to the next."""
    monkeypatch.setattr(chain_module, bound, 1)
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


def test_messages_without_bytes_are_cut_into_batches() -> None:
    """What many of them take beside their bytes counts, too."""
    many = stage("lambda m: [b''] * 10_000")
    chain = Chain("extract", [many], DeadLetters(Path("nowhere"), pipeline="p"))
    rows = [batch.num_rows for batch in chain.run(iter([given(*numbers(600))]))]
    assert sum(rows) == 6_000_001
    assert max(rows) < 3_000_000


def test_errors_hold_no_secrets() -> None:
    """Neither that of the account, which is staged, nor one that Spark logs."""
    hidden = {"s3cr3t": "${TOKEN}"}
    letters = DeadLetters(Path("nowhere"), pipeline="p", hidden=hidden)
    telling = "lambda m: (sys.stderr.write('s3cr3t'), sys.stderr.flush(), os._exit(3))"
    policy = ErrorPolicy(retries=0, then="fail")
    chain = Chain("extract", [stage(telling, on_error=policy)], letters)
    (batch,) = chain.run(iter([given(b"m")]))
    note = read_note(0, batch.column(3)[0].as_py())
    assert "exited with status 3" in str(note.error)
    assert "s3cr3t" not in str(note.error)
    chain = Chain("extract", [Stage(name="t", command=("no-s3cr3t",))], letters)
    with pytest.raises(WorkerStartFailed, match=r"no-\$\{TOKEN\}") as raised:
        list(chain.run(iter([given(b"m")])))
    assert "s3cr3t" not in "".join(traceback.format_exception(raised.value))
