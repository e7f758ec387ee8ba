"""Journals of a broker: the same reads and appends, even if responses get lost."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from fcntl import F_DUPFD_CLOEXEC, fcntl
from http.client import HTTPConnection
from socket import socket
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from etlstage.errors import ConfigError, LocalProtocolError
from etlstage.journal import (
    AppendInDoubt,
    Broker,
    JournalError,
    Journals,
    OffsetGone,
    Publisher,
    modulo,
)
from etlstage.sequencing import Clock, JsonMessage
from tests.journal.gateway import Gateway, running
from tests.patience import HANG

ELECTING = 500, "NO_JOURNAL_PRIMARY_BROKER"
PART = "orders/part-000"


@pytest.fixture(name="gateway")
def gateway_() -> Iterator[Gateway]:
    """Return a gateway with one journal."""
    with running(PART) as gateway:
        yield gateway


def opened(
    gateway: Gateway,
    retry_for: float = 10,
    timeout: float = 30,
    **fields: Any,  # noqa: ANN401
) -> Journals:
    """Return the journals of a gateway."""
    broker = Broker(gateway.url, timeout=timeout, retry_for=retry_for)
    return Journals(broker, **fields)


def publisher(journals: Journals) -> Publisher:
    """Return a publisher that maps messages by a key."""
    return Publisher(journals, Clock(1000), mapping=modulo(lambda m: m["k"]))


def numbers(journals: Journals, **fields: Any) -> list[int]:  # noqa: ANN401
    """Return the numbers of the messages that a reader delivers."""
    found = []
    for envelope in journals.read_committed(**fields):
        assert isinstance(envelope.message, JsonMessage)
        found.append(envelope.message["k"])
    return found


def test_messages_come_back() -> None:
    """Messages are read from all partitions, in transactions and without."""
    with (
        running(*(f"orders/part-{n:03}" for n in range(3))) as gateway,
        Journals(gateway.url, partitions=3) as journals,
    ):
        one, two = publisher(journals), publisher(journals)
        for number in range(20):
            one.publish_committed({"k": number})
            two.publish_uncommitted({"k": 100 + number})
        assert sorted(numbers(journals)) == list(range(20))
        for intent in two.build_ack_intents():
            journals.append(intent.journal, intent.intent)
        assert len(numbers(journals)) == 40
        assert all(gateway.data.values())


def test_one_journal_by_its_name() -> None:
    """An address without a slash at its end is that of a single journal."""
    with running("orders/all") as gateway:
        with Journals(f"{gateway.url}all") as journals:
            publisher(journals).publish_committed({"k": 1})
            assert numbers(journals) == [1]
        with pytest.raises(ConfigError, match="is one journal"):
            Journals(f"{gateway.url}all", partitions=2)


async def test_follower_is_woken(gateway: Gateway) -> None:
    """It waits with one blocking request, instead of polling."""
    async with (
        opened(gateway) as journals,
        journals.read_committed(follow=True) as reader,
    ):
        found: list[int] = []

        async def follow() -> None:
            async for envelope in reader:
                assert isinstance(envelope.message, JsonMessage)
                found.append(envelope.message["k"])
                if found == [1, 2]:
                    return

        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(follow)
                while not any("block=true" in one for one in gateway.requests):
                    await anyio.lowlevel.checkpoint()
                for number in (1, 2):
                    await anyio.to_thread.run_sync(
                        publisher(journals).publish_committed, {"k": number}
                    )
                    while number not in found:
                        await anyio.lowlevel.checkpoint()
    assert sum("block=true" in one for one in gateway.requests) <= 3


def test_append_whose_answer_is_lost_stands_twice_and_counts_once(
    gateway: Gateway,
) -> None:
    """An append whose response was lost, or without a primary, is tried again."""
    with opened(gateway) as journals:
        one = publisher(journals)
        for number, fault in enumerate(("lost", ELECTING, "dropped", (503, ""))):
            gateway.faults["PUT"].append(fault)
            one.publish_uncommitted({"k": number})
        gateway.faults["PUT"] += "lost", "lost"
        for intent in one.build_ack_intents():
            journals.append(intent.journal, intent.intent)
        lines = bytes(gateway.data[PART]).splitlines()
        assert len(lines) == 8
        assert len(set(lines)) == 5
        assert numbers(journals) == [0, 1, 2, 3]


def test_append_whose_answer_is_late_is_tried_again(gateway: Gateway) -> None:
    """After the timeout the append is sent again, over another connection."""
    with opened(gateway, timeout=1) as journals:
        gateway.faults["PUT"].append("late")
        publisher(journals).publish_committed({"k": 1})
        assert len(gateway.requests) > 1
        assert numbers(journals) == [1]


def test_append_in_doubt_uses_its_clock_up(gateway: Gateway) -> None:
    """Otherwise the next message could be dropped as a duplicate of it."""
    with opened(gateway, retry_for=0) as journals:
        one = publisher(journals)
        gateway.faults["PUT"].append("lost")
        with pytest.raises(AppendInDoubt, match=r"can't append: .*failed 1 times"):
            one.publish_committed({"k": 1})
        one.publish_committed({"k": 2})
        assert numbers(journals) == [1, 2]


def test_transaction_with_an_append_in_doubt_is_not_committed(gateway: Gateway) -> None:
    """It may lack a message; another publisher is needed for the next transaction."""
    with opened(gateway, retry_for=0) as journals:
        one = publisher(journals)
        one.publish_uncommitted({"k": 1})
        gateway.faults["PUT"].append("dropped")
        with pytest.raises(AppendInDoubt):
            one.publish_uncommitted({"k": 2})
        with pytest.raises(LocalProtocolError, match="is uncertain"):
            one.publish_uncommitted({"k": 2})
        with pytest.raises(LocalProtocolError, match="another publisher"):
            one.build_ack_intents()


def test_append_whose_retry_is_refused_is_in_doubt(gateway: Gateway) -> None:
    """The attempt before may have appended the message (issue 24)."""
    with opened(gateway) as journals:
        one = publisher(journals)
        gateway.faults["PUT"] += "lost", (403, "expired")
        with pytest.raises(
            AppendInDoubt, match="'403 expired', at attempt 2 to append"
        ):
            one.publish_uncommitted({"k": 1})
        with pytest.raises(LocalProtocolError, match="is uncertain"):
            one.publish_uncommitted({"k": 1})


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ((400, "Journal: must be a clean path"), "broker answered '400 Journal: must"),
        ((500, "boom"), "broker answered '500 boom'"),
        (ELECTING, "within 0 s .*: 500 NO_JOURNAL_PRIMARY_BROKER"),
        ((403, ""), "broker answered '403 Forbidden'"),
        ("late", "timed out"),
        ("dropped", "closed|reset"),
    ],
)
def test_what_fails_is_a_clear_error(
    gateway: Gateway, fault: object, error: str
) -> None:
    """This goes for reads and appends alike."""
    timeout = 1 if fault == "late" else 30
    with opened(gateway, retry_for=0, timeout=timeout) as journals:
        gateway.faults["PUT"].append(fault)
        with pytest.raises(JournalError, match=error):
            publisher(journals).publish_committed({"k": 1})
        publisher(journals).publish_committed({"k": 2})
        gateway.faults["GET"] += fault, fault
        with pytest.raises(JournalError, match=error):
            numbers(journals)
        with pytest.raises(JournalError, match=error):
            journals.byte_log(PART).end()


def test_committed_bytes_that_are_others(gateway: Gateway) -> None:
    """If the broker's checksum is of other bytes, the append is in doubt."""
    with opened(gateway) as journals:
        gateway.faults["PUT"].append("other")
        with pytest.raises(AppendInDoubt, match="committed bytes other than"):
            publisher(journals).publish_committed({"k": 1})


