from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterator,
    Sequence,
)
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.lowlevel
import pyarrow as pa
import pytest

from etlstage.columns import Column
from etlstage.errors import (
    ConfigError,
    InvalidMessage,
    LedgerImbalance,
    SinkFailed,
    SourceFailed,
    StageFailed,
    StateUnusable,
    WorkerLost,
    WorkerStartFailed,
)
from etlstage.messages import AnnotatedRun, Position, Run, StageKind
from etlstage.pipeline import (
    DeadLetter,
    DeadLetters,
    Pipeline,
    Report,
    WorkerSink,
    WorkerSource,
)
from etlstage.pipeline import pipeline as pipeline_module
from etlstage.pipeline.dead_letter.files import letter_files
from etlstage.pipeline.delivery.delivery import Bounds, Delivery
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.interfaces import DeadLetterSink, Sink, Source
from etlstage.pipeline.report import KeptLetters
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import (
    ErrorBudget,
    ErrorPolicy,
    OffsetPolicy,
    Order,
    RestartPolicy,
    Stage,
    Timeouts,
)
from etlstage.supervisor import AsyncSupervisor
from etlstage.telemetry import PrometheusMeter
from etlstage.testing import (
    MemorySink,
    MemorySource,
    ScriptedLaunch,
    ScriptedWorker,
)
from etlstage.transport import Launch, launch_worker
from tests.patience import HANG
from tests.pipeline.ends import (
    GatedSink,
    ScriptedSource,
    Wait,
    refuse_at,
    unreadable,
)
from tests.pipeline.test_disk import Files
from tests.pipeline.test_loading import Numbers
from tests.supervisor.acts import LAUNCHES, script_of
from tests.supervisor.workers import QUICK, cyclic, load, plain, stage


def launch_of(*stages: Stage) -> Launch:
    """Return a launch that runs the workers of these stages in memory."""
    scripts = {stage.name: script_of(stage) for stage in stages}
    launch = ScriptedLaunch(
        lambda worker: scripts[worker.name.rpartition("-")[0]](worker)
    )
    LAUNCHES.append(launch)
    return launch


def pipeline(
    source: Source,
    *stages: Stage,
    sink: Sink,
    flush_every: float = 60.0,
    dead_letters: DeadLetters | None = None,
    dead_letter_sink: DeadLetterSink | None = None,
    delivery: Delivery | None = None,
    launch: Launch | None = None,
) -> Pipeline:
    """Return a pipeline called ``p``; by default its workers are not processes."""
    return Pipeline(
        name="p",
        source=source,
        stages=stages,
        sink=sink,
        flush_every=flush_every,
        dead_letters=dead_letters,
        dead_letter_sink=dead_letter_sink,
        delivery=delivery,
        launch=launch or launch_of(*stages),
    )


async def run(made: Pipeline) -> Report:
    """Run a pipeline, with a timeout."""
    with anyio.fail_after(HANG):
        return await made.run()


async def run_until(
    made: Pipeline, reached: anyio.Event, then: Callable[[], Awaitable[None]]
) -> Report:
    """Run a pipeline, and await ``then`` once an event is set."""
    reports = []

    async def start() -> None:
        reports.append(await run(made))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start)
        with anyio.fail_after(HANG):
            await reached.wait()
        await then()
    return reports[0]


def numbers(start: int, end: int) -> Run:
    """Return messages that can be distinguished."""
    return [b"%d" % n for n in range(start, end)]


def counts(report: Report) -> list[tuple[int, int, int, int, int]]:
    """Return, by stage: received, done, failed, unprocessed, produced."""
    return [
        (a.received, a.done, a.failed, a.unprocessed, a.produced) for a in report.ledger
    ]


words = stage("words", name="words")
echo = stage("echo", name="echo")


# --- runs that succeed ---------------------------------------------------------------


async def test_messages_pass_from_end_to_end() -> None:
    """In order, through two stages with none, one or many results; all are counted."""
    source = ScriptedSource([[b"a b", b""], [b"c", b"d e f"]])
    sink = GatedSink()
    report = await run(pipeline(source, words, echo, sink=sink))

    assert report.status == "done"
    assert report.error is None
    assert sink.messages == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert counts(report) == [
        (0, 0, 0, 0, 4),
        (4, 4, 0, 0, 6),
        (6, 6, 0, 0, 6),
        (6, 6, 0, 0, 0),
    ]
    assert report.undelivered == 0
    assert (sink.finished, sink.open, source.closed) == (1, False, 1)


@pytest.mark.parametrize("count", [0, 1, 30_000])
async def test_any_number_of_messages(count: int) -> None:
    """A run without messages succeeds, too."""
    script = [numbers(at, min(at + 1000, count)) for at in range(0, count, 1000)]
    sink = GatedSink()
    made = pipeline(ScriptedSource(script), stage("fast", workers=2), sink=sink)
    report = await run(made)

    assert report.status == "done"
    assert sink.messages == numbers(0, count)
    assert counts(report)[1] == (count, count, 0, 0, count)
    assert sink.finished == 1


async def test_stages_are_not_needed() -> None:
    """A source and a sink make a pipeline."""
    sink = GatedSink()
    report = await run(pipeline(ScriptedSource([[b"a"]]), sink=sink))

    assert report.status == "done"
    assert counts(report) == [(0, 0, 0, 0, 1), (1, 1, 0, 0, 0)]


async def test_stage_that_swallows_everything() -> None:
    """That nothing arrives is no error."""
    sink = GatedSink()
    report = await run(
        pipeline(ScriptedSource([numbers(0, 9)]), stage("silent"), sink=sink)
    )

    assert report.status == "done"
    assert counts(report)[1:] == [(9, 9, 0, 0, 0), (0, 0, 0, 0, 0)]


