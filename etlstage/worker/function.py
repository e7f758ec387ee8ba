"""
The user's function, with checks of its results.

Results are checked one by one, because a wrong one may look like a right one: a
``bytes`` object is an iterable, and ``b""`` an empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from types import CoroutineType, GeneratorType
from typing import Any, Final, NoReturn

__all__ = ("ITERABLE", "Function", "expect_none")

ITERABLE: Final = frozenset({list, tuple, GeneratorType})
"""Types that are known to be iterables."""
_SINGLE: Final = (bytes, str, bytearray, memoryview)


def expect_none(name: str, result: object, remedy: str) -> None:
    """
    Check that the function called ``name`` returned None.

    A generator function and an ``async def`` return without having done anything.

    Raises:
        TypeError: If it returned something.

    """
    if result is not None:
        kind = _dismissed(result)
        raise TypeError(f"{name} returned {kind}, expected None: {remedy}")


class Function:
    """
    A function, with its name for error messages.

    Args:
        call: The user's function.
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
        Check the type of what the function returned, not its items.

        Raises:
            TypeError: If it is not an iterable, or is a single message.

        """
        kind = _dismissed(reply)
        if isinstance(reply, _SINGLE):
            raise TypeError(
                f"{self.name} returned a single {kind} object, expected an iterable"
                " of bytes: yield it, or return [..]"
            )
        if not isinstance(reply, Iterable):
            raise TypeError(
                f"{self.name} returned {kind}, expected an iterable of bytes:"
                " yield each message, or return a list; [] for none"
            )

    def check_only(self, outputs: Sized) -> None:
        """
        Check that a reply is one message, as it must be if ``eop`` is ``eom``.

        Raises:
            ValueError: If there is none, or more than one.

        """
        if len(outputs) != 1:
            raise ValueError(
                f"{self.name} gave {'several' if outputs else 'no'} messages,"
                " expected exactly one: eop is eom"
            )

    def refuse(self, message: object) -> NoReturn:
        """
        Raise for a message that is not bytes.

        Raises:
            TypeError: Always.

        """
        kind = type(message).__name__
        remedy = "; use .encode()" if isinstance(message, str) else ""
        raise TypeError(f"{self.name} gave {kind}, expected bytes{remedy}")

    def load(self, asked: object) -> tuple[()]:
        """
        Call the function, which must return None, and return an empty reply.

        Raises:
            TypeError: If it returned something.

        """
        expect_none(self.name, self.call(asked), "a load stage emits no messages")
        return ()


def _dismissed(result: object) -> str:
    """Return the name of a wrong result's type; close it if it is a coroutine."""
    if isinstance(result, CoroutineType):
        result.close()  # else Python warns that it was never awaited
    return type(result).__name__
