"""
A worker that is a function of bytes and time, and the link to it: no I/O, no clock.

The worker is a generator that yields its actions: read at most that many bytes, sleep,
write. The link moves bytes as the supervisor does: it gives what there is room for,
looks at what the worker has not read, and receives everything written before that look.
A seed decides which of the two goes first when both have something to do, so any run
can be repeated.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Final

from etlstage.protocol.base import Side
from etlstage.protocol.events import Failed, Mispaired
from etlstage.protocol.marker import MarkerProtocol, Markers, Mode
from etlstage.protocol.marker.blocks import Terms
from tests.protocol.words import Answers, BatchEnd, Messages, Output, tell, words_of

__all__ = ("Fault", "Life", "Plan", "draw", "live")

EOM, EOP, EOB, BNC, _ = Markers()
ERR: Final = b"\x15"
_MODES: Final = (
    Mode.SINGLE,
    Mode.SINGLE,
    Mode.CYCLIC,
    Mode.BATCH_SUPERVISOR,
    Mode.BATCH_WORKER,
)
_KINDS: Final = (
    *("", "double", "double", "double_die", "double_die"),
    *("omit", "die", "exit", "greet"),
)

Doing = tuple[str, bytes | float | int]
"""What a worker does: ``("read", 7)``, ``("sleep", 0.1)``, ``("write", b"a")``."""
Program = Generator[Doing, bytes, int]


@dataclass(frozen=True)
class Fault:
    """What goes wrong at an exchange, counted from 0; -1: before all of them."""

    kind: str = ""
    at: int = -2
    late: float = 0.0
    """Seconds until the fault happens."""
    status: int = 1


@dataclass(frozen=True)
class Plan:
    """A worker process, and what it is given."""

    mode: Mode = Mode.SINGLE
    count: int = 12
    size: int = 3
    """Messages of a batch."""
    fault: Fault = field(default_factory=Fault)
    latency: float = 0.0
    """Seconds that an exchange takes; quiet times depend on a worker's pace."""
    parts: bool = False
    """Write each reply in pieces."""
    eager: bool = False
    """Read ahead everything that is available."""
    refuses: int = -1
    """The exchange that the worker refuses."""
    terms: Terms = field(default_factory=Terms)
    step: bool = False
    gaps: bool = False
    """Give each message only some time after the reply to the one before."""
    seed: int = 0


