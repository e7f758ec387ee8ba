from __future__ import annotations

import errno
import os
import pickle
import re
import signal
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from typing import ClassVar

import anyio
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.columns import Column
from etlstage.errors import SinkFailed, StageFailed, StateUnusable, WorkerLost
from etlstage.messages import AnnotatedRun, Position, StageKind
from etlstage.pipeline import Pipeline, epoch_sink
from etlstage.pipeline.dead_letter.retry import Retry
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import Bounds, Delivery, take_over
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.epoch_sink import EpochSink
from etlstage.pipeline.interfaces import Epochs
from etlstage.pipeline.ledger import Account
from etlstage.pipeline.report import Report
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import (
    BatchPolicy,
    ErrorBudget,
    ErrorPolicy,
    RestartPolicy,
    Stage,
    Timeouts,
    WorkerProgram,
)
from etlstage.supervisor import WorkerExited
from tests.pipeline.dead_letter.test_retry import letter
from tests.pipeline.ends import ScriptedSource

pytestmark = pytest.mark.process

LOAD = """\
    while read line; do
        echo "$line" >> "aside.$ETLSTAGE_EPOCH.$ETLSTAGE_ATTEMPT"
        printf '\\0'
    done
"""
COMMIT = """\
    read told
    mv "aside.$ETLSTAGE_EPOCH.$ETLSTAGE_ATTEMPT" "final.$1"
    printf '\\0'
"""
ABORT = """\
    read told
    rm -f aside.$1.* "final.$1"
    printf '\\0'
"""


class Resumable(ScriptedSource):
    """Six messages with a position after every two."""

    def __init__(self) -> None:
        super().__init__([])
        self._from = 0

    def resume(self, position: object) -> None:
        """Begin after a position."""
        assert isinstance(position, int)
        self._from = position
        self._play()

    def _play(self) -> None:
        self._script = [
            item
            for end in range(self._from + 2, 7, 2)
            for item in ([b"%d" % (end - 1), b"%d" % end], Position(end))
        ]


def sink(
    folder: Path,
    *,
    load: str = LOAD,
    commit: str = COMMIT,
    stop: float = 5.0,
    restarts: int = 5,
    letters: DeadLetters | None = None,
    batch: BatchPolicy | None = None,
) -> EpochSink:
    """Return a sink whose programs are scripts."""
    for name, text in (("load", load), ("commit", commit), ("abort", ABORT)):
        (folder / name).write_text(textwrap.dedent(text))
    stage = Stage(
        name="load",
        kind=StageKind.LOAD,
        worker=WorkerProgram(command=("sh", "load"), cwd=folder),
        timeout=Timeouts(stop=stop),
        restart=RestartPolicy(max=restarts, delay=0.001),
    )
    if batch is not None:
        program = WorkerProgram(command=(sys.executable, "load"), cwd=folder)
        spoken = MarkerDialect(mode=Mode.BATCH_SUPERVISOR)
        stage = replace(stage, worker=program, batch=batch, dialect=spoken)
    return EpochSink(
        stage, commit=("sh", "commit"), abort=("sh", "abort"), dead_letters=letters
    )


async def run(folder: Path, end: EpochSink, *, crash: str | None = None) -> Report:
    """Run a pipeline whose epochs have two messages; crash in the second commit."""
    delivery = Delivery(folder / "s", exactly_once=True, bounds=Bounds(messages=2))
    steps: list[str] = []

    def at(step: str) -> None:
        steps.append(step)
        if step == crash and steps.count(step) == 2:
            raise RuntimeError("crash")

    delivery.at = at
    source = Resumable()
    source._play()
    return await Pipeline(name="p", source=source, sink=end, delivery=delivery).run()


def loaded(folder: Path) -> list[str]:
    """Return the content of each epoch, final or temporary."""
    return [path.read_text() for path in sorted(folder.glob("*.*-*"))]


