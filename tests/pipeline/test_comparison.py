from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.messages import StageKind
from etlstage.pipeline import comparison
from etlstage.pipeline.comparison import (
    excesses,
    ledger_difference,
    letter_difference,
    message_difference,
    shown,
)
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.ledger import Account, Ledger

NAMES = ("local", "spark")
MESSAGES = st.lists(st.binary(max_size=2), max_size=30)


def difference(first: list[bytes], second: list[bytes], *, ordered: bool) -> str | None:
    """Return the reported difference of two outputs."""
    return message_difference(NAMES, first, second, ordered=ordered)


# --- in order ------------------------------------------------------------------------


def test_equal_outputs_have_no_difference() -> None:
    """Neither have two empty ones."""
    assert difference([b"one", b"two"], [b"one", b"two"], ordered=True) is None
    assert difference([], [], ordered=True) is None


def test_first_message_that_differs_is_reported() -> None:
    """Its place is counted from 1."""
    assert difference([b"one", b"two", b"3"], [b"one", b"2", b"4"], ordered=True) == (
        "message 2 differs: local has 'two', spark has '2'"
    )


@pytest.mark.parametrize(
    ("first", "second", "has", "lacks"),
    [
        ([b"1", b"2"], [b"1"], "local", "spark"),
        ([b"1"], [b"1", b"2"], "spark", "local"),
    ],
)
def test_output_that_ends_early_lacks_a_message(
    first: list[bytes], second: list[bytes], has: str, lacks: str
) -> None:
    """The first missing message is reported."""
    assert difference(first, second, ordered=True) == (
        f"{lacks} lacks a message that {has} has (place 2): '2'"
    )


def test_empty_message_is_one() -> None:
    """It is not taken for the end of the output."""
    assert difference([b""], [], ordered=True) == (
        "spark lacks a message that local has (place 1): ''"
    )


def test_order_counts_where_it_is_promised() -> None:
    """Elsewhere it is no difference."""
    assert difference([b"1", b"2"], [b"2", b"1"], ordered=True) == (
        "the messages are the same, their order is not: message 1 differs: local has"
        " '1', spark has '2'"
    )
    assert difference([b"1", b"2"], [b"2", b"1"], ordered=False) is None


@given(MESSAGES, MESSAGES)
def test_ordered_outputs_agree_when_they_are_equal(
    first: list[bytes], second: list[bytes]
) -> None:
    """For any two outputs."""
    assert (difference(first, second, ordered=True) is None) == (first == second)


# --- as multisets --------------------------------------------------------------------


def test_missing_message_is_reported_with_its_place() -> None:
    """Whichever side lacks it."""
    assert difference([b"1", b"2", b"3"], [b"3", b"1"], ordered=False) == (
        "spark lacks a message that local has (place 2): '2'"
    )
    assert difference([b"3", b"1"], [b"1", b"2", b"3"], ordered=False) == (
        "local lacks a message that spark has (place 2): '2'"
    )


def test_repeated_message_counts_each_time() -> None:
    """The place is that of the surplus occurrence."""
    assert difference([b"1", b"2", b"1"], [b"1", b"2"], ordered=False) == (
        "spark lacks a message that local has (place 3): '1'"
    )


