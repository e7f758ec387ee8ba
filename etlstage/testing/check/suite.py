"""
Define checks, run them, and collect what they find.

The suite is data: a check is an async function whose name and docstring are shown to
the user. It returns if all is well, and raises an exception for what it has found.

A check compares the worker's replies to the same messages in two processes: one is
given them whole and one after the other, the other in another way. So a worker may keep
any state from message to message, and a check need not know which reply is right.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from typing import Final, NamedTuple, NoReturn

import anyio

from etlstage.errors import ConfigError, InvalidMessage, WorkerStartFailed
from etlstage.messages import Run, StageKind, counted
from etlstage.protocol.base import Dialect, Limits, Shape, Side
from etlstage.protocol.events import Opened
from etlstage.protocol.registry import DEFAULT, dialect_class, dialect_names
from etlstage.stage.stage import Stage
from etlstage.testing.conversation import WorkerMisbehaved, WorkerUnderTest
from etlstage.testing.dialect import DialectKit, kit_of
from etlstage.testing.replies import Reply
from etlstage.transport import Launch, launch_worker
from etlstage.transport.base import describe_status

__all__ = (
    "MESSAGES",
    "Advice",
    "Check",
    "Finding",
    "NotApplicable",
    "Subject",
    "Verdict",
    "assert_conforms",
    "check_worker",
    "examine_sample",
    "known_checks",
    "summary",
)

MESSAGES: Final = tuple(
    b"one two three four five six seven eight nine ten eleven twelve".split()
)
"""Messages for a worker if there is no sample of those that it can process."""


class Advice(Exception):
    """Raised by a check: no breach of the protocol, but its author should know."""

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
        sample: Messages that it can process; if empty, words are used.
        ranges: Whether it extracts ranges of offsets.
        timeout: How long it may take for anything, in seconds.
        launch: Starts it.

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
    request: bytes = b""
    """What it is asked for if it extracts; of ranges, one that it has messages for."""
    given: tuple[bytes, ...] = ()
    """Its output for the first request to a process killed before the next one."""
    chatter: float = 0.0
    """Bytes written to stderr per message."""
    _known: dict[object, list[Reply]] = field(default_factory=dict)

    @property
    def dialect(self) -> Dialect:
        """The dialect that it speaks."""
        return self.stage.dialect

    @property
    def kit(self) -> DialectKit[Dialect]:
        """The test kit of its dialect."""
        return kit_of(self.dialect)

    @property
    def shape(self) -> Shape:
        """How exchanges are made from messages."""
        return self.stage.dialect.shape

    def messages(self, count: int) -> list[bytes]:
        """Return ``count`` messages that it can process, or requests if it extracts."""
        known = list(self.sample or MESSAGES)
        if self.stage.kind is StageKind.EXTRACT:
            known = [self.request]
        return (known * (count // len(known) + 1))[:count]

    @property
    def divisible(self) -> bytes:
        """A message, if possible of the sample, that is not complete in one byte."""
        return next(filter(None, (*self.sample, *MESSAGES)))

    def start(
        self, stage: Stage | None = None, *, mute: bool = False
    ) -> WorkerUnderTest:
        """Return a fresh process, as an async context manager."""
        return WorkerUnderTest(
            stage or self.stage, launch=self.launch, timeout=self.timeout, mute=mute
        )

    async def tell(
        self, runs: Sequence[Run], *, stage: Stage | None = None
    ) -> list[Reply]:
        """Hand runs to a fresh process, one after the other; return the replies."""
        replies = []
        async with self.start(stage) as worker:
            for run in runs:
                replies += await worker.exchange(run)
            await self.settle(worker)
        return replies

    async def expected(
        self, runs: Sequence[Run], *, stage: Stage | None = None
    ) -> list[Reply]:
        """Return its replies to these runs when they are given in the simplest way."""
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
        Return how replies differ from those expected; empty if they do not.

        If a worker's replies vary from process to process, only their number counts.
        """
        wanted = await self.expected(runs, stage=stage)
        if len(wanted) != len(replies):
            return f"gave {len(replies)} replies instead of {len(wanted)}"
        for number, (want, got) in enumerate(zip(wanted, replies, strict=True), 1):
            if want != got:
                again = await self.tell(self._one_by_one(runs), stage=stage)
                if again != wanted:
                    return ""
                what = f"{self.shown(got)} instead of {self.shown(want)}"
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
        """Close its stdin; it may write no more. Other checks require that it exits."""
        worker.close_stdin()
        with anyio.move_on_after(min(self.timeout, 0.3 + self.pace)):
            await worker.exited()
        worker.examine()

    async def end(self, worker: WorkerUnderTest) -> None:
        """Close its stdin; it must exit, and leave no process behind."""
        status = await worker.close()
        if worker.left:
            left = counted(worker.left, "process", "processes")
            worker.fail(f"left {left} behind, which had to be killed")
        fate = f"{describe_status(status)} when its stdin ended"
        if status < 0:
            worker.fail(fate)
        loads = self.stage.kind is StageKind.LOAD
        if self.dialect.failed(status, stopped=True, held=0, unproven=int(loads)):
            worker.fail(f"{fate}, expected status 0 from a load worker")
        if status:
            self.advise(worker, f"it {fate}")

    def advise(self, worker: WorkerUnderTest, what: str) -> NoReturn:
        """Raise :class:`Advice`, with the transcript."""
        raise Advice(what, worker.transcript.shown(self.dialect))

    def note(self, run: Run, replies: Sequence[Reply]) -> None:
        """Record which messages were refused."""
        for message, reply in zip(run, replies, strict=False):
            if reply.refused is not None:
                self.refused.append((message, reply.refused))