@pytest.mark.parametrize("crash", ["begin", "written", "aside", "recorded"])
async def test_each_message_is_final_once(tmp_path: Path, crash: str) -> None:
    """Wherever a commit is interrupted, unrecorded epochs are undone (issue 14)."""
    assert (await run(tmp_path, sink(tmp_path), crash=crash)).status == "failed"
    report = await run(tmp_path, sink(tmp_path))
    assert (report.status, report.error) == ("done", None)
    assert loaded(tmp_path) == ["1\n2\n", "3\n4\n", "5\n6\n"]
    assert report.ledger[-1].done == 6


async def test_programs_need_not_report_that_they_are_ready(tmp_path: Path) -> None:
    """Unlike the workers that load (issue 24)."""
    end = sink(tmp_path, load=f'echo > "$ETLSTAGE_STATUS"\n{LOAD}', restarts=1)
    program = replace(end._stage.program, ready=True)
    end._stage = replace(end._stage, worker=program, timeout=Timeouts(start=3))
    report = await run(tmp_path, end)
    assert (report.status, report.error) == ("done", None)
    assert loaded(tmp_path) == ["1\n2\n", "3\n4\n", "5\n6\n"]


async def test_worker_that_does_not_end_well(tmp_path: Path) -> None:
    """It may have stored only half of the epoch: nothing is committed (issue 14)."""
    report = await run(tmp_path, sink(tmp_path, load=f"{LOAD}\n    exit 3\n"))
    assert isinstance(report.error, StageFailed)
    assert "exited with status 3 at the end of its input" in str(report.error)
    assert loaded(tmp_path) == ["1\n2\n"]  # aside
    assert report.ledger[-1].done == 0


async def test_worker_of_an_open_epoch_that_does_not_end_well(tmp_path: Path) -> None:
    """Such as after a drain that was cut: the sink leaves no tasks open (issue 23)."""
    end = sink(tmp_path, load=f"{LOAD}\n    exit 3\n")
    end.begin(Epochs("l", 0, once=True, check=lambda: None))
    with (
        pytest.raises(StageFailed, match="exited with status 3"),
        anyio.CancelScope(),  # refuses to end around what has not ended
    ):
        async with end:
            await end.write([b"1"])
    assert end._kept._file is None


DIES = """\
    while read line; do
        echo "$line" >> "aside.$ETLSTAGE_EPOCH.$ETLSTAGE_ATTEMPT"
        if [ "$line" = 4 ] && TEST; then
            exit 3
        fi
        printf '\\0'
    done
"""


@pytest.mark.parametrize("in_memory", [16 << 20, 1])
async def test_worker_that_is_lost_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: int
) -> None:
    """It has stored the message already, but the epoch has it once (issue 24)."""
    monkeypatch.setattr(epoch_sink, "_IN_MEMORY", in_memory)
    report = await run(
        tmp_path, sink(tmp_path, load=DIES.replace("TEST", "mkdir once"))
    )
    assert (report.status, report.error) == ("done", None)
    assert loaded(tmp_path) == ["1\n2\n", "3\n4\n", "5\n6\n"]
    account = report.ledger[-1]
    assert (account.done, account.dead, account.failures) == (6, 0, 1)


SKIPS = """echo '{"metric": "skipped", "add": 1}' >> "$ETLSTAGE_STATUS\""""


class Watched(Account):
    """Notes each change of a count that a counter of the metrics is made of."""

    __slots__ = ()
    noted: ClassVar[dict[str, list[int]]] = {}

    def __setattr__(self, name: str, value: int) -> None:
        """Set an attribute, and note its value."""
        self.noted.setdefault(name, []).append(value)
        super().__setattr__(name, value)


async def test_counts_of_an_epoch_never_go_back(tmp_path: Path) -> None:
    """They are those of the metrics, and count what is committed (issue 22)."""
    load = DIES.replace("TEST", "mkdir once")
    end = sink(tmp_path, load=load.replace("; do", f"; do {SKIPS}"))
    end.account.__class__ = Watched
    Watched.noted.clear()
    report = await run(tmp_path, end)
    assert (report.status, report.error) == ("done", None)
    for name in ("done", "skipped"):
        assert Watched.noted[name] == [2, 4, 6], name


