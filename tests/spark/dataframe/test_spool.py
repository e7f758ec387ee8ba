from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyspark
import pytest

from etlstage.errors import BlockDamaged
from etlstage.messages import AnnotatedRun
from etlstage.spark.dataframe.source import _read_file
from etlstage.spark.dataframe.spool import _cutting, read_packed, spool_into, spooled
from tests.spark.driver import Driver

Program = Callable[..., "subprocess.CompletedProcess[str]"]


def cut(lengths: list[int], messages: int, size: int) -> list[list[int]]:
    """Return the lengths of the messages in each piece of a batch."""
    batch = pa.record_batch({"m": pa.array([b"x" * n for n in lengths], pa.binary())})
    pieces = _cutting(messages, size)(batch)
    return [[len(item) for item in piece.column(0).to_pylist()] for piece in pieces]


@pytest.mark.parametrize(
    ("lengths", "messages", "size", "pieces"),
    [
        ([], 9, 9, []),
        ([1, 2], 9, 99, [[1, 2]]),
        ([1, 2, 3, 4, 5], 2, 99, [[1, 2], [3], [4, 5]]),
        ([1, 90, 1, 1], 9, 20, [[1], [90], [1, 1]]),
    ],
)
def test_batch_is_cut_within_the_bounds(
    lengths: list[int], messages: int, size: int, pieces: list[list[int]]
) -> None:
    """Pieces keep the order, and only a single message may exceed the size."""
    assert cut(lengths, messages, size) == pieces


def test_packed_run_is_read_back() -> None:
    """A packed run is an Arrow stream of one column."""
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"m": pa.array([b"", b"\0", b"z"], pa.binary())})
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    assert list(read_packed(sink.getvalue().to_pybytes())) == [b"", b"\0", b"z"]


def test_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task's error reaches the driver, with its errno."""
    context = Mock(partitionId=lambda: 0, taskAttemptId=lambda: 0)
    monkeypatch.setattr(pyspark.TaskContext, "get", lambda: context)
    (tmp_path / "nonce").write_text("n")
    (tmp_path / "0-0.arrow.part").symlink_to("/dev/full")
    batch = pa.record_batch({"m": pa.array([b"x" * 100_000], pa.binary())})
    spool = spool_into(str(tmp_path), "n", _cutting(9, 999_999))
    with pytest.raises(RuntimeError) as raised:
        list(spool(iter([batch])))
    frame = Mock(columns=["message"])
    frame.mapInArrow().collect.side_effect = raised.value
    with pytest.raises(OSError, match="No space left") as told:
        spooled(frame, str(tmp_path), "n", 9, 999_999)
    assert told.value.errno == errno.ENOSPC


def test_spool_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its keys; a block changed on disk is named and not passed on (issue 14)."""
    context = Mock(partitionId=lambda: 0, taskAttemptId=lambda: 0)
    monkeypatch.setattr(pyspark.TaskContext, "get", lambda: context)
    (tmp_path / "nonce").write_text("n")
    batch = pa.record_batch(
        {"m": pa.array([b"a", b"b", b"c"], pa.binary()), "key": pa.array([7, 8, 7])}
    )
    spool = spool_into(str(tmp_path), "n", _cutting(2, 999), 2)
    assert [row.to_pylist()[0]["messages"] for row in spool(iter([batch, batch]))] == [
        6
    ]
    path = tmp_path / "0-0.arrow"
    whole = path.read_bytes()
    runs = list(_read_file(path, 6))
    assert [list(run) for run in runs] == [[b"a"], [b"b", b"c"]] * 2
    assert isinstance(runs[3], AnnotatedRun)
    assert runs[3].columns["key"] == [8, 7]
    assert not path.exists()
    path.write_bytes(whole[:-1] + b"?")
    with pytest.raises(BlockDamaged, match=r"0-0\.arrow: .* of message 4 and those"):
        list(_read_file(path, 6))


@pytest.mark.process
def test_executors_do_not_need_etlstage(program: Program) -> None:
    """The functions are pickled by value: executors need no etlstage to load them."""
    done = program(
        """
        import subprocess, sys
        from pyspark import cloudpickle
        from etlstage.spark.dataframe.spool import _cutting, _pack, spool_into
        cut = _cutting(1, 1)
        pickled = cloudpickle.dumps([spool_into("/x", "y", cut), _pack(cut)])
        other = '''if 1:
            import pickle, sys
            sys.modules["etlstage"] = None
            functions = pickle.load(sys.stdin.buffer)
            print([function.__name__ for function in functions])
        '''
        subprocess.run([sys.executable, "-c", other], input=pickled, check=True)
        """
    )
    assert (done.stdout, done.stderr) == ("['spool', 'pack']\n", "")


@pytest.mark.spark
def test_retried_task_does_no_harm(retrying: Driver) -> None:
    """A task that fails after it has written is repeated, and counts once."""
    same = retrying.run(
        """
        import anyio
        from etlstage.spark import DataFrameSource

        def fail_once(batches):
            from pyspark import TaskContext
            for batch in batches:
                yield batch
            if TaskContext.get().attemptNumber() == 0:
                raise RuntimeError("first attempt")

        async def main():
            frame = spark.range(0, 30_000, 1, 2).mapInArrow(fail_once, "id long")
            source = DataFrameSource(frame, message="cast(id as string)")
            return [m async for run in source.runs() for m in run]

        result = anyio.run(main) == [b"%d" % n for n in range(30_000)]
        """
    )
    assert same
