"""
The workers of the tests: one program, whose first argument sets how to behave.

It imports no more than it must, and nothing of etlstage: a test starts it many times.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

EOM, EOP, EOB, BNC, ERR = (
    os.environ.get(f"ETLSTAGE_{name}", default)
    .encode()
    .decode("unicode_escape")
    .encode("latin-1")
    for name, default in (
        ("EOM", r"\n"),
        ("EOP", r"\0"),
        ("EOB", r"\27"),
        ("BNC", r"\5"),
        ("ERR", r"\25"),
    )
)


def write(data: bytes) -> None:
    """Write all of ``data`` to stdout."""
    while data:
        data = data[os.write(1, data) :]


def reply(*outputs: bytes) -> None:
    """Answer one exchange."""
    write(b"".join(output + EOM for output in outputs) + EOP)


def complain(text: str) -> None:
    """Write a line to stderr."""
    os.write(2, f"{text}\n".encode())


def chunks() -> Iterator[bytes]:
    """Yield what can be read, until the end of the input."""
    while chunk := os.read(0, 1024 * 1024):
        yield chunk


def messages() -> Iterator[bytes]:
    """Yield each message."""
    rest = b""
    for chunk in chunks():
        *whole, rest = (rest + chunk).split(EOM)
        yield from whole


def batches() -> Iterator[list[bytes]]:
    """Yield each batch that an EOB ends."""
    rest = b""
    for chunk in chunks():
        *whole, rest = (rest + chunk).split(EOB)
        for batch in whole:
            yield batch.removeprefix(EOM).split(EOM)[:-1] if batch else []


# --- workers that behave ---------------------------------------------------------


def echo() -> None:
    """Answer each message with itself."""
    for message in messages():
        reply(message)


def fast() -> None:
    """Do as ``echo``, a chunk at a time."""
    rest = b""
    for chunk in chunks():
        *whole, rest = (rest + chunk).split(EOM)
        write(b"".join(message + EOM + EOP for message in whole))


def words() -> None:
    """Answer each message with its words: none, one or many."""
    for message in messages():
        reply(*message.split())


def uneven(seed: str) -> None:
    """Answer now at once and now after a moment, with our pid."""
    state = int(seed) + os.getpid()
    for message in messages():
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        time.sleep((state >> 16) % 4 / 1000)
        reply(message, str(os.getpid()).encode())


def where() -> None:
    """Answer each message with the working directory."""
    for _ in messages():
        reply(os.getcwd().encode())


def answers_early(size: str) -> None:
    """Write each answer before the message has been read to its end."""
    rest = b""
    for chunk in chunks():
        if not rest:
            write(b"x" * int(size) + EOM)
        rest += chunk
        while EOM in rest:
            _, rest = rest.split(EOM, 1)
            write(EOP)
            if rest:
                write(b"x" * int(size) + EOM)


# --- batches ---------------------------------------------------------------------


def batch() -> None:
    """Answer each batch with its messages, joined."""
    for messages in batches():
        reply(b" ".join(messages))


# --- workers that don't want to go -------------------------------------------------


def has_child(ends: str, own_session: str = "") -> None:
    """
    Start a child that holds our pipes and never ends; answer with its pid.

    Args:
        ends: Message at which we exit.
        own_session: Not empty: the child leaves our process group.

    """
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", f"{ignore} time.sleep(3600)"],
        start_new_session=bool(own_session),
    )
    for message in messages():
        if message == ends.encode():
            os._exit(0)
        reply(message, str(child.pid).encode())


def leaves(gate: str, target: str, end: str) -> None:
    """
    Leave a child behind with each message, which goes on when we are gone.

    It waits until somebody opens the gate, appends the message to the target, and
    writes to stdout, too, if the message asks for that.

    Args:
        gate: A FIFO, or nothing.
        target: A file.
        end: What to do behind each answer, with the pid of the child: ``exit``, ``fail``
            or ``crash``, or nothing.

    """
    us = os.getpid()
    for message in messages():
        child = os.fork()
        if not child:
            while os.getppid() == us:
                time.sleep(0.001)
            if gate:
                Path(gate).read_bytes()
            with Path(target).open("ab", buffering=0) as file:
                file.write(message + b"\n")
            if message == b"write":
                write(b"too late")
            os._exit(0)
        reply(str(child).encode())
        if end == "crash":
            os.kill(us, signal.SIGKILL)
        elif end:
            os._exit(("exit", "fail").index(end))


# --- extraction --------------------------------------------------------------------


def extract_behind(gate: str, *outputs: str) -> None:
    """Exit at once; a child writes the arguments then, when the gate is opened."""
    us = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == us:
        time.sleep(0.001)
    if gate:
        Path(gate).read_bytes()
    extract(*outputs)


def extract(*outputs: str) -> None:
    """Write the arguments, each with EOM."""
    write(b"".join(text.encode() + EOM for text in outputs))


def extract_tail(status: str, tail: str, *outputs: str) -> None:
    """Write messages, a tail without EOM, and exit."""
    extract(*outputs)
    write(tail.encode())
    complain("that was all")
    sys.exit(int(status))


def extract_counted() -> None:
    """Write messages of 100 kB forever; report on stderr how many are out."""
    number = 0
    while True:
        write(b"x" * 100_000 + EOM)
        number += 1
        complain(str(number))


def extract_and_leave_child() -> None:
    """Write a message and exit; a child in its own session holds the pipes."""
    extract("one")
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(3600)"],
        start_new_session=True,
    )
    complain(f"child {child.pid}")
    os._exit(0)


def rounds(*outputs: str) -> None:
    """Answer request number n with the n-th argument's words; then with nothing."""
    rest = list(outputs)
    for _ in messages():
        reply(*(rest.pop(0).encode().split() if rest else ()))


def log(end: str, *later: str, gap: str = "0") -> None:
    """
    Answer a request for a range with its numbers, up to the last ``end``.

    Numbers below ``gap`` there are none. The latest offset is the first ``end``, then,
    each time that it is asked for, the next one. The initial one is 3.
    """
    import json

    latest = [int(end), *map(int, later)]
    last = max(latest)
    for message in messages():
        asked = json.loads(message)
        if "offsets" in asked:
            initial = asked["offsets"] == "initial"
            reply(b"3" if initial else b"%d" % latest[0])
            del latest[: not initial and len(latest) > 1]
            continue
        numbers = range(max(asked["start"], int(gap)), min(asked["end"], last))
        reply(*(str(n).encode() for n in numbers))


def gap(below: str, end: str) -> None:
    """Do as ``log``, where numbers below the first are missing."""
    log(end, gap=below)


def requests() -> None:
    """Answer each request with itself, and with our pid."""
    for message in messages():
        reply(b"<" + message + b">", str(os.getpid()).encode())


# --- loading -----------------------------------------------------------------------


def append(path: str) -> None:
    """Append each message to a file as a line."""
    for message in messages():
        with open(path, "ab") as target:
            target.write(message + b"\n")
        reply()


def append_until(path: str, word: str) -> None:
    """Append each message to a file as a line; exit with 1 at ``word``."""
    for message in messages():
        if message == word.encode():
            complain("disk full")
            sys.exit(1)
        with open(path, "ab") as target:
            target.write(message + b"\n")
        reply()


if __name__ == "__main__":
    _behave: Callable[..., None] = globals()[sys.argv[1]]
    _behave(*sys.argv[2:])
