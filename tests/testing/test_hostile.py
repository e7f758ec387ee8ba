"""The hostile worker alone, byte by byte: it does what its plan demands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Literal

import pytest

from etlstage.errors import ConfigError
from etlstage.protocol.marker import Markers, Mode
from etlstage.testing import Fault, FaultKind, FaultPlan, Moment, hostile_worker
from tests.patience import HANG

THREE = b"one\ntwo\nthree\n"
ANSWERED = b"one\n\0two\n\0three\n\0"
WORDS = Markers(b"EOM", b"EOP", b"EOB", b"BNC")


def converse(
    data: bytes,
    *faults: Fault,
    mode: Mode = Mode.SINGLE,
    markers: Markers | None = None,
    transform: Literal["identity", "upper", "count", "nothing"] = "identity",
    messages: int = 3,
    seed: int = 0,
    who: tuple[str, int] = ("t-1", 1),
) -> tuple[bytes, int]:
    """Return what the worker writes for that input, and its exit status."""
    command = hostile_worker(
        FaultPlan(faults, seed),
        mode=mode,
        batch=2,
        messages=messages,
        transform=transform,
    )
    done = subprocess.run(
        command,
        input=data,
        env=(markers or Markers()).environment()
        | {"ETLSTAGE_WORKER": who[0], "ETLSTAGE_START": str(who[1])},
        capture_output=True,
        timeout=10,
        check=False,
    )
    assert done.stderr == b""
    return done.stdout, done.returncode


@contextmanager
def started(
    *faults: Fault,
    env: Mapping[str, str] | None = None,
    pass_fds: Collection[int] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the worker with pipes; kill it and its group after the block."""
    process = subprocess.Popen(
        hostile_worker(FaultPlan(faults)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=env or {},
        pass_fds=pass_fds,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        # The group outlives its leader, when a grandchild is in it.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            assert process.poll() is not None
        process.wait(HANG)
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def say(process: subprocess.Popen[bytes], data: bytes) -> None:
    """Write to the worker's stdin."""
    assert process.stdin is not None
    process.stdin.write(data)


def hear(process: subprocess.Popen[bytes], size: int) -> bytes:
    """Read that many bytes from its stdout, or fewer at the end."""
    assert process.stdout is not None
    data = b""
    while len(data) < size and (more := process.stdout.read(size - len(data))):
        data += more
    return data


def state_of(pid: int) -> str:
    """Return the state of a process as the kernel calls it."""
    status = Path(f"/proc/{pid}/stat").read_text()
    return status.rpartition(")")[2].split()[0]


def becomes(pid: int, state: str) -> bool:
    """Return whether a process gets into a state within two seconds."""
    for _ in range(200):
        if state_of(pid) == state:
            return True
        time.sleep(0.01)
    return False


# --- it is a worker like others -------------------------------------------------------


def test_scripted_is_the_same_worker_as_a_process() -> None:
    """Each byte and the status are those of ``hostile_worker`` (issue 26)."""
    fault = Fault(FaultKind.EXIT, message=3, status=7)
    words = hostile_worker(FaultPlan.of(fault), transform="upper")[-4:]
    done = subprocess.run(
        [sys.executable, "-m", "etlstage.testing.scripted", *words],
        input=THREE,
        env=Markers().environment(),
        capture_output=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == (b"ONE\n\0TWO\n\0", b"")
    assert done.returncode == 7
    assert (done.stdout, 7) == converse(THREE, fault, transform="upper")


def test_without_faults_it_answers_each_message_with_itself() -> None:
    """This is single mode, with the default markers."""
    assert converse(THREE) == (ANSWERED, 0)


@pytest.mark.parametrize(
    ("transform", "replies"),
    [
        ("upper", b"AEOMEOPBEOMEOP"),
        ("count", b"1EOMEOP2EOMEOP"),
        ("nothing", b"EOPEOP"),
    ],
)
def test_transforms(
    transform: Literal["upper", "count", "nothing"], replies: bytes
) -> None:
    """Replies are capitals, the message's number in the process, or empty (issue 9)."""
    assert converse(b"aEOMbEOM", markers=WORDS, transform=transform) == (replies, 0)


def test_one_message_for_each_where_eop_is_eom() -> None:
    """Only its EOM marks the end of a reply."""
    assert converse(THREE, markers=Markers(eop=b"\n")) == (THREE, 0)


def test_batch_that_the_supervisor_closes() -> None:
    """An empty one is answered, too."""
    wire = b"oneEOMtwoEOMEOBEOBthreeEOMEOB"
    replies = b"oneEOMtwoEOMEOPEOPthreeEOMEOP"
    mode = Mode.BATCH_SUPERVISOR
    assert converse(wire, markers=WORDS, mode=mode) == (replies, 0)


def test_batch_that_the_worker_closes() -> None:
    """It asks until it has two messages, or EOB shows that there are no more."""
    wire = b"oneEOMtwoEOMthreeEOMEOB"
    replies = b"BNConeEOMtwoEOMEOPBNCthreeEOMEOP"
    assert converse(wire, markers=WORDS, mode=Mode.BATCH_WORKER) == (replies, 0)


def test_message_that_comes_in_pieces() -> None:
    """However long a message is, the marker that comes after it ends it."""
    with started() as process:
        say(process, b"a" * 3_000_000)
        say(process, b"\n")
        assert hear(process, 3_000_002) == b"a" * 3_000_000 + b"\n\0"


def test_plan_may_come_in_the_environment() -> None:
    """The command is the same for each plan then."""
    plan = FaultPlan.of(Fault(FaultKind.EXIT, status=7))
    done = subprocess.run(
        hostile_worker(None),
        input=b"one\n",
        env={"ETLSTAGE_FAULTS": plan.to_json()},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 7


def test_plain_extraction() -> None:
    """It writes numbers, without EOP, and does not read its input (issue 12)."""
    assert converse(b"", mode=Mode.PLAIN) == (b"0\n1\n2\n", 0)
    many, _ = converse(b"", mode=Mode.PLAIN, messages=100_000)
    assert many == b"".join(b"%d\n" % n for n in range(100_000))


def test_cyclic_extraction() -> None:
    """It gives offsets, a range, or all that was not given yet (issue 12)."""
    asked = (
        *(b'{"offsets": "initial"}\n', b'{"offsets": "latest"}\n'),
        *(b'{"start": 1, "end": 2}\n', b'{"start": 2, "end": 9}\n', b"\n"),
        b'{"start": 0, "end": 1}\n\n',
    )
    replies = b"0\n\x003\n\x001\n\x002\n\0\x000\n\x001\n2\n\0"
    assert converse(b"".join(asked), mode=Mode.CYCLIC) == (replies, 0)
    wire = b'{"start": 0, "end": 2}\n' * 2
    markers = Markers(eop=b"\n")
    assert converse(wire, mode=Mode.CYCLIC, markers=markers) == (b"01\n01\n", 0)


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.CYCLIC])
@pytest.mark.parametrize(
    ("fault", "reply", "status"),
    [
        (Fault(FaultKind.KILL, equals=b"2"), b"0\n1\n", -signal.SIGKILL),
        (Fault(FaultKind.KILL, message=1), b"", -signal.SIGKILL),
        (Fault(FaultKind.EXIT, message=2, status=7), b"0\n", 7),
        (Fault(FaultKind.PARTIAL, message=2), b"0\n1\n2\n", -signal.SIGKILL),
        (Fault(FaultKind.GARBAGE, message=2, data=b"!"), b"0\n!1\n2\n\0", 0),
        (Fault(FaultKind.TWICE, message=3), b"0\n1\n2\n\0" * 2, 0),
        (Fault(FaultKind.SKIP, message=3), b"", 0),
        (Fault(FaultKind.EXTRA_EOP, at=Moment.END), b"0\n1\n2\n\0\0", 0),
    ],
)
def test_extraction_with_a_fault(
    mode: Mode, fault: Fault, reply: bytes, status: int
) -> None:
    """Both modes write the same, except for EOP (issue 12)."""
    if mode is Mode.PLAIN:
        surplus = reply.endswith(b"\0\0")
        reply = reply.replace(b"\0", b"") + b"\0" * surplus
    assert converse(b"\n", fault, mode=mode) == (reply, status)


def test_extraction_that_gives_nothing() -> None:
    """It writes nothing; a negative number of messages is refused (issue 12)."""
    assert converse(b"", mode=Mode.PLAIN, transform="nothing") == (b"", 0)
    with pytest.raises(ConfigError, match="messages must be 0 or more, got -1"):
        hostile_worker(FaultPlan(), mode=Mode.PLAIN, messages=-1)


def test_size_of_its_batches_is_checked() -> None:
    """A batch has at least one message."""
    with pytest.raises(ConfigError, match="batch must be 1 or more, got 0"):
        hostile_worker(FaultPlan(), mode=Mode.BATCH_WORKER, batch=0)


def test_it_needs_nothing_of_what_is_installed() -> None:
    """Each restart starts it anew, so it runs isolated, without site packages."""
    assert hostile_worker(FaultPlan())[:3] == (sys.executable, "-I", "-S")


# --- when -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "answered"),
    [
        (Fault(FaultKind.KILL), b""),
        (Fault(FaultKind.KILL, message=2), b"one\n\0"),
        (Fault(FaultKind.KILL, contains=b"hre"), b"one\n\0two\n\0"),
        (Fault(FaultKind.KILL, equals=b"two"), b"one\n\0"),
        (Fault(FaultKind.KILL, probability=1.0), b""),
        (Fault(FaultKind.KILL, message=2, contains=b"w"), b"one\n\0"),
    ],
)
def test_kill_happens_when_all_conditions_hold(fault: Fault, answered: bytes) -> None:
    """Earlier messages are answered, even if they came in the same read."""
    assert converse(THREE, fault) == (answered, -signal.SIGKILL)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.KILL, message=4),
        Fault(FaultKind.KILL, contains=b"four"),
        Fault(FaultKind.KILL, equals=b"thre"),
        Fault(FaultKind.KILL, probability=0.0),
        Fault(FaultKind.KILL, message=2, contains=b"x"),
        Fault(FaultKind.KILL, start=2),
        Fault(FaultKind.KILL, worker="t-2"),
    ],
)
def test_nothing_happens_when_a_condition_does_not_hold(fault: Fault) -> None:
    """A fault needs all of its conditions."""
    assert converse(THREE, fault) == (ANSWERED, 0)


