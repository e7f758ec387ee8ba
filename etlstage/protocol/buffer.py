"""
A buffer for bytes that have been received and not parsed yet.

Each search starts where the last one ended, so that a message which arrives in a
thousand pieces is searched once and not a thousand times.
"""

from __future__ import annotations

__all__ = ("ReceiveBuffer",)


class ReceiveBuffer:
    """Holds received bytes until a boundary is found in them."""

    def __init__(self) -> None:
        self._data = bytearray()
        # Where the next search for each marker may begin.
        self._searched: dict[bytes, int] = {}
        # Per marker: how many begin before which byte.
        self._counted: dict[bytes, tuple[int, int]] = {}
        self.offset: int = 0
        """Place in the stream of the first byte held, in bytes."""

    def __len__(self) -> int:
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """Append ``data``."""
        self._data += data

    def peek(self, count: int) -> bytes:
        """Return the first ``count`` bytes, or fewer, and keep them."""
        return bytes(self._data[:count])

    def startswith(self, prefix: bytes) -> bool:
        """Return whether the held bytes begin with ``prefix``."""
        return self._data.startswith(prefix)

    def find(self, marker: bytes) -> int:
        """Return where ``marker`` first begins, or -1."""
        found = self._data.find(marker, self._searched.get(marker, 0))
        # A marker may be cut: its first bytes here, the others in the next chunk.
        start = found if found >= 0 else len(self._data) - len(marker) + 1
        self._searched[marker] = max(0, start)
        return found

    def end_of_last(self, marker: bytes, before: int | None = None) -> int:
        """Return where the last ``marker`` ends, ``before`` at most, or 0."""
        if self.find(marker) < 0:
            return 0
        at = self._data.rfind(marker, 0, before)
        return at + len(marker) if at >= 0 else 0

    def count(self, marker: bytes) -> int:
        """Return how many times ``marker`` is held."""
        count, start = self._counted.get(marker, (0, 0))
        count += self._data.count(marker, start)
        self._counted[marker] = count, max(0, len(self._data) - len(marker) + 1)
        return count

    def take(self, count: int) -> bytes:
        """Remove and return the first ``count`` bytes."""
        with memoryview(self._data) as view:
            taken = bytes(view[:count])
        self.drop(count)
        return taken

    def feed_and_take(self, data: bytes, count: int) -> bytes:
        """Feed ``data``, and take everything up to its byte ``count``."""
        if not self._data and count == len(data):
            taken = data
        else:
            # The rest, a part of a reply, is small compared to what is returned.
            view = memoryview(data)
            taken = b"".join((self._data, view[:count]))
            self._data = bytearray(view[count:])
        self.offset += len(taken)
        self._forget()
        return taken

    def pass_by(self, count: int) -> bool:
        """Count bytes as taken without a feed if none are held; return whether."""
        if self._data:
            return False
        self.offset += count
        return True

    def drop(self, count: int) -> None:
        """Remove the first ``count`` bytes."""
        del self._data[:count]
        self.offset += count
        self._forget()

    def truncate(self, count: int) -> None:
        """Forget all but the first ``count`` bytes."""
        del self._data[count:]
        self._forget()

    def put_back(self, data: bytes) -> None:
        """Insert ``data``, just taken, before the held bytes."""
        if data:
            self._data[:0] = data
            self.offset -= len(data)
            self._forget()

    def _forget(self) -> None:
        """Search from the beginning again, as the beginning has changed."""
        self._searched.clear()
        self._counted.clear()
