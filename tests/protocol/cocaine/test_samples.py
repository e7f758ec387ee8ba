"""
Bytes that real workers wrote, and that real workers understood.

Those of version 0 come from the Python framework 0.11.1.17, those of version 1 from
Python's 0.12.14.5 and from Go's.
"""

from __future__ import annotations

from typing import Final

import pytest

from etlstage.protocol.base import Limits, Side
from etlstage.protocol.cocaine import CocaineSession, CocaineVersion
from etlstage.protocol.cocaine.settings import CocaineDialect, Payload
from etlstage.protocol.events import (
    Added,
    Alive,
    Cancelled,
    Ended,
    Farewell,
    Noise,
    Opened,
    Ready,
)
from tests.protocol.cocaine.pair import received, sent, worker

UUID: Final = "01234567-89ab-cdef-0123-456789abcdef"
WHO: Final = b"\xda\x00\x24" + UUID.encode()
ZERO, ONE = CocaineVersion.ZERO, CocaineVersion.ONE


def hexed(text: str, said: bytes = b"", behind: str = "") -> bytes:
    """Return bytes given in hexadecimal, with some text in between."""
    return bytes.fromhex(text) + said + bytes.fromhex(behind)


HELLO: Final = {
    ZERO: hexed("93 00 00 91", WHO) + hexed("93 01 00 90"),
    ONE: hexed("93 01 00 91", WHO) + hexed("93 01 00 90"),
}
INVOKES: Final = {
    ZERO: hexed("93 03 01 91 a4", b"echo"),
    ONE: hexed("93 02 00 91 a4", b"echo"),
}
CHUNKS: Final = {
    ZERO: hexed("93 04 01 91 a3", b"one"),
    ONE: hexed("93 02 00 91 a3", b"one"),
}
CHOKES: Final = {
    ZERO: hexed("93 06 01 90"),
    ONE: hexed("93 02 02 90"),
}
BYES: Final = {
    ZERO: hexed("93 02 00 92 01 bb", b"the engine is shutting down"),
    ONE: hexed("93 01 01 92 01 bb", b"the engine is shutting down"),
}
BYE: Final = Farewell(1, "the engine is shutting down")

versions = pytest.mark.parametrize("version", [ZERO, ONE])


def supervisor(
    version: CocaineVersion, said: CocaineVersion | None = None
) -> CocaineSession:
    """Return our side, with a worker that is ready."""
    session = CocaineSession(Side.SUPERVISOR, said or version)
    session.receive_data(HELLO[version], 0.0)
    assert session.events_received() == [Ready(UUID)]
    session.data_to_send()
    return session


@versions
def test_worker_identifies_itself_and_is_alive(version: CocaineVersion) -> None:
    """The handshake has the UUID as raw16: there was no str8 yet."""
    session = CocaineSession(Side.WORKER, version)

    assert sent(session, Ready(UUID)) == HELLO[version]


@versions
def test_first_heartbeat_makes_a_worker_ready_and_is_answered(
    version: CocaineVersion,
) -> None:
    """The handshake alone does not: a worker beats once it can take sessions."""
    session = CocaineSession(Side.SUPERVISOR, version)
    heartbeat = HELLO[version][-4:]

    assert received(session, HELLO[version][:-4]) == []
    assert session.data_to_send() == []
    assert received(session, heartbeat) == [Ready(UUID)]
    assert session.data_to_send() == [heartbeat]
    assert received(session, heartbeat) == [Alive()]
    assert session.data_to_send() == [heartbeat]


@versions
def test_first_frames_show_the_version(version: CocaineVersion) -> None:
    """Version 0 is detected although the supervisor does not know the version."""
    session = supervisor(version, CocaineVersion.AUTO)

    assert sent(session, Opened(1, [b"one"], each=False, event="echo")) == (
        INVOKES[version] + CHUNKS[version] + CHOKES[version]
    )


@versions
def test_message_is_an_invoke_a_chunk_and_a_choke(version: CocaineVersion) -> None:
    """Both sides write the same bytes, and no type that msgpack got later."""
    ours, theirs = supervisor(version), worker(version)

    data = sent(ours, Opened(1, [b"one"], each=False, event="echo"))

    assert data == INVOKES[version] + CHUNKS[version] + CHOKES[version]
    assert received(theirs, data) == [
        Opened(1, [], each=False, ended=False, event="echo"),
        Added(1, (b"one",), ended=True),
    ]
    reply = sent(theirs, Added(1, [b"one"]), Ended(1, [()]))
    assert reply == CHUNKS[version] + CHOKES[version]
    assert received(ours, reply) == [Ended(1, [(b"one",)])]
    assert (ours.owed, theirs.owed) == (0, 0)


@versions
def test_supervisor_sends_terminate_and_the_worker_does(
    version: CocaineVersion,
) -> None:
    """Both use the same frame."""
    ours, theirs = supervisor(version), worker(version)

    assert sent(ours, BYE) == BYES[version]
    assert received(theirs, BYES[version]) == [BYE]
    assert sent(theirs, BYE) == BYES[version]
    assert received(ours, BYES[version]) == [BYE]


