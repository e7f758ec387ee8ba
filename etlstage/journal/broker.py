"""
Journals of a Gazette broker, through its HTTP gateway.

A PUT appends, a GET reads. A request whose answer was lost or came too late is
repeated. An append may then be in the journal twice, and a sequencer drops the second
copy, unless its producer has begun another transaction before it arrives. A reader that
follows keeps a GET open that the broker answers when there is more, and reads with
another GET. So no read waits longer than the broker takes to answer.
"""

from __future__ import annotations

import itertools
import select
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha1
from http import HTTPStatus
from http.client import (
    HTTPConnection,
    HTTPException,
    HTTPResponse,
    HTTPSConnection,
    parse_headers,
)
from typing import Final, NoReturn, TypeVar
from urllib.parse import quote, urlsplit

from etlstage.errors import ConfigError
from etlstage.journal.errors import AppendInDoubt, JournalError, OffsetGone
from etlstage.journal.log import Group

__all__ = ("Broker", "BrokerLog")

T = TypeVar("T")

_CHUNK: Final = 1 << 18
_SHORT: Final = 1 << 10
_ELECTING: Final = "NO_JOURNAL_PRIMARY_BROKER", "INSUFFICIENT_JOURNAL_BROKERS"
_RETRIED: Final = 502, 503, 504
_NOT_YET: Final = "OFFSET_NOT_YET_AVAILABLE"
_FIRST_WAIT: Final = 0.05
_LONGEST_WAIT: Final = 2.0


