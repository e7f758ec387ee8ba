"""
Runs of messages as one frame: a UUID, and a block in etlstage's on-disk format.

A UUID for each message would cost more than the rest of publishing and reading it. So
messages that are published together share a UUID, and are committed together. The block
has no checksum of its own, as the journal's group that contains the frame has one.
Instead of a first number the block's head has the checksum of the UUID, for readers
that read only heads.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID
from zlib import crc32

try:
    from etlstage.block import Blocks, block_of
except ModuleNotFoundError as _missing:
    raise ModuleNotFoundError(
        "journals need PyArrow: pip install 'etlstage[arrow]'", name=_missing.name
    ) from None
from etlstage.errors import BlockDamaged
from etlstage.messages import Run
from etlstage.sequencing import (
    FIXED_FRAME_HEADER_LENGTH,
    FIXED_FRAME_WORD,
    NO_UUID,
    ByteWriter,
    FrameBuffer,
    NotFrameable,
    Unmarshaller,
    located,
    register_framing,
    unpack_fixed_frame,
)

__all__ = ("RunFraming", "RunMessage", "uuid_of")

_START: Final = FIXED_FRAME_HEADER_LENGTH + 16


class RunMessage:
    """Messages that are one message to a journal; an acknowledgement has none."""

    __slots__ = ("_uuid", "run")

    def __init__(self, run: Run = ()) -> None:
        self.run: Run = run
        self._uuid = NO_UUID

    def __repr__(self) -> str:
        return f"<RunMessage {self._uuid} messages={len(self.run)}>"

    @property
    def uuid(self) -> UUID:
        """The UUID that all messages of the run share."""
        return self._uuid

    def set_uuid(self, uuid: UUID) -> None:
        """Set the UUID."""
        self._uuid = uuid

    def acknowledgement(self, journal: str) -> RunMessage:
        """Return a run without messages."""
        return RunMessage()


class RunFraming:
    """Runs in fixed frames: 16 bytes of UUID, then a block."""

    content_type: Final = "application/x-etlstage-run"

    def marshal(self, message: Any, writer: ByteWriter) -> None:  # noqa: ANN401
        """Write a :class:`RunMessage`."""
        self._check(message)
        run = message.run
        sum_ = crc32(message.uuid.bytes)
        parts = block_of(run, sum_, summed=False) if len(run) else []
        size = 16 + sum(map(len, parts))
        writer.write(FIXED_FRAME_WORD + size.to_bytes(4, "little") + message.uuid.bytes)
        for part in parts:
            writer.write(part)

    def unmarshaller(self, buffer: FrameBuffer) -> Unmarshaller:
        """Return a function that reads a :class:`RunMessage`."""

        def unmarshal(message: Any) -> bool:  # noqa: ANN401
            self._check(message)
            frame = unpack_fixed_frame(buffer)
            if frame is None:
                return False
            if len(frame) < _START:
                raise ValueError(f"expected a UUID of 16 bytes, got {len(frame) - 8}")
            message.set_uuid(uuid_of(frame))
            message.run = _run(frame)
            return True

        return located(unmarshal, buffer, self.content_type)

    def _check(self, message: object) -> None:
        if not isinstance(message, RunMessage):
            raise NotFrameable(
                f"{type(message).__name__} can't be framed as {self.content_type}: it is"
                " not a RunMessage"
            )


def _run(frame: bytes) -> Run:
    if len(frame) == _START:
        return ()
    left = memoryview(frame)[_START:]

    def read(size: int) -> memoryview:
        nonlocal left
        part, left = left[:size], left[size:]
        return part

    try:
        for block in Blocks(read, name="frame", start=_START, first=None):
            return block.messages
    except BlockDamaged as error:
        raise ValueError(str(error)) from error
    raise ValueError("its block is incomplete")


register_framing(RunFraming())


def uuid_of(frame: bytes) -> UUID:
    """Return the UUID of a frame of a run, or of its acknowledgement."""
    return UUID(bytes=bytes(frame[FIXED_FRAME_HEADER_LENGTH:_START]))
