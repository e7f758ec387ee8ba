"""
How fast are messages sequenced?

Messages of two producers in transactions of about fifty, each queued and dequeued.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from benchmarks.harness import Job, Row, in_turn
from etlstage.sequencing import Envelope, Opaque, Sequencer, build_uuid

COUNT = 200_000


def measure() -> list[Row]:
    """Return messages per second of processor time."""
    envelopes = _envelopes()

    def sequence() -> float:
        began = time.process_time()
        _sequence(envelopes)
        return COUNT / (time.process_time() - began)

    found = in_turn({"sequencer": sequence}, rounds=7)["sequencer"]
    wanted = [250_000.0] * len(found)
    return [
        Row(
            "Sequencer, a frame a message, ring 8192",
            found,
            "wanted",
            wanted,
            "msg/s",
            1,
        )
    ]


def _envelopes() -> list[Envelope]:
    found = []
    for number in range(COUNT):
        message = Opaque()
        producer = b"\1aaaaa" if number % 2 else b"\1bbbbb"
        flags = 2 if number % 100 >= 98 else 1
        message.set_uuid(build_uuid(producer, 160 * (number + 1), flags))
        found.append(Envelope("journal", 100 * number, 100 * number + 100, message))
    return found


def _sequence(envelopes: list[Envelope]) -> None:
    sequencer, count = Sequencer(ring=8192), 0
    queue, dequeue = sequencer.queue_uncommitted, sequencer.deque_committed
    for envelope in envelopes:
        queue(envelope)
        while dequeue() is not None:
            count += 1
    assert count == COUNT


def _job() -> Iterator[Callable[[], object]]:
    envelopes = _envelopes()
    yield lambda: _sequence(envelopes)


JOBS = {"sequencer": Job(COUNT, _job)}
