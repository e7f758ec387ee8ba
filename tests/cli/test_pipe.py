"""A worker as a filter, from stdin to stdout."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import IO

import pytest

from tests.cli.conftest import UPPER, Etlstage, command
from tests.cli.forked import Forks, environment

pytestmark = pytest.mark.process

REFUSING = """\
from etlstage import worker

@worker.transform
def upper(message):
    if message == b"bad":
        raise ValueError("no good")
    return [message.upper()]
"""
DYING = """\
import os, sys
for line in sys.stdin.buffer:
    number = int(line)
    mark = f"{number // 50}.died"
    if number % 50 == 49 and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), 9)
    sys.stdout.buffer.write(line + b"\\0")
    sys.stdout.flush()
"""


class Filter:
    """``etlstage pipe`` in a folder with a worker; it is forked."""

    def __init__(self, folder: Path, program: str) -> None:
        self.folder = folder
        self._program = [program]

    @property
    def of_its_own(self) -> Filter:
        """The same, started as a process of its own, which signals can reach."""
        other = Filter(self.folder, "")
        other._program = command([])
        return other

    def start(self, *words: str, worker: str = UPPER) -> subprocess.Popen[bytes]:
        """Start it; ``words`` are its options."""
        (self.folder / "worker.py").write_text(worker)
        return subprocess.Popen(
            [*self._program, "pipe", *words, "--", "python", "worker.py"],
            cwd=self.folder,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __call__(
        self, data: bytes, *words: str, worker: str = UPPER
    ) -> tuple[int, bytes, str]:
        """Run it to its end; return its exit status, stdout and stderr."""
        with self.start(*words, worker=worker) as process:
            out, err = process.communicate(data, timeout=60)
        return process.returncode, out, err.decode()


@pytest.fixture
def filtered(tmp_path: Path, forks: Forks) -> Filter:
    """Return a filter in the test's folder."""
    return Filter(tmp_path, forks.program)


def test_lines_go_through(filtered: Filter) -> None:
    """The ledger is on stderr; the last line needs no line end."""
    status, out, err = filtered(b"a\nb\n\nc")
    assert (status, out) == (0, b"A\nB\n\nC\n")
    assert "stdin" in err
    assert "4 messages written to stdout\npipe: done in" in err


def test_file_is_read_in_place_of_stdin(filtered: Filter) -> None:
    """Several workers keep its order."""
    lines = b"".join(b"line %d\n" % number for number in range(2000))
    (filtered.folder / "in.txt").write_bytes(lines)
    status, out, err = filtered(b"", "in.txt", "--workers", "3", "-q")
    assert (status, out, err) == (0, lines.upper(), "")


def test_name_of_a_file_is_harmless(filtered: Filter) -> None:
    """The ledger has neither its control characters nor its line ends (issue 26)."""
    name = os.fsdecode(b"x\ny[red]\x1b[31m\xff")
    (filtered.folder / name).write_bytes(b"a\n")
    status, out, err = filtered(b"", name)
    assert (status, out) == (0, b"A\n")
    assert "\nx\\ny[red]\\udcff  " in err
    assert "\x1b" not in err


def test_messages_may_end_in_nul(filtered: Filter) -> None:
    """They may have line ends in them then, if the worker's EOM is another."""
    worker = """\
import sys
data = b""
while chunk := sys.stdin.buffer.read1():
    *messages, data = (data + chunk).split(b"|")
    for message in messages:
        sys.stdout.buffer.write(message.upper() + b"|\\0")
        sys.stdout.flush()
"""
    status, out, _ = filtered(b"a\nb\0c\0", "-0", "--markers", "eom=|", worker=worker)
    assert (status, out) == (0, b"A\nB\0C\0")


def test_replies_come_as_messages_come(filtered: Filter) -> None:
    """Each line of a log that is followed is answered at once."""
    with filtered.start() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for word in b"one", b"two":
            _write(process.stdin, word + b"\n")
            assert process.stdout.readline() == word.upper() + b"\n"
        process.stdin.close()
        assert process.wait(60) == 0


def test_first_refusal_ends_it_in_words(filtered: Filter) -> None:
    """A message that would be kept nowhere must not be dropped."""
    status, out, err = filtered(b"a\nbad\nb\n", worker=REFUSING)
    assert status == 1
    assert out in {b"", b"A\n"}
    assert "refused the message: ValueError: no good" in err


def test_dead_letters_are_kept_where_asked(
    filtered: Filter, etlstage: Etlstage
) -> None:
    """The command that the ledger names lists them."""
    budget = "on_error.budget=100%"
    status, out, err = filtered(
        b"a\nbad\nb\n", "--dead-letters", "dead", "--set", budget, worker=REFUSING
    )
    assert (status, out) == (0, b"A\nB\n")
    assert "etlstage dlq ls dead" in err
    shown = etlstage("dlq", "ls", "dead", "--json")
    (letter,) = map(json.loads, shown.stdout.splitlines())
    assert letter["stage"] == "worker"


def test_error_budget_that_is_spent(filtered: Filter) -> None:
    """The report names the remedy, and why two of three are too many (issue 26)."""
    status, _, err = filtered(
        b"bad\nbad\nb\n", "--dead-letters", "dead", worker=REFUSING
    )
    assert status == 1
    assert "on_error.budget allows 1%; the last one" in err
    assert (
        "to allow more dead letters: --set on_error.budget=100% (fewer than 100 messages"
        " count as 100)"
    ) in err