HOLDS_BACK = """\
    trap "exit 3" USR1
    echo $$ > pid
    while read line; do
        held="$held$line "
        printf '\\0'
    done
    printf '%s\\n' $held >> "aside.$ETLSTAGE_EPOCH.$ETLSTAGE_ATTEMPT"
"""


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSEGV, signal.SIGUSR1])
async def test_worker_that_fails_while_it_is_idle(
    tmp_path: Path, kill: signal.Signals
) -> None:
    """What it answered, and was still to store, is loaded again (issue 22)."""
    end = sink(tmp_path, load=HOLDS_BACK)
    end.begin(Epochs("l", 0, once=True, check=lambda: None))
    async with end:
        await end.write([b"1", b"2"])
        with end.supervisor.events() as events:
            os.kill(int((tmp_path / "pid").read_text()), kill)
            async for event in events:
                if isinstance(event, WorkerExited):
                    break
        await end.write([b"3"])
        await end.flush()
    assert loaded(tmp_path) == ["1\n2\n3\n"]
    assert end.account.done == 3


async def test_worker_that_a_message_kills(tmp_path: Path) -> None:
    """The message is dead-lettered, and the epoch does not contain it (issue 24)."""
    letters = DeadLetters(tmp_path / "letters", pipeline="p")
    end = sink(tmp_path, load=DIES.replace("TEST", "true"), letters=letters)
    report = await run(tmp_path, end)
    assert (report.status, report.error) == ("done", None)
    assert loaded(tmp_path) == ["1\n2\n", "3\n", "5\n6\n"]
    assert [(x.message, x.place) for x in letters.letters()] == [(b"4", 3)]
    letters.close()
    account = report.ledger[-1]
    assert (account.received, account.done, account.dead) == (6, 5, 1)


async def test_batch_that_is_rejected_behind_a_part_of_it(tmp_path: Path) -> None:
    """Such as by a function that raises halfway: what it stored is there once."""
    load = """\
        import os
        from etlstage import worker

        epoch, attempt = os.environ["ETLSTAGE_EPOCH"], os.environ["ETLSTAGE_ATTEMPT"]
        file = open(f"aside.{epoch}.{attempt}", "ab", buffering=0)

        def load(messages):
            for message in messages:
                if message == b"4":
                    raise ValueError("four")
                file.write(message + b"\\n")

        worker.load_batch(load)
        """
    letters = DeadLetters(tmp_path / "letters", pipeline="p")
    end = sink(tmp_path, load=load, letters=letters, batch=BatchPolicy(size=2))
    report = await run(tmp_path, end)
    assert (report.status, report.error) == ("done", None)
    assert loaded(tmp_path) == ["1\n2\n", "3\n", "5\n6\n"]
    assert [letter.message for letter in letters.letters()] == [b"4"]
    letters.close()


async def test_what_comes_behind_a_lost_worker(tmp_path: Path) -> None:
    """Later messages wait for the next attempt, except those of a draining run."""
    end = sink(tmp_path, load=DIES.replace("TEST", "mkdir once"))
    end.begin(Epochs("l", 0, once=True, check=lambda: None))
    async with end:
        await end.write([b"3", b"4"])
        await end.write([b"5"])
        assert loaded(tmp_path) == ["3\n4\n4\n"]
        end.withhold()
        await end.write([b"6"])
        await end.flush()
    assert loaded(tmp_path) == ["3\n4\n5\n"]
    assert (end.account.received, end.account.done) == (4, 3)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    rounds=st.lists(st.lists(st.integers(0, 15)), max_size=3),
)
def test_messages_of_an_epoch_are_kept_with_their_places(
    sizes: list[int], rounds: list[list[int]]
) -> None:
    """They can be iterated repeatedly, without those dead-lettered in between."""
    kept, alive, place = epoch_sink._EpochMessages("load"), dict[int, bytes](), 0
    for size in sizes:
        run = [b"%d" % n for n in range(place, place + size)]
        kept.add(place, AnnotatedRun(run, key=[*range(size)]))
        alive |= dict(enumerate(run, place))
        place += size + 1  # a message that went to another part of the load
    for dead in ([], *rounds):
        for one in dead:
            kept.drop(range(one, one + 1))
            alive.pop(one, None)
        assert {n: m for at, run in kept for n, m in enumerate(run, at)} == alive
        assert all(isinstance(run, AnnotatedRun) and len(run) for _, run in kept)
    kept.clear()


