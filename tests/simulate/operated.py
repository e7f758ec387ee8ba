"""What operators and another reader do with an edge's journals during the runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import anyio

from etlstage.journal import JournalError, Journals
from etlstage.journal.account import lags, verify
from etlstage.journal.reader import CommittedReader
from etlstage.pipeline.journal_source import messages_of
from etlstage.testing.scenario import Violation

__all__ = ("Operated", "Operation", "any_operations")

Operation: TypeAlias = tuple[float, str]
"""Virtual seconds to wait, and the command to give then."""

COMMANDS: Final = ("trim", "lags", "cat", "verify", "read", "read", "stop")
"""Commands of ``etlstage journal``; and actions of another reader, which reads some
messages and stores its position (``read``), or ends without storing it (``stop``)."""


def any_operations(draw: random.Random, *, limited: bool) -> list[Operation]:
    """Draw operations; if ``limited``, no reads, as they would block the writers."""
    commands = COMMANDS[:4] if limited else COMMANDS
    return [
        (draw.choice((0.0, 0.001, 0.01, 0.05, 0.5)), draw.choice(commands))
        for _ in range(draw.choice((0, 0, 3, 12)))
    ]


class Operated:
    """
    Gives commands, and acts as another reader of the journals.

    Args:
        opened: Opens the journals.
        wanted: Returns what may be appended, each message once; None: anything, in any
            number.
        operations: The operations to do.
        chance: Draws how much is read at a time.

    """

    def __init__(
        self,
        opened: Callable[[], Journals],
        wanted: Callable[[], Sequence[bytes] | None],
        operations: Sequence[Operation],
        chance: random.Random,
    ) -> None:
        self._opened = opened
        self._wanted = wanted
        self._operations = operations
        self._chance = chance
        self._from_the_first = False
        self._read: list[bytes] = []

    async def run(self) -> None:
        """Do all operations; those before there are journals are skipped."""
        for pause, command in self._operations:
            await anyio.sleep(pause)
            try:
                journals = self._opened()
            except JournalError:
                continue  # nothing was appended yet
            with journals:
                self._do(command, journals)

    def _do(self, command: str, journals: Journals) -> None:
        match command:
            case "trim":
                journals.trim()
            case "lags":
                lags(journals)
            case "cat":
                self._check(_all_of(journals.read_committed()), self._wanted())
            case "verify":
                for spec in journals.select():
                    verify(journals, spec.name)
            case _:
                self._go_on(journals, stop=command == "stop")

    def _go_on(self, journals: Journals, *, stop: bool) -> None:
        """Continue reading as the other reader, killed afterwards or not."""
        if "other" not in {one.name for one in journals.readers()}:
            logs = [journals.log(spec.name) for spec in journals.select()]
            self._from_the_first = not any(log.first() for log in logs)
        count = self._chance.choice((1, 3, 1000))
        reader = journals.read_committed("other", commit_every=None)
        found = _all_of(reader, count)
        if not stop:
            reader.commit(reader.position())
            self._read += found
        reader.close()

    def _check(self, messages: Sequence[bytes], wanted: Sequence[bytes] | None) -> None:
        """Assert that each message was read at most once, and no unwanted ones."""
        if wanted is not None and (many := Counter(messages) - Counter(wanted)):
            raise Violation(f"{[*many]} is read too often beside the halves")

    def check_over(self, wanted: Sequence[bytes]) -> None:
        """Assert that the other reader gets everything that was not dropped."""
        with self._opened() as journals:
            if "other" not in {one.name for one in journals.readers()}:
                return
            reader = journals.read_committed("other", commit_every=None)
            self._read += _all_of(reader)
            reader.commit(reader.position())
            reader.close()
        self._check(self._read, wanted)
        if self._from_the_first and (few := Counter(wanted) - Counter(self._read)):
            raise Violation(f"{[*few]} was lost to another reader")


def _all_of(reader: CommittedReader, most: int = 1 << 30) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < most and (envelope := reader.poll()) is not None:
        found += messages_of(envelope.message)
    return found
