"""
Draw pipelines of three stages, and what goes wrong in them.

A message is a JSON list of its key, and of a number to which each stage adds a letter,
so that all messages differ. The workers of a stage make none, one or two messages of
it, depending on the first digit of its number.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

from etlstage.messages import StageKind
from etlstage.pipeline.delivery.delivery import Bounds
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import (
    BatchPolicy,
    ErrorBudget,
    ErrorPolicy,
    Order,
    PoolPolicy,
    RecyclePolicy,
    RestartPolicy,
    Stage,
    Timeouts,
    WorkerProgram,
)
from etlstage.testing.fault import (
    Fault,
    FaultKind,
    FaultPlan,
    Moment,
    hostile_worker,
)
from etlstage.testing.scripted import Work
from tests.simulate.scenario import Scenario

__all__ = (
    "STEPS",
    "any_pipeline",
    "miscounting",
    "of_programs",
    "refusing",
    "three_stages",
)

_DEADLY: Final = (
    FaultKind.KILL,
    FaultKind.SEGFAULT,
    FaultKind.ABORT,
    FaultKind.EXIT,
    FaultKind.PARTIAL,
    FaultKind.STALL,
    FaultKind.STOP,
    FaultKind.CLOSE_STDOUT,
)
"""Faults that lose the message that the worker has."""
_CRASHES: Final = (*_DEADLY, FaultKind.CLOSE_STDIN)
_ODD: Final = (
    Fault(FaultKind.KILL, at=Moment.START, start=1),
    Fault(FaultKind.EXIT, at=Moment.IDLE, start=1, status=0),
    Fault(FaultKind.KILL, at=Moment.IDLE, start=2),
    Fault(FaultKind.KILL, at=Moment.END),
    Fault(FaultKind.STALL, at=Moment.END),
    Fault(FaultKind.NEVER_READY, start=1),
    Fault(FaultKind.IGNORE_SIGTERM),
    Fault(FaultKind.STDERR, at=Moment.START, size=200),
    Fault(FaultKind.CUT, probability=0.2),
)
"""Faults that lose no message."""
_WHAT: Final = ("slow", "odd", "crash", "crash", "chance", "culprit")
_WRONG: Final = (FaultKind.TWICE, FaultKind.SKIP)
"""Faults that only show in the replies that follow."""
_SILENT: Final = {
    FaultKind.STALL,
    FaultKind.STOP,
    FaultKind.CLOSE_STDIN,
    FaultKind.SKIP,
}
_MARKERS: Final = (Markers(), Markers(b"EOM", b"EOP", b"EOB", b"BNC", b"ERR"))
_ENDS: Final[tuple[Literal["", "drained", "cancelled"], ...]] = (
    "",
    "drained",
    "cancelled",
)
BREAKS: Final[tuple[Literal["source", "sink", "flush", "commit", "letters"], ...]] = (
    "source",
    "sink",
    "flush",
    "commit",
    "letters",
)
STEPS: Final = ("begin", "written", "committed", "aside", "recorded")
"""Steps of a commit; see ``Delivery.at``."""
_MANY: Final = 1000  # restarts
_LONG: Final = 100.0  # virtual seconds


def any_pipeline(draw: random.Random) -> Scenario:
    """Draw three stages, some with many refusals, or one stage that miscounts."""
    chance = draw.random()
    if chance < 0.2:
        return miscounting(draw)
    return refusing(draw) if chance > 0.95 else three_stages(draw)


def three_stages(draw: random.Random) -> Scenario:
    """Draw a pipeline of three stages of workers, with faults."""
    count = draw.randint(1, 7)
    messages = [b'[%d,"%d"]' % (draw.randrange(3), n) for n in range(count)]
    names = ("a", "b", "c")
    kinds = [StageKind.TRANSFORM] * 3
    ends = draw.random()
    if ends < 0.2:
        kinds[0] = StageKind.EXTRACT
    elif ends < 0.4:
        kinds[2] = StageKind.LOAD
    work: dict[str, Work] = {
        name: partial(any_work, name, draw.randrange(9), draw.randrange(9))
        for name in names
    }
    plans: dict[str, FaultPlan] = {}
    fatal: dict[str, set[bytes]] = {}
    known, may_fail, stages = True, False, []
    given = messages
    for name, kind in zip(names, kinds, strict=True):
        stage = any_stage(draw, name, kind)
        stages.append(stage)
        faults, culprits, wrong = any_faults(draw, stage, given)
        plans[name] = FaultPlan(tuple(faults), draw.randrange(2**32))
        fatal[name] = culprits or set()
        known = known and culprits is not None
        may_fail = may_fail or wrong
        if kind is StageKind.TRANSFORM:
            given = [out for m in given for out in work[name](m)]
    (ended,) = draw.choices(_ENDS, (8, 1, 1))
    # A drain doesn't wait for workers that have never replied, so their messages fail.
    silent = any(f.kind in _SILENT for plan in plans.values() for f in plan.faults)
    known = known and not (ended == "drained" and silent)
    # Separate dice, so that earlier seeds still draw the same pipelines.
    late = random.Random(f"{plans['a'].seed} drain")  # noqa: S311
    limited = ended == "drained" and late.random() < 0.5
    broken = draw.choice(BREAKS) if draw.random() < 0.1 else ""
    may_fail = may_fail or (ended == "drained" and silent) or bool(broken)
    made = Scenario(
        messages=messages,
        stages=stages,
        work=work,
        faults=plans,
        fatal=fatal if known else None,
        may_fail=may_fail,
        position_every=draw.randint(1, 5),
        starts_that_fail={draw.choice(names): {2}} if draw.random() < 0.1 else {},
        pipe_size=draw.choice((65536, 65536, 65536, 8, 40)),
        broken=broken,
        broken_at=draw.randrange(3),
        flushes=draw.random() < 0.5,
        flush_every=draw.choice((0.5, 60.0)),
        seconds=_LONG,
        ended=ended,
        ended_at=draw.choice((0.0, 0.01, 0.1, 1.0)) if ended else 0.0,
        drain_limit=late.choice((0.0, 0.02, 0.3)) if limited else None,
    )
    strict = random.Random(f"{plans['b'].seed} strict")  # noqa: S311
    if strict.random() < 0.15:
        made = _strict(strict, made)
    untried = random.Random(f"{plans['c'].seed} untried")  # noqa: S311
    if untried.random() < 0.1:
        made = _untried(untried, made)
    if made.sink is not None:
        # Separate dice, so that earlier seeds still draw the same pipelines.
        draw = random.Random(f"{plans['c'].seed} epochs")  # noqa: S311
    if draw.random() < (0.75 if made.sink is None else 0.5):
        return made
    breaks: list[tuple[str, int] | float] = []
    for _ in range(draw.randint(0, 3)):
        step = draw.choice(STEPS), draw.randint(1, 3)
        breaks.append(draw.choice((step, step, draw.random() * 0.1)))
    bounds = Bounds(
        messages=draw.randint(1, 4),
        bytes=draw.choice((20, 1000)),
        seconds=draw.choice((0.02, 60.0)),
    )
    made = replace(made, epoch=bounds, notes=draw.random() < 0.5, breaks=breaks)
    # Separate dice, so that earlier seeds still draw the same pipelines.
    disk = random.Random(plans["c"].seed)  # noqa: S311
    if made.broken or disk.random() < 0.7:
        return made
    return replace(
        made,
        broken="state",
        broken_at=disk.randrange(12),
        broken_for=disk.choice((1, 1, 3)),
        may_fail=True,
    )


def _strict(draw: random.Random, made: Scenario) -> Scenario:
    """Let a stage fail the run rather than dead-letter a message."""
    stages, place = list(made.stages), draw.randrange(len(made.stages))
    stage = stages[place]
    if stage.kind is StageKind.EXTRACT:
        return made
    stages[place] = replace(
        stage, on_error=ErrorPolicy(retries=stage.on_error.retries, then="fail")
    )
    return replace(made, stages=stages, strict=True, may_fail=True, fatal=None)


def _untried(draw: random.Random, made: Scenario) -> Scenario:
    """Let a stage try no message again that failed alone, whatever the cause."""
    stages, place = list(made.stages), draw.randrange(len(made.stages))
    stage = stages[place]
    if stage.kind is StageKind.EXTRACT:
        return made
    stages[place] = replace(stage, on_error=replace(stage.on_error, retries=0))
    return replace(made, stages=stages, fatal=None)


def refusing(draw: random.Random) -> Scenario:
    """Draw three stages, one of which refuses many messages, some of them in a row."""
    made = three_stages(draw)
    place, given = draw.randrange(len(made.stages)), list(made.messages)
    for stage in made.stages[:place]:
        if stage.kind is StageKind.TRANSFORM:
            given = [out for message in given for out in made.work[stage.name](message)]
    stage = made.stages[place]
    if stage.kind is not StageKind.TRANSFORM:
        return made
    refused = {message for message in given if draw.random() < 0.7}
    faults = [Fault(FaultKind.REFUSE, equals=message) for message in sorted(refused)]
    fatal = None if made.fatal is None else {**made.fatal, stage.name: refused}
    if draw.random() < 0.5:
        faults.append(Fault(FaultKind.KILL, probability=0.2))
        fatal = None
    plan = FaultPlan(tuple(faults), draw.randrange(2**32))
    return replace(made, faults={**made.faults, stage.name: plan}, fatal=fatal)


def of_programs(draw: random.Random) -> Scenario:
    """
    Draw two stages whose workers can also run as the hostile program.

    What becomes of each message doesn't depend on timing.
    """
    messages = [
        b'[%d,"%d"]' % (draw.randrange(3), n) for n in range(draw.randint(1, 9))
    ]
    stages: list[Stage] = []
    plans, fatal = dict[str, FaultPlan](), dict[str, set[bytes]]()
    for name in ("a", "b"):
        stage = any_stage(draw, name, StageKind.TRANSFORM)
        faults, culprits, wrong = any_faults(draw, stage, messages)
        while culprits is None or wrong or (stage.pool.max > 1 and _once(faults)):
            faults, culprits, wrong = any_faults(draw, stage, messages)
        plans[name] = FaultPlan(tuple(faults), draw.randrange(2**32))
        fatal[name] = culprits
        dialect = stage.dialect
        assert isinstance(dialect, MarkerDialect)
        command = hostile_worker(plans[name], mode=dialect.mode, batch=stage.batch.size)
        program = replace(stage.program, command=command)
        # In real time a busy machine needs longer deadlines.
        beats = None if stage.timeout.heartbeat is None else 6.0
        timeout = replace(stage.timeout, message=6.0, start=6.0, heartbeat=beats)
        stages.append(replace(stage, worker=program, timeout=timeout))
    return Scenario(
        messages=messages,
        stages=stages,
        work={"a": _same, "b": _same},
        faults=plans,
        fatal=fatal,
        position_every=draw.randint(1, 5),
        seconds=3 * _LONG,
    )


def _once(faults: list[Fault]) -> bool:
    """Return whether a fault hits a worker's n-th message, whichever that is."""
    return any(fault.message is not None for fault in faults)


