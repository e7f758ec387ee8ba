"""
A strategy of messages that the user named, which may be anything.

This module needs the extra ``testing``.
"""

from __future__ import annotations

from functools import partial

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from etlstage.errors import ConfigError
from etlstage.protocol.marker import Markers
from etlstage.testing.fuzzing.oracle import named
from etlstage.testing.strategies import sendable

__all__ = ("NamedStrategy",)


class NamedStrategy:
    """
    Makes strategies of sendable messages from a strategy in the user's module.

    Args:
        name: Its ``module:name``.

    Attributes:
        drawn: Number of messages drawn.
        left_out: Number of those that were left out, as they contain a marker.

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
        self._messages = found.map(self._message)
        self.drawn: int = 0
        self.left_out: int = 0

    def __call__(self, markers: Markers | None = None) -> st.SearchStrategy[bytes]:
        """
        Return a strategy of the messages that may be sent with these markers.

        Args:
            markers: The markers; None: the dialect has none.

        """
        if markers is None:
            return self._messages
        return self._messages.filter(partial(self._may_be_sent, markers))

    def check(self) -> None:
        """
        Assert that not all messages were left out.

        Raises:
            ConfigError: If they were.

        """
        if 0 < self.drawn == self.left_out:
            raise ConfigError(
                f"{self._where}: each message that it draws contains a marker, expected"
                " some that can be sent; change the strategy or the markers"
            )

    def _may_be_sent(self, markers: Markers, message: bytes) -> bool:
        may = sendable(message, markers)
        self.left_out += not may
        return may

    def _message(self, drawn: object) -> bytes:
        self.drawn += 1
        if isinstance(drawn, bytes):
            return drawn
        text = f"{self._where} draws {type(drawn).__name__}, expected bytes"
        remedy = "; add .map(str.encode)" if isinstance(drawn, str) else ""
        raise ConfigError(f"{text}{remedy}")
