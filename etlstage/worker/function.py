"""
The user's function: what it may give, and how errors call it.

What it gives is checked here, one thing at a time, because a wrong thing may look
like a right one: a ``bytes`` object is an iterable, and ``b""`` an empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from types import GeneratorType
from typing import Any, Final, NoReturn

__all__ = ("ITERABLE", "Function")

ITERABLE: Final = frozenset({list, tuple, GeneratorType})
"""What is known by its type to be an iterable."""
_SINGLE: Final = (bytes, str, bytearray, memoryview)


class Function:
    """
    A function, with the words for its errors.

    Args:
        call: What the user gave us.
        role: What it does: transform, load or extract.

    """

    def __init__(self, call: Callable[..., Any], role: str) -> None:
        if not callable(call):
            raise TypeError(
                f"{role} takes a function, got {type(call).__name__}:"
                " pass the function itself, not what it returns"
            )
        self.call = call
        self.name: str = (
            f"{role} function {getattr(call, '__qualname__', repr(call))!r}"
        )

    def check(self, reply: object) -> None:
        """
        Check what the function returned; not what is in it.

        Raises:
            TypeError: If it's not an iterable of messages.

        """
        kind = type(reply).__name__
        if isinstance(reply, _SINGLE):
            raise TypeError(
                f"{self.name} returned a single {kind} object, expected an iterable"
                " of bytes: yield it, or return [..]"
            )
        if not isinstance(reply, Iterable):
            raise TypeError(
                f"{self.name} returned {kind}, expected an iterable of bytes:"
                " yield each message, or return a list; [] is no message"
            )

    def check_only(self, outputs: Sized) -> None:
        """
        Check that a reply is one message, where ``eop`` is ``eom``.

        Raises:
            ValueError: If there are none, or more.

        """
        if len(outputs) != 1:
            raise ValueError(
                f"{self.name} gave {'many' if outputs else 'no'} messages,"
                " expected exactly one: eop is eom"
            )

    def refuse(self, message: object) -> NoReturn:
        """
        Refuse a message that is not bytes.

        Raises:
            TypeError: Always.

        """
        kind = type(message).__name__
        remedy = "; use .encode()" if isinstance(message, str) else ""
        raise TypeError(f"{self.name} gave {kind}, expected bytes{remedy}")

    def load(self, asked: object) -> tuple[()]:
        """
        Call the function, which has nothing to give.

        Raises:
            TypeError: If it returned something.

        """
        reply = self.call(asked)
        if reply is not None:
            raise TypeError(
                f"{self.name} returned {type(reply).__name__}, expected None:"
                " a load stage makes no messages"
            )
        return ()
