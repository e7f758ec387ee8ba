"""
Headers of a frame, as version 1 of the protocol compresses them.

The tables are those of HPACK (RFC 7541), the bytes are not. A header is the number of
an entry, or ``[store, name, value]`` where the name may be the number of an entry, too.
What is stored is then entry 83, and those before it move up. Each direction of a
connection has a table of its own. We write all headers out, which needs none.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from etlstage.errors import RemoteProtocolError

__all__ = ("HeaderTable", "Headers")

Headers = tuple[tuple[bytes, bytes], ...]
"""Names and values."""

_ZEROS: Final = bytes(8)
# RFC 7541, appendix A; then what the runtimes add for tracing, at 80, 81 and 82.
_STATIC: Final[Headers] = (
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    *((b":status", b"%d" % code) for code in (200, 204, 206, 304, 400, 404, 500)),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    *(
        (name.encode(), b"")
        for name in [
            "accept-language",
            "accept-ranges",
            "accept",
            "access-control-allow-origin",
            "age",
            "allow",
            "authorization",
            "cache-control",
            "content-disposition",
            "content-encoding",
            "content-language",
            "content-length",
            "content-location",
            "content-range",
            "content-type",
            "cookie",
            "date",
            "etag",
            "expect",
            "expires",
            "from",
            "host",
            "if-match",
            "if-modified-since",
            "if-none-match",
            "if-range",
            "if-unmodified-since",
            "last-modified",
            "link",
            "location",
            "max-forwards",
            "proxy-authenticate",
            "proxy-authorization",
            "range",
            "referer",
            "refresh",
            "retry-after",
            "server",
            "set-cookie",
            "strict-transport-security",
            "transfer-encoding",
            "user-agent",
            "vary",
            "via",
            "www-authenticate",
        ]
    ),
    *((b"", b"") for _ in range(62, 80)),
    (b"trace_id", _ZEROS),
    (b"span_id", _ZEROS),
    (b"parent_id", _ZEROS),
)
_LIMIT: Final = 4096  # bytes that are stored
_OVERHEAD: Final = 32  # bytes of an entry beside its name and value


class HeaderTable:
    """Reads the headers that one peer sends."""

    def __init__(self) -> None:
        self._stored: deque[tuple[bytes, bytes]] = deque()
        self._size = 0

    def read(self, headers: object) -> Headers:
        """
        Return the headers of one frame.

        Raises:
            RemoteProtocolError: If they are none.

        """
        if headers == ():
            return ()
        if type(headers) is not tuple:
            raise RemoteProtocolError("headers of a frame are no array")
        return tuple(map(self._header, headers))

    def _header(self, header: object) -> tuple[bytes, bytes]:
        if type(header) is int:
            return self._entry(header)
        if type(header) is not tuple or len(header) != 3:
            raise RemoteProtocolError("a header is neither a number nor of 3 elements")
        store, name, value = header
        if type(name) is int:
            name, _ = self._entry(name)
        if (
            type(store) is not bool
            or type(name) is not bytes
            or type(value) is not bytes
        ):
            raise RemoteProtocolError("a header is not [store, name, value]")
        if store:
            self._store(name, value)
        return name, value

    def _entry(self, number: int) -> tuple[bytes, bytes]:
        if 1 <= number <= len(_STATIC):
            return _STATIC[number - 1]
        at = number - len(_STATIC) - 1
        if 0 <= at < len(self._stored):
            return self._stored[at]
        raise RemoteProtocolError(f"there is no header {number}")

    def _store(self, name: bytes, value: bytes) -> None:
        self._stored.appendleft((name, value))
        self._size += _cost(name, value)
        # One that is larger than all there is room for empties the table.
        while self._size > _LIMIT:
            self._size -= _cost(*self._stored.pop())


def _cost(name: bytes, value: bytes) -> int:
    return len(name) + len(value) + _OVERHEAD