@pytest.mark.process
async def test_workers_at_both_ends(tmp_path: Path) -> None:
    """Extract, transform and load are all done by workers."""
    target = tmp_path / "target"
    source = WorkerSource(plain("extract", "one two", "", "three"))
    sink = WorkerSink(load("append", target))
    made = pipeline(source, words, sink=sink, launch=launch_worker)
    report = await run(made)

    assert report.status == "done"
    assert target.read_bytes() == b"one\ntwo\nthree\n"
    assert report.landed == "3 messages loaded; output complete"


def account_of(stage: str, kind: str, **counts: int | None) -> dict[str, object]:
    """Return a stage of a JSON report; all counts not given are 0."""
    names = [
        "in",
        "out",
        "done",
        "dead",
        "failed",
        "unprocessed",
        "skipped",
        "doubtful",
        "restarts",
        "failures",
    ]
    zeros = dict.fromkeys(names, 0)
    return {"stage": stage, "kind": kind, "mismatches": {}, **zeros, **counts}


async def test_report_as_json() -> None:
    """As ``--report`` writes it; its counts are those of the table (issue 11)."""
    before = datetime.now(UTC)
    report = await run(pipeline(ScriptedSource([[b"a b"]]), words, sink=GatedSink()))
    plainly = json.loads(json.dumps(report.to_dict()))
    for part in [plainly, *plainly["stages"]]:
        assert part.pop("seconds") >= 0
    for part in plainly["stages"]:
        assert part.pop("busy") >= 0
        assert part.pop("started") <= part.pop("ended")
    start, end = (datetime.fromisoformat(plainly.pop(n)) for n in ("started", "ended"))
    before = before.replace(microsecond=before.microsecond // 1000 * 1000)
    assert before <= start <= end <= datetime.now(UTC)
    assert re.fullmatch("[0-9a-f]{8}", plainly.pop("run"))

    assert plainly == {
        "pipeline": "p",
        "status": "done",
        "error": None,
        "story": [],
        "stages": [
            account_of("source", "extract", **{"in": None, "out": 1}),
            account_of("words", "transform", **{"in": 1, "done": 1, "out": 2}),
            account_of("sink", "load", **{"in": 2, "done": 2, "out": 2}),
        ],
        "edges": [
            {
                "name": "source -> words",
                "from": "source",
                "to": "words",
                "messages": 1,
                "undelivered": 0,
            },
            {
                "name": "words -> sink",
                "from": "words",
                "to": "sink",
                "messages": 2,
                "undelivered": 0,
            },
        ],
        "output": {
            "what": "memory",
            "where": "sink",
            "messages": 2,
            "text": "2 messages in memory",
        },
        "dead_letters": {"messages": 0, "where": None, "command": None},
    }


@pytest.mark.process
async def test_full_edges_stop_the_source() -> None:
    """If the sink takes nothing, only what edges and a stage can hold is read."""
    gate = Wait()
    source = ScriptedSource([[b"x" * 1_000_000] for _ in range(250)])
    sink = GatedSink(gate=gate)
    made = pipeline(source, stage("fast"), sink=sink, launch=launch_worker)

    async def look() -> None:
        before = -1
        while source.yielded > before or source.yielded <= 16:
            before = source.yielded
            for _ in range(100):
                await anyio.wait_all_tasks_blocked()
        assert source.yielded < 200
        gate.released.set()

    report = await run_until(made, gate.reached, look)

    assert report.status == "done"
    assert len(sink.messages) == 250


# --- positions -----------------------------------------------------------------------


async def test_positions_are_acknowledged_when_what_they_cover_is_durable() -> None:
    """Not once written, and only if nothing before the position is missing."""
    second = Wait()
    source = ScriptedSource(
        [[b"1", b"2"], Position("a"), [b"3"], Position("b"), second, [b"4"]]
    )
    sink = GatedSink(durable=False)
    made = pipeline(source, echo, sink=sink)

    async def flush() -> None:
        while len(sink.messages) < 3:
            await anyio.wait_all_tasks_blocked()
        assert source.acknowledged == []
        sink.account.done = 2
        second.released.set()

    report = await run_until(made, second.reached, flush)

    assert report.status == "done"
    assert source.acknowledged == ["a", "b"]


async def test_position_waits_for_slow_workers() -> None:
    """It waits for the replies to all messages before it; the last position counts."""
    script: list[Run | Position] = []
    for n in range(50):
        script += [[b"%d" % n], Position(n)]
    source, sink = ScriptedSource(script), GatedSink()
    slow = stage("uneven", 3, workers=3)
    report = await run(pipeline(source, slow, sink=sink))

    assert report.status == "done"
    assert source.acknowledged == sorted(source.acknowledged)  # type: ignore[type-var]
    assert source.acknowledged[-1] == 49


@pytest.mark.process
async def test_positions_do_not_overtake_each_other_at_a_full_edge() -> None:
    """However long they wait for room."""
    script: list[Run | Position] = []
    for n in range(60):
        script += [[b"x" * 1_000_000], Position(n), Position(n + 0.5)]
    source = ScriptedSource(script)
    fast = stage("fast", window=2)
    sink = GatedSink(gate=Wait())
    made = pipeline(source, fast, sink=sink, launch=launch_worker)
    gate = made._sink._gate  # type: ignore[attr-defined]

    async def release() -> None:
        for _ in range(300):
            await anyio.wait_all_tasks_blocked()
        gate.released.set()

    report = await run_until(made, gate.reached, release)

    assert report.status == "done"
    assert source.acknowledged == sorted(source.acknowledged)  # type: ignore[type-var]
    assert source.acknowledged[-1] == 59.5


async def test_position_in_front_of_everything_is_acknowledged() -> None:
    """It covers no messages, so there is nothing to wait for."""
    source = ScriptedSource([Position(0), [b"a"]])
    report = await run(pipeline(source, echo, sink=GatedSink()))

    assert report.status == "done"
    assert source.acknowledged == [0]


async def test_positions_of_a_failed_run_stay_behind() -> None:
    """The next run reads from the last acknowledged one again."""
    source = ScriptedSource([[b"a"], Position(1), [b"b"], Position(2)])
    sink = GatedSink(before=refuse_at(1))
    report = await run(pipeline(source, sink=sink))

    assert report.status == "failed"
    assert source.acknowledged == [1]


async def test_position_waits_for_what_comes_behind_it() -> None:
    """By then its worker has replied to more than the messages before it (issue 14)."""
    source = ScriptedSource([[b"a"], Position(1), [b"b"], Position(2), [b"c"]])
    found: list[list[object]] = []
    sink = GatedSink(before=lambda _: found.append([*source.acknowledged]))
    report = await run(pipeline(source, sink=sink))

    assert report.status == "done"
    assert found == [[], [], [1]]
    assert source.acknowledged == [1, 2]


async def test_endless_extraction_is_flushed_now_and_then() -> None:
    """Otherwise the sink would wait for messages, and the positions for the sink."""
    wait = Wait()
    source = ScriptedSource([[b"a"], Position(1), wait])
    sink = GatedSink(durable=False)
    made = pipeline(source, sink=sink, flush_every=0.05)

    async def look() -> None:
        with anyio.fail_after(HANG):
            await source.stored.wait()
        assert not sink.finished
        wait.released.set()

    report = await run_until(made, wait.reached, look)

    assert report.status == "done"
    assert source.acknowledged == [1]


@pytest.fixture
def everybodys(tmp_path: Path) -> Path:
    """Give a folder that all users may write to."""
    tmp_path.chmod(0o777)
    return tmp_path


async def test_dead_letters_in_a_folder_of_others(everybodys: Path) -> None:
    """The error comes before anything is loaded, not with a first letter (issue 10)."""
    source, sink = ScriptedSource([[b"a"]]), GatedSink()
    letters = DeadLetters(everybodys, pipeline="p")
    report = await run(pipeline(source, sink=sink, dead_letters=letters))
    assert isinstance(report.error, StateUnusable)
    assert "others may write to the folder (mode 777)" in str(report.error)
    assert sink.messages == []


@pytest.mark.process
async def test_second_run_of_one_state_loads_nothing(tmp_path: Path) -> None:
    """A run that stores positions locks its state, without a setting (issue 10)."""
    offsets = OffsetPolicy(by="supervisor", step=3, end=12)
    sink = GatedSink()
    source = WorkerSource(cyclic("ranges"), offsets=offsets)
    with Delivery(tmp_path):
        delivery = Delivery(tmp_path)
        report = await run(pipeline(source, echo, sink=sink, delivery=delivery))
    assert report.status == "failed"
    assert isinstance(report.error, StateUnusable)
    assert sink.messages == []
    assert (await run(pipeline(source, echo, sink=sink))).error is None


@pytest.mark.process
async def test_second_run_reads_on_where_the_first_was_durable(tmp_path: Path) -> None:
    """The sink fails in the middle; after the second run nothing is missing."""
    offsets = OffsetPolicy(by="supervisor", step=3, end=12)
    loaded: list[bytes] = []
    statuses = []
    for limit in 5, 100:
        sink = GatedSink(before=refuse_at(limit))
        source = WorkerSource(cyclic("ranges"), offsets=offsets)
        delivery = Delivery(tmp_path)
        report = await run(pipeline(source, echo, sink=sink, delivery=delivery))
        statuses.append(report.status)
        stored = CommitRecord.latest(tmp_path).position
        assert isinstance(stored, int)
        loaded += sink.messages
        assert set(numbers(0, stored)) <= set(loaded)

    assert statuses == ["failed", "done"]
    assert stored == 12
    assert set(loaded) == set(numbers(0, 12))


# --- runs that fail ------------------------------------------------------------------


async def test_worker_that_dies_fails_the_run() -> None:
    """Its message and those in flight are unprocessed; all workers are stopped."""
    source = ScriptedSource([numbers(0, 5), [b"end", b"behind"], numbers(0, 3)])
    sink = GatedSink()
    dying = stage(
        "exits_at_word", "end", name="dies", window=1, restart=RestartPolicy()
    )
    made = pipeline(source, echo, dying, stage("deaf_to_eof", timeout=QUICK), sink=sink)
    report = await run(made)

    assert report.status == "failed"
    assert isinstance(report.error, WorkerLost)
    assert "stage dies: worker dies-1" in str(report.error)
    account = report.ledger[2]
    assert (account.done, account.failed) == (5, 0)
    assert account.unprocessed == account.received - 5 > 0
    assert all(a.pending == 0 for a in report.ledger)
    assert not sink.finished
    assert (sink.open, source.closed) == (False, 1)
    report.ledger.check(whole=False)
    assert str(report.error) == report.to_dict()["error"]


async def test_message_with_a_marker_fails_the_run() -> None:
    """It counts as failed, not as unprocessed."""
    source = ScriptedSource([[b"good", b"b\0ad"]])
    report = await run(pipeline(source, echo, sink=GatedSink()))

    assert isinstance(report.error, InvalidMessage)
    assert report.ledger[1].failed == 1


async def test_source_that_fails_fails_the_run() -> None:
    """Earlier messages may be loaded, but the output is not marked complete."""
    sink = GatedSink()
    source = ScriptedSource([numbers(0, 3), unreadable()])
    report = await run(pipeline(source, echo, sink=sink))

    assert report.status == "failed"
    assert isinstance(report.error, SourceFailed)
    assert not sink.finished
    assert source.closed == 1


async def test_source_that_fails_as_our_own_channel_would() -> None:
    """Any exception of a source is its failure, even one that our channels raise."""
    broken: Any = anyio.BrokenResourceError()
    report = await run(pipeline(ScriptedSource([[b"a"], broken]), sink=GatedSink()))

    assert (report.status, report.error) == ("failed", broken)


async def test_sink_that_fails_fails_the_run() -> None:
    """The refused run counts as unprocessed, and the source is stopped."""
    gate = Wait()
    source = ScriptedSource([numbers(0, 4), numbers(4, 8), gate])
    sink = GatedSink(before=refuse_at(4))
    report = await run(pipeline(source, sink=sink))

    assert isinstance(report.error, SinkFailed)
    assert counts(report) == [(0, 0, 0, 0, 8), (8, 4, 0, 4, 0)]
    assert report.landed == "4 messages in memory"
    assert sink.open is False


@pytest.mark.parametrize("where", ["source", "middle", "sink"])
@pytest.mark.process
async def test_program_that_is_missing_fails_the_run(where: str) -> None:
    """Whichever stage lacks its program."""
    missing = {"name": "gone", "worker": ("no-such-program",)}
    loading = Stage(kind=StageKind.LOAD, **missing)  # type: ignore[arg-type]
    extract = plain("extract")
    report = await run(
        pipeline(
            WorkerSource(
                Stage(kind=extract.kind, dialect=extract.dialect, **missing)  # type: ignore[arg-type]
            )
            if where == "source"
            else ScriptedSource([[b"a"]]),
            *([Stage(**missing)] if where == "middle" else []),  # type: ignore[arg-type]
            sink=WorkerSink(loading) if where == "sink" else GatedSink(),
            launch=launch_worker,
        )
    )

    assert report.status == "failed"
    assert isinstance(report.error, WorkerStartFailed)
    assert "no program 'no-such-program' on PATH" in str(report.error)


@pytest.mark.parametrize("where", ["source", "middle"])
async def test_error_ends_the_run_at_once(where: str) -> None:
    """It does not wait for earlier messages to pass a slow sink."""
    strict = replace(echo, on_error=ErrorPolicy(then="fail"))
    fails = [unreadable()] if where == "source" else [[b"b\0ad"]]
    source = ScriptedSource([numbers(0, 5), *fails])
    sink = GatedSink(gate=Wait())
    with anyio.fail_after(HANG):
        report = await pipeline(source, strict, words, sink=sink).run()

    expected = SourceFailed if where == "source" else InvalidMessage
    assert isinstance(report.error, expected)
    assert not sink.finished
    assert (sink.open, source.closed) == (False, 1)


@pytest.mark.process
async def test_workers_of_all_stages_are_stopped_at_once() -> None:
    """They ignore SIGTERM, and share the one second that each may take."""
    deaf = stage("deaf_to_sigterm", timeout=Timeouts(stop=1.0))
    stages = [replace(deaf, name=f"deaf-{n}") for n in range(4)]
    gate = Wait()
    source = ScriptedSource([numbers(0, 5), gate, unreadable()])
    made = pipeline(source, *stages, sink=GatedSink(), launch=launch_worker)

    async def release() -> None:
        gate.released.set()

    report = await run_until(made, gate.reached, release)

    assert isinstance(report.error, SourceFailed)
    assert report.seconds < 3


async def test_cause_in_a_group_is_reported() -> None:
    """An exception group with a single error is unwrapped."""
    group = ExceptionGroup("errors", [ExceptionGroup("errors", [unreadable()])])
    report = await run(pipeline(ScriptedSource([group]), sink=GatedSink()))

    assert isinstance(report.error, SourceFailed)


class Clumsy(GatedSink):
    """A sink that can't be closed."""

    async def __aexit__(self, *args: object) -> None:
        """Fail."""
        raise SinkFailed("stage sink: can't be closed", stage="sink")


async def test_first_error_wins() -> None:
    """Errors that follow from it are not reported."""
    report = await run(pipeline(ScriptedSource([unreadable()]), sink=Clumsy()))

    assert isinstance(report.error, SourceFailed)


async def test_undelivered_messages_are_counted() -> None:
    """Messages that were between two stages when the run ended."""
    gate = Wait()
    source = ScriptedSource([[b"x"], [b"y"], [b"z"]])
    sink = GatedSink(gate=gate)
    made = pipeline(source, sink=sink)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            await gate.reached.wait()
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
    report = made.report("forced")

    assert counts(report) == [(0, 0, 0, 0, 2), (1, 0, 0, 1, 0)]
    assert report.undelivered == 1
    assert [e["undelivered"] for e in report.to_dict()["edges"]] == [1]


# --- a ledger that does not balance --------------------------------------------------


class Miscounting(GatedSink):
    """A sink that counts too many or too few messages as loaded."""

    def __init__(self, wrong: int) -> None:
        super().__init__()
        self._wrong = wrong

    async def finish(self) -> None:
        """Finish, and miscount."""
        await super().finish()
        self.account.done += self._wrong


@pytest.mark.parametrize("wrong", [-1, 1])
async def test_sink_that_miscounts_is_found_out(wrong: int) -> None:
    """A run that can't account for all messages has not succeeded."""
    made = pipeline(ScriptedSource([numbers(0, 5)]), echo, sink=Miscounting(wrong))

    with pytest.raises(
        LedgerImbalance,
        match=rf"stage sink: 5 received, but {5 + wrong} done \+ 0 dead \+ 0 failed \+ 0 unprocessed",
    ):
        await run(made)


class Forgetful(GatedSink):
    """A sink that does not count all messages."""

    async def write(self, run: Run) -> None:
        """Take a run without its first message."""
        await super().write(run[1:])


async def test_sink_that_forgets_is_found_out() -> None:
    """All messages that leave one stage must reach the next."""
    made = pipeline(ScriptedSource([numbers(0, 5)]), sink=Forgetful())

    with pytest.raises(
        LedgerImbalance, match="5 left stage source, but 4 reached sink"
    ):
        await run(made)


# --- drain and cancel ----------------------------------------------------------------


async def test_drained_run_lands_what_was_extracted() -> None:
    """Extraction is cancelled at once if the source may stop anywhere."""
    wait = Wait()
    source = ScriptedSource([numbers(0, 5), wait, numbers(5, 10)])
    sink = GatedSink(durable=False)
    made = pipeline(source, echo, sink=sink)

    async def drain() -> None:
        made.drain()

    report = await run_until(made, wait.reached, drain)

    assert report.status == "drained"
    assert sink.messages == numbers(0, 5)
    assert (sink.account.done, sink.finished) == (5, 0)
    assert source.closed == 1


async def test_drained_run_loads_what_waits_to_be_taken() -> None:
    """Messages that were read are not dropped, though the sink was busy."""
    gate = Wait()
    source = ScriptedSource([[b"1"], [b"2"], [b"3"]])
    sink = GatedSink(gate=gate)
    made = pipeline(source, sink=sink)

    async def drain() -> None:
        await anyio.wait_all_tasks_blocked()
        made.drain()
        gate.released.set()

    report = await run_until(made, gate.reached, drain)

    assert (report.status, sink.finished) == ("drained", 0)
    assert sink.messages == [b"1", b"2"]
    assert source.closed == 1


async def test_drained_run_ends_at_a_position() -> None:
    """At one from which the source can resume."""
    wait = Wait()
    source = ScriptedSource(
        [[b"1"], Position(1), wait, [b"2"], Position(2), [b"3"]], alike=False
    )
    sink = GatedSink()
    made = pipeline(source, echo, sink=sink)

    async def drain() -> None:
        made.drain()
        wait.released.set()

    report = await run_until(made, wait.reached, drain)

    assert report.status == "drained"
    assert sink.messages == [b"1", b"2"]
    assert source.acknowledged == [1, 2]


@pytest.mark.process
async def test_drained_extraction_by_a_worker(tmp_path: Path) -> None:
    """A plain worker is stopped; its messages until then are loaded."""
    gate = Wait()
    sink = GatedSink(gate=gate)
    source = WorkerSource(plain("ranges", timeout=QUICK))
    made = pipeline(source, sink=sink)

    async def drain() -> None:
        made.drain()
        gate.released.set()

    report = await run_until(made, gate.reached, drain)

    assert report.status == "drained"
    assert len(sink.messages) == report.ledger[0].produced > 0


async def test_drained_before_it_began() -> None:
    """A signal may come that early: as little as possible is extracted."""
    sink = GatedSink()
    made = pipeline(
        ScriptedSource([[b"1"], Wait()], alike=True),
        sink=sink,
    )
    made.drain()
    report = await run(made)

    assert report.status == "drained"
    assert not sink.finished


@pytest.mark.parametrize(("limit", "cut"), [(4, 4), (5, 5), (9, 6)])
async def test_limited_run_loads_the_first_messages(
    tmp_path: Path, limit: int, cut: int
) -> None:
    """A limited output is incomplete, and the next run reads on (issue 23)."""
    sink, source = (
        GatedSink(),
        ScriptedSource([numbers(0, 4), Position(1), [b"4", b"5"]]),
    )
    made = Pipeline(
        name="p",
        source=source,
        stages=[echo],
        sink=sink,
        delivery=Delivery(tmp_path / "state"),
        launch=launch_of(echo),
        limit=limit,
    )
    report = await run(made)
    assert (report.error, report.status) == (None, "done")
    assert sink.messages == numbers(0, cut)
    assert report.ledger[0].produced == cut
    assert bool(sink.finished) == (cut < limit)
    assert source.closed
    record = CommitRecord.latest(tmp_path / "state")
    assert record.ended
    assert record.position == {4: None, 5: 1, 9: None}[limit]


class Lingering(ScriptedSource):
    """A source that waits for something when it ends, as one of a worker does."""

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Play the script."""
        async with aclosing(super().runs()) as items:
            try:
                async for item in items:
                    yield item
            finally:
                await anyio.lowlevel.checkpoint()


async def test_limited_run_that_is_drained_at_its_last_messages() -> None:
    """It has reached its limit, so it is done (issue 22)."""
    gate = Wait()
    source, sink = Lingering([[b"1"], [b"2"], [b"3"]]), GatedSink(gate=gate)
    made = Pipeline(name="p", source=source, sink=sink, limit=2)

    async def drain() -> None:
        await anyio.wait_all_tasks_blocked()
        made.drain()
        gate.released.set()

    report = await run_until(made, gate.reached, drain)

    assert (report.error, report.status) == (None, "done")
    assert sink.messages == [b"1", b"2"]
    assert made.stopped_at == "limit"


@pytest.mark.process
async def test_limited_extraction_by_a_worker() -> None:
    """It is stopped while it writes, which is not a failure of the worker."""
    sink = MemorySink()
    made = Pipeline(
        name="p",
        source=WorkerSource(plain("ranges", timeout=QUICK)),
        sink=sink,
        limit=3,
    )
    report = await run(made)
    assert (report.error, report.status, len(sink.messages)) == (None, "done", 3)


async def test_cancelled_run_stops_its_workers() -> None:
    """The report still balances: messages without an outcome are unprocessed."""
    wait = Wait()
    source = ScriptedSource([numbers(0, 5), wait])
    sink = GatedSink(gate=Wait())
    made = pipeline(source, stage("deaf_to_sigterm", timeout=QUICK), sink=sink)
    with anyio.fail_after(HANG), anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            await wait.reached.wait()
            scope.cancel()
    report = made.report("forced")

    assert report.status == "forced"
    assert report.error is None
    assert all(account.pending == 0 for account in report.ledger)
    assert report.ledger[2].done == 0
    assert (sink.open, source.closed) == (False, 1)


# --- pipelines that can't be ---------------------------------------------------------


def test_two_stages_with_one_name() -> None:
    """Reports and state files identify stages by name."""
    with pytest.raises(
        ConfigError, match="two stages are called source; names must differ"
    ):
        pipeline(ScriptedSource([]), stage("echo", name="source"), sink=GatedSink())


def test_stage_in_the_middle_that_does_not_transform() -> None:
    """The error names its kind."""
    with pytest.raises(
        ConfigError,
        match="stage l is of kind load: between the source and the sink only transform",
    ):
        pipeline(
            ScriptedSource([]),
            load("append"),
            sink=GatedSink(),
        )


# --- dead letters --------------------------------------------------------------------


@pytest.fixture
def letters(tmp_path: Path) -> DeadLetters:
    """Give a store for dead letters."""
    return DeadLetters(tmp_path / "state", pipeline="p")


def tolerant(budget: ErrorBudget, *, retries: int = 1) -> Stage:
    """Return a stage whose workers exit on each message ``end``."""
    policy = ErrorPolicy(budget=budget, retries=retries)
    dying = stage("exits_at_word", "end", name="dies")
    return replace(dying, on_error=policy, restart=EAGER)


SOME = ErrorBudget(count=3, share=None)
EAGER = RestartPolicy(max=50, delay=0.01)


async def test_messages_that_kill_are_put_aside(
    letters: DeadLetters, tmp_path: Path
) -> None:
    """The others pass in order; all are counted, and the letters can be read."""
    source = ScriptedSource([[b"a", b"end", b"b"], [b"c\0d", b"end", b"e"]])
    sink = GatedSink()
    report = await run(
        pipeline(source, echo, tolerant(SOME), sink=sink, dead_letters=letters)
    )

    assert (report.status, report.error) == ("done", None)
    assert sink.messages == [b"a", b"b", b"e"]
    assert sink.finished == 1
    assert [(a.received, a.done, a.dead) for a in report.ledger] == [
        *((0, 0, 0), (6, 5, 1), (5, 3, 2), (3, 3, 0)),
    ]
    assert report.to_dict()["stages"][2]["dead"] == 2
    assert report.to_dict()["run"] == letters.run
    # Each of the two messages was tried twice.
    assert (report.ledger[2].restarts, report.ledger[2].failures) == (4, 4)
    assert [fault.worker for fault in report.ledger[2].faults] == ["dies-1"] * 4
    assert {fault.what for fault in report.ledger[2].faults} == {"exited with status 3"}
    assert report.to_dict()["dead_letters"] == {
        "messages": 3,
        "where": str(tmp_path / "state/dead_letters"),
        "command": letters.look,
    }
    found = {(x.stage, x.place): x for x in letters.letters()}
    assert sorted(found) == [("dies", 1), ("dies", 3), ("echo", 3)]
    assert found["echo", 3].message == b"c\0d"
    assert found["echo", 3].kind == "InvalidMessage"
    assert found["dies", 1].message == b"end"
    assert found["dies", 1].kind == "WorkerLost"
    assert len(found["dies", 1].attempts) == 2
    assert '"equals":"end"' in found["dies", 1].config["worker"]["command"][-1]


async def test_run_without_dead_letters_has_nothing_of_them(
    letters: DeadLetters, tmp_path: Path
) -> None:
    """It leaves no files, either."""
    report = await run(
        pipeline(ScriptedSource([[b"a"]]), echo, sink=GatedSink(), dead_letters=letters)
    )
    assert report.dead_letters == KeptLetters()
    assert letter_files(tmp_path / "state") == []


async def test_budget_ends_the_run(letters: DeadLetters) -> None:
    """Dead letters are kept, the rest is unprocessed, the output is incomplete."""
    source = ScriptedSource([[b"a"], *[[b"end"]] * 3, numbers(0, 9)])
    sink = GatedSink()
    dying = tolerant(ErrorBudget(count=1, share=None), retries=0)
    report = await run(pipeline(source, dying, sink=sink, dead_letters=letters))

    assert report.status == "failed"
    assert "2 of " in str(report.error)
    assert "on_error.budget allows 1 message" in str(report.error)
    assert letters.look in str(report.error)
    assert report.ledger[1].dead == letters.count == 2
    assert report.ledger[1].pending == 0
    assert report.dead_letters.command == letters.look
    assert not sink.finished
    report.ledger.check(whole=False)


async def test_strict_stage_ends_the_run_at_once(letters: DeadLetters) -> None:
    """The setting asks for it."""
    strict = replace(echo, on_error=ErrorPolicy(then="fail"))
    report = await run(
        pipeline(
            ScriptedSource([[b"b\0ad"]]), strict, sink=GatedSink(), dead_letters=letters
        )
    )
    assert isinstance(report.error, InvalidMessage)
    assert (report.ledger[1].failed, letters.count) == (1, 0)


async def test_stage_without_workers_puts_nothing_aside(letters: DeadLetters) -> None:
    """Messages are not to blame for a program that never works."""
    hopeless = replace(
        stage("exits_at_word", "end", name="dies"), restart=RestartPolicy(max=0)
    )
    source = ScriptedSource([[b"end"], numbers(0, 50)])
    report = await run(
        pipeline(source, hopeless, sink=GatedSink(), dead_letters=letters)
    )
    assert report.status == "failed"
    assert isinstance(report.error, StageFailed)
    assert letters.count <= 1
    assert report.ledger[1].unprocessed > 0


class Recorded(DeadLetters):
    """Dead letters that record in a source when they are durable."""

    def __init__(self, folder: Path, source: ScriptedSource) -> None:
        super().__init__(folder, pipeline="p")
        self._source = source

    async def sync(self) -> None:
        """Make letters durable, and record that."""
        await super().sync()
        self._source.acknowledged.append(f"synced {self.count}")


async def test_position_waits_until_dead_letters_are_durable(tmp_path: Path) -> None:
    """A dead-lettered message has an outcome, like one that is loaded."""
    gate = Wait()
    source = ScriptedSource([[b"a", b"end"], Position(1), gate, [b"b"], Position(2)])
    letters = Recorded(tmp_path, source)
    made = pipeline(
        source,
        tolerant(SOME),
        sink=GatedSink(),
        dead_letters=letters,
        flush_every=0.05,
    )

    async def release() -> None:
        gate.released.set()

    report = await run_until(made, source.stored, release)
    assert report.status == "done"
    found = source.acknowledged
    assert found[:2] == ["synced 1", 1]
    assert 2 in found


@pytest.mark.parametrize("order", [Order.NONE, Order.TOTAL])
async def test_position_does_not_pass_a_message_without_an_outcome(
    letters: DeadLetters, order: Order
) -> None:
    """Where replies come in any order, counting them is not enough."""
    sink = GatedSink()
    loaded: dict[object, set[bytes]] = {}

    class Source(ScriptedSource):
        async def acknowledge(self, position: Position) -> None:
            dead = {letter.message for letter in letters.letters()}
            loaded[position.value] = {*sink.messages, *dead}

    script: list[Run | Position] = []
    for n in range(40):
        script += [[b"%d" % n if n % 9 else b"%d\0" % n], Position(n)]
    uneven = stage("uneven", 3, workers=3, order=order)
    uneven = replace(
        uneven, on_error=ErrorPolicy(budget=ErrorBudget(count=9, share=None))
    )
    report = await run(
        pipeline(Source(script), uneven, sink=sink, dead_letters=letters)
    )

    assert (report.status, report.ledger[1].dead) == ("done", 5)
    messages = [item[0] for item in script if not isinstance(item, Position)]
    for place, found in loaded.items():
        assert isinstance(place, int)
        assert set(messages[: place + 1]) <= found
    assert 39 in loaded


async def test_keys_reach_the_first_stage() -> None:
    """Runs are passed on unchanged."""
    keyed = stage("uneven", 3, workers=3, order=Order.KEY)
    source = ScriptedSource([AnnotatedRun(numbers(0, 20), key=[1, 2] * 10)])
    sink = GatedSink()
    report = await run(pipeline(source, keyed, sink=sink))

    assert report.error is None
    odd = [int(m) for m in sink.messages if int(m) < 20 and int(m) % 2]
    assert odd == list(range(1, 20, 2))


async def test_meter_counts_what_the_stages_do() -> None:
    """The supervisors get the meter, and count for each worker."""
    meter = PrometheusMeter()
    made = Pipeline(
        name="p",
        source=ScriptedSource([numbers(0, 7)]),
        stages=[echo],
        sink=GatedSink(),
        meter=meter,
        launch=launch_of(echo),
    )
    assert (await run(made)).status == "done"
    wanted = 'etlstage_messages_total{stage="echo",worker="echo-1"} 7'
    assert wanted in meter.render().replace("7.0", "7")


class Shelf(DeadLetterSink):
    """A sink of dead letters that may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.taken: list[bytes] = []
        self.closed = 0
        self._error = error

    async def write(self, found: Iterator[DeadLetter]) -> None:
        """Take the messages."""
        self.taken += [letter.message for letter in found]
        if self._error is not None:
            raise self._error

    async def aclose(self) -> None:
        """Count the call."""
        self.closed += 1


class Announced(DeadLetters):
    """Dead letters that set an event when one is kept."""

    came: anyio.Event

    async def keep(self, letters: Sequence[DeadLetter]) -> None:
        """Keep letters."""
        await super().keep(letters)
        self.came.set()


@pytest.mark.parametrize("fails", [False, True])
async def test_letters_are_handed_over_at_the_end(
    tmp_path: Path, *, fails: bool
) -> None:
    """Even if the run failed: then they matter most."""
    letters = Announced(tmp_path, pipeline="p")
    letters.came = anyio.Event()
    script: list[Run | Exception] = [[b"a", b"end"]]
    gate = Wait()
    source = ScriptedSource([*script, gate, *([unreadable()] if fails else [])])
    shelf = Shelf()
    made = pipeline(
        source,
        tolerant(SOME, retries=0),
        sink=GatedSink(),
        dead_letters=letters,
        dead_letter_sink=shelf,
    )

    async def release() -> None:
        with anyio.fail_after(HANG):
            await letters.came.wait()
        gate.released.set()

    report = await run_until(made, gate.reached, release)

    assert report.status == ("failed" if fails else "done")
    assert (shelf.taken, shelf.closed) == ([b"end"], 1)


@pytest.mark.parametrize("step", ["written", "recorded", "performed"])
async def test_letters_of_all_starts_are_handed_over_once(
    tmp_path: Path, step: str
) -> None:
    """Once the run is over: a start that failed is resumed (issue 23)."""
    shelf, plan = Shelf(), [SinkFailed("planted", stage="load"), None]

    def made(error: Exception | None) -> Pipeline:
        state, reached = tmp_path / "state", Counter[str]()
        bounds = Bounds(messages=10, seconds=3600)
        delivery = Delivery(state, exactly_once=True, bounds=bounds)

        def at(name: str) -> None:
            reached[name] += 1
            if error is not None and (name, reached[name]) == (step, 2):
                raise error

        delivery.at = at
        letters = DeadLetters(state, pipeline="p")
        return pipeline(
            Numbers(20, 5),
            sink=Files(tmp_path / "out", letters),
            dead_letters=letters,
            dead_letter_sink=shelf,
            delivery=delivery,
        )

    for error in plan:
        again = made(error)
        assert (await run(again)).error is error
        assert shelf.taken == ([] if error else [b"7", b"17"])
    assert [letter.message for letter in again.letters()] == shelf.taken


async def test_letters_that_can_not_be_handed_over(letters: DeadLetters) -> None:
    """The report has the error; the letters are in their files all the same."""
    shelf = Shelf(SinkFailed("no room", stage="dead_letters"))
    made = pipeline(
        ScriptedSource([[b"a", b"b\0"]]),
        echo,
        sink=GatedSink(),
        dead_letters=letters,
        dead_letter_sink=shelf,
    )
    report = await run(made)
    assert (report.status, str(report.error)) == ("failed", "no room")
    assert [x.message for x in letters.letters()] == [b"b\0"]
    assert shelf.closed == 1


async def test_without_letters_nothing_is_handed_over(letters: DeadLetters) -> None:
    """Spark must not be started needlessly."""
    shelf = Shelf(SinkFailed("asked", stage="dead_letters"))
    made = pipeline(
        ScriptedSource([[b"a"]]),
        sink=GatedSink(),
        dead_letters=letters,
        dead_letter_sink=shelf,
    )
    assert (await run(made)).status == "done"
    assert shelf.closed == 1


@pytest.mark.process
async def test_load_worker_puts_aside_too(letters: DeadLetters, tmp_path: Path) -> None:
    """Positions can pass messages that it could not load."""
    stage = replace(
        load("append_until", tmp_path / "target", "three"),
        on_error=ErrorPolicy(budget=SOME, retries=0),
        restart=EAGER,
    )
    source = ScriptedSource(
        [[b"one"], Position(1), [b"two", b"three"], Position(3), [b"four"], Position(4)]
    )
    sink = WorkerSink(stage, dead_letters=letters)
    report = await run(pipeline(source, sink=sink, dead_letters=letters))

    assert report.status == "done"
    assert report.ledger[1].dead == 1
    assert report.ledger[1].done == 3
    assert source.acknowledged == [1, 3, 4]
    assert [(x.message, x.place) for x in letters.letters()] == [(b"three", 2)]


@pytest.mark.parametrize(
    "between", [[], [stage("batch", dialect=MarkerDialect(mode=Mode.BATCH_SUPERVISOR))]]
)
@pytest.mark.process
async def test_columns_pass_from_stage_to_stage(between: list[Stage]) -> None:
    """Columns stay columns, even with a batch stage in between."""
    messages = numbers(0, 20_000)
    column = Column(pa.array(messages, pa.binary()))
    columns: list[bool] = []

    class Sink(GatedSink):
        async def write(self, run: Sequence[bytes]) -> None:
            columns.append(isinstance(run, Column))
            await super().write(list(run))

    source = ScriptedSource([column[:7], column[7:]])
    stages = [replace(echo, name="a"), *between, replace(echo, name="b")]
    sink = Sink()
    made = Pipeline(name="p", source=source, stages=stages, sink=sink)
    report = await run(made)
    assert report.error is None
    assert all(columns)
    assert b" ".join(sink.messages).split() == messages


@pytest.mark.parametrize("where", ["transform", "load"])
@pytest.mark.process
async def test_drain_does_not_wait_for_who_never_answers(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that never replies would delay it until its deadline (issue 23)."""
    monkeypatch.setattr(pipeline_module, "_LOOK", 0.01)
    cat = Stage(name="cat", worker=("cat",), timeout=Timeouts(stop=0.1))
    if where == "load":
        sink: Sink = WorkerSink(replace(cat, kind=StageKind.LOAD, window=1))
    else:
        sink = MemorySink()

    class Draining(MemorySource):
        async def runs(self) -> AsyncGenerator[Run | Position, None]:
            yield [b"a", b"b"]
            hangs.drain()

    stages = [cat] if where == "transform" else []
    hangs = Pipeline(name="p", source=Draining([]), stages=stages, sink=sink)
    with anyio.fail_after(HANG):
        report = await hangs.run()
    assert (report.status, report.error) == ("forced", None)
    assert sum(a.unprocessed for a in report.ledger) + report.undelivered == 2
    assert sum(a.dead + a.failed for a in report.ledger) == 0
    report.ledger.check(whole=False)


async def test_drain_waits_for_who_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has replied before is slow, but not stuck."""
    monkeypatch.setattr(pipeline_module, "_LOOK", 0.01)
    wait, looked = Wait(), 0

    async def slow(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            if message == b"2":
                await wait.here()
            await worker.write(message + b"\n\0")
        return 0

    def is_mute(self: Pipeline, supervisor: AsyncSupervisor) -> bool:
        nonlocal looked
        looked += wait.reached.is_set()
        if looked > 20:
            wait.released.set()
        return found(self, supervisor)

    found = Pipeline._is_mute
    monkeypatch.setattr(Pipeline, "_is_mute", is_mute)
    sink = MemorySink()
    made = Pipeline(
        name="p",
        source=ScriptedSource([[b"1", b"2"], Wait()]),
        stages=[Stage(name="slow", worker=("none",), timeout=Timeouts(stop=0.001))],
        sink=sink,
        launch=ScriptedLaunch(slow),
    )

    async def drain() -> None:
        made.drain()

    report = await run_until(made, wait.reached, drain)
    assert (report.status, report.error) == ("drained", None)
    assert sink.messages == [b"1", b"2"]


def test_what_a_run_waits_for() -> None:
    """The activity is the sink's; before the first message, reading (issue 11)."""
    pipeline = Pipeline(name="p", source=MemorySource([]), sink=(sink := MemorySink()))
    assert pipeline.activity == "reading"
    sink.activity = "writing epoch 1"
    assert pipeline.activity == "writing epoch 1"
    pipeline.ledger[0].produced = sink.account.received = sink.account.done = 1
    assert pipeline.activity == "writing epoch 1"
    sink.activity = ""
    assert pipeline.activity == ""


async def test_cancelled_while_its_sink_is_entered() -> None:
    """By then its workers are gone, which is no error (issue 11)."""
    entered, go_on = anyio.Event(), anyio.Event()

    class Deaf(MemorySink):
        async def __aenter__(self) -> Self:
            with anyio.CancelScope(shield=True):
                entered.set()
                await go_on.wait()
            return self

    async def work(worker: ScriptedWorker) -> None:
        async for message in worker.messages():
            await worker.reply(message)

    pipeline = Pipeline(
        name="p",
        source=MemorySource([[b"a"]]),
        stages=[Stage(name="t", worker=("t",))],
        sink=Deaf(),
        launch=ScriptedLaunch(work),
    )
    with anyio.fail_after(HANG):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipeline.run)
            await entered.wait()
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
            go_on.set()
    assert pipeline.report("forced").error is None