_AT_ONCE: Final = 3  # checks at a time, where they don't disturb each other


class Verdict(Enum):
    """The outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    ADVICE = "advice"
    """Nothing is wrong, but the worker's author should know."""
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Check:
    """
    One thing that a worker should do.

    Args:
        function: Performs it; its name and docstring are those of the check.
        gate: Whether the other checks are skipped if it fails.
        last: Whether it runs last, as it evaluates what the others have observed.
        when: Returns why it does not apply to a subject; empty if it does.
        promised: Whether it is only for a stage with ``expect``.

    """

    function: Callable[[Subject], Awaitable[None]]
    gate: bool = False
    last: bool = False
    when: Callable[[Subject], str] = lambda _subject: ""
    promised: bool = False

    @property
    def name(self) -> str:
        """The name shown to users."""
        return self.function.__name__.strip("_").replace("_", " ")

    @property
    def purpose(self) -> str:
        """The first paragraph of :attr:`meaning`, on one line."""
        first = self.meaning.partition("\n\n")[0].replace("``", "")
        return " ".join(first.split())

    @property
    def meaning(self) -> str:
        """What a worker should do, and why."""
        return inspect.cleandoc(self.function.__doc__ or "")


class Finding(NamedTuple):
    """The result of one check."""

    check: Check
    verdict: Verdict
    reason: str = ""
    transcript: str = ""
    """The transcript, as text."""
    seconds: float = 0.0
    blocked: bool = False
    """Whether it was skipped because a gate has failed."""

    def lines(self) -> list[str]:
        """Return the finding as text for people."""
        verdicts = {
            Verdict.PASSED: "ok",
            Verdict.FAILED: "FAIL",
            Verdict.ADVICE: "advice",
        }
        head = f"{verdicts.get(self.verdict, '-'):<7}{self.check.name}"
        if self.verdict is Verdict.PASSED:
            return [f"{head} ({self.seconds:.2f} s)"]
        lines = [f"{head}: {self.reason}"]
        if self.verdict is Verdict.FAILED:
            meaning = filter(None, self.check.meaning.splitlines())
            lines += [f"       {line}" for line in meaning]
        if self.transcript:
            lines += [f"       {line}" for line in self.transcript.splitlines()]
        return lines


async def check_worker(
    subject: Subject, *, found: Callable[[Finding], None] | None = None
) -> list[Finding]:
    """
    Run all checks that apply to a worker.

    Those of a transform worker run a few at a time. Those of others might disturb each
    other, as they share where they load to, or how far they have read.

    Args:
        subject: The worker.
        found: Called with each finding, in the order of the checks.

    Raises:
        ConfigError: If the sample can't be sent.
        WorkerStartFailed: If the program can't be run.

    """
    _examine(subject)
    checks = _checks(subject)
    findings: list[Finding | None] = [None] * len(checks)
    shown = 0

    limiter = anyio.CapacityLimiter(
        _AT_ONCE if subject.stage.kind is StageKind.TRANSFORM else 1
    )

    def show() -> None:
        nonlocal shown
        while shown < len(findings) and (finding := findings[shown]) is not None:
            shown += 1
            if found is not None:
                found(finding)

    blocked = ""

    async def make(number: int) -> None:
        nonlocal blocked
        async with limiter:
            findings[number] = finding = await _make(checks[number], subject, blocked)
        if finding.check.gate and finding.verdict is Verdict.FAILED:
            blocked = f"'{finding.check.name}' has failed"
        show()

    for some in _turns(checks):
        if len(some) == 1:  # its errors are then not wrapped in a group
            await make(*some)
            continue
        try:
            async with anyio.create_task_group() as group:
                for number in some:
                    group.start_soon(make, number)
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first from first.__cause__
    return [finding for finding in findings if finding is not None]