def draw(seed: int) -> Plan:
    """Return a process that counting can judge, honest or not."""
    dice = random.Random(seed)  # noqa: S311 - a table, no secret
    mode = dice.choice(_MODES)
    kind = dice.choice(_KINDS)
    loads = mode is not Mode.CYCLIC and dice.random() < 0.15
    count = dice.randint(1, 24)
    exchanges = -(-count // 3) if mode.batches else count
    late = dice.choice((0.0, 0.0, 0.0005, 0.003, 0.02, 0.05))
    # An eager reader that adds a reply late, or before it dies, leaves no trace.
    eager = dice.random() < 0.3 and not (late or kind in ("double_die", "exit"))
    return Plan(
        mode=mode,
        count=count,
        fault=Fault(
            kind,
            dice.randrange(exchanges),
            late,
            dice.choice((0, 1, 1, -9)) if not eager else 1,
        ),
        latency=dice.choice((0.0, 0.0, 0.001, 0.02)),
        parts=dice.random() < 0.3,
        eager=eager,
        refuses=dice.choice((-1, -1, dice.randrange(exchanges))),
        terms=Terms(
            first=dice.choice((1, 1, 2, 4, 8)),
            life=dice.choice((math.inf, 20.0)),
            alone=loads or mode is Mode.CYCLIC,
            loads=loads,
        ),
        step=dice.random() < 0.2,
        gaps=dice.random() < 0.5,
        seed=seed,
    )


def answer_to(messages: Sequence[bytes]) -> bytes:
    """Return an honest worker's outputs for an exchange."""
    return b"".join(message.upper() + EOM for message in messages)


def worker_of(plan: Plan, dice: random.Random) -> Program:
    """Return a worker's program; its value is the exit status."""
    fault, number = plan.fault, 0
    batch: list[bytes] = []
    if fault.kind == "greet":
        yield "write", b"hello" + EOM
    held = b""
    while True:
        while not _complete(held):
            data = yield "read", 65536 if plan.eager else 1
            if not data:
                return 0
            held += data
        message, end, held = _next(held)
        if message is not None:
            batch.append(message)
        if plan.mode is Mode.BATCH_WORKER and not end and len(batch) < plan.size:
            yield "write", BNC
            continue
        if plan.mode is Mode.BATCH_SUPERVISOR and not end:
            continue
        asked, batch = batch, []
        if plan.latency:
            yield "sleep", plan.latency
        mine = fault.kind if number == fault.at else ""
        if mine == "die":
            return fault.status
        reply = answer_to(asked) + EOP
        if number == plan.refuses:
            reply = b"no" + ERR
        if mine == "omit":
            reply = reply[:-1]
        pieces = [reply]
        if plan.parts:
            cut = dice.randrange(len(reply) + 1)
            pieces = [reply[:cut], reply[cut:]]
        for piece in pieces:
            yield "write", piece
        if mine in ("double", "double_die"):
            if fault.late:
                yield "sleep", fault.late
            yield "write", reply
        if mine in ("double_die", "exit"):
            if mine == "exit" and fault.late:
                yield "sleep", fault.late
            return fault.status
        number += 1


def _complete(held: bytes) -> bool:
    return EOM in held or EOB in held[:1]


def _next(held: bytes) -> tuple[bytes | None, bool, bytes]:
    """Return the next message, whether a batch ends, and the rest."""
    if held[:1] == EOB:
        return None, True, held[1:]
    message, _, rest = held.partition(EOM)
    return message, False, rest


class _Process:
    """Runs a program, a step at a time."""

    def __init__(self, program: Program) -> None:
        self.stdin, self.stdout = bytearray(), bytearray()
        self.status: int | None = None
        self.ended = False  # whether its input has ended
        self.awake = 0.0
        self._program = program
        self._does: Doing = next(program)

    def ready(self, now: float) -> bool:
        """Return whether it can do something now."""
        if self.status is not None or now < self.awake:
            return False
        return self._does[0] != "read" or bool(self.stdin) or self.ended

    def turn(self, now: float) -> None:
        """Take the next action."""
        what, value = self._does
        data = b""
        if what == "read":
            assert isinstance(value, int)
            data = bytes(self.stdin[:value])
            del self.stdin[:value]
        elif what == "write":
            assert isinstance(value, bytes)
            self.stdout += value
        elif now >= self.awake and self.awake:
            self.awake = 0.0
        else:
            assert isinstance(value, float)
            self.awake = now + value
            if value:
                return
        try:
            self._does = self._program.send(data)
        except StopIteration as end:
            self.status = end.value


@dataclass
class Life:
    """The outcome of one process."""

    released: list[tuple[bytes, ...] | None] = field(default_factory=list)
    """The reply to each exchange, in order; None for a refusal."""
    mispaired: Mispaired | None = None
    failed: bool = False
    given: list[list[bytes]] = field(default_factory=list)
    """The messages of each exchange."""
    seconds: float = 0.0
    loads: bool = False
    stuck: bool = False
    """Replies are missing, and nothing can happen any more."""

    @property
    def wrong(self) -> int:
        """Return how many exchanges got another's reply, and are not doubtful."""
        sure = len(self.released)
        if self.loads and self.mispaired is not None:
            sure += self.mispaired.exchanges  # loaded data can't be undone
        doubtful = 0 if self.mispaired is None else self.mispaired.doubtful
        while doubtful > 0:
            sure -= 1
            doubtful -= len(self.given[sure])
        assert not doubtful, "an exchange is doubtful as a whole"
        return sum(
            reply is not None and reply != tuple(m.upper() for m in messages)
            for reply, messages in zip(
                self.released[:sure], self.given[:sure], strict=False
            )
        )


class _Link:
    """Moves bytes and time between a session and a process."""

    def __init__(self, plan: Plan) -> None:
        self.dice = random.Random(plan.seed)  # noqa: S311 - the same
        self.plan = plan
        self.life = Life(loads=plan.terms.loads)
        self.session = MarkerProtocol(
            Side.SUPERVISOR, plan.mode, batch=plan.size, terms=plan.terms
        )
        assert self.session.proof is not None
        self.session.go_in_step(plan.step)
        self.process = _Process(worker_of(plan, self.dice))
        self.backlog = [b"m%d" % n for n in range(plan.count)]
        self.next_at = 0.0
        self.filling = 0  # messages in the open batch
        self.part: list[bytes] = []  # the outputs so far of an unfinished reply
        self.eof = False

    def run(self) -> Life:
        """Run until nothing can happen any more, or the worker has exited."""
        now, turns = 0.0, 0
        while not self._over():
            turns += 1
            assert turns < 100_000, "the run does not end"
            if not self._turn(now):
                later = self._later(now)
                if later is None:
                    break
                now = later
        self._finish(now)
        return self.life

    def _over(self) -> bool:
        return self.life.mispaired is not None or self.life.failed or self.eof

    def _turn(self, now: float) -> bool:
        """Let one side do something; return whether either could."""
        choices: list[Callable[[float], bool]] = [self._look, self._receive]
        if self.process.ready(now):
            choices.append(self._work)
        self.dice.shuffle(choices)
        return any(choice(now) for choice in choices)

    def _work(self, now: float) -> bool:
        self.process.turn(now)
        return True

    def _later(self, now: float) -> float | None:
        times = [t for t in (self.process.awake, self.next_at) if t > now]
        timer = self.session.get_timer()
        if timer is not None and self.session.wants_unread:
            times.append(max(timer, now + 1e-6))
        return min(times, default=None)

    def _receive(self, now: float) -> bool:
        if self.process.stdout:
            data = bytes(self.process.stdout)
            self.process.stdout.clear()
            self.session.receive_data(data, now)
            self._take(now)
            self._give(now)
            return True
        if self.process.status is not None and not self.eof:
            self.eof = True
            return True
        return self._give(now)

    def _look(self, now: float) -> bool:
        timer = self.session.get_timer()
        if not self.session.wants_unread or (timer is not None and timer > now):
            return False
        if self.process.status is not None:
            return False
        stand = self.session.proof and self.session.proof.stand
        if self.session.input_unread(len(self.process.stdin), now):
            if self.process.stdout:
                data = bytes(self.process.stdout)
                self.process.stdout.clear()
                self.session.receive_data(data, now)
            self.session.output_dry(now)
        self._take(now)
        gave = self._give(now)
        assert self.session.proof is not None
        return gave or self.session.proof.stand is not stand

    def _give(self, now: float) -> bool:
        gave = False
        size = self.plan.size if self.plan.mode.batches else 1
        if not self._over() and self.process.status is None:
            while self.backlog and now >= self.next_at and self.session.room >= 1:
                most = len(self.backlog)
                if self.plan.mode.batches:
                    most = min(most, size - self.filling)
                if self.plan.mode is Mode.BATCH_WORKER:
                    most = 1
                if self.plan.gaps:
                    most = 1
                count = int(min(most, self.session.room))
                run, self.backlog = self.backlog[:count], self.backlog[count:]
                self._open(run, now)
                gave = True
                if self.plan.gaps:
                    self.next_at = now + self.dice.choice((0.0, 0.001, 0.02))
                    break
        self.process.stdin += b"".join(self.session.data_to_send())
        return gave

    def _open(self, run: list[bytes], now: float) -> None:
        tell(self.session, Messages(run), now)
        if not self.plan.mode.batches:
            self.life.given += [[message] for message in run]
            return
        if not self.filling:
            self.life.given.append([])
        self.life.given[-1] += run
        self.filling += len(run)
        full = self.filling == self.plan.size
        asks = self.plan.mode is Mode.BATCH_WORKER
        if full or (not self.backlog and not asks):
            if not (asks and full):
                tell(self.session, BatchEnd(), now)
            self.filling = 0

    def _take(self, now: float) -> None:
        for event in words_of(self.session):
            if isinstance(event, Answers):
                refused = {place for place, _ in event.refusals}
                for place, group in enumerate(event.groups):
                    reply = (*self.part, *group)
                    self.part = []
                    self.life.released.append(None if place in refused else reply)
                if self.plan.gaps:
                    self.next_at = max(self.next_at, now)
            elif isinstance(event, Output):
                self.part += event.messages
            elif isinstance(event, Mispaired):
                self.life.mispaired = event
            elif isinstance(event, Failed):
                self.life.failed = True
        if (
            self.plan.mode is Mode.BATCH_WORKER
            and not self.backlog
            and self.filling
            and self.session.room >= 1
            and not self._over()
        ):
            tell(self.session, BatchEnd(), now)
            self.filling = 0

    def _finish(self, now: float) -> None:
        life, session = self.life, self.session
        life.seconds = now
        if life.mispaired is not None or life.failed:
            return
        if self.process.status is None:
            if session.owed or (session.proof and session.proof.held):
                life.stuck = True
                return
            # At the end the worker reads the end of its input, and exits.
            self.process.ended = True
            while self.process.ready(now):
                self.process.turn(now)
        session.input_unread(len(self.process.stdin), now)
        data = bytes(self.process.stdout)
        if data:
            session.receive_data(data, now)
        session.receive_eof(now)
        status = self.process.status
        session.peer_exited(status == 0, now)
        self._take(now)


def live(plan: Plan) -> Life:
    """Run a process; return its outcome."""
    return _Link(plan).run()
