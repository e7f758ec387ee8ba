"""
The tests' workers: one program, whose first argument selects the behavior.

It imports as little as possible, and nothing from etlstage, as tests start it often.
"""

from __future__ import annotations

import os
import resource
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
    """Yield chunks of the input, until its end."""
    while chunk := os.read(0, 1024 * 1024):
        yield chunk


def messages() -> Iterator[bytes]:
    """Yield each message."""
    rest = b""
    for chunk in chunks():
        *whole, rest = (rest + chunk).split(EOM)
        yield from whole


def batches() -> Iterator[list[bytes]]:
    """Yield each batch that is ended by an EOB."""
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
    """Do the same as ``echo``, chunk by chunk."""
    rest = b""
    for chunk in chunks():
        *whole, rest = (rest + chunk).split(EOM)
        write(b"".join(message + EOM + EOP for message in whole))


def crashes_at_the_end() -> None:
    """Answer each message, and crash when the input has ended."""
    # A core file would be written to the current directory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    echo()
    os.kill(os.getpid(), signal.SIGSEGV)


def words() -> None:
    """Answer each message with its words: none, one or many."""
    for message in messages():
        reply(*message.split())


def uneven(seed: str) -> None:
    """Answer at once or after a moment, with the message and the worker's pid."""
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


# --- workers that leave processes behind -------------------------------------------


def has_child(ends: str, own_session: str = "") -> None:
    """
    Start a child that holds the pipes and never ends; answer with its pid.

    Args:
        ends: Message at which the worker exits.
        own_session: Not empty: the child leaves the worker's process group.

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
    Leave behind, with each message, a child that outlives the worker.

    Once the worker has exited and the gate is opened, the child appends the message to
    the target, and writes to stdout, too, if the message is ``write``.

    Args:
        gate: A FIFO, or empty.
        target: A file.
        end: What to do after each answer, which is the child's pid: ``exit``, ``fail``,
            ``crash``, or nothing.

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
    """Exit at once; then, once the gate is opened, a child writes the arguments."""
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


def extract_counted() -> None:
    """Write messages of 100 kB forever; report their number on stderr."""
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


def requests() -> None:
    """Answer each request with itself, and with the worker's pid."""
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
