"""
Read the lines of a file, compressed or not, and name their places in errors.

A chunk is some whole lines, of about a megabyte. Reading resumes from the end of any
chunk: an offset in bytes, of the decompressed data if the file is compressed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa

from etlstage.errors import os_reason
from etlstage.files.find import InputFile

__all__ = ("BLANKS", "FileLines", "Unreadable")

BLANKS: Final = bytes(range(33))
"""A line of only these is blank, as with Spark."""
_CHUNK: Final = 1 << 20
_PACKED: Final = {".gz": "gzip", ".zst": "zstd"}


class Unreadable(ValueError):
    """A file can't be read in its format; the text has the place, and a remedy."""


class FileLines:
    """
    Iterates over chunks of whole lines, each ended by a line feed.

    Args:
        file: The file.
        start: Where to begin: 0, or an earlier ``end``.

    Attributes:
        end: Offset after the last chunk.

    Raises:
        Unreadable: If the file ends before ``start``, or can't be read.

    """

    def __init__(self, file: InputFile, start: int = 0) -> None:
        self.end: int = start
        self._file = file
        self._start = start
        self._before = 0  # lines between ``start`` and the last chunk
        self._blank = True  # all of these
        self._rest = b""
        self._packed = _PACKED.get(file.path.suffix)
        self._stream = self._opened()
        if self._packed is None:
            self._stream.seek(start)
        else:
            self._skip(self._stream, start)

    def __iter__(self) -> Iterator[bytes]:
        while data := self._next():
            bare = data.removeprefix(b"\xef\xbb\xbf") if not self.end else data
            self.end += len(data)
            if b"\r" in bare:
                bare = bare.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            yield bare if bare.endswith(b"\n") or not bare else bare + b"\n"
            self._before += bare.count(b"\n")
            self._blank = self._blank and not bare.strip(BLANKS)

    @property
    def first(self) -> bool:
        """Whether no line of the file before the last chunk has text."""
        return not self._start and self._blank

    def place(self, index: int) -> str:
        """Return the file and line number of a line of the last chunk, for an error."""
        number = self._before + index + 1
        if self._start:
            # Reads the file up to there: only an error is worth that.
            with self._opened() as stream:
                number += self._skip(stream, self._start)
        return f"{self._file.path}:{number}"

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _opened(self) -> Any:  # noqa: ANN401 - Arrow is not typed
        return pa.input_stream(str(self._file.path), compression=self._packed)

    def _skip(self, stream: Any, size: int) -> int:  # noqa: ANN401 - Arrow is not typed
        """Read that many bytes of a stream, and return how many lines end in them."""
        lines, last = 0, b""
        while size:
            data = self._read(stream, min(size, _CHUNK))
            if not data:
                raise Unreadable(f"{self._file.path} ends before offset {self._start}")
            lines += data.count(b"\n") + data.count(b"\r")
            lines -= (last + data).count(b"\r\n")
            last, size = data[-1:], size - len(data)
        return lines

    def _read(self, stream: Any, size: int) -> bytes:  # noqa: ANN401 - not typed
        try:
            return bytes(stream.read(size))
        except OSError as error:
            # What decompresses does not name the file.
            raise Unreadable(
                f"can't read {self._file.path}: {os_reason(error)}"
            ) from error

    def _next(self) -> bytes:
        """Return the next whole lines, as they are; nothing at the end."""
        data = self._rest
        while True:
            more = self._read(self._stream, _CHUNK)
            data += more
            if not more:
                self._rest = b""
                return data
            # A line feed may follow a carriage return at the end of what was read.
            cut = data.rfind(b"\n") + 1 or data.rfind(b"\r", 0, -1) + 1
            if cut:
                data, self._rest = data[:cut], data[cut:]
                return data
