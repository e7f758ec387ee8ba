from __future__ import annotations

import re
import sys
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any, Final

import anyio
import pytest

from etlstage.errors import WorkerStartFailed
from etlstage.messages import StageKind
from etlstage.protocol.events import Added, Opened
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage
from etlstage.testing import (
    Fault,
    FaultKind,
    FaultPlan,
    Reply,
    ScriptedLaunch,
    ScriptedWorker,
    WorkerMisbehaved,
    WorkerUnderTest,
    hostile_worker,
)
from etlstage.testing.transcript import BYTEWISE, Channel
from tests.staged import staged

WORDS: Final = Markers(b"EOM", b"EOP", b"EOB", b"BNC")


def hostile(*faults: Fault, mode: Mode = Mode.SINGLE, **dialect: Any) -> Stage:  # noqa: ANN401
    """Return a stage of a worker that answers in capitals, except for its faults."""
    command = hostile_worker(FaultPlan(faults), mode=mode, batch=2, transform="upper")
    return Stage(name="t", worker=command, dialect=MarkerDialect(mode=mode, **dialect))


def python(program: str, **settings: Any) -> Stage:  # noqa: ANN401
    """Return a stage that runs a program in Python."""
    return staged((sys.executable, "-c", program), **settings)


@pytest.mark.parametrize("cuts", [(), (1, 3), BYTEWISE])
async def test_messages_are_answered_however_they_are_cut(
    cuts: tuple[int, ...] | range,
) -> None:
    """The process is real, on either event loop; each piece is a write (issue 12)."""
    async with WorkerUnderTest(hostile(markers=WORDS)) as worker:
        assert await worker.exchange([b"one", b""], cuts=cuts) == [
            Reply((b"ONE",)),
            Reply((b"",)),
        ]
        assert await worker.close() == 0
    written = [item.data for item in worker.transcript if item.channel is Channel.STDIN]
    assert b"".join(written) == b"oneEOMEOM"
    assert len(written) == {0: 1, 2: 3}.get(len(cuts), 9)
    assert worker.transcript.of(Channel.STDOUT) == b"ONEEOMEOPEOMEOP"
    assert repr(worker) == "<WorkerUnderTest 't' exited with status 0>"


async def test_next_piece_waits_until_the_worker_has_read_the_last() -> None:
    """Only then it sees the cut, however busy the machine is (issue 12)."""
    program = (
        "import os\nwhile data := os.read(0, 99):\n os.write(1, b'%d\\n' % len(data))"
    )
    dialect = MarkerDialect(markers=Markers(eop=b"\n"))
    async with WorkerUnderTest(python(program, dialect=dialect)) as worker:
        await worker.send(Opened(1, [b"x", b"yy", b"zzz"]), cuts=[2, 5])
        assert await worker.replies() == [Reply((size,)) for size in (b"2", b"3", b"4")]


async def test_batch_that_we_close() -> None:
    """It is one exchange, also when it is empty (issue 12)."""
    async with WorkerUnderTest(hostile(mode=Mode.BATCH_SUPERVISOR)) as worker:
        assert await worker.exchange([b"a", b"b", b"c"]) == [Reply((b"A", b"B", b"C"))]
        assert await worker.exchange([]) == [Reply()]


async def test_batch_that_the_worker_closes() -> None:
    """Each message is sent when it asks; EOB ends an incomplete batch (issue 12)."""
    async with WorkerUnderTest(hostile(mode=Mode.BATCH_WORKER)) as worker:
        assert await worker.exchange([b"a", b"b", b"c"], cuts=BYTEWISE) == [
            Reply((b"A", b"B")),
            Reply((b"C",)),
        ]
    assert worker.transcript.of(Channel.STDIN) == b"a\nb\nc\n\x17"


async def test_refusal_is_a_reply() -> None:
    """It has its reason (issue 12)."""
    fault = Fault(FaultKind.REFUSE, message=2, data=b"no date")
    async with WorkerUnderTest(hostile(fault)) as worker:
        assert await worker.exchange([b"a", b"b"]) == [
            Reply((b"A",)),
            Reply((), "no date"),
        ]


async def test_worker_that_streams_has_no_stdin() -> None:
    """Its outputs are all that it writes, up to its end (issue 12)."""
    stage = python(
        "print('one\\ntwo')",
        kind=StageKind.EXTRACT,
        dialect=MarkerDialect(mode=Mode.PLAIN),
    )
    async with WorkerUnderTest(stage) as worker:
        assert await worker.outputs() == [b"one", b"two"]
        assert await worker.exited() == 0


async def failure(stage: Stage, *messages: bytes, timeout: float = 10) -> str:  # noqa: ASYNC109
    """Return the error of an exchange of these messages; empty if there is none."""
    try:
        async with WorkerUnderTest(stage, timeout=timeout) as worker:
            await worker.exchange(messages)
            await worker.quiet(0.1)
            await worker.close()
    except WorkerMisbehaved as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(FaultKind.KILL), "has 1 reply outstanding: was killed by SIGKILL"),
        (Fault(FaultKind.WRONG_MARKER), "broke the protocol: can't handle BNC"),
    ],
    ids=lambda value: value.kind.value if isinstance(value, Fault) else "",
)
async def test_error_shows_what_the_worker_did(fault: Fault, said: str) -> None:
    """It has the transcript, too, with the markers by name (issue 12)."""
    text = await failure(hostile(fault), b"a")
    assert re.match(f"the worker {said}", text)
    assert "stdin   a<EOM>" in text