def test_own_append_is_read_at_once(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader sees it even before its blocking request is answered."""

    class Silent:
        def register(self, *_: object) -> None:
            """Ignore the request."""

        def poll(self, _: float) -> list[object]:
            """Return no answer."""
            return []

    monkeypatch.setattr("select.poll", Silent)
    with opened(gateway) as journals, journals.read_committed() as reader:
        for number in (1, 2):
            assert [reader.poll(), reader.poll()] == [None, None]
            publisher(journals).publish_committed({"k": number})
            assert reader.poll() is not None


def test_process_may_have_many_files_open(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower's request may get a descriptor above 1023 (issue 24)."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    connect = HTTPConnection.connect

    def connected(connection: HTTPConnection) -> None:
        connect(connection)
        low = connection.sock.detach()
        connection.sock = socket(fileno=fcntl(low, F_DUPFD_CLOEXEC, 1024))
        connection.sock.settimeout(connection.timeout)
        os.close(low)

    monkeypatch.setattr(HTTPConnection, "connect", connected)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    try:
        with opened(gateway) as journals:
            publisher(journals).publish_committed({"k": 1})
            with journals.read_committed(follow=True) as reader:
                assert [reader.poll() is None for _ in range(3)] == [False, True, True]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_journal_that_is_not_there(gateway: Gateway) -> None:
    """The error names the journal."""
    gone = pytest.raises(JournalError, match=r"does not exist \(orders/part-001\)")
    with opened(gateway, partitions=2) as journals, gone:
        numbers(journals)


def test_no_one_listens() -> None:
    """The error names the address, and the number of attempts."""
    with running() as gateway:
        url = gateway.url
    with Journals(Broker(url, retry_for=0.2)) as journals:
        with pytest.raises(JournalError, match=r"/orders/ failed [23] times.*refused"):
            publisher(journals).publish_committed({"k": 1})
        assert journals.byte_log(PART).grown(0)


@pytest.mark.parametrize("plain", [False, True], ids=["chunked", "plain"])
@pytest.mark.parametrize("cut", [0, 1, 49, 50, 51, 149, 700])
def test_answer_that_is_cut_goes_on_there(
    gateway: Gateway, cut: int, plain: bool
) -> None:
    """It may be cut within a chunk, within a frame, or before the first byte."""
    gateway.plain = plain
    with opened(gateway) as journals:
        one = publisher(journals)
        for number in range(10):
            one.publish_committed({"k": number})
        # The first response has the write head, with which the position is checked.
        gateway.faults["GET"] += cut, "broker terminated RPC", cut + 7
        assert numbers(journals) == list(range(10))


def test_position_is_resumed_from(gateway: Gateway) -> None:
    """The caller stores the position, as a broker stores none."""
    with opened(gateway) as journals:
        publisher(journals).publish_committed({"k": 1})
        with journals.read_committed() as reader:
            next(reader)
            position = reader.position()
        second = len(gateway.data[PART])
        publisher(journals).publish_committed({"k": 2})
        assert numbers(journals, position=position) == [2]
        assert numbers(journals, start={PART: second}) == [2]
        assert numbers(journals, start="end") == []


def test_what_was_dropped_is_gone(gateway: Gateway) -> None:
    """Offset 0 stands for the first that is kept; any other offset must exist."""
    with opened(gateway) as journals:
        one = publisher(journals)
        for number in range(3):
            one.publish_committed({"k": number})
        second = bytes(gateway.data[PART]).index(b"\n") + 1
        gateway.begins[PART] = second
        assert numbers(journals) == [1, 2]
        with pytest.raises(OffsetGone, match=f"offset 5 .* kept is {second}"):
            numbers(journals, start={PART: 5})


def test_what_a_broker_does_not_have_is_refused(gateway: Gateway) -> None:
    """Named readers, times, adding partitions, segments, and retention settings."""
    with opened(gateway) as journals:
        with pytest.raises(JournalError, match="a broker keeps no readers"):
            journals.read_committed("billing")
        with pytest.raises(JournalError, match="no index of times"):
            journals.read_committed(start=1.0)
        with pytest.raises(JournalError, match="are created at the broker"):
            journals.add_partitions(1)
        with pytest.raises(JournalError, match="does not show its segments"):
            journals.log(PART)
        assert journals.trim() == {}
    of_folders: list[dict[str, Any]] = [{"keep": "read"}, {"limit": "1GiB"}]
    for setting in of_folders:
        with pytest.raises(ConfigError, match="applies to a folder, not to a broker"):
            opened(gateway, **setting)


@pytest.mark.parametrize(
    "url", ["http://", "http://host", "http://host:x/a/", "http://host/a/?b=1"]
)
def test_address_that_is_none(url: str) -> None:
    """The error shows an example of a valid address."""
    with pytest.raises(ConfigError, match="expected an address such as"):
        Journals(url)


def test_headers_are_sent_and_not_shown() -> None:
    """Headers may hold secrets, so the broker's repr leaves them out."""
    assert "token" not in repr(
        Broker("http://host/a/", headers={"Authorization": "token"})
    )
