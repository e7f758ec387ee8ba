"""
A strategy of messages that the user named, which may be anything.

This module needs the extra ``testing``.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from etlstage.errors import ConfigError
from etlstage.protocol.marker import Markers
from etlstage.testing.fuzzing.oracle import named
from etlstage.testing.strategies import sendable_of

__all__ = ("NamedStrategy",)


class NamedStrategy:
    """
    Makes strategies of sendable messages from a strategy in the user's module.

    Args:
        name: Its ``module:name``.

    Raises:
        ConfigError: If there is no such strategy, or it can't draw anything; while
            drawing, if it draws something else than bytes.

    """

    def __init__(self, name: str) -> None:
        found = named(name, "strategy")
        self._where = f"strategy {name}"
        if not isinstance(found, st.SearchStrategy):
            text = f"{self._where} is of type {type(found).__name__}"
            text += ", expected a Hypothesis strategy of bytes"
            if callable(found):
                own = name.partition(":")[2]
                text += f"; name the result of a call, as in messages = {own}()"
            raise ConfigError(text)
        try:
            found.validate()
        except InvalidArgument as error:
            raise ConfigError(f"{self._where}: {error}") from None
        if found.is_empty:
            raise ConfigError(f"{self._where} draws nothing, expected bytes")
        self._drawn = found.map(self._message)

    def __call__(self, markers: Markers | None = None) -> st.SearchStrategy[bytes]:
        """Return a strategy of the messages that may be sent with these markers."""
        return sendable_of(self._drawn, markers)

    def _message(self, drawn: object) -> bytes:
        if isinstance(drawn, bytes):
            return drawn
        text = f"{self._where} draws {type(drawn).__name__}, expected bytes"
        remedy = "; add .map(str.encode)" if isinstance(drawn, str) else ""
        raise ConfigError(f"{text}{remedy}")
