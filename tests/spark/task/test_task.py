"""The code that runs in Spark's Python worker, without Spark."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from etlstage.errors import RepliesDoubtful, StageFailed, WorkerStartFailed
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.spark.task import portal as bridge
from etlstage.spark.task import rows as rows_module
from etlstage.spark.task.transform import Task
from etlstage.stage import BatchPolicy, ErrorPolicy, RestartPolicy, Stage
from tests.planted import AGAIN

pytestmark = pytest.mark.process

SDK = "import os, sys; from etlstage import worker; worker.{}({})"


def stage(function: str, call: str = "transform", **options: object) -> Stage:
    """Return a stage whose worker replies with ``function`` of ``m``."""
    command = (sys.executable, "-c", SDK.format(call, function))
    return Stage(name="t", worker=command, **options)  # type: ignore[arg-type]


def given(*batches: list[bytes]) -> Iterator[pa.RecordBatch]:
    """Yield batches as Spark does, with a kept column of numbers."""
    start = 0
    for messages in batches:
        numbers = pa.array(range(start, start + len(messages)), pa.int64())
        kept = pa.StructArray.from_arrays([numbers], names=["n"])
        columns = [pa.array(messages, pa.binary()), kept]
        yield pa.RecordBatch.from_arrays(columns, names=["message", "kept"])
        start += len(messages)


def rows(made: Iterator[pa.RecordBatch]) -> list[tuple[int, bytes]]:
    """Return the results with the numbers of their messages."""
    found: list[tuple[int, bytes]] = []
    for batch in made:
        numbers = batch.column(1).field(0).to_pylist()
        found += zip(numbers, batch.column(0).to_pylist(), strict=True)
    return found


def test_batches_come_back_in_order() -> None:
    """Even more batches than are read ahead, and empty ones."""
    batches = [[b"%d" % n] * n for n in (3, 0, 5000, 1, 0, 20_000, 7, 1, 1, 0)]
    task = Task(stage("lambda m: (m,)"), texts=False)
    messages = [m for batch in batches for m in batch]
    assert rows(task.run(given(*batches))) == list(enumerate(messages))


def test_nothing_is_waited_for_behind_empty_batches() -> None:
    """However many empty batches come in a row."""
    task = Task(stage("lambda m: (m,)"), texts=False)
    assert rows(task.run(given(*[[]] * 9, [b"a"], *[[]] * 9))) == [(0, b"a")]


@pytest.mark.parametrize("kind", [pa.large_binary(), pa.string(), pa.large_string()])
def test_messages_are_bytes_however_spark_gives_them(kind: pa.DataType) -> None:
    """Spark may pass text, and 64-bit offsets, depending on its settings."""
    messages = [b"a", b"", "cœç".encode()]
    batch = pa.record_batch({"message": pa.array(messages, pa.binary()).cast(kind)})
    (made,) = Task(stage("lambda m: (m,)"), texts=False).run(iter([batch]))
    assert made.column(0).to_pylist() == messages


def test_worker_that_dies_costs_nothing(tmp_path: Path) -> None:
    """Its messages are retried, alone or together, and all rows come in order."""
    died = tmp_path / "died"
    function = (
        f"lambda m: os._exit(open({str(died)!r}, 'w').close() or 3)"
        f" if m == b'4000' and not os.path.exists({str(died)!r}) else [m] * (len(m) - 2)"
    )
    restart = RestartPolicy(delay=0.01)
    task = Task(stage(function, restart=restart), texts=False)
    messages = [b"%d" % n for n in range(100, 9000)]
    made = rows(task.run(given(messages[:5000], messages[5000:])))
    expected = [(n, m) for n, m in enumerate(messages) for _ in range(len(m) - 2)]
    assert made == expected
    assert died.exists()


@pytest.mark.parametrize("rows_at_once", [1, 10_000])
def test_message_with_a_marker_fails_alone(
    monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    """Earlier messages are processed; the error names the marker and the message."""
    monkeypatch.setattr(rows_module, "_ROWS", rows_at_once)
    task = Task(stage("lambda m: (m,)"), texts=False)
    with pytest.raises(StageFailed, match=r"marker eop '\\000' at offset 1") as raised:
        rows(task.run(given([b"a"], [b"b", b"c\0", b"d"])))
    assert "(message 3)" in str(raised.value)


def test_failed_message_is_named() -> None:
    """Without further retries, the task fails."""
    dying = stage(
        "lambda m: os._exit(3) if m else (m,)",
        on_error=ErrorPolicy(retries=0),
        restart=RestartPolicy(delay=0.01),
    )
    task = Task(dying, texts=False)
    with pytest.raises(StageFailed, match=r"exited with status 3 .*\(message 2\)"):
        rows(task.run(given([b"", b"b", b""])))


def test_errors_are_rows_if_they_are_to_be() -> None:
    """For rejected, lost and invalid messages, and for replies that are no text."""
    function = (
        "lambda m: exec('raise worker.Refuse(\"no date\")') if m == b'no'"
        " else os._exit(3) if m == b'die' else [bytes([255]), m] if m == b'raw' else [m] * 2"
    )
    run = stage(
        function,
        on_error=ErrorPolicy(retries=0),
        restart=RestartPolicy(delay=0.01),
    )
    task = Task(run, texts=True, errors=True)
    messages = [b"a", b"no", b"die", b"c\0", b"raw", b"b"]
    made = [
        (number, value, error)
        for batch in task.run(given(messages[:2], messages[2:]))
        for number, value, error in zip(
            batch.column(1).field(0).to_pylist(),
            batch.column(0).to_pylist(),
            batch.column(2).to_pylist(),
            strict=True,
        )
    ]
    (at,) = [n for n, row in enumerate(made) if row[0] == 2]
    _, value, died = made.pop(at)
    assert value is None
    assert "exited with status 3" in died
    assert made == [
        (0, "a", None),
        (0, "a", None),
        (1, None, "no date"),
        (3, None, r"message contains marker eop '\000' at offset 1"),
        (4, None, "stage t: a reply is not UTF-8"),
        (4, "raw", None),
        (5, "b", None),
        (5, "b", None),
    ]


def test_errors_of_a_stage_are_no_rows() -> None:
    """They concern no message, so they fail the task."""
    task = Task(Stage(name="t", worker=("no-such-program",)), texts=False, errors=True)
    with pytest.raises(WorkerStartFailed, match="there is no program"):
        rows(task.run(given([b"a"])))


def test_program_that_is_not_there_is_missed() -> None:
    """However many batches are still to come."""
    task = Task(Stage(name="t", worker=("no-such-program",)), texts=False)
    with pytest.raises(WorkerStartFailed, match="there is no program"):
        rows(task.run(given(*[[b"a"]] * 20)))


def test_stage_may_answer_in_batches() -> None:
    """The results come in order, if no columns are kept."""
    batches = (b.select(["message"]) for b in given([b"a", b"b", b"c"], [b"d"]))
    batch = stage(
        "lambda ms: (b'+'.join(ms),)",
        "transform_batch",
        dialect=MarkerDialect(mode=Mode.BATCH_SUPERVISOR),
        batch=BatchPolicy(size=2),
    )
    made = [v for b in Task(batch, texts=True).run(batches) for v in b[0].to_pylist()]
    assert "+".join(made) == "a+b+c+d"


def test_much_from_little_waits_for_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies that are not yet taken are limited in size."""
    monkeypatch.setattr(bridge, "_UNREAD", 1)
    task = Task(stage("lambda m: [m * 1000] * 100"), texts=False)
    made = task.run(given(*[[b"%03d" % n for n in range(50)]] * 3))
    assert len(rows(made)) == 3 * 50 * 100


def test_replies_that_are_doubtful_fail_the_task() -> None:
    """A row may have another's value, which was noticed too late (issue 10)."""
    task = Task(Stage(name="t", worker=AGAIN), texts=False)
    with pytest.raises(
        RepliesDoubtful, match="stage t: results of 1 message may be mismatched"
    ):
        rows(task.run(given([b"a"])))