@given(first=MESSAGES, second=MESSAGES, size=st.sampled_from([1, 5, 1_000_000]))
def test_excesses_are_what_counters_find(
    first: list[bytes], second: list[bytes], size: int
) -> None:
    """With any number of buckets; with a single one, each is the first such message."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "BUCKET", size)
        found = excesses(first, second)

    for one, other, extra in ((first, second, found[0]), (second, first, found[1])):
        more = Counter(one) - Counter(other)
        assert (extra is not None) == bool(more)
        if extra is not None:
            before = Counter(one[: extra.place])
            assert one[extra.place] == extra.message
            assert before[extra.message] == other.count(extra.message)
            if size > len(first) + len(second):
                assert not before - Counter(other)


@given(MESSAGES, st.randoms())
def test_shuffled_messages_are_the_same_multiset(
    messages: list[bytes], dice: object
) -> None:
    """The order never matters."""
    other = sorted(messages, key=lambda _: dice.random())  # type: ignore[attr-defined]
    assert difference(messages, other, ordered=False) is None


# --- ledgers -------------------------------------------------------------------------


def ledger(**counts: int) -> Ledger:
    """Return a ledger whose stage ``clean`` has these counts."""
    made = Ledger.of_pipeline("extract", [], Account("clean", StageKind.LOAD))
    for name, count in counts.items():
        setattr(made[1], name, count)
    return made


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("received", "in"),
        ("done", "done"),
        ("dead", "dead"),
        ("failed", "failed"),
        ("unprocessed", "unprocessed"),
        ("produced", "out"),
        ("skipped", "skipped"),
        ("doubtful", "doubtful"),
    ],
)
def test_each_count_of_a_ledger_is_compared(name: str, word: str) -> None:
    """It is named as in the report."""
    assert ledger_difference(NAMES, ledger(**{name: 1000}), ledger(**{name: 7})) == (
        f"stage clean: local has 1,000 {word}, spark has 7"
    )


def test_ledgers_with_the_same_counts_do_not_differ() -> None:
    """Times and the number of restarts are not compared."""
    one, other = ledger(done=1), ledger(done=1, restarts=2, failures=1)
    one[1].seconds = 3.0
    assert ledger_difference(NAMES, one, other) is None


# --- dead letters --------------------------------------------------------------------


async def put(state: Path, *letters: tuple[str, bytes]) -> Path:
    """Dead-letter messages of stages; return the state directory."""
    made = DeadLetters(state, pipeline="p")
    for place, (stage, message) in enumerate(letters):
        letter = made.letter(
            stage,
            place,
            message,
            ValueError(),
            config={},
            time="2026-01-02T12:00:00.000+00:00",
        )
        await made.keep([letter])
    made.close()
    return state


async def test_letters_are_compared_by_stage_and_message(tmp_path: Path) -> None:
    """The time and run of dead-lettering are no difference."""
    first = await put(tmp_path / "1", ("a", b"1"), ("b", b"2"), ("a", b"3"))
    second = await put(tmp_path / "2", ("b", b"2"), ("a", b"3"), ("a", b"1"))
    third = await put(tmp_path / "3", ("b", b"2"), ("b", b"3"), ("a", b"1"))

    assert letter_difference(NAMES, first, second) is None
    assert letter_difference(NAMES, first, third) == (
        "spark lacks a dead letter that local has: stage a, '3'"
    )


async def test_run_without_letters_lacks_those_of_the_other(tmp_path: Path) -> None:
    """Its folder need not exist."""
    second = await put(tmp_path / "2", ("a b", b"\0"))

    assert letter_difference(NAMES, tmp_path / "1", tmp_path / "1") is None
    assert letter_difference(NAMES, tmp_path / "1", second) == (
        "local lacks a dead letter that spark has: stage a b, '\\x00'"
    )


# --- what is shown -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (b"plain", "'plain'"),
        ("é€𝄞".encode(), "'é€𝄞'"),
        (b"a\tb\r\0\x1b[31m", r"'a\tb\r\x00\x1b[31m'"),
        (b"\xff\xfe", r"'\xff\xfe'"),
        ("\u202e".encode(), r"'\u202e'"),
        (b"x" * 80, f"'{'x' * 80}'"),
        (b"x" * 81, f"'{'x' * 80}'..."),
        ("𝄞".encode() * 81, f"'{'𝄞' * 80}'..."),
    ],
)
def test_message_is_escaped_and_cut(message: bytes, text: str) -> None:
    """No control characters reach a terminal."""
    assert shown(message) == text


def test_long_messages_are_shown_where_they_part() -> None:
    """Eighty equal characters would show nothing."""
    head = b"x" * 1000
    assert difference([head + b"1" + head], [head + b"2"], ordered=True) == (
        f"message 1 differs: local has ...'{'x' * 20}1{'x' * 59}'...,"
        f" spark has ...'{'x' * 20}2'"
    )


def test_message_that_begins_like_the_other_parts_at_its_end() -> None:
    """Where one message is a prefix of the other, no byte differs."""
    assert difference([b"one"], [b"one two"], ordered=True) == (
        "message 1 differs: local has 'one', spark has 'one two'"
    )
