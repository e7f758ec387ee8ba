"""
Dead letters that are run once more, through their stage and on into the load.

Some letters of one stage at a time are the source of a pipeline that begins with their
stage. When all that came of them is durable, one record says what became of each: it
passed, or failed again, and which letters are new further on. A retry that was
interrupted has no record, and its letters are as they were.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from etlstage.errors import StateUnusable
from etlstage.messages import AnnotatedRun, Position, Run
from etlstage.pipeline.dead_letter.record import DeadLetter
from etlstage.pipeline.dead_letter.settled import settle
from etlstage.pipeline.interfaces import Source

__all__ = ("LetterSource", "Retry", "chunks", "record_noted")

_AT_ONCE: Final = 10_000  # letters that one record covers, at most
_BYTES: Final = 64 << 20  # of their messages, unless one alone is larger
_RUN: Final = 256  # messages


class LetterSource(Source):
    """
    Yields the messages of letters.

    Args:
        letters: The letters.
        name: As reports and errors call it.

    """

    def __init__(self, letters: Sequence[DeadLetter], *, name: str) -> None:
        super().__init__(name)
        self.given: int = 0
        """How many were passed on."""
        self._letters = letters
        self.size: int | None = len(self._letters)

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield runs of messages; positions there are none."""
        for at in range(0, len(self._letters), _RUN):
            run = [letter.message for letter in self._letters[at : at + _RUN]]
            self.given += len(run)
            # Their keys are gone with the rows of the source: one key keeps the order.
            yield AnnotatedRun(run, key=[0] * len(run))

    def drain(self) -> bool:
        """Let it be cancelled right away: what was not passed on stays as it is."""
        return False


class Retry:
    """
    One attempt at some letters of a stage.

    Args:
        letters: The letters.
        number: Of the retry, see :class:`Settled`.

    """

    def __init__(self, letters: Sequence[DeadLetter], number: int) -> None:
        self.stage: str = letters[0].stage
        self.number: int = number
        self.source: LetterSource = LetterSource(
            letters, name=f"dead letters of {self.stage}"
        )
        self.again: list[DeadLetter] = []
        """Those that failed again, with one more attempt."""
        self.new: list[DeadLetter] = []
        """What came of letters, and could not be processed further on."""
        self._letters = letters

    @property
    def known(self) -> dict[tuple[str, int, bytes], str]:
        """The id of each letter, by the stage, place and message in this attempt."""
        places = enumerate(self._letters)
        return {(self.stage, at, x.message): x.id for at, x in places}

    async def keep(self, letter: DeadLetter) -> None:
        """Take note of a message that could not be processed."""
        if letter.stage != self.stage:
            self.new.append(letter)
            return
        old = self._letters[letter.place]
        self.again.append(
            replace(
                letter,
                id=old.id,
                run=old.run,
                place=old.place,
                attempts=old.attempts + letter.attempts,
            )
        )

    @property
    def passed(self) -> list[str]:
        """The ids of those that passed, once the pipeline has run to its end."""
        failed = {letter.id for letter in self.again}
        given = self._letters[: self.source.given]
        return [letter.id for letter in given if letter.id not in failed]

    def record(self, state: Path) -> None:
        """Record what became of the letters; raises as :func:`settle`."""
        letters = [*self.again, *self.new]
        settle(state, self.passed, "passed", letters=letters, number=self.number)

    @property
    def note(self) -> str:
        """What became of them, for a sink to note where they end."""
        letters = [letter.to_line().decode() for letter in (*self.again, *self.new)]
        return json.dumps([self.number, self.passed, letters])


def record_noted(state: Path, number: int, note: str) -> bool:
    """
    Record what a sink has noted of a retry that was killed before it was recorded.

    Args:
        state: The state directory.
        number: Of the retry that is to come.
        note: What was noted last.

    Returns:
        Whether that was of this retry; then there is another to come.

    Raises:
        StateUnusable: If it can't be understood, or recorded.

    """
    try:
        noted, passed, lines = json.loads(note)
        letters = [DeadLetter.from_line(line.encode()) for line in lines]
    except (ValueError, TypeError, AttributeError) as error:
        raise StateUnusable(
            f"can't read what was noted with the retry of dead letters ({error})"
        ) from error
    if noted != number:
        return False
    settle(state, passed, "passed", letters=letters, number=number)
    return True


def chunks(letters: Iterable[DeadLetter]) -> Iterator[list[DeadLetter]]:
    """Yield letters of one stage in lists of a bounded size."""
    chunk: list[DeadLetter] = []
    size = 0
    for letter in letters:
        size += len(letter.message)
        if chunk and (len(chunk) >= _AT_ONCE or size > _BYTES):
            yield chunk
            chunk, size = [], len(letter.message)
        chunk.append(letter)
    if chunk:
        yield chunk