def test_one_start_of_one_worker() -> None:
    """The supervisor passes the worker's name, and the number of the start."""
    fault = Fault(FaultKind.EXIT, at=Moment.START, start=3, worker="t-1")

    for start, status in ((1, 0), (2, 0), (3, 1), (4, 0)):
        assert converse(b"", fault, who=("t-1", start)) == (b"", status)


def test_dice_fall_alike_in_each_run_and_differently_in_each_process() -> None:
    """Chance depends on seed, worker, start and message, and on nothing else."""
    fault = Fault(FaultKind.GARBAGE, probability=0.5, data=b"!")

    def fell(seed: int, worker: str, start: int) -> bytes:
        return converse(b"m\n" * 200, fault, seed=seed, who=(worker, start))[0]

    first = fell(1, "t-1", 1)
    assert first == fell(1, "t-1", 1)
    assert 70 <= first.count(b"!") <= 130
    others = {fell(2, "t-1", 1), fell(1, "t-2", 1), fell(1, "t-1", 2)}
    assert len(others | {first}) == 4


def test_all_faults_happen_in_order() -> None:
    """Two happen at one message, and one of them at another, too."""
    assert converse(
        THREE,
        Fault(FaultKind.GARBAGE, data=b"<", contains=b"o"),
        Fault(FaultKind.TWICE, contains=b"w"),
    ) == (b"<one\n\0<two\n\0two\n\0three\n\0", 0)


