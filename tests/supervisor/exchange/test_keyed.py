"""Messages that keep their order per key, or have no order."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from contextlib import aclosing

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.errors import LocalProtocolError, WorkerRefusal
from etlstage.messages import AnnotatedRun, Position, Result
from etlstage.stage import Order, RestartPolicy, Stage
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.exchange import Outcome
from etlstage.supervisor.exchange.keyed import Lanes, key_text, keys_of, point
from etlstage.supervisor.exchange.submission import Collected
from tests.patience import HANG
from tests.supervisor.acts import acting, in_memory
from tests.supervisor.exchange.test_dispatch import stage as silent
from tests.supervisor.refusing import refusing
from tests.supervisor.workers import QUICK, numbers, outputs, stage

NO = WorkerRefusal("no", stage="t", code=0, reason="no")


def keyed(key: str | None = "/id", workers: int = 3) -> Stage:
    """Return a stage that is never started, ordered by key."""
    return silent(order=Order.KEY, key=key, workers=workers)


# --- keys ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pointer", "tokens"),
    [("", ()), ("/", ("",)), ("/a/0", ("a", "0")), ("/a~1b/m~0n", ("a/b", "m~n"))],
)
def test_pointer_is_read_as_the_rfc_has_it(
    pointer: str, tokens: tuple[str, ...]
) -> None:
    """Tokens between slashes, with two escapes."""
    assert point(pointer) == tokens


@pytest.mark.parametrize(
    ("pointer", "left", "right", "same"),
    [
        ("/id", b'{"id": 1}', b'{"x": 0, "id": 1}', True),
        ("/id", b'{"id": 1}', b'{"id": 2}', False),
        ("/id", b'{"id": {"a": 1, "b": 2}}', b'{"id": {"b": 2, "a": 1}}', True),
        ("/a/1", b'{"a": [1, 2]}', b'{"a": [3, 2]}', True),
        ("", b'"x"', b'"y"', False),
        ("/id", b"no json", b'{"other": 1}', True),
        ("/id", b"[]", b"7", True),
        ("/id", b"[" * 100_000, b"{}", True),
    ],
)
def test_key_is_what_the_pointer_points_at(
    pointer: str, left: bytes, right: bytes, same: bool
) -> None:
    """Messages without the key share one."""
    one, other = keys_of(keyed(pointer), [left, right])

    assert (one == other) is same


@pytest.mark.parametrize(
    ("token", "found"),
    [
        ("0", "1"),
        ("10", "11"),
        ("11", None),
        ("-1", None),
        ("01", None),
        ("0_1", None),
        (" 1", None),
        ("+1", None),
        ("\u0661", None),
        ("-", None),
        ("", None),
        ("1" * 5000, None),
    ],
)
def test_index_of_a_list(token: str, found: str | None) -> None:
    """It has no sign, no leading zero, and nothing but digits (issue 22)."""
    message = json.dumps(list(range(1, 12))).encode()
    assert key_text(message, (token,)) == found


def test_keys_can_be_beside_the_messages() -> None:
    """A source may annotate its messages with keys."""
    assert keys_of(keyed(None), AnnotatedRun([b"a", b"b"], key=[5, 6])) == [5, 6]


def test_no_keys_at_all_are_refused() -> None:
    """The error shows the remedy."""
    with pytest.raises(
        LocalProtocolError,
        match="stage t: order key needs keys: set key to a JSON pointer",
    ):
        keys_of(keyed(None), [b"a"])


# --- lanes ---------------------------------------------------------------------------


def test_lane_belongs_to_one_worker() -> None:
    """Messages with the same key are in the same lane."""
    lanes = Lanes(keyed(None), 3, lambda: None, max_unread=math.inf)
    lanes.feed(AnnotatedRun([b"a", b"b", b"c", b"d"], key=[0, 1, 3, 2]), 0.0)

    assert all(lane.keyed for lane in lanes.lanes)
    taken = [lane.take(9, 99).messages for lane in lanes.lanes]
    assert taken == [[b"a", b"c"], [b"b"], [b"d"]]


@given(
    keys=st.lists(st.integers(-5, 5), max_size=20),
    cuts=st.lists(st.integers(1, 4), min_size=1),
)
def test_answers_know_their_place(keys: list[int], cuts: list[int]) -> None:
    """In any order of replies: places are the caller's, and sizes are accounted for."""
    lanes = Lanes(keyed(None), 3, lambda: None, max_unread=math.inf)
    messages = [b"%d" % n for n in range(len(keys))]
    lanes.feed(AnnotatedRun(messages, key=keys), 0.0)
    lanes.close()
    for lane in lanes.lanes[::-1]:
        while lane.waiting:
            e = lane.take(cuts[lane.waiting % len(cuts)], 99)
            groups = [(m,) if keys[int(m)] else () for m in e.messages]
            noes = [(n, NO) for n, m in enumerate(e.messages) if not keys[int(m)]]
            lane.deliver(
                Outcome(
                    e.start,
                    e.messages,
                    groups,
                    e.size,
                    2 * e.size,
                    refused=refusing(noes),
                )
            )
    answers = [item for item in lanes.collect() if isinstance(item, Outcome)]

    seen = {a.start + n: m for a in answers for n, m in enumerate(a.messages)}
    assert [seen[n] for n in range(len(keys))] == messages
    for answer in answers:
        for m, reply, error in zip(
            answer.messages, answer.replies, answer.errors, strict=True
        ):
            wanted = ((m,), None) if keys[int(m)] else ((), NO)
            assert (reply, error) == wanted
    assert (lanes.finished, lanes.held, lanes.held_bytes) == (True, 0, 0)
    by_key = defaultdict(list)
    for answer in answers:
        for n in range(len(answer.messages)):
            by_key[keys[answer.start + n]].append(answer.start + n)
    assert all(places == sorted(places) for places in by_key.values())