async def test_error_has_for_how_long_nothing_came() -> None:
    """Each wait is bounded (issue 12)."""
    text = await failure(hostile(Fault(FaultKind.STALL)), b"a", timeout=0.5)
    assert text.startswith(
        "the worker has 1 reply outstanding: timed out after 0.5 seconds; it wrote nothing"
    )


async def test_worker_that_closes_its_stdin() -> None:
    """Nothing more can be written (issue 12)."""
    stage = python("import os, time; os.close(0); os.write(2, b'x'); time.sleep(60)")
    async with WorkerUnderTest(stage) as worker:
        await worker.until(lambda: bool(worker.transcript), "wrote nothing")
        with pytest.raises(
            WorkerMisbehaved, match="closed its stdin before it had read"
        ):
            await worker.feed(b"a\n", b"b\n")


async def test_transcript_shows_stderr_and_cuts() -> None:
    """They are in the order in which they happened (issue 12)."""
    program = (
        "import sys; sys.stderr.write('starting\\n')\n"
        "for line in sys.stdin: print(line, end='\\0')"
    )
    async with WorkerUnderTest(python(program)) as worker:
        written = worker.transcript.of
        await worker.until(lambda: bool(written(Channel.STDERR)), "wrote nothing")
        await worker.exchange([b"one"], cuts=[2])
        shown = worker.transcript.shown(worker.stage.dialect)
    assert [line[12:] for line in shown.splitlines()] == [
        "stderr  starting",
        "stdin   on | e<EOM>",
        "stdout  one<EOM><EOP>",
    ]


async def test_much_is_shown_by_its_ends() -> None:
    """The failure of a worker that got a megabyte still fits a terminal (issue 12)."""
    async with WorkerUnderTest(hostile()) as worker:
        await worker.exchange([b"x" * 1_000_000, *[b"y"] * 100], cuts=range(1, 100))
        for _ in range(100):
            await worker.exchange([b"z"])
        shown = worker.transcript.shown(worker.stage.dialect)
    assert len(shown) < 10_000
    assert "bytes ..." in shown
    assert "(in 100 pieces)" in shown
    assert "lines ..." in shown


async def test_signals_and_stdin_are_ours_to_send_and_close() -> None:
    """The state of the session does not matter (issue 12)."""
    stall = Fault(FaultKind.STALL)
    async with WorkerUnderTest(hostile(stall)) as worker:
        await worker.send(Opened(1, [b"a"]))
        await worker.has_read()
        worker.signal(SIGTERM)
        assert await worker.exited() == -SIGTERM
    async with WorkerUnderTest(hostile(mode=Mode.BATCH_SUPERVISOR)) as worker:
        await worker.send(Opened(1, [b"a"], each=False, ended=False))
        worker.close_stdin()
        assert await worker.exited() == 0
    assert worker.transcript.of(Channel.STDOUT) == b""


async def test_no_one_is_left_behind() -> None:
    """A worker that is not asked to end is killed after the block (issue 12)."""
    async with WorkerUnderTest(hostile()) as worker:
        pass
    assert worker.status == -SIGKILL


async def test_ready_worker_is_waited_for(tmp_path: Path) -> None:
    """The stage declares that its workers report when they are ready (issue 12)."""
    mark = tmp_path / "mark"
    program = (
        "import os, pathlib\n"
        f"pathlib.Path({str(mark)!r}).touch()\n"
        "open(os.environ['ETLSTAGE_STATUS'], 'w').write('\\n')\ninput()"
    )
    async with WorkerUnderTest(python(program, ready=True)):
        assert mark.exists()
    with pytest.raises(WorkerMisbehaved, match="did not report that it is ready"):
        async with WorkerUnderTest(python("input()", ready=True), timeout=0.2):
            pass


async def test_program_that_does_not_start() -> None:
    """The error is that of a supervisor (issue 12)."""
    stage = Stage(name="t", worker=("no-such-program",))
    with pytest.raises(WorkerStartFailed, match="there is no program"):
        async with WorkerUnderTest(stage):
            pass


@pytest.mark.core
@pytest.mark.virtual
class TestScripted:
    """A scripted worker does as well, and takes no real time."""

    async def test_script_is_a_worker(self) -> None:
        """It may be slow, too (issue 12)."""

        async def script(worker: ScriptedWorker) -> None:
            async for message in worker.messages():
                await anyio.sleep(5)
                await worker.reply(message.upper())

        stage = Stage(name="t", worker=("nobody-runs-this",))
        async with WorkerUnderTest(stage, launch=ScriptedLaunch(script)) as worker:
            assert await worker.exchange([b"a"], cuts=BYTEWISE) == [Reply((b"A",))]
            with pytest.raises(
                WorkerMisbehaved,
                match="has 2 replies outstanding: timed out after 10 seconds",
            ):
                await worker.exchange([b"b", b"c", b"d"])


async def test_session_is_not_given_raw_bytes() -> None:
    """``feed`` bypasses it, even in the middle of a batch (issue 12)."""
    async with WorkerUnderTest(hostile(mode=Mode.BATCH_SUPERVISOR)) as worker:
        await worker.send(Opened(1, [b"a"], each=False, ended=False))
        await worker.feed(b"b", b"\n")
        await worker.send(Added(1, (), ended=True))
        assert await worker.replies(1) == [Reply((b"A", b"B"))]
