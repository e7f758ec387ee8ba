"""The testing kit's machine, over journals in memory, in a folder, and of a broker."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from etlstage.journal import (
    Broker,
    CommittedReader,
    FolderStorage,
    Journals,
    MemoryStorage,
)
from etlstage.journal.storage import Storage
from etlstage.sequencing import Append, AppendUncertain, Checkpoint, OrderedSection
from etlstage.testing.journal import JournalMachine
from tests.dice import diced
from tests.journal.gateway import running

FIELDS: dict[str, Any] = {"partitions": 2, "segment": 700, "keep": "read"}


class Stored(JournalMachine):
    """A machine with a named reader, whose position decides what is kept."""

    storage: Storage

    def open(self) -> Journals:
        """Open the set of journals."""
        return Journals(storage=self.storage, name="orders", **FIELDS)

    def read(self, journals: Journals, position: Checkpoint | None) -> CommittedReader:
        """Continue reading under the same name."""
        return journals.read_committed(
            "r", ring=self.ring, commit_every=None, position=position
        )

    def __init__(self) -> None:
        super().__init__()
        self.ring = 3

    @rule(ring=st.sampled_from([0, 1, 3, 100]))
    def choose_ring(self, ring: int) -> None:
        """Set the number of messages that the next reader may hold."""
        self.ring = ring

    @rule()
    def trim(self) -> None:
        """Drop the segments that the reader's recorded position has passed."""
        if self._position is not None:
            self._reader.commit(self._position)  # type: ignore[attr-defined]
        self._appender.trim()  # type: ignore[attr-defined]

    def tear(self, journals: Journals, writer: int) -> None:
        """Leave the beginning of a group after the last whole group."""
        folder = f"part-{writer % 2:03}"
        # A writer would cut a torn tail that another one has left.
        log = Journals(storage=self.storage, name="orders").log(f"orders/{folder}")
        segment, _, _ = log._recovered()
        self.storage.append(f"{folder}/{segment:020}.log", b"ETJ1torn")

    def close(self, journals: Journals) -> None:
        """Close the set."""
        journals.close()


class InMemory(Stored):
    def __init__(self) -> None:
        super().__init__()
        self.memory = self.storage = MemoryStorage()

    @rule(written=st.integers(0, 200))
    def fill_disk(self, written: int) -> None:
        """Let the next append fail after some bytes are written."""
        error = OSError(28, "No space left on device")
        # A writer gives up when ten appends in a row have failed.
        if len(self.memory.faults) < 9:
            self.memory.faults.append(("append", error, written))

    def teardown(self) -> None:
        """Clear the faults, and finish."""
        self.memory.faults.clear()
        super().teardown()

    def tear(self, journals: Journals, writer: int) -> None:
        """Leave a torn tail, after clearing faults that would prevent that."""
        self.memory.faults.clear()
        super().tear(journals, writer)


class InFolder(Stored):
    def __init__(self) -> None:
        super().__init__()
        self._folder = TemporaryDirectory()
        self.storage = FolderStorage(Path(self._folder.name) / "orders")

    def teardown(self) -> None:
        """Finish, and remove the folder."""
        super().teardown()
        self.storage.close()
        self._folder.cleanup()


class AtBroker(JournalMachine):
    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        names = "orders/part-000", "orders/part-001"
        self._gateway = self._stack.enter_context(running(*names))

    def open(self) -> Journals:
        """Open the broker's journals."""
        broker = Broker(self._gateway.url, retry_for=0)
        return Journals(broker, partitions=2)

    def read(self, journals: Journals, position: Checkpoint | None) -> CommittedReader:
        """Read on from the position, holding one message at a time."""
        return journals.read_committed(position=position, ring=1)

    def close(self, journals: Journals) -> None:
        """Close the connections."""
        journals.close()

    @rule(fault=st.sampled_from(["lost", "dropped"]))
    def lose(self, fault: str) -> None:
        """Let the next append get lost, or only the response to it."""
        self._gateway.faults["PUT"].append(fault)

    def teardown(self) -> None:
        """Finish, and stop the gateway."""
        super().teardown()
        self._stack.close()


class Late:
    """An append whose failure is only known when it is awaited."""

    done = True

    def __init__(self, journal: str, error: Exception) -> None:
        self.journal = journal
        self._error = error

    def wait(self) -> None:
        """Raise the error."""
        raise self._error

    def __await__(self) -> Generator[Any, None, None]:
        yield
        self.wait()