def test_answers_are_cut_where_their_messages_were_not_neighbours() -> None:
    """Adjacent messages stay together."""
    lanes = Lanes(keyed(None), 3, lambda: None, max_unread=math.inf)
    lanes.feed(AnnotatedRun([b"a", b"b", b"c", b"d"], key=[0, 0, 1, 0]), 0.0)
    lane = lanes.lanes[0]
    taken = lane.take(9, 99)
    groups = [(message,) for message in taken.messages]
    lane.deliver(Outcome(taken.start, taken.messages, groups, taken.size))

    parts = [item for item in lanes.collect() if isinstance(item, Outcome)]
    assert [(part.start, list(part.messages)) for part in parts] == [
        (0, [b"a", b"b"]),
        (3, [b"d"]),
    ]


def test_messages_without_a_key_are_counted() -> None:
    """A misspelled pointer must not go unnoticed."""
    lanes = Lanes(keyed(), 3, lambda: None, max_unread=math.inf)
    lanes.feed([b'{"id": 1}', b'{"di": 1}', b"x"], 0.0)

    assert lanes.unkeyed == 2


def busy(backlog: Backlog) -> list[int]:
    """Return how many lanes each of three workers may take from."""
    return [len(backlog.in_turn(n)) for n in range(3)]


def test_lane_has_one_owner() -> None:
    """Two workers must not process one key at once; one that has left owns none."""
    backlog = Backlog()
    for number in range(3):
        backlog.join(number)
    lanes = Lanes(keyed(None), 3, lambda: None, max_unread=math.inf)
    for lane in lanes.lanes:
        backlog.open(lane)
    lanes.feed(AnnotatedRun([b"a", b"b", b"c"], key=[0, 1, 2]), 0.0)
    assert busy(backlog) == [1, 1, 1]
    backlog.leave(0)
    assert sorted(busy(backlog)) == [0, 1, 2]
    backlog.leave(1)
    assert busy(backlog) == [0, 0, 3]
    backlog.leave(2)
    assert busy(backlog) == [0, 0, 0]


def test_lane_moves_to_a_new_worker_only_at_rest() -> None:
    """Its owner finishes what it began, or a later message might overtake it."""
    backlog = Backlog()
    backlog.join(0)
    lanes = Lanes(keyed(None), 3, lambda: None, max_unread=math.inf)
    for lane in lanes.lanes:
        backlog.open(lane)
    lanes.feed(AnnotatedRun([b"a", b"b", b"c"] * 2, key=[0, 1, 2] * 2), 0.0)
    assert busy(backlog) == [3, 0, 0]
    taken = [lane.take(1, 9) for lane in lanes.lanes]
    backlog.join(1)
    assert busy(backlog) == [3, 0, 0]
    for exchange in taken:
        exchange.fail(LocalProtocolError("ended"))
    assert busy(backlog) == [3, 1, 0]
    assert busy(backlog) == [2, 1, 0]


def places(item: Collected) -> list[int] | Position:
    """Return the places of an outcome's messages, or the position."""
    if isinstance(item, Position):
        return item
    return list(range(item.start, item.start + len(item.messages)))