def test_framework_of_version_0_packs_only_what_it_writes() -> None:
    """It reads messages as they are sent, and packs replies with msgpack once more."""
    settings = CocaineDialect(protocol=ZERO, payload=Payload.MSGPACK)
    ours, theirs = (settings.open(side, Limits()) for side in Side)
    ours.receive_data(HELLO[ZERO], 0.0)
    said = sent(theirs, Ready(UUID))
    assert ours.events_received() == [Ready(UUID)]
    ours.data_to_send()

    data = sent(ours, Opened(1, [b"one"], event="echo"))
    assert data == INVOKES[ZERO] + CHUNKS[ZERO] + CHOKES[ZERO]
    reply = hexed("93 04 01 91 a4 a3", b"one") + CHOKES[ZERO]
    assert received(ours, reply) == [Ended(1, [(b"one",)])]
    assert said == HELLO[ZERO]
    assert received(theirs, data)[-1] == Added(1, (b"one",), ended=True)
    assert sent(theirs, Ended(1, [(b"one",)])) == reply


def test_frames_of_go_have_headers() -> None:
    """Each of its frames carries an array of headers, even if empty."""
    session = CocaineSession(Side.SUPERVISOR)

    hello = hexed("94 01 00 91", WHO, "90") + hexed("94 01 00 90 90")
    assert received(session, hello) == [Ready(UUID)]
    session.send(Opened(1, [], each=False, event="echo"))
    reply = hexed("94 02 00 91 a3", b"one", "90") + hexed("94 02 02 90 90")
    assert received(session, reply) == [Ended(1, [(b"one",)])]


PANIC: Final = b"Event: 'boom', recover: handler raised, stack: \n\n"


@pytest.mark.parametrize(
    ("version", "data", "said"),
    [
        (
            ZERO,
            hexed("93 05 01 92 01 da002c")
            + b"Error in event 'boom' handler handler raised",
            (1, "Error in event 'boom' handler handler raised"),
        ),
        (
            ZERO,
            hexed("93 05 01 92 f3 b0", b"explicit failure"),
            (-13, "explicit failure"),
        ),
        (
            ZERO,
            hexed("93 05 01 92 d09c da0024", b"there is no handler for event nosuch"),
            (-100, "there is no handler for event nosuch"),
        ),
        (ZERO, hexed("93 05 01 92 01 a9", b"someerror"), (1, "someerror")),
        (
            ONE,
            hexed("93 02 01 92 92 2a64 ae", b"handler raised"),
            (100, "handler raised"),
        ),
        (ONE, hexed("94 02 01 92 92 2a64 da0031", PANIC, "90"), (100, PANIC.decode())),
        (
            ONE,
            hexed("93 02 01 92 92 2af3 b0", b"explicit failure"),
            (-13, "explicit failure"),
        ),
        (
            ONE,
            hexed("93 02 01 92 92 2accc8 da0027")
            + b"there is no handler for event b'nosuch'",
            (200, "there is no handler for event b'nosuch'"),
        ),
    ],
)
def test_worker_rejects(
    version: CocaineVersion, data: bytes, said: tuple[int, str]
) -> None:
    """The code is a number, or a category and a number."""
    session = supervisor(version)
    session.send(Opened(1, [], each=False, event="boom"))

    category = 42 if version is ONE else 0  # version 0 had none
    assert received(session, data) == [Ended.refused(1, *said, category)]
    assert session.owed == 0


def test_choke_behind_an_error_of_version_0_is_late() -> None:
    """The error already is the end, so the choke is reported as noise."""
    session = supervisor(ZERO)
    session.send(Opened(1, [], each=False, event="boom"))
    error = hexed("93 05 01 92 f3 b0", b"explicit failure")

    events = received(session, error + hexed("93 06 01 90"))

    assert events == [
        Ended.refused(1, -13, "explicit failure"),
        Noise(b"frame 6 for session 1"),
    ]


@pytest.mark.parametrize(
    ("version", "data"),
    [
        (ZERO, hexed("93 05 01 92 f3 a2", b"no") + hexed("93 06 01 90")),
        (ONE, hexed("93 02 01 92 92 2a f3 a2", b"no")),
    ],
)
def test_what_a_worker_sends_that_rejects(version: CocaineVersion, data: bytes) -> None:
    """Followed by a choke where the error does not end the session."""
    session = worker(version)
    received(session, INVOKES[version])

    assert sent(session, Ended.refused(1, -13, "no", 42)) == data
    assert session.owed == 0


@pytest.mark.parametrize(
    ("version", "data"),
    [
        (ZERO, hexed("93 05 01 92 07 ab", b"client gone") + hexed("93 06 01 90")),
        (ONE, hexed("93 02 01 92 92 2a 07 ab", b"client gone")),
    ],
)
def test_session_whose_half_is_open_is_cancelled_by_an_error(
    version: CocaineVersion, data: bytes
) -> None:
    """The handler gets an exception where it reads."""
    ours, theirs = supervisor(version), worker(version)
    opened = sent(ours, Opened(1, [b"one"], each=False, ended=False, event="echo"))

    assert opened == INVOKES[version] + CHUNKS[version]
    assert sent(ours, Cancelled(1, 7, "client gone")) == data
    received(theirs, opened)
    assert received(theirs, data)[0] == Cancelled(1, 7, "client gone")
