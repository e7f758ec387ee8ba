"""Writers and readers that are killed: each message once for each reader."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etlstage.journal import Journals

pytestmark = pytest.mark.process

WRITER = """
import sys
from etlstage.journal import Journals, Publisher
path, name = sys.argv[1:]
# What it has stored: how many messages are committed, and the intents of that.
import json, os, pathlib
state = pathlib.Path(path + "-" + name)
done, intents = json.loads(state.read_text()) if state.exists() else (0, [])
journals = Journals.open(path)
for journal, intent in intents:
    journals.append(journal, bytes.fromhex(intent))
specs = journals.partitions()
publisher = Publisher(
    journals, mapping=lambda m: (specs[m["n"] % len(specs)].name, specs[0].content_type)
)
while done < int(os.environ["COUNT"]):
    for n in range(done, done + 10):
        publisher.publish_uncommitted({"w": name, "n": n})
    done += 10
    built = publisher.build_ack_intents()
    aside = state.with_suffix(".new")
    aside.write_text(json.dumps([done, [[i.journal, i.intent.hex()] for i in built]]))
    aside.replace(state)
    for intent in built:
        journals.append(intent.journal, intent.intent)
"""
READER = """
import json, pathlib, sys
from etlstage.journal import Journals
path, name = sys.argv[1:]
journals = Journals.open(path)
out = open(path + "-read-" + name, "a")
reader = journals.read_committed(name, follow=True, ring=16, commit_every=0)
for envelope in reader:
    out.write(f"{envelope.message['w']} {envelope.message['n']}\\n")
    out.flush()
"""


def run(code: str, *arguments: str, count: int) -> subprocess.Popen[bytes]:
    """Start a program."""
    import os

    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "COUNT": str(count)},
    )


def check_kills(path: Path, kills: int, count: int) -> None:
    """Kill two writers at any time; then read all there is."""
    Journals.open(path, partitions=3, segment=200_000).close()
    chance = random.Random(1)  # noqa: S311
    running = {name: run(WRITER, str(path), name, count=count) for name in "ab"}
    done = 0
    while running:
        name = chance.choice(sorted(running))
        child = running[name]
        if done < kills:
            time.sleep(chance.uniform(0.15, 0.5))
            child.send_signal(signal.SIGKILL)
            done += child.wait() == -signal.SIGKILL
        if child.wait() == 0:
            del running[name]
            continue
        assert child.returncode == -signal.SIGKILL
        running[name] = run(WRITER, str(path), name, count=count)
    with Journals.open(path) as journals:
        for ring in (16, 8192):
            found = [
                (envelope.message["w"], envelope.message["n"])  # type: ignore[index]
                for envelope in journals.read_committed(ring=ring)
            ]
            assert sorted(found) == [(w, n) for w in "ab" for n in range(count)]
    assert done == kills


def test_reader_that_is_killed_gets_at_most_two_messages_again(tmp_path: Path) -> None:
    """
    With a position stored for each message; none is missing, its name is free.

    The position that is stored when a message is asked for is that of the one before.
    """
    path = tmp_path / "orders"
    Journals.open(path, partitions=2).close()
    assert run(WRITER, str(path), "a", count=300).wait() == 0
    kills, out = 0, Path(f"{path}-read-r")
    while kills < 5:
        child = run(READER, str(path), "r", count=0)
        before = out.stat().st_size if out.exists() else 0
        deadline = time.monotonic() + 15
        while (out.stat().st_size if out.exists() else 0) < before + 100:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        child.kill()
        assert child.wait() == -signal.SIGKILL
        kills += 1
    with Journals.open(path) as journals:
        rest = [
            f"{e.message['w']} {e.message['n']}"  # type: ignore[index]
            for e in journals.read_committed("r")
        ]
    found = out.read_text().split("\n")[:-1] + rest
    assert set(found) == {f"a {n}" for n in range(300)}
    assert len(found) - len(set(found)) <= 2 * kills


def test_writers_that_are_killed(tmp_path: Path) -> None:
    """A few times."""
    check_kills(tmp_path / "orders", 4, 2000)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_writers_that_are_killed_many_times(tmp_path: Path) -> None:
    """At any time."""
    check_kills(tmp_path / "orders", 40, 8_000)