def test_position_waits_for_all_lanes() -> None:
    """It comes after exactly the messages fed before it, in all lanes (issue 14)."""
    lanes = Lanes(keyed(None), 2, lambda: None, max_unread=math.inf)
    lanes.feed(AnnotatedRun([b"a", b"b"], key=[0, 1]), 0.0)
    lanes.mark(Position("here"))
    lanes.feed(AnnotatedRun([b"c"], key=[0]), 0.0)
    lanes.close()
    first, second = (lane.take(1, 9) for lane in lanes.lanes)
    last = lanes.lanes[0].take(1, 9)
    for exchange in first, last:
        exchange.fail(LocalProtocolError("ended"))
    found = [places(item) for item in lanes.collect()]
    assert found == [[0]]
    assert not lanes.finished
    second.fail(LocalProtocolError("ended"))

    assert [places(item) for item in lanes.collect()] == [[1], Position("here"), [2]]
    assert lanes.finished


# --- with workers --------------------------------------------------------------------


def record(key: int, number: int) -> bytes:
    """Return a message with a key."""
    return json.dumps({"id": key, "n": number}).encode()


@in_memory
async def test_stream_in_any_order_does_not_wait_for_the_slow() -> None:
    """One worker holds a message forever; the results of all others come out."""
    run = stage(
        "slow_at", "stuck", 30, workers=2, window=1, order=Order.NONE, timeout=QUICK
    )
    messages = [b"stuck", *numbers(500)]
    seen: list[Result] = []
    with anyio.fail_after(HANG):
        async with (
            acting(run) as supervisor,
            aclosing(supervisor.stream(messages)) as results,
        ):
            async for result in results:
                seen.append(result)
                if len(seen) == 500:
                    break
    assert sorted(outputs(seen)) == sorted((m,) for m in numbers(500))


@in_memory
async def test_stream_by_key_keeps_the_order_of_each_key() -> None:
    """A slow key holds up its own lane, but no other."""
    run = stage(
        "slow_at", "stuck", 30, workers=3, order=Order.KEY, key="/id", timeout=QUICK
    )
    others = [record(key, n) for n in range(200) for key in (1, 2, 3, 4)]
    lane = keys_of(run, [b"stuck"])[0] % 3
    free = [m for m in others if keys_of(run, [m])[0] % 3 != lane]
    assert len(free) >= 200
    seen: list[Result] = []
    with anyio.fail_after(HANG):
        async with (
            acting(run) as supervisor,
            aclosing(supervisor.stream([b"stuck", *others])) as results,
        ):
            async for result in results:
                seen.append(result)
                if len(seen) == len(free):
                    break

    by_key: dict[int, list[int]] = defaultdict(list)
    for (text,) in outputs(seen):
        value = json.loads(text)
        by_key[value["id"]].append(value["n"])
    assert {tuple(ns) for ns in by_key.values()} == {tuple(range(200))}


@in_memory
@pytest.mark.parametrize("order", [Order.NONE, Order.KEY])
async def test_submit_returns_results_in_input_order(order: Order) -> None:
    """Whatever order the stage promises for streams."""
    key = "/id" if order is Order.KEY else None
    messages = [record(n * 7 % 11, n) for n in range(500)]
    async with acting(stage("echo", workers=3, order=order, key=key)) as supervisor:
        results = await supervisor.submit(messages)

    assert [r.message for r in results] == messages
    assert outputs(results) == [(m,) for m in messages]


@in_memory
async def test_key_that_is_missing_fails_the_stream() -> None:
    """It is the caller's mistake."""
    run = stage("echo", workers=2, order=Order.KEY)
    async with acting(run) as supervisor:
        with pytest.raises(LocalProtocolError, match="order key needs keys"):
            await supervisor.submit([b"one"])


@in_memory
async def test_lane_of_a_worker_that_is_given_up_goes_to_others() -> None:
    """Its keys are not lost with it."""
    run = stage(
        "exits_at_word", "end", workers=2, order=Order.KEY, restart=RestartPolicy(max=0)
    )
    with anyio.fail_after(HANG):
        async with acting(run) as supervisor:
            (first,) = await supervisor.submit(AnnotatedRun([b"end"], key=[0]))
            assert first.error is not None
            results = await supervisor.submit(
                AnnotatedRun(numbers(100), key=[0, 1] * 50)
            )

    assert outputs(results) == [(n,) for n in numbers(100)]