def _same(message: bytes) -> Iterable[bytes]:
    return [message]


def any_work(name: str, none: int, two: int, message: bytes) -> Iterable[bytes]:
    number = message[4] % 9
    if number == none:
        return []
    made = [message[:-2] + name.encode() + b'"]']
    if number == two:
        made.append(message[:-2] + name.upper().encode() + b'"]')
    return made


def any_stage(draw: random.Random, name: str, kind: StageKind) -> Stage:
    mode = draw.choice(
        (
            Mode.SINGLE,
            Mode.SINGLE,
            Mode.SINGLE,
            Mode.BATCH_SUPERVISOR,
            Mode.BATCH_WORKER,
        )
    )
    given: dict[str, Any] = {}
    if kind is StageKind.EXTRACT:
        mode = Mode.CYCLIC
    else:
        order = draw.choice((Order.TOTAL, Order.TOTAL, Order.KEY, Order.NONE))
        several = (1, 2, 3, 3) if order is Order.KEY else (1, 1, 1, 1, 2, 3)
        pool: int | PoolPolicy = draw.choice(several)
        if draw.random() < 0.1:
            grow_at = draw.choice((1.0, 2.0))
            pool = PoolPolicy(min=draw.randint(0, 1), max=3, idle=1.0, grow_at=grow_at)
        given = {
            "order": order,
            "key": "/0" if order is Order.KEY else None,
            "workers": pool,
            "window": draw.choice((None, 1, 4)),
            "batch": BatchPolicy(size=draw.randint(1, 4), seconds=0.02),
            "on_error": ErrorPolicy(
                retries=draw.randint(1, 2),
                retries_refused=draw.choice((0, 0, 1)),
                budget=ErrorBudget(share=1.0),
            ),
        }
        if draw.random() < 0.1:
            given["recycle"] = RecyclePolicy(max_messages=draw.randint(1, 5))
        elif draw.random() < 0.1:
            given["recycle"] = RecyclePolicy(max_age=0.5)
    beats = kind is not StageKind.EXTRACT and draw.random() < 0.1
    return Stage(
        name=name,
        kind=kind,
        dialect=MarkerDialect(mode=mode, markers=draw.choice(_MARKERS)),
        timeout=Timeouts(
            message=2.0, stop=0.1, start=2.0, heartbeat=2.0 if beats else None
        ),
        worker=WorkerProgram(command=("simulated",), ready=draw.random() < 0.2),
        restart=RestartPolicy(max=_MANY, delay=0.01, max_delay=0.05),
        **given,
    )


