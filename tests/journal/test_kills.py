"""Writers and readers are killed, and each reader still gets each message once."""

from __future__ import annotations

from pathlib import Path

import pytest

from etlstage.journal import Journals, RunMessage
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.retry import Settled
from tests.journal.victims import append, count_of, divide, follow, pipe, relay, served

pytestmark = pytest.mark.process

RUN = "application/x-etlstage-run"


def check_writers(path: Path, kills: int) -> None:
    """Kill two applications at any time, often enough; then check all messages."""
    Journals.open(path, partitions=3, segment=100_000).close()
    with served(1, kills, path) as victims:
        running = {name: victims.start(append, str(path), name) for name in "ab"}
        while running:
            name = victims.chance.choice(sorted(running))
            # Short intervals, as both must be killed until the end.
            if victims.kill(running[name], victims.chance.uniform(0.02, 0.06)):
                del running[name]
            else:
                running[name] = victims.start(append, str(path), name)
    wanted = [(name, n) for name in "ab" for n in range(count_of(path, name))]
    with Journals.open(path) as journals:
        for ring in (16, 8192):
            found = [
                (envelope.message["w"], envelope.message["n"])  # type: ignore[index]
                for envelope in journals.read_committed(ring=ring)
            ]
            assert sorted(found) == wanted
    assert victims.kills >= kills


def check_pipelines(path: Path, kills: int) -> None:
    """Kill two pipelines that append, and two that read what those append."""
    Journals.open(path, partitions=3, segment=100_000, content_type=RUN).close()
    with served(2, kills, path) as victims:
        works = {name: (pipe, str(path), name) for name in "ab"}
        works |= {name: (relay, str(path), name) for name in "xy"}
        running = {name: victims.start(*work) for name, work in works.items()}
        # A writer that ends well is complete; a reader only if it started after that.
        last = {"a", "b"}
        while running:
            name = victims.chance.choice(sorted(running))
            child = running.pop(name)
            ended = victims.kill(child, victims.chance.uniform(0.02, 0.2))
            if ended and name in last:
                continue
            running[name] = victims.start(*works[name])
            if not running.keys() & {"a", "b"}:
                last.add(name)
    assert victims.kills >= kills
    wanted = sorted(f"{w} {n}" for w in "ab" for n in range(count_of(path, w)))
    for name in "xy":
        found = []
        with Journals.open(f"{path}-out-{name}") as journals:
            for envelope in journals.read_committed():
                assert isinstance(envelope.message, RunMessage)
                found += [m.decode().rpartition(" ")[0] for m in envelope.message.run]
        assert sorted(found) == wanted


def check_durable_edges(path: Path, kills: int) -> None:
    """Kill a runner with two durable edges at any time; then check all messages."""
    with served(4, kills, path) as victims:
        while True:
            child = victims.start(divide, str(path))
            if victims.kill(child, victims.chance.uniform(0.1, 0.4)):
                break
    count = count_of(path, "a")
    refused = {n for n in range(count) if n % 100 == 7}
    found = []
    with Journals.open(path) as journals:
        for envelope in journals.read_committed():
            assert isinstance(envelope.message, RunMessage)
            found += [message.decode().split() for message in envelope.message.run]
    assert {len(words) for words in found} == {5}
    loaded = sorted(int(words[1]) for words in found)
    assert loaded == [n for n in range(count) if n not in refused]
    letters = Settled(Path(f"{path}-state") / "dead_letters")
    dead = [
        (stage, int(letter.message.split()[1]))
        for stage in letters.stages
        for letter in letters.letters(stage)
        if isinstance(letter, DeadLetter)
    ]
    stages = ("one", "two", "three")
    assert sorted(dead) == sorted((stages[n // 100 % 3], n) for n in refused)
    assert victims.kills >= kills


def test_reader_that_is_killed_gets_at_most_two_messages_again(tmp_path: Path) -> None:
    """
    No message is missing, and the killed reader's name is free again.

    A position is stored for each message; the one that is stored when a message is
    requested covers only the messages before it.
    """
    path = tmp_path / "orders"
    Journals.open(path, partitions=2).close()
    out = Path(f"{path}-read-r")
    with served(3, 5, path) as victims:
        Path(f"{path}-enough").touch()
        victims.kill(victims.start(append, str(path), "a"), 60)
        assert not victims.kills
        Path(f"{path}-enough").unlink()
        while victims.kills < 5:
            child = victims.start(follow, str(path), "r")
            before = out.stat().st_size if out.exists() else 0
            for _ in range(1500):
                if (out.stat().st_size if out.exists() else 0) >= before + 30:
                    break
                child.join(0.01)
            assert not victims.kill(child, 0)
    with Journals.open(path) as journals:
        rest = [
            f"{e.message['w']} {e.message['n']}"  # type: ignore[index]
            for e in journals.read_committed("r")
        ]
    found = out.read_text().split("\n")[:-1] + rest
    assert set(found) == {f"a {n}" for n in range(200)}
    assert len(found) - len(set(found)) <= 2 * victims.kills


def test_writers_that_are_killed(tmp_path: Path) -> None:
    """Kill writers a few times; each message is read once."""
    check_writers(tmp_path / "orders", 10)


def test_pipelines_that_are_killed(tmp_path: Path) -> None:
    """Kill pipelines a few times; each reader has each message once."""
    check_pipelines(tmp_path / "orders", 10)


def test_runner_with_durable_edges_that_is_killed(tmp_path: Path) -> None:
    """Kill it a few times; each message and dead letter is there once (issue 24)."""
    check_durable_edges(tmp_path / "out", 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_writers_that_are_killed_many_times(tmp_path: Path) -> None:
    """Kill writers 200 times; each message is read once."""
    check_writers(tmp_path / "orders", 200)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pipelines_that_are_killed_many_times(tmp_path: Path) -> None:
    """Kill pipelines 200 times; each reader has each message once."""
    check_pipelines(tmp_path / "orders", 200)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runner_with_durable_edges_that_is_killed_many_times(tmp_path: Path) -> None:
    """Kill it 200 times; each message and dead letter is there once."""
    check_durable_edges(tmp_path / "out", 200)
