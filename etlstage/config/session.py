"""
The Spark session that the parts of one pipeline share.

It starts when the first of them needs it, and ends when the last of them is closed;
one that was handed in is left as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from etlstage.config.model import SessionKeys
from etlstage.spark import Session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ("SessionUser", "SharedSession")


class SharedSession:
    """A session for as long as one of its users is open."""

    def __init__(self, keys: SessionKeys, spark: SparkSession | None) -> None:
        self._session = Session(spark, **keys.given("master", "remote", "config"))
        self._users = 0
        self._lock = threading.Lock()
        self._failed = False

    @property
    def log_path(self) -> Path | None:
        """Spark's log, once the session has started."""
        return self._session.log_path

    def join(self) -> None:
        """Count one more user; nothing is started."""
        self._users += 1

    def start(self) -> SparkSession:
        """Return the session, started by the first who asks; blocks."""
        with self._lock:
            return self._session.start()

    def note(self, error: BaseException | None) -> None:
        """Keep Spark's log if ``error`` sends the user there."""
        if self.log_path is not None and str(self.log_path) in str(error):
            self._failed = True

    async def leave(self) -> None:
        """Count one user less; the last one ends the session."""
        self._users -= 1
        if not self._users:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._stop)

    def _stop(self) -> None:
        with self._lock:
            self._session.stop(failed=self._failed)


class _Membership:
    """One user's part in a session."""

    def __init__(self, session: SharedSession) -> None:
        session.join()
        self._session: SharedSession | None = session

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.leave()


class SessionUser:
    """What the parts of a pipeline that share a session have in common."""

    _log_path: Path | None

    def _join(self, session: SharedSession) -> None:
        self._shared = session
        self._membership = _Membership(session)

    def _start_session(self) -> SparkSession:
        spark = self._shared.start()
        self._log_path = self._shared.log_path
        return spark

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._shared.note(error)
            raise