def any_faults(
    draw: random.Random, stage: Stage, given: list[bytes]
) -> tuple[list[Fault], set[bytes] | None, bool]:
    """Draw faults; return them, dead letters if known, and whether the run may fail."""
    culprits = given if stage.kind is StageKind.TRANSFORM else []
    if culprits and draw.random() < 0.1:
        # As the only fault: two faults that make up for each other look like none, and
        # a surplus reply can't be told from that to the next message in progress.
        message = draw.choice(culprits)
        return [Fault(draw.choice(_WRONG), equals=message)], {message}, True
    faults, fatal, known = [], set[bytes](), True
    for what in draw.choices(_WHAT, k=draw.choice((0, 1, 1, 2))):
        if what == "slow":
            seconds = draw.choice((0.001, 0.05, 0.3))
            faults.append(Fault(FaultKind.PAUSE, probability=0.3, seconds=seconds))
        elif what == "odd":
            faults.append(draw.choice(_ODD))
        elif what == "crash":
            # The first message of another worker may be one that is tried again.
            at = draw.randint(1 if stage.pool.max == 1 else 2, 4)
            kind, status = draw.choice(_CRASHES), draw.randint(0, 1)
            faults.append(Fault(kind, message=at, start=1, status=status))
        elif what == "chance":
            faults.append(Fault(draw.choice(_DEADLY), probability=0.1))
            known = False
        elif culprits:
            message = draw.choice(culprits)
            kind = draw.choice((*_DEADLY, *[FaultKind.REFUSE] * 3))
            faults.append(Fault(kind, equals=message))
            fatal.add(message)
    return faults, fatal if known else None, False


