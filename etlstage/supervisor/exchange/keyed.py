"""
Messages that keep their order by key: each key has one worker.

To its caller a :class:`Lanes` looks like one submission; to the workers, like one per
lane. Messages with the same key are in the same lane: they are processed one after the
other, are answered in order, and wait only for messages before them in their lane.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from etlstage.errors import LocalProtocolError
from etlstage.messages import AnnotatedRun, Position, Run
from etlstage.stage.stage import Stage
from etlstage.supervisor.exchange.exchange import Outcome
from etlstage.supervisor.exchange.submission import Collected, Submission

__all__ = ("Lanes", "key_text", "keys_of", "point", "value_at")

_NO_KEY: Final = -1
_INDEX: Final = re.compile(r"0|[1-9][0-9]*")


class Lanes:
    """
    One caller's messages, in a lane for each worker, or several.

    Its bounds apply to each lane; see
    :class:`~etlstage.supervisor.exchange.submission.Submission`.
    """

    def __init__(
        self,
        stage: Stage,
        count: int,
        on_outcome: Callable[[], None],
        *,
        max_unread: float,
        max_reply: float = math.inf,
    ) -> None:
        self._stage = stage
        self.lanes: list[Submission] = [
            Submission(
                on_outcome, max_unread=max_unread, max_reply=max_reply, keyed=True
            )
            for _ in range(count)
        ]
        # For each lane, the places of its uncollected messages in the caller's input.
        self._places: list[deque[int]] = [deque() for _ in self.lanes]
        self._total = 0
        self.unkeyed: int = 0
        """Number of messages without a key."""

    @property
    def finished(self) -> bool:
        """Whether everything was fed, answered and collected."""
        if self.lanes[0].withheld:
            passes = all(lane.at_position for lane in self.lanes)
            return not passes and all(lane.spent for lane in self.lanes)
        return all(lane.finished for lane in self.lanes)

    @property
    def stalled(self) -> bool:
        """Whether the consumer must take replies first."""
        return any(lane.stalled for lane in self.lanes)

    @property
    def held(self) -> int:
        """Messages that were fed and not collected."""
        return sum(lane.held for lane in self.lanes)

    @property
    def held_bytes(self) -> int:
        """Bytes of these messages and of the replies to them."""
        return sum(lane.held_bytes for lane in self.lanes)

    def feed(self, messages: Run, now: float) -> None:
        """Append messages, each to the lane of its key; raises as :func:`keys_of`."""
        runs: list[list[bytes]] = [[] for _ in self.lanes]
        keys = keys_of(self._stage, messages)
        if self._stage.key is not None:
            self.unkeyed += keys.count(_NO_KEY)
        for message, key in zip(messages, keys, strict=True):
            number = key % len(runs)
            runs[number].append(message)
            self._places[number].append(self._total)
            self._total += 1
        for lane, run in zip(self.lanes, runs, strict=True):
            lane.feed(run, now)

    def close(self) -> None:
        """Promise that no more will be fed."""
        for lane in self.lanes:
            lane.close()

    def withhold(self) -> None:
        """Drop what no worker has taken, and all that is fed from now on."""
        for lane in self.lanes:
            lane.withhold()

    def mark(self, position: Position) -> None:
        """Have ``position`` collected after all messages fed so far."""
        for lane in self.lanes:
            lane.mark(position)

    def collect(self) -> list[Collected]:
        """
        Return, once, what is due in each lane, and positions after all before them.

        The messages of an outcome are consecutive, and ``start`` is their place in the
        caller's input.
        """
        collected: list[Collected] = []
        while True:
            collected += [
                part
                for lane, places in zip(self.lanes, self._places, strict=True)
                for outcome in lane.collect_up_to_mark()
                for part in _parts(outcome, places)
            ]
            if not all(lane.at_position for lane in self.lanes):
                return collected
            passed = [lane.pass_mark() for lane in self.lanes]
            collected.append(passed[0])


def keys_of(stage: Stage, messages: Run) -> Sequence[int]:
    """
    Return a number for each message, equal for messages with the same key.

    All messages that are not JSON, or have nothing where the pointer points, share one
    key.

    Raises:
        LocalProtocolError: If there are no keys beside the messages, and no pointer.

    """
    if stage.key is not None:
        tokens = point(stage.key)
        return [_key(message, tokens) for message in messages]
    if isinstance(messages, AnnotatedRun) and "key" in messages.columns:
        return [int(key) for key in messages.columns["key"]]
    raise LocalProtocolError(
        f"stage {stage.name}: order key needs keys: set key to a JSON pointer, or"
        " submit an AnnotatedRun with a column key"
    )


def point(pointer: str) -> tuple[str, ...]:
    """Return the tokens of a JSON pointer (RFC 6901, sections 3 and 4)."""
    tokens = pointer.split("/")[1:]
    return tuple(t.replace("~1", "/").replace("~0", "~") for t in tokens)


def _key(message: bytes, tokens: tuple[str, ...]) -> int:
    text = key_text(message, tokens)
    return _NO_KEY if text is None else zlib.crc32(text.encode())


def key_text(message: bytes, tokens: tuple[str, ...]) -> str | None:
    """Return what a pointer points at in a JSON message, as JSON; None: nothing."""
    try:
        value = value_at(json.loads(message), tokens)
        return json.dumps(value, sort_keys=True)
    except (ValueError, LookupError, RecursionError):
        return None


def value_at(value: Any, tokens: Sequence[str]) -> Any:  # noqa: ANN401 - JSON
    """
    Return the value at a JSON pointer (RFC 6901, section 4).

    Raises:
        LookupError: If there is none.
        ValueError: If there is none, as an index has thousands of digits.

    """
    for token in tokens:
        if isinstance(value, dict):
            value = value[token]
        elif isinstance(value, list) and _INDEX.fullmatch(token):
            value = value[int(token)]
        else:
            raise LookupError(token)
    return value


def _parts(outcome: Outcome, places: deque[int]) -> Iterator[Outcome]:
    """Cut an outcome where its messages are not consecutive in the caller's input."""
    mine = [places.popleft() for _ in outcome.messages]
    outcome = outcome._replace(groups=outcome.replies)
    at = 0
    for end in range(1, len(mine) + 1):
        if end < len(mine) and mine[end] == mine[end - 1] + 1:
            continue
        yield outcome.cut(at, end)._replace(start=mine[at])
        at = end