@pytest.mark.parametrize(
    ("at", "replies"),
    [(Moment.START, b"!one\n\0"), (Moment.END, b"one\n\0!")],
)
def test_moments_beside_messages(at: Moment, replies: bytes) -> None:
    """They are before anything is read, and when the input has ended."""
    assert converse(b"one\n", Fault(FaultKind.GARBAGE, at=at, data=b"!"))[0] == replies


def test_idle_moment_comes_when_nothing_comes() -> None:
    """It comes after a moment without input, and again after the next."""
    with started(Fault(FaultKind.GARBAGE, at=Moment.IDLE, data=b"!")) as process:
        assert hear(process, 2) == b"!!"


@pytest.mark.parametrize(
    ("faults", "heartbeat", "signs"),
    [
        ((), "", 1),
        ((), "0.15", 4),
        ((Fault(FaultKind.NEVER_READY),), "0.15", 0),
    ],
)
def test_signs_of_life_are_given_where_the_supervisor_looks(
    faults: tuple[Fault, ...], heartbeat: str, signs: int
) -> None:
    """They are in its file, once or as heartbeats, unless the plan forbids them."""
    read, write = os.pipe()
    about = {"ETLSTAGE_STATUS": f"/dev/fd/{write}", "ETLSTAGE_HEARTBEAT": heartbeat}
    with (
        open(read, "rb", buffering=0) as status,
        started(*faults, env=about, pass_fds=(write,)) as process,
    ):
        say(process, b"one\n")
        assert hear(process, 5) == b"one\n\0"
        os.close(write)
        for _ in range(signs):
            assert select([status], [], [], HANG)[0]
            assert status.read(1) == b"\n"
        more = select([status], [], [], 0.5)[0]
        assert bool(more) is (signs > 1)
        assert process.poll() is None