def assert_conforms(
    command: Sequence[str] | Stage,
    *,
    kind: StageKind = StageKind.TRANSFORM,
    sample: Sequence[bytes] = (),
    ranges: bool = False,
    timeout: float = 5.0,
) -> None:
    """
    Check a worker, from a test in any test suite.

    ::

        def test_worker_keeps_to_the_protocol():
            assert_conforms(["node", "clean.mjs"])

    Args:
        command: Program and arguments; or a stage, if there are more settings.
        kind: Kind of the stage, if ``command`` is not a stage.
        sample: Messages that the worker can process; by default, words.
        ranges: Whether an extract worker is asked for ranges of offsets.
        timeout: How long it may take for anything, in seconds.

    Raises:
        AssertionError: If a check fails; the text shows the transcript.
        ConfigError: If the sample can't be sent.
        WorkerStartFailed: If the program can't be run.

    """
    if not isinstance(command, Stage):
        dialect = dialect_class(DEFAULT).section(kind).read({})
        command = Stage(name="worker", worker=command, kind=kind, dialect=dialect)
    subject = Subject(command, sample=sample, ranges=ranges, timeout=timeout)
    findings = anyio.run(check_worker, subject)
    failed = [item for item in findings if item.verdict is Verdict.FAILED]
    if failed:
        lines = [line for finding in failed for line in finding.lines()]
        raise AssertionError("\n".join([summary(findings), *lines]))


def summary(findings: Sequence[Finding]) -> str:
    """Return one line that summarizes all findings."""
    counts = {
        verdict: sum(1 for finding in findings if finding.verdict is verdict)
        for verdict in Verdict
    }
    parts = [f"{count} {verdict.value}" for verdict, count in counts.items() if count]
    return f"{counted(len(findings), 'check')}: {', '.join(parts)}"


def _turns(checks: Sequence[Check]) -> Iterator[list[int]]:
    """Yield which checks may run at once: first each gate alone."""
    numbered = list(enumerate(checks))
    yield from ([number] for number, check in numbered if check.gate)
    for last in (False, True):
        yield [n for n, check in numbered if not check.gate and check.last is last]


def _checks(subject: Subject) -> list[Check]:
    from etlstage.testing.check import extracting, speaking

    extracts = subject.stage.kind is StageKind.EXTRACT
    checks = [*(extracting.CHECKS if extracts else speaking.CHECKS)]
    if subject.shape is Shape.COMMITTED:
        checks = []  # they compare replies, and such a worker has none
    if subject.stage.expect.empty:
        checks = [check for check in checks if not check.promised]
    own = _own(subject.dialect.name)
    gates = [check for check in own if check.gate]
    return [*gates, *checks, *(check for check in own if not check.gate)]


def _own(dialect: str) -> Sequence[Check]:
    """Return a dialect's checks in addition to those of any dialect."""
    name = f"{__package__}.{dialect}"
    checks: Sequence[Check] = import_module(name).CHECKS if find_spec(name) else ()
    return checks


def known_checks() -> Iterator[tuple[str, Sequence[Check]]]:
    """Yield all checks, grouped by the workers that they are for."""
    from etlstage.testing.check import extracting, speaking

    yield "workers that are given messages", speaking.CHECKS
    yield "workers that extract", extracting.CHECKS
    for dialect in dialect_names():
        if own := _own(dialect):
            yield f"dialect {dialect}", own


def _examine(subject: Subject) -> None:
    if subject.stage.kind is StageKind.EXTRACT and subject.sample:
        raise ConfigError("a sample is for workers that are given messages")
    examine_sample(subject.stage, subject.sample)


async def _make(check: Check, subject: Subject, blocked: str) -> Finding:
    if reason := blocked or check.when(subject):
        return Finding(check, Verdict.NOT_APPLICABLE, reason, blocked=bool(blocked))
    began = anyio.current_time()
    finding = Finding(check, Verdict.PASSED)
    try:
        await check.function(subject)
    except WorkerMisbehaved as error:
        finding = Finding(check, Verdict.FAILED, error.what, error.transcript)
    except WorkerStartFailed as error:
        if check.gate:
            raise
        finding = Finding(check, Verdict.FAILED, str(error))
    except Advice as advice:
        finding = Finding(check, Verdict.ADVICE, str(advice), advice.transcript)
    except (NotApplicable, InvalidMessage) as why:
        finding = Finding(check, Verdict.NOT_APPLICABLE, str(why))
    return finding._replace(seconds=anyio.current_time() - began)