def test_slices_of_an_array_are_kept_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of a large Arrow array takes about as many bytes as it has itself."""
    sizes: list[int] = []
    dump = pickle.dumps
    monkeypatch.setattr(
        pickle, "dump", lambda what, _file: sizes.append(len(dump(what)))
    )
    column = Column(pa.array([b"%07d" % n for n in range(10_000)], pa.binary()))
    kept = epoch_sink._EpochMessages("load")
    for at in range(0, 10_000, 1000):
        kept.add(at, column[at : at + 1000])
    kept.clear()
    assert sum(sizes) < 2 * column.size


async def test_worker_that_is_lost_in_each_attempt(tmp_path: Path) -> None:
    """The run fails with the cause, and nothing of the epoch is final."""
    load = DIES.replace("TEST", 'mkdir "once.$ETLSTAGE_ATTEMPT"')
    report = await run(tmp_path, sink(tmp_path, load=load, restarts=2))
    assert isinstance(report.error, SinkFailed)
    assert "was loaded 3 times, and each time a worker was lost," in str(report.error)
    assert "restart.max is 2" in str(report.error)
    assert loaded(tmp_path) == ["3\n4\n4\n", "1\n2\n"]  # aside, and final
    assert report.ledger[-1].done == 2


async def test_messages_for_which_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch that could not be loaded again is not begun."""

    def dump(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pickle, "dump", dump)
    report = await run(tmp_path, sink(tmp_path))
    assert isinstance(report.error, SinkFailed)
    assert "no space left on device; set TMPDIR" in str(report.error)


def test_full_disk_is_found_before_an_epoch_is_loaded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the remedy, and the messages can still be forgotten (issue 23)."""
    monkeypatch.setattr(epoch_sink, "_IN_MEMORY", 10)
    kept = epoch_sink._EpochMessages("load")
    kept.add(0, [b"x" * 30])
    soft, hard = getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(
            SinkFailed,
            match=r"can't keep the messages .* file too large; set TMPDIR to",
        ):
            kept.add(1, [b"x" * 200])
        kept.clear()
    finally:
        setrlimit(RLIMIT_FSIZE, (soft, hard))
    kept.add(0, [b"y"])
    assert [*kept] == [(0, [b"y"])]
    kept.clear()


async def test_epoch_of_which_an_upload_was_killed(tmp_path: Path) -> None:
    """The upload may have been part of what its worker acknowledged (issue 22)."""
    load = LOAD.replace("printf", "sleep 3600 & printf")
    report = await run(tmp_path, sink(tmp_path, load=load, stop=0.2))
    assert isinstance(report.error, WorkerLost)
    assert loaded(tmp_path) == ["1\n2\n"]  # aside
    assert (report.ledger[-1].done, report.ledger[-1].doubtful) == (0, 2)


async def test_commit_that_fails(tmp_path: Path) -> None:
    """The error names the program and the epoch (issue 14)."""
    refusing = "read told; printf 'no room\\025'"
    report = await run(tmp_path, sink(tmp_path, commit=refusing))
    assert isinstance(report.error, SinkFailed)
    assert "load: commit of epoch " in str(report.error)
    assert "no room" in str(report.error)


async def test_skipped_messages_of_an_epoch_that_is_not_committed(
    tmp_path: Path,
) -> None:
    """They are unprocessed as all of it, and not also skipped (issue 22)."""
    commit = COMMIT.replace("read told", 'read told; case "$1" in *-2) exit 3; esac')
    end = sink(tmp_path, load=LOAD.replace("; do", f"; do {SKIPS}"), commit=commit)
    report = await run(tmp_path, end)
    assert isinstance(report.error, SinkFailed)
    account = report.ledger[-1]
    assert (account.done, account.skipped, account.unprocessed) == (2, 2, 2)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("; exit 1", "exited with status 1 at the end of its input"),
        ("; printf '\\0'", "broke the protocol: .*reply"),
    ],
)
async def test_commit_that_does_not_end_well(
    tmp_path: Path, end: str, why: str
) -> None:
    """Its reply alone proves nothing: the epoch is not recorded (issue 14)."""
    commit = f"{COMMIT.strip()}{end}"
    report = await run(tmp_path, sink(tmp_path, commit=commit))
    assert isinstance(report.error, SinkFailed)
    assert re.search(f"load: commit of epoch .* failed: .*{why}", str(report.error))
    assert CommitRecord.latest(tmp_path / "s").epoch == 0


async def test_retry_that_was_not_recorded(tmp_path: Path) -> None:
    """The next retry's epoch has the same name, and undoes it first (issue 14)."""
    for number in (3, 3, 4):
        retry = Retry([letter(1), letter(2)], number)
        end = sink(tmp_path)
        end.begin(Epochs("retry", number - 1, once=True, check=lambda: None))
        pipeline = Pipeline(name="p", source=retry.source, sink=end)
        assert (await pipeline.run()).status == "done"
        assert retry.passed == ["r-1", "r-2"]
    assert loaded(tmp_path) == ["m1\nm2\n"] * 2


