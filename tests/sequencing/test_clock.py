"""UUIDs, clocks and flags, byte by byte."""

from __future__ import annotations

from threading import Barrier, Thread
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.sequencing.clock import (
    NO_UUID,
    Clock,
    Flags,
    build_uuid,
    clock_at,
    clock_of,
    flags_of,
    new_producer_id,
    parse_uuid,
    producer_of,
    seconds_of,
)
from tests.sequencing.vectors import VECTORS

A = bytes.fromhex("01aaaaaaaa01")


@pytest.mark.parametrize("row", VECTORS["uuid_build"], ids=lambda row: row["uuid"])
def test_uuids_are_those_of_the_real_package(row: dict[str, Any]) -> None:
    """Both for building a UUID and for taking it apart."""
    producer, clock, flags = (
        bytes.fromhex(row["producer"]),
        int(row["clock"]),
        row["flags"],
    )
    uuid = build_uuid(producer, clock, flags)
    assert str(uuid) == row["uuid"]
    assert (producer_of(uuid), clock_of(uuid), flags_of(uuid)) == (
        producer,
        clock,
        flags,
    )


@pytest.mark.parametrize("row", VECTORS["uuid_parse"], ids=lambda row: row["uuid"])
def test_any_uuid_has_parts(row: dict[str, Any]) -> None:
    """This includes UUIDs of other makers: version and variant are ignored."""
    uuid = UUID(row["uuid"])
    assert producer_of(uuid).hex() == row["producer"]
    assert clock_of(uuid) == int(row["clock"])
    assert flags_of(uuid) == row["flags"]


@given(
    st.binary(min_size=6, max_size=6), st.integers(0, 2**64 - 1), st.integers(0, 1023)
)
def test_parts_come_back(producer: bytes, clock: int, flags: int) -> None:
    """A UUID returns the parts that it was built from."""
    uuid = build_uuid(producer, clock, flags)
    assert (producer_of(uuid), clock_of(uuid), flags_of(uuid)) == (
        producer,
        clock,
        flags,
    )
    assert uuid.version == 1


@pytest.mark.parametrize(
    ("producer", "clock", "flags", "found"),
    [
        (b"12345", 0, 0, "'3132333435'"),
        (b"1234567", 0, 0, "'31323334353637'"),
        (A, 1 << 64, 0, "18446744073709551616"),
        (A, -1, 0, "-1"),
        (A, 0, 0x400, "0x400"),
        (A, 0, -1, "-0x1"),
    ],
)
def test_parts_beyond_their_bits_are_refused(
    producer: bytes, clock: int, flags: int, found: str
) -> None:
    """The error has the value."""
    with pytest.raises(ValueError, match=f"got {found}$"):
        build_uuid(producer, clock, flags)


def test_flags_have_names() -> None:
    """Three flags have names; other values show their bits."""
    assert [str(Flags(n)) for n in (0, 1, 2, 3, 0x2AA)] == [
        "OUTSIDE_TXN",
        "CONTINUE_TXN",
        "ACK_TXN",
        "Flags(3)",
        "Flags(2aa)",
    ]


@pytest.mark.parametrize(
    "row",
    # Before that, Go overflows, so there is nothing to compare with.
    [row for row in VECTORS["clock_of_time"] if row["sec"] > -12219292800],
    ids=lambda row: f"{row['sec']}.{row['nsec']:09}",
)
def test_times_are_clocks(row: dict[str, Any]) -> None:
    """Clocks count units of 100 ns; the rest is cut off towards 1970."""
    clock = Clock()
    clock.update(row["sec"] * 10**9 + row["nsec"])
    assert clock.value == int(row["clock"])
    seconds, nanoseconds = row["as_time"]
    assert seconds_of(clock.value) == pytest.approx(seconds + nanoseconds / 1e9)