class LateSection(NamedTuple):
    """A section whose append is lost, or only its confirmation."""

    section: OrderedSection
    journal: str
    fault: str

    def release(self, *data: bytes) -> Append:
        """Append the data if only the confirmation is lost."""
        if self.fault == "dropped":
            self.section.release(*data).wait()
        else:
            self.section.abandon()
        failed = self.fault == "failed"
        error = OSError(5, "no") if failed else AppendUncertain("no response")
        return Late(self.journal, error)

    def abandon(self) -> None:
        """Append nothing."""
        self.section.abandon()


class LateAppender:
    """Journals whose appends may fail after their section."""

    def __init__(self, journals: Journals) -> None:
        self.journals = journals
        self.faults: list[str] = []
        self.partitions = journals.partitions
        self.pending_except = journals.pending_except

    def start_append(self, journal: str) -> OrderedSection:
        """Return a section that has the next fault, if any."""
        section = self.journals.start_append(journal)
        if not self.faults:
            return section
        return LateSection(section, journal, self.faults.pop())


class FailingLate(JournalMachine):
    """A machine whose appends fail in wait() instead of release()."""

    def __init__(self) -> None:
        super().__init__()
        self._storage = MemoryStorage()

    def open(self) -> LateAppender:
        """Open the set of journals."""
        return LateAppender(Journals(storage=self._storage, partitions=2))

    def read(
        self, appender: LateAppender, position: Checkpoint | None
    ) -> CommittedReader:
        """Read on from the position."""
        return appender.journals.read_committed(position=position)

    def close(self, appender: LateAppender) -> None:
        """Close the set."""
        appender.journals.close()

    @rule(fault=st.sampled_from(["lost", "dropped", "failed"]))
    def fail(self, fault: str) -> None:
        """Let the next append fail, get lost, or only its confirmation."""
        self._appender.faults.append(fault)  # type: ignore[attr-defined]


def test_append_that_fails_late_is_not_taken_for_committed() -> None:
    """Only an uncertain one may be delivered, and a failed one not again (issue 24)."""
    run_state_machine_as_test(
        FailingLate,
        settings=settings(deadline=None, max_examples=50, stateful_step_count=20),
    )


@pytest.mark.parametrize(
    ("machine", "examples"), [(InMemory, 100), (InFolder, 12), (AtBroker, 12)]
)
def test_each_message_once(machine: type[JournalMachine], examples: int) -> None:
    """Readers get each message once, whichever writers and readers crash, and when."""
    run_state_machine_as_test(
        machine,
        settings=settings(deadline=None, max_examples=examples, stateful_step_count=40),
    )


_ONE: Final = {"writer": range(3)}
_SOME: Final = {"count": range(1, 5)}
ACTS: Final[Mapping[str, Mapping[str, Sequence[int]]]] = {
    "publish_uncommitted": _ONE,
    "commit": _ONE,
    "publish_committed": _ONE,
    "repeat": {"writer": range(3), "count": range(1, 6)},
    "roll_back": _ONE,
    "crash_writer": _ONE,
    "take": _SOME,
    "crash_reader": _SOME,
    "crash_all": {},
    "choose_ring": {"ring": (0, 1, 3, 100)},
    "trim": {},
    "fill_disk": {"written": range(201)},
}
"""The rules of the machine in memory, and the values to draw their arguments from."""
_MARKED: Final = "hypothesis_stateful_rule"
"""The attribute that Hypothesis sets on a rule."""


def test_no_rule_is_left_to_hypothesis_alone() -> None:
    """The test with dice, below, must know every rule, too."""
    rules = {
        name for name in dir(InMemory) if hasattr(getattr(InMemory, name), _MARKED)
    }
    assert rules == ACTS.keys()


@pytest.mark.slow
@pytest.mark.timeout(600)
@diced(40)
def test_each_message_once_at_length(dice: Random) -> None:
    """
    Run the machine many times, driven by dice instead of Hypothesis.

    As with Hypothesis, each run uses only some of the rules: if everything crashes all
    the time, hardly any transaction gets long.
    """
    acts = [act for act in ACTS for _ in range(dice.choice([0, 1, 1, 4]))] or [*ACTS]
    machine = InMemory()
    machine.start()
    for _ in range(50):
        act = dice.choice(acts)
        drawn = {name: dice.choice(values) for name, values in ACTS[act].items()}
        getattr(machine, act)(**drawn)
    machine.teardown()