async def test_retry_of_which_nothing_reaches_the_load(tmp_path: Path) -> None:
    """No worker is started, and the letters have failed once more (issue 23)."""
    retry = Retry([letter(1), letter(2)], 1)
    site = DeadLetters(tmp_path / "s", pipeline="p")
    end = sink(tmp_path, load="touch started")
    end.begin(Epochs("retry", 0, once=True, check=lambda: None))
    picky = Stage(
        name=retry.stage,
        worker=WorkerProgram(
            command=("sh", "-c", "while read a; do printf 'no\\25'; done")
        ),
        on_error=ErrorPolicy(budget=ErrorBudget()),
    )
    pipeline = Pipeline(
        name="p",
        source=retry.source,
        stages=[picky],
        sink=end,
        dead_letters=site.kept_by(retry.keep, {}, retry.known),
    )
    report = await pipeline.run()
    assert (report.status, report.error) == ("done", None)
    assert [again.id for again in retry.again] == ["r-1", "r-2"]
    assert not (tmp_path / "started").exists()


async def test_sink_that_was_taken_over(tmp_path: Path) -> None:
    """It neither undoes nor commits what now belongs to another run (issue 14)."""
    holder = Delivery(tmp_path / "state", exactly_once=True)
    with holder:
        holder.begin("r", stages=["extract", "load"], letters={})
        late, ends = sink(tmp_path), sink(tmp_path)
        for end in (late, ends):
            fence = holder.record.fence
            end.begin(Epochs("l", 0, once=True, check=holder.check, start=fence))
        async with ends:
            await ends.write([b"1"])
            take_over(tmp_path / "state")
            (tmp_path / "final.l-1").write_text("of another\n")
            with pytest.raises(StateUnusable, match="has taken over"):
                await ends.flush()
        with pytest.raises(StateUnusable, match="has taken over"):
            async with late:
                pass
    assert loaded(tmp_path) == ["1\n", "of another\n"]


async def test_programs_know_who_starts_them(tmp_path: Path) -> None:
    """Each start has a higher fence than all before (issue 14)."""
    commit = "read told; echo \"$told $ETLSTAGE_FENCE\" >> said; printf '\\0'"
    for number in (1, 2):
        end = sink(tmp_path, commit=f"cd {tmp_path}; {commit}")
        end.begin(
            Epochs("l", number - 1, once=True, check=lambda: None, start=number + 6)
        )
        async with end:
            await end.write([b"1"])
            await end.finish()
    first, second = (tmp_path / "said").read_text().splitlines()
    assert '"fence": 7' in first
    assert first.endswith(" 7")
    assert second.endswith(" 8")
