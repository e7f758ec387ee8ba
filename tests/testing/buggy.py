"""
Workers with a planted bug each: one program, whose first argument names which.

It imports no more than it must, and nothing of etlstage: a test starts it many times.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator


def marker(name: str, default: str) -> bytes:
    """Return a marker from the environment."""
    text = os.environ.get(f"ETLSTAGE_{name}", default)
    return text.encode().decode("unicode_escape").encode("latin-1")


EOM, EOP, EOB = marker("EOM", r"\n"), marker("EOP", r"\0"), marker("EOB", r"\27")


def write(data: bytes) -> None:
    """Write all of ``data`` to stdout."""
    while data:
        data = data[os.write(1, data) :]


def reply(*outputs: bytes) -> None:
    """Answer one exchange."""
    write(b"".join(output + EOM for output in outputs) + EOP)


def chunks() -> Iterator[bytes]:
    """Yield what can be read, until the end of the input."""
    while chunk := os.read(0, 1024 * 1024):
        yield chunk


def reads() -> Iterator[list[bytes]]:
    """Yield the messages that each read completes."""
    rest = b""
    for chunk in chunks():
        *whole, rest = (rest + chunk).split(EOM)
        yield whole


def messages() -> Iterator[bytes]:
    """Yield each message."""
    for whole in reads():
        yield from whole


def batches() -> Iterator[list[bytes]]:
    """Yield each batch that an EOB ends."""
    rest = b""
    for chunk in chunks():
        *whole, rest = (rest + chunk).split(EOB)
        for batch in whole:
            yield batch.split(EOM)[:-1]


def none() -> None:
    """Have no bug: answer each message with itself."""
    for message in messages():
        reply(message)


def no_bug_in_batches() -> None:
    """Have no bug: answer each batch with its messages."""
    for batch in batches():
        reply(*batch)


# --- single messages -----------------------------------------------------------------


def keeps_state() -> None:
    """Number the messages."""
    for number, message in enumerate(messages()):
        reply(b"%d %s" % (number, message))


def loses_last() -> None:
    """Take the last of many messages in one read for one that goes on."""
    for whole in reads():
        for message in whole if len(whole) == 1 else whole[:-1]:
            reply(message)


def dies_when_empty() -> None:
    """Look at the first byte of each message."""
    for message in messages():
        assert message[0] >= 0
        reply(message)


def dies_at_high_byte() -> None:
    """Take everything for ASCII."""
    for message in messages():
        reply(message.decode("ascii").encode())


def buffers() -> None:
    """Forget to flush."""
    for message in messages():
        sys.stdout.buffer.write(message + EOM + EOP)


def swaps() -> None:
    """Answer the last message of a read first."""
    for whole in reads():
        for message in reversed(whole):
            reply(message)


def decodes() -> None:
    """Write the newline that an escape stands for, which is a marker."""
    for message in messages():
        reply(message.replace(rb"\n", b"\n"))


def dies_at_100() -> None:
    """Run out of something."""
    for number, message in enumerate(messages(), 1):
        if number == 100:
            sys.exit(3)
        reply(message)


def silent_without_output() -> None:
    """End a reply only if there is one."""
    for message in messages():
        if message:
            reply(message)


def drops_repeated() -> None:
    """Take a message that comes again for one that was sent twice."""
    before = None
    for message in messages():
        reply(*([message] if message != before else []))
        before = message


def takes_reads_for_messages() -> None:
    """Believe that a read ends where a message does."""
    for chunk in chunks():
        for message in chunk.removesuffix(EOM).split(EOM):
            reply(message)


def cuts_markers() -> None:
    """Look for EOM in each read by itself."""
    rest = b""
    for chunk in chunks():
        first, *others = chunk.split(EOM)
        parts = [rest + first, *others]
        rest = parts.pop()
        for message in parts:
            reply(message)


def never_ends() -> None:
    """Wait for more behind the end of the input."""
    none()
    while True:
        os.read(os.pipe()[0], 1)


def fails_at_the_end() -> None:
    """Exit with an error although all was well."""
    none()
    sys.exit(1)


def brackets() -> None:
    """Add to what was added before."""
    for message in messages():
        reply(b"<" + message + b">")


def counts() -> None:
    """Return how many messages are not empty, so far."""
    count = 0
    for message in messages():
        count += bool(message)
        reply(b"%d" % count)


def writes_python() -> None:
    """Write as Python does what came as JSON."""
    import json

    for message in messages():
        reply(str(json.loads(message)).encode())


def forgets_x() -> None:
    """Forget one letter where the model has it."""
    for message in messages():
        reply(message.upper() if b"x" not in message else message)


# --- batches -------------------------------------------------------------------------


def two_bugs() -> None:
    """Die at 0x80; answer twice what holds a double y."""
    for message in messages():
        if b"\x80" in message:
            raise ValueError(message)
        reply(message)
        if b"yy" in message:
            reply(message)


def reads_a_pipe_full() -> None:
    """Take no message for one that is longer than a pipe has room for."""
    for message in messages():
        if len(message) > 65536:
            os._exit(4)
        reply(message)


def refuses() -> None:
    """Refuse each message that is not empty."""
    for message in messages():
        if message:
            write(b"no" + marker("ERR", ""))
        else:
            reply()


def loses_end_of_batch() -> None:
    """Stop one too early at the end of a batch of three."""
    for batch in batches():
        reply(*(batch[:2] if len(batch) == 3 else batch))


def answers_three_twice() -> None:
    """Answer a full batch when it is full, and again at its EOB."""
    for batch in batches():
        reply(*batch)
        if len(batch) == 3:
            reply(*batch)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