# --- what -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "reply"),
    [
        (Fault(FaultKind.TWICE), b"oneEOMEOPoneEOMEOP"),
        (Fault(FaultKind.WRONG_MARKER), b"oneEOMBNC"),
        (Fault(FaultKind.WRONG_MARKER, data=b"EOB"), b"oneEOMEOB"),
        (Fault(FaultKind.REFUSE), b"one\x15"),
        (Fault(FaultKind.REFUSE, data=b"no"), b"no\x15"),
        (Fault(FaultKind.GARBAGE), b"stray printEOMoneEOMEOP"),
        (Fault(FaultKind.FLOOD, size=3), b"xEOMxEOMxEOMoneEOMEOP"),
        (Fault(FaultKind.HUGE, size=5), b"xxxxxEOMEOP"),
        (Fault(FaultKind.SKIP), b""),
        (Fault(FaultKind.CUT), b"oneEOMEOP"),
        (Fault(FaultKind.PAUSE), b"oneEOMEOP"),
        (Fault(FaultKind.EXTRA_EOP, at=Moment.END), b"oneEOMEOPEOP"),
    ],
)
@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.BATCH_SUPERVISOR])
def test_reply_is_as_the_plan_has_it(fault: Fault, reply: bytes, mode: Mode) -> None:
    """In a batch, the fault of one message changes the reply to the batch."""
    wire = b"oneEOM" if mode is Mode.SINGLE else b"oneEOMEOB"
    assert converse(wire, fault, markers=WORDS, mode=mode) == (reply, 0)


def test_fault_changes_one_reply() -> None:
    """The next message is answered as if nothing had happened."""
    assert converse(THREE, Fault(FaultKind.SKIP, message=2))[0] == b"one\n\0three\n\0"


def test_markers_come_in_pieces() -> None:
    """Each byte of a marker is a write of its own, also of BNC."""
    env = WORDS.environment()
    command = hostile_worker(
        FaultPlan.of(Fault(FaultKind.CUT)), mode=Mode.BATCH_WORKER, batch=2
    )
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=env
    ) as process:
        say(process, b"aEOMbEOM")
        assert process.stdout is not None
        reads: list[bytes] = []
        while len(b"".join(reads)) < 14:
            reads.append(process.stdout.read(100))
        assert process.stdin is not None
        process.stdin.close()
    assert b"".join(reads) == b"BNCaEOMbEOMEOP"
    assert len(reads) > 7