def miscounting(draw: random.Random) -> Scenario:
    """Draw a stage whose worker replies twice, skips a reply, or dies after that."""
    early = draw.random() < 0.2
    count = draw.randint(1, 4) if early else draw.randint(8, 30)
    messages = [b'[%d,"%d"]' % (draw.randrange(3), n) for n in range(count)]
    mode = draw.choice((Mode.SINGLE, Mode.SINGLE, Mode.SINGLE, Mode.BATCH_SUPERVISOR))
    stage = Stage(
        name="a",
        worker=("simulated",),
        dialect=MarkerDialect(mode=mode),
        window=draw.choice((None, 1, 2, 4, 8)),
        workers=draw.choice((1, 1, 2)),
        batch=BatchPolicy(size=draw.randint(1, 4), seconds=0.02),
        timeout=Timeouts(message=2.0, stop=0.1),
        restart=RestartPolicy(max=_MANY, delay=0.01, max_delay=0.05),
        on_error=ErrorPolicy(retries=1, budget=ErrorBudget(share=1.0)),
    )
    at, young, start = draw.randint(1, max(1, count - 1)), draw.randint(1, 3), 1
    faults = {
        "twice": [Fault(FaultKind.TWICE, message=at, start=start)],
        "skip": [Fault(FaultKind.SKIP, message=at, start=start)],
        "late": [Fault(FaultKind.EXTRA_EOP, start=start)],
        # After a surplus reply, the message at which it is killed counts as answered.
        # Later in its life a lone message is released without proof, and a worker that
        # is killed leaves no trace of what was wrong with it.
        "dies": [
            Fault(FaultKind.TWICE, message=young, start=start),
            Fault(FaultKind.KILL, message=young + 1, start=start),
        ],
        # Each process exits, with a message outstanding.
        "exits": [Fault(FaultKind.EXIT, message=draw.randint(2, 9), status=1)],
    }
    plan = faults[draw.choice((*faults, "dies", "dies"))]
    if early:
        # Nothing follows the last message: only a quiet time can prove its reply.
        plan = [
            Fault(FaultKind.EXTRA_EOP, at=Moment.MESSAGE, message=count, start=start),
            Fault(FaultKind.PAUSE, message=count, start=start, seconds=0.003),
        ]
    elif draw.random() < 0.5:
        pause = Fault(FaultKind.PAUSE, probability=0.3, seconds=0.003)
        plan = [pause, *plan]
    return Scenario(
        messages=messages,
        stages=[stage],
        work={"a": partial(any_work, "a", draw.randrange(9), draw.randrange(9))},
        faults={"a": FaultPlan(tuple(plan), draw.randrange(2**32))},
        position_every=draw.randint(1, 5),
        pipe_size=draw.choice((65536, 65536, 8, 40)),
        may_fail=True,
        seconds=_LONG,
    )