@dataclass(frozen=True)
class Broker:
    """
    A broker's address, timeouts and headers.

    Raises:
        ConfigError: If the address is invalid.

    """

    url: str
    """``http://broker:8080/orders/`` for journals ``orders/part-000`` and so on;
    without the trailing slash, one journal of that name."""
    timeout: float = 10.0
    """Seconds to wait for an answer, or for more of one."""
    retry_for: float = 30.0
    """Seconds for which a failed request is retried."""
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    """Sent with each request, such as ``Authorization``."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        try:
            known = parts.scheme in ("http", "https") and parts.port != 0
        except ValueError:
            known = False
        if not (known and parts.hostname and parts.path.strip("/")) or parts.query:
            raise ConfigError(
                f"broker is {self.url!r}, expected an address such as"
                " 'http://broker:8080/orders/'"
            )

    @property
    def name(self) -> str:
        """The prefix of the names of its journals."""
        return urlsplit(self.url).path.strip("/")

    @property
    def single(self) -> bool:
        """Whether the address is that of one journal."""
        return not urlsplit(self.url).path.endswith("/")

    def connect(self) -> HTTPConnection:
        """Return a connection, which is opened by its first request."""
        parts = urlsplit(self.url)
        kind = HTTPConnection if parts.scheme == "http" else HTTPSConnection
        return kind(parts.hostname or "", parts.port, timeout=self.timeout)


class _Transient(Exception):
    """A failure after which a retry may succeed."""


_BROKEN: Final = OSError, HTTPException, _Transient


class BrokerLog:
    """
    One journal of a broker.

    Args:
        broker: The broker.
        name: Name of the journal.

    """

    rolled: Final = False
    """Always False: segments are the broker's concern."""

    def __init__(self, broker: Broker, name: str) -> None:
        self.name = name
        self._broker = broker
        self._appending: HTTPConnection | None = None
        # By offset, a request that is answered when there is something to read.
        self._bells: dict[int, HTTPConnection] = {}
        self._confirmed = 0  # the end of our last append

    @property
    def lock(self) -> str:
        """Lock between this process's threads; the broker orders all appends."""
        return f"{self.name}/lock"

    def first(self) -> int:
        """Return 0: a read from 0 begins at the first offset that is kept."""
        return 0

    def end(self) -> int:
        """Return the broker's write head."""
        return self._retried("read the write head", self._head)

    def reach(self) -> int:
        """Return the write head: a broker's log has no incomplete groups."""
        return self.end()

    def appended(self) -> int:
        """Return the write head."""
        return self.end()

    def sync(self) -> None:
        """Do nothing: a broker answers an append once it is replicated."""

    def secure(self, offset: int) -> None:
        """Do nothing: whatever can be read is replicated."""

    def at_time(self, time: int) -> NoReturn:
        """
        Refuse: a broker has no index of times.

        Raises:
            JournalError: Always.

        """
        raise JournalError(
            f"{self.name}: a broker has no index of times; begin at an offset"
        )

    def close(self) -> None:
        """Close all connections."""
        for connection in (*self._bells.values(), self._appending):
            if connection is not None:
                connection.close()
        self._bells.clear()
        self._appending = None

    def append(self, now: int, *data: bytes) -> tuple[int, int]:
        """
        Append bytes, and return their begin and end offsets.

        Raises:
            AppendInDoubt: If no answer confirms the append. The bytes may be in the
                journal, or may appear there later.
            JournalError: If the append was refused at the first attempt.

        """
        body = b"".join(data)
        return self._retried("append", lambda: self._put(body), AppendInDoubt)

    def grown(self, offset: int) -> bool:
        """
        Return whether there may be more after an offset.

        The first call asks the broker to answer once there is more, and later calls
        look whether it has answered. That answer comes a moment after the confirmation
        of an append, so for our own appends we do not wait for it.
        """
        bell = self._bells.get(offset)
        if self._confirmed > offset:
            if bell is not None:
                self._bells.pop(offset).close()
            return True
        if bell is None:
            bell = self._broker.connect()
            try:
                self._send(bell, "GET", f"?offset={offset}&block=true")
            except _BROKEN:
                bell.close()
                return True  # the read that follows fails with the cause
            self._bells[offset] = bell
        # Not select(), which refuses descriptors above 1023.
        answers = select.poll()
        answers.register(bell.sock, select.POLLIN)
        if not answers.poll(0):
            return False
        self._bells.pop(offset).close()
        return True

    def groups(
        self, offset: int, *, skip: bool = False, heads: bool = False
    ) -> Iterator[Group]:
        """
        Iterate over the bytes from ``offset`` on, in pieces as they arrive.

        Args:
            offset: Where to begin; 0 is the first offset that is kept.
            skip: Ignored: the broker verifies what it sends.
            heads: Ignored: the broker sends everything.

        Raises:
            OffsetGone: If that offset was dropped.
            JournalError: If the broker does not answer, or refuses.

        """
        body: _Body | None = None
        while body is None or _NOT_YET not in body.closing:
            with closing(self._broker.connect()) as connection:
                opened = self._retried("read", partial(self._open, connection, offset))
                if opened is None:
                    return
                begin, body, data = opened
                if offset and begin != offset:
                    raise OffsetGone(self.name, offset, begin)
                offset = begin
                # If the answer is cut off, the next request resumes from there.
                with suppress(*_BROKEN):
                    while data:
                        yield Group(offset, offset + len(data), 0, data)
                        offset += len(data)
                        data = next(body.parts, b"")

    def _head(self) -> int:
        with closing(self._broker.connect()) as connection:
            return _head_of(self._ask(connection, "GET", "?offset=0&block=false"))

    def _open(
        self, connection: HTTPConnection, offset: int
    ) -> tuple[int, _Body, bytes] | None:
        """Return an answer's begin offset, body and first bytes; None: none yet."""
        connection.close()  # from the previous attempt
        answer = self._ask(connection, "GET", f"?offset={offset}&block=false")
        if answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return None
        body = _Body(answer)
        if data := next(body.parts, b""):
            # Such as "bytes 1024-9223372036854775807/9223372036854775807".
            place = answer.headers.get("Content-Range", "").removeprefix("bytes ")
            begin = place.partition("-")[0]
            return int(begin) if begin.isdigit() else offset, body, data
        if _NOT_YET in body.closing or offset >= _head_of(answer):
            return None
        raise _Transient(body.closing or "the answer was empty")

    def _put(self, body: bytes) -> tuple[int, int]:
        connection, self._appending = self._appending, None
        connection = connection or self._broker.connect()
        try:
            answer = self._ask(connection, "PUT", "", body)
            answer.read()
        except BaseException:
            connection.close()
            raise
        self._appending = connection
        place = [answer.headers.get(f"X-Commit-{one}", "") for one in ("Begin", "End")]
        begin, end = (int(one) if one.isdigit() else -1 for one in place)
        total = answer.headers.get("X-Commit-Sha1-Sum")
        own = sha1(body, usedforsecurity=False).hexdigest()
        if end - begin != len(body) or total not in (None, own):
            raise AppendInDoubt(
                f"{self.name}: the broker committed bytes other than the {len(body)}"
                f" that were sent: from offset {begin} to {end}, SHA-1 {total}"
            )
        self._confirmed = max(self._confirmed, end)
        return begin, end

    def _ask(
        self, connection: HTTPConnection, method: str, query: str, body: bytes = b""
    ) -> HTTPResponse:
        """Return a successful answer, or one to a read that there is nothing yet."""
        self._send(connection, method, query, body)
        answer = connection.getresponse()
        if answer.status < HTTPStatus.MULTIPLE_CHOICES:
            return answer
        text = answer.read(_SHORT).decode("utf-8", "replace").strip()
        if answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and not body:
            return answer
        answered = f"{answer.status} {text or answer.reason}"
        if answer.status in _RETRIED or any(status in text for status in _ELECTING):
            raise _Transient(answered)
        if answer.status == HTTPStatus.NOT_FOUND:
            raise JournalError(
                f"fetching journal spec: named journal does not exist ({self.name})"
            )
        in_doubt = body and answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        raise (AppendInDoubt if in_doubt else JournalError)(
            f"{self.name}: broker answered {answered!r}"
        )

    def _send(
        self, connection: HTTPConnection, method: str, query: str, body: bytes = b""
    ) -> None:
        target = f"/{quote(self.name)}{query}"
        connection.request(method, target, body or None, self._broker.headers)

    def _retried(
        self,
        what: str,
        attempt: Callable[[], T],
        failure: type[JournalError] = JournalError,
    ) -> T:
        deadline = time.monotonic() + self._broker.retry_for
        for count in itertools.count(1):
            try:
                return attempt()
            except _BROKEN as error:
                wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** min(count - 1, 10))
                if time.monotonic() + wait > deadline:
                    raise failure(
                        f"{self.name}: can't {what}: broker at {self._broker.url}"
                        f" failed {count} times within {self._broker.retry_for} s"
                        f" (retry_for), the last time: {error or type(error).__name__}"
                    ) from error
                time.sleep(wait)
            except JournalError as refused:
                if count == 1 or isinstance(refused, failure):
                    raise
                raise failure(
                    f"{refused}, at attempt {count} to {what}; earlier ones may have"
                    " succeeded"
                ) from refused
        raise AssertionError("unreachable: attempts have no end")


class _Body:
    """
    The bytes of an answer as they arrive, and the status in its trailer.

    ``http.client`` drops trailers, so chunks are parsed here.

    Attributes:
        parts: The bytes. If the answer is cut off, the iterator ends, or raises a
            connection error.
        closing: Why the broker has ended the answer, from the trailer.

    """

    def __init__(self, answer: HTTPResponse) -> None:
        self.closing: str = ""
        self.parts: Iterator[bytes] = self._parts(answer)

    def _parts(self, answer: HTTPResponse) -> Iterator[bytes]:
        if not answer.chunked:
            while data := answer.read1(_CHUNK):
                yield data
            return
        file = answer.fp
        while left := _size(file.readline(_SHORT)):
            while left:
                if not (data := file.read(min(left, _CHUNK))):
                    raise _Transient("the answer was cut off")
                left -= len(data)
                yield data
            file.readline(_SHORT)
        self.closing = parse_headers(file).get("X-Close-Error", "")


def _size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    try:
        return int(digits, 16)
    except ValueError:
        raise _Transient("the answer was cut off") from None


def _head_of(answer: HTTPResponse) -> int:
    text = answer.headers.get("X-Write-Head", "")
    return int(text) if text.isdigit() else 0
