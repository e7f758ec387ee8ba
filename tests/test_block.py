from __future__ import annotations

from io import BytesIO

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.block import Blocks, block_of, making
from etlstage.columns import Column
from etlstage.errors import BlockDamaged
from etlstage.messages import AnnotatedRun

RUNS = [[b"a", b""], [b"\0\n" * 40], [b"c"] * 5]


def written(runs: list[list[bytes]], first: int = 0) -> list[bytes]:
    """Return the blocks of a file."""
    blocks = []
    for run in runs:
        blocks.append(b"".join(block_of(run, first)))
        first += len(run)
    return blocks


def read(data: bytes) -> tuple[list[list[bytes]], int]:
    """Return the runs of a file, and where the last whole block ends."""
    blocks = Blocks(BytesIO(data).read, name="x")
    return [list(block.messages) for block in blocks], blocks.end


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.binary(max_size=9), max_size=5), max_size=5), st.data())
def test_all_whole_blocks_are_read(
    runs: list[list[bytes]], data: st.DataObject
) -> None:
    """An incomplete file may end at any byte (issue 14)."""
    blocks = written(runs)
    whole = b"".join(blocks)
    assert read(whole) == (runs, len(whole))
    ends = [sum(map(len, blocks[:n])) for n in range(len(blocks) + 1)]
    at = data.draw(st.integers(0, len(whole)))
    count = sum(end <= at for end in ends) - 1
    assert read(whole[:at]) == (runs[:count], ends[count])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_flipped_bit_is_found_and_named(data: st.DataObject) -> None:
    """Wherever it is, also in a length (issue 14)."""
    blocks = written(RUNS)
    whole = bytearray(b"".join(blocks))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    start, number = 0, 0
    for block, run in zip(blocks, RUNS, strict=True):
        if bit // 8 < start + len(block):
            break
        start, number = start + len(block), number + len(run)
    where = f"^x: the block at byte {start}, of message {number} and those"
    with pytest.raises(BlockDamaged, match=where):
        read(bytes(whole))


def test_messages_have_numbers() -> None:
    """They count on when reading begins in the middle, and none may be missing."""
    first, second, third = written(RUNS)
    blocks = Blocks(BytesIO(first + second + third).read, name="x")
    assert [block.first for block in blocks] == [0, 2, 3]
    assert blocks.messages == 8
    middle = Blocks(BytesIO(second + third).read, name="x", start=9, first=None)
    assert [block.first for block in middle] == [2, 3]
    assert middle.end == 9 + len(second + third)
    with pytest.raises(
        BlockDamaged, match=r"of message 2 and .*: it begins with message 3"
    ):
        read(first + third)


def test_columns_beside_the_messages() -> None:
    """They are read back, and a sliced column is written as it is."""
    batch = pa.record_batch({"m": pa.array([b"x"], pa.binary()), "key": pa.array([7])})
    (block,) = Blocks(BytesIO(b"".join(making()(batch, 0))).read, name="x")
    assert block.batch == batch
    column = Column(pa.array([b"x", b"y"], pa.binary())[1:])
    for run in (column, AnnotatedRun(column, key=[7])):
        assert read(b"".join(block_of(run, 0)))[0] == [[b"y"]]
