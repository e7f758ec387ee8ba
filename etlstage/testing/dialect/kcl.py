"""What tests know of dialect ``kcl``."""

from __future__ import annotations

from collections.abc import Sequence

from etlstage.protocol.base import Limits, Side
from etlstage.protocol.events import Opened
from etlstage.protocol.kcl.lines import status_line
from etlstage.protocol.kcl.session import KclSession
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.testing.dialect.kit import DialectKit

__all__ = ("KclKit",)


class KclKit(DialectKit[KclDialect]):
    """Begins the life of a processor."""

    def raw(self, messages: Sequence[bytes]) -> bytes:
        """Return the messages as a processor reads them, in its first action."""
        session = self._dialect.open(
            Side.SUPERVISOR, Limits(), batch=max(1, len(messages))
        )
        assert isinstance(session, KclSession)
        session.receive_data(status_line("initialize"), 0.0)
        session.send(Opened(1, messages), 0.0)
        return b"".join(session.data_to_send())