def test_the_ticks_of_both_ages() -> None:
    """The default tick is 160, a microsecond; the documented page has a tick of 1."""
    clock = Clock()
    assert [clock.tick(), clock.tick(), clock.value] == [160, 320, 320]
    clock = Clock(tick=1)
    assert [clock.tick(), clock.tick()] == [1, 2]


def test_clock_never_goes_back() -> None:
    """An earlier time, or the same, changes nothing."""
    clock = Clock()
    for nanoseconds, value in (
        (12_000_000_300, 1955086849920000048),
        (11_000_000_100, 1955086849920000048),
        (12_000_005_000, 1955086849920000800),
    ):
        clock.update(nanoseconds)
        assert clock.value == value
    assert clock.tick() == 1955086849920000960
    clock.update(12_000_005_900)
    assert clock.value == 1955086849920000960
    assert repr(clock) == "<Clock 1955086849920000960>"


def test_clock_wraps_at_64_bits() -> None:
    """It behaves like an unsigned 64-bit number."""
    assert Clock(2**64 - 1, tick=1).tick() == 0
    assert clock_at(10**24) < 2**64


@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_clock_beyond_its_bits_is_refused(value: int) -> None:
    """The error has the value."""
    with pytest.raises(ValueError, match=f"got {value}$"):
        Clock(value)


def test_a_clock_has_to_move() -> None:
    """A tick of 0 would give two messages the same UUID."""
    with pytest.raises(ValueError, match=r"got 0$"):
        Clock(tick=0)


def test_a_tick_is_undone_unless_the_clock_has_moved() -> None:
    """Another thread may have taken its own tick since."""
    clock = Clock(1000)
    clock.untick(clock.tick())
    assert clock.value == 1000
    first = clock.tick()
    clock.tick()
    clock.untick(first)
    assert clock.value == 1320


def test_threads_share_a_clock() -> None:
    """No two ticks return the same value."""
    clock, found, together = Clock(), set[int](), Barrier(4)

    def run() -> None:
        together.wait()
        for _ in range(2000):
            found.add(clock.tick())

    threads = [Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8000
    assert clock.value == 160 * 8000


def test_producers_are_unique_and_multicast() -> None:
    """Checked for a thousand ids."""
    ids = {new_producer_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(one) == 6 and one[0] & 1 for one in ids)
    assert any(one[0] & 0xFE for one in ids)


PLAIN = "83fc2f81-cc5f-11e9-8400-01aaaaaaaa01"


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        PLAIN.upper(),
        f"{{{PLAIN}}}",
        f"urn:uuid:{PLAIN}",
        f"URN:UUID:{PLAIN}",
        PLAIN.replace("-", ""),
    ],
)
def test_texts_of_a_uuid(text: str) -> None:
    """All texts are accepted that the real package accepts."""
    assert parse_uuid(text) == UUID(PLAIN)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "invalid UUID length: 0"),
        ("not-a-uuid", "invalid UUID length: 10"),
        (f"({PLAIN})", "invalid UUID length: 38"),
        (f"urn:uuix:{PLAIN}", "invalid urn prefix: 'urn:uuix:'"),
        (PLAIN.replace("-", "_"), "invalid UUID format"),
        (PLAIN.replace("8", "g"), "invalid UUID format"),
        (PLAIN.replace("83", "+3"), "invalid UUID format"),
        (PLAIN.replace("83", "\u0663\u0663"), "invalid UUID format"),
        ("_" * 32, "invalid UUID format"),
        (PLAIN[:8] + PLAIN[9:] + "0", "invalid UUID format"),
    ],
)
def test_other_texts_are_refused(text: str, error: str) -> None:
    """The errors have the texts of the real package."""
    with pytest.raises(ValueError, match=error.replace("(", r"\(")):
        parse_uuid(text)


def test_no_uuid_is_of_clock_0() -> None:
    """Hence a message without a UUID is never a duplicate."""
    assert (clock_of(NO_UUID), flags_of(NO_UUID)) == (0, Flags.OUTSIDE_TXN)