@pytest.mark.parametrize("where", ["dead", "dead/letters"])
def test_dead_letters_can_not_be_kept_in_a_file(filtered: Filter, where: str) -> None:
    """It is wrong usage of the option, and no message is read (issue 26)."""
    (filtered.folder / "dead").touch()
    status, out, err = filtered(b"a\n", "--dead-letters", where)
    assert (status, out) == (2, b"")
    assert err == (
        f"etlstage: error: --dead-letters: can't use {where}: not a directory; name"
        " another folder\n"
    )


def test_killed_workers_lose_nothing(filtered: Filter) -> None:
    """Each message is written once, in order, though workers die twenty times."""
    lines = b"".join(b"%d\n" % number for number in range(1000))
    words = "--workers", "2", "--set", "restart.max=100", "--set", "restart.delay=1ms"
    status, out, _ = filtered(lines, *words, worker=DYING)
    assert (status, out) == (0, lines)
    assert len(list(filtered.folder.glob("*.died"))) == 20


def test_reader_that_has_seen_enough_ends_it(filtered: Filter) -> None:
    """The error states that stdout was closed, and after how many messages."""
    with filtered.start() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        _write(process.stdin, b"a\n")
        assert process.stdout.readline() == b"A\n"
        process.stdout.close()
        _write(process.stdin, b"b\n")
        err = process.stderr.read().decode()
        assert process.wait(60) == 1
        process.stdin.close()
    assert "stdout was closed by its reader, after 1 message" in err
    assert "Traceback" not in err


def test_interrupt_drains(filtered: Filter) -> None:
    """Lines that were read are answered and written; the exit code is 4."""
    with filtered.of_its_own.start() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        _write(process.stdin, b"a\nb")
        assert process.stdout.readline() == b"A\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 4
        assert process.stdout.read() == b""
        process.stdin.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--"], "expected the command of a worker, as in -- ./worker"),
        (["cat"], "expected the command of a worker, as in -- ./worker"),
        (["cat", "x.py"], "expected the command of a worker, as in -- ./worker"),
        (["missing.txt", "--", "cat"], "missing.txt can't be read: no such file"),
        (["--set", "timeout.mesage=1s", "--", "cat"], "--set timeout.mesage: unknown"),
        (["--set", "workers", "--", "cat"], "--set workers: expected a place and"),
        (
            ["--set", "workers=three", "--", "cat"],
            "--set workers: expected a whole number, got 'three'",
        ),
        (
            ["--set", "workers=${NOPE:-three}", "--", "cat"],
            "--set workers: expected a whole number, got an interpolated value",
        ),
        (["--dialect", "morse", "--", "cat"], "unknown dialect 'morse'"),
    ],
)
def test_wrong_words_are_named(
    etlstage: Etlstage, tmp_path: Path, words: list[str], said: str
) -> None:
    """The error is one line, exit code 2; nothing is read, nothing is started."""
    (tmp_path / "cat").touch()
    done = etlstage("pipe", *words, code=2)
    assert said in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("value", ["durable=true", "durable.partitions=2"])
def test_durable_is_refused(etlstage: Etlstage, value: str) -> None:
    """A filter has no state, so the key would be ignored (issue 26)."""
    done = etlstage("pipe", "--set", value, "--", "cat")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"etlstage: error: --set {value.partition('=')[0]}: not supported by pipe,"
        " which has no state for the journals; use a pipeline file and etlstage run\n"
    )


def test_name_of_the_stage_is_set(filtered: Filter) -> None:
    """The ledger shows it (issue 26)."""
    status, out, err = filtered(b"a\n", "--set", "name=upper")
    assert (status, out) == (0, b"A\n")
    assert "\nupper " in err


def test_order_by_key_without_a_key(etlstage: Etlstage) -> None:
    """The remedy is an option of the command (issue 26)."""
    done = etlstage("pipe", "--set", "order=key", "--", "cat")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "etlstage: error: --set order=key needs a key: --set key=/POINTER\n"
    )


@pytest.mark.parametrize(
    ("redirected", "error"),
    [
        ("<&-", "stdin is closed; redirect it, or name a FILE"),
        (
            "/dev/stdin <&-",
            "/dev/stdin can't be read: no such device or address",
        ),
        (">&-", "stdout is closed; redirect it, as in >/dev/null"),
        ("in.txt <&- >&-", "stdout is closed; redirect it, as in >/dev/null"),
    ],
)
def test_closed_stream_is_named(tmp_path: Path, redirected: str, error: str) -> None:
    """It is wrong usage, and nothing is started (issue 26)."""
    (tmp_path / "in.txt").write_bytes(b"a\n")
    piped = f"{shlex.join(command([]))} pipe {redirected} -- cat"
    done = subprocess.run(
        ["/bin/sh", "-c", piped],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"etlstage: error: {error}\n"


def test_file_is_read_where_stdin_is_closed(tmp_path: Path) -> None:
    """Only the streams that are used have to be open (issue 26)."""
    (tmp_path / "in.txt").write_bytes(b"a\n")
    (tmp_path / "worker.py").write_text(UPPER)
    piped = f"{shlex.join(command([]))} pipe -q in.txt <&- -- python worker.py"
    done = subprocess.run(
        ["/bin/sh", "-c", piped],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"A\n", b"")


def test_help_names_the_command(etlstage: Etlstage) -> None:
    """The usage shows the command after the dashes."""
    done = etlstage("pipe", "--help")
    assert "etlstage pipe [OPTIONS] [FILE] -- COMMAND..." in done.stdout


def _write(stdin: IO[bytes], data: bytes) -> None:
    os.write(stdin.fileno(), data)
