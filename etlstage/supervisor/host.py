"""What the parts of a connection need of the worker at its other end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from etlstage.errors import Attempt, EtlstageError, FailureCause
from etlstage.supervisor.lifecycle.events import Event

__all__ = ("Host",)


class Host(Protocol):
    """What a connection needs of the worker that it is the connection to."""

    name: str

    @property
    def usable(self) -> bool:
        """Whether the worker may be given messages."""
        ...

    @property
    def failed(self) -> bool:
        """Whether it was at fault: what it writes then is no reply."""
        ...

    @property
    def exited(self) -> bool:
        """Whether its process is gone."""
        ...

    def handle(self, event: Event) -> None:
        """Take note of what happened, and act upon it."""
        ...

    def commit(self, position: object, answer: Callable[[str | None], None]) -> None:
        """Have a position stored, then call ``answer``, with the error if it failed."""
        ...

    def announce(self) -> None:
        """Take note that the worker says that it is ready."""
        ...

    def stop(self, *, patient: bool = True) -> None:
        """Stop the worker."""
        ...

    def broke(self, pipe: str) -> None:
        """Take note that the worker closed a pipe; it is stopped if it does not exit."""
        ...

    def fail(
        self, reason: str, cause: FailureCause, blame: EtlstageError | None = None
    ) -> None:
        """Declare the worker at fault."""
        ...

    def despair(self, reason: str) -> None:
        """End all that is submitted: nobody waits for another worker."""
        ...

    def silent(self, seconds: float, hint: str, *, progressing: bool = False) -> None:
        """Take note that the worker has not answered for so long."""
        ...

    def refused(self, code: int, category: int, reason: str) -> EtlstageError:
        """Return the error of a message to which the worker said no."""
        ...

    def cancelled(
        self, reason: str
    ) -> tuple[Attempt, Callable[[tuple[Attempt, ...]], EtlstageError]]:
        """Return the attempt at an exchange that took too long, and its last error."""
        ...