@pytest.mark.parametrize(("size", "count"), [(2_500_000, 2_500_000), (0, 0)])
def test_long_reply_is_exactly_so_long(size: int, count: int) -> None:
    """It is written in pieces; nothing is lost between them."""
    reply, _ = converse(b"one\n", Fault(FaultKind.HUGE, size=size))
    assert reply == b"x" * count + b"\n\0"
    flood, _ = converse(b"one\n", Fault(FaultKind.FLOOD, size=size))
    assert flood == b"x\n" * count + b"one\n\0"


def test_stderr_may_be_a_line() -> None:
    """It is written once, or as often as it fits into ``size``."""
    once = Fault(FaultKind.STDERR, message=2, data=b"bad")
    thrice = Fault(FaultKind.STDERR, message=3, data=b"worse", size=18)
    done = subprocess.run(
        hostile_worker(FaultPlan.of(once, thrice)),
        input=THREE,
        env={},
        capture_output=True,
        check=False,
    )
    assert done.stderr == b"bad\nworse\nworse\nworse\n"


def test_reply_may_end_with_nothing() -> None:
    """Without its EOP, the reply is joined with the next one."""
    fault = Fault(FaultKind.WRONG_MARKER, message=2, data=b"")
    wire = b"oneEOMEOPtwoEOMthreeEOMEOP"
    assert converse(b"oneEOMtwoEOMthreeEOM", fault, markers=WORDS) == (wire, 0)


def test_stderr_has_the_size_that_was_asked_for() -> None:
    """The reply follows it."""
    plan = FaultPlan.of(Fault(FaultKind.STDERR, size=1_234_567))
    done = subprocess.run(
        hostile_worker(plan), input=b"one\n", env={}, capture_output=True, check=True
    )
    assert len(done.stderr) == 1_234_567
    assert done.stdout == b"one\n\0"


@pytest.mark.parametrize(
    ("kind", "state"),
    [(FaultKind.STALL, "S"), (FaultKind.SPIN, "R"), (FaultKind.STOP, "T")],
)
def test_it_hangs(kind: FaultKind, state: str) -> None:
    """It sleeps, runs or is stopped; the end of its input changes nothing."""
    with started(Fault(kind, message=2)) as process:
        say(process, b"one\ntwo\nthree\n")
        assert hear(process, 5) == b"one\n\0"
        assert process.stdin is not None
        process.stdin.close()
        assert becomes(process.pid, state)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        if kind is not FaultKind.STOP:
            process.terminate()
            assert process.wait(HANG) == -signal.SIGTERM


def test_closed_stdin_leaves_what_was_read_answered() -> None:
    """Writing to it fails then, but the worker lives on."""
    with started(Fault(FaultKind.CLOSE_STDIN, message=2)) as process:
        say(process, THREE)
        assert hear(process, 17) == ANSWERED
        with pytest.raises(BrokenPipeError):
            say(process, b"four\n")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)


@pytest.mark.parametrize("own_session", [False, True])
def test_grandchild_holds_the_pipes(own_session: bool) -> None:
    """The worker answers and exits; its child lives on and keeps stdout open."""
    fault = Fault(FaultKind.GRANDCHILD, message=1, own_session=own_session)
    with started(fault) as process:
        say(process, b"one\n")
        assert hear(process, 5) == b"one\n\0"
        (child,) = map(int, _children(process.pid))
        # Once it runs, it sleeps.
        assert becomes(child, "S")
        assert (os.getsid(child) == child) is own_session
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(HANG) == 0
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        assert process.stdout.read(1) is None
        os.kill(child, signal.SIGTERM)
        time.sleep(0.05)
        assert state_of(child) in "SR"
        os.kill(child, signal.SIGKILL)


def _children(pid: int) -> list[str]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [child for task in tasks for child in task.read_text().split()]
