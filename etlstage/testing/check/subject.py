"""
The worker that is checked, and what checks do with it again and again.

A check compares the worker's replies to the same messages in two processes: one that
was given them whole and one after the other, and one that was given them in another
way. So a worker may keep what it likes from message to message, and a check need not
know what is right.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

import anyio

from etlstage.errors import ConfigError, InvalidMessage
from etlstage.messages import Run, StageKind, counted
from etlstage.protocol.base import Dialect, Limits, Shape, Side
from etlstage.protocol.events import Opened
from etlstage.stage.stage import Stage
from etlstage.testing.conversation import WorkerUnderTest
from etlstage.testing.dialect import DialectKit, kit_of
from etlstage.testing.replies import Reply
from etlstage.transport import Launch, launch_worker
from etlstage.transport.base import describe_status

__all__ = ("MESSAGES", "Advice", "NotApplicable", "Subject", "examine_sample")

MESSAGES: Final = tuple(
    b"one two three four five six seven eight nine ten eleven twelve".split()
)
"""What a worker is given where there is no sample of what it can process."""


class Advice(Exception):
    """Raised by a check: it is no breach of the protocol, but its author should know."""

    def __init__(self, what: str, transcript: str = "") -> None:
        super().__init__(what)
        self.transcript = transcript


class NotApplicable(Exception):
    """Raised by a check that can't be made, with the reason."""


def examine_sample(stage: Stage, sample: Sequence[bytes]) -> None:
    """Raise ConfigError for a message of the sample that can't be sent."""
    if stage.dialect.shape is Shape.STREAM:
        return
    for number, message in enumerate(sample, 1):
        one = stage.dialect.fitted(batches=False, heartbeat=None).open(
            Side.SUPERVISOR, Limits(stage.max_message, stage.max_reply)
        )
        if not one.in_order:
            # It has no framing that a message could break.
            if len(message) > stage.max_message:
                wrong = f"is longer than {stage.max_message} bytes"
                raise ConfigError(f"message {number} of the sample {wrong}")
            continue
        try:
            one.send(Opened(1, [message]), 0.0)
        except InvalidMessage as error:
            raise ConfigError(f"message {number} of the sample: {error}") from None


@dataclass
class Subject:
    """
    A worker to be checked.

    Args:
        stage: Its command and all its settings.
        sample: Messages that it can process; none: words.
        ranges: Whether it extracts ranges of offsets.
        timeout: How long it may take for anything, in seconds.
        launch: What starts it.

    """

    stage: Stage
    sample: Sequence[bytes] = ()
    ranges: bool = False
    timeout: float = 5.0
    launch: Launch = launch_worker
    pace: float = 0.5
    """Seconds from its start to its first reply."""
    each: float = 0.01
    """Seconds from a message to its reply."""
    refused: list[tuple[bytes, str]] = field(default_factory=list)
    """Messages that it rejected, and why."""
    given: tuple[bytes, ...] = ()
    """What it gave to its first request, when it was killed before the next."""
    chatter: float = 0.0
    """Bytes to stderr for each message."""
    _known: dict[object, list[Reply]] = field(default_factory=dict)

    @property
    def dialect(self) -> Dialect:
        """What it speaks."""
        return self.stage.dialect

    @property
    def kit(self) -> DialectKit[Dialect]:
        """What tests know of that."""
        return kit_of(self.dialect)

    @property
    def shape(self) -> Shape:
        """How exchanges are made from messages."""
        return self.stage.dialect.shape

    def messages(self, count: int) -> list[bytes]:
        """Return so many messages that it can process; or requests for one."""
        known = list(self.sample or MESSAGES)
        if self.stage.kind is StageKind.EXTRACT:
            known = [b'{"start": 0, "end": 1}' if self.ranges else b""]
        return (known * (count // len(known) + 1))[:count]

    def start(
        self, stage: Stage | None = None, *, mute: bool = False
    ) -> WorkerUnderTest:
        """Return a fresh process, to be entered; see there."""
        return WorkerUnderTest(
            stage or self.stage, launch=self.launch, timeout=self.timeout, mute=mute
        )

    async def tell(
        self,
        runs: Sequence[Run],
        *,
        stage: Stage | None = None,
        cuts: Collection[int] = (),
    ) -> list[Reply]:
        """Hand runs to a fresh process, one after the other; return the replies."""
        replies = []
        async with self.start(stage) as worker:
            for run in runs:
                replies += await worker.exchange(run, cuts=cuts)
            await self.settle(worker)
        return replies

    async def expected(
        self, runs: Sequence[Run], *, stage: Stage | None = None
    ) -> list[Reply]:
        """Return what it replies to these runs when nothing is difficult about them."""
        key = (tuple(map(tuple, runs)), (stage or self.stage).dialect)
        if key not in self._known:
            self._known[key] = await self.tell(self._one_by_one(runs), stage=stage)
        return self._known[key]

    async def differs(
        self,
        runs: Sequence[Run],
        replies: Sequence[Reply],
        *,
        stage: Stage | None = None,
    ) -> str:
        """
        Return how replies differ from those expected, or nothing.

        Those of a worker that never replies the same are only counted.
        """
        wanted = await self.expected(runs, stage=stage)
        if len(wanted) != len(replies):
            return f"gave {len(replies)} replies, and {len(wanted)} otherwise"
        for number, (want, got) in enumerate(zip(wanted, replies, strict=True), 1):
            if want != got:
                again = await self.tell(self._one_by_one(runs), stage=stage)
                if again != wanted:
                    return ""
                what = f"{self.shown(got)}, and {self.shown(want)} otherwise"
                return f"replied to exchange {number} with {what}"
        return ""

    def _one_by_one(self, runs: Sequence[Run]) -> Sequence[Run]:
        if self.shape is not Shape.MESSAGE:
            return runs
        return [[message] for run in runs for message in run]

    def shown(self, reply: Reply) -> str:
        """Return a reply as text, its middle left out if it is long."""
        if reply.refused is not None:
            return f"the refusal {reply.refused!r}"
        outputs = [self.kit.shown(output[:80]) for output in reply.outputs[:5]]
        if len(reply.outputs) > len(outputs):
            outputs.append("...")
        return f"[{', '.join(outputs)}]"

    async def settle(self, worker: WorkerUnderTest) -> None:
        """Close its stdin; it may write no more. That it exits is another check."""
        worker.close_stdin()
        with anyio.move_on_after(min(self.timeout, 0.3 + self.pace)):
            await worker.exited()
        worker.examine()

    async def end(self, worker: WorkerUnderTest) -> None:
        """Close its stdin; it must exit, and leave nothing behind."""
        status = await worker.close()
        if worker.left:
            left = counted(worker.left, "process", "processes")
            worker.fail(f"left {left} behind, which had to be killed")
        fate = f"{describe_status(status)} when its stdin ended"
        if status < 0:
            worker.fail(fate)
        if status:
            self.advise(worker, f"it {fate}")

    def advise(self, worker: WorkerUnderTest, what: str) -> NoReturn:
        """Raise :class:`Advice`, with the transcript."""
        raise Advice(what, worker.transcript.shown(self.dialect))

    def note(self, run: Run, replies: Sequence[Reply]) -> None:
        """Keep which messages were refused."""
        for message, reply in zip(run, replies, strict=False):
            if reply.refused is not None:
                self.refused.append((message, reply.refused))
