"""The machine of the kit, over journals in memory, in a folder, and of a broker."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
from etlstage.sequencing import Checkpoint
from etlstage.testing.journal import JournalMachine
from tests.journal.gateway import running

FIELDS: dict[str, Any] = {"partitions": 2, "segment": 700, "keep": "read"}


class Stored(JournalMachine):
    """Has a named reader, whose position is what is kept."""

    storage: Storage

    def open(self) -> Journals:
        """Open the set."""
        return Journals(storage=self.storage, name="orders", **FIELDS)

    def read(self, journals: Journals, position: Checkpoint | None) -> CommittedReader:
        """Read on under the name."""
        return journals.read_committed(
            "r", ring=self.ring, commit_every=None, position=position
        )

    def __init__(self) -> None:
        super().__init__()
        self.ring = 3

    @rule(ring=st.sampled_from([0, 1, 3, 100]))
    def choose_ring(self, ring: int) -> None:
        """Have the next reader hold so much."""
        self.ring = ring

    @rule()
    def trim(self) -> None:
        """Drop what the reader has recorded."""
        if self._position is not None:
            self._reader.commit(self._position)  # type: ignore[attr-defined]
        self._appender.trim()  # type: ignore[attr-defined]

    def tear(self, journals: Journals, writer: int) -> None:
        """Leave the beginning of a group behind the last that is whole."""
        folder = f"part-{writer % 2:03}"
        # Who appends cuts what another has left.
        log = Journals(storage=self.storage, name="orders").log(f"orders/{folder}")
        segment, _, _ = log._recovered()
        self.storage.append(f"{folder}/{segment:020}.log", b"ETJ1torn")

    def close(self, journals: Journals) -> None:
        """Close it."""
        journals.close()


class InMemory(Stored):
    def __init__(self) -> None:
        super().__init__()
        self.memory = self.storage = MemoryStorage()

    @rule(written=st.integers(0, 200))
    def fill_disk(self, written: int) -> None:
        """Have the next append fail, with some of it written."""
        error = OSError(28, "No space left on device")
        self.memory.faults.append(("append", error, written))

    def teardown(self) -> None:
        """Have no more errors to come."""
        self.memory.faults.clear()
        super().teardown()

    def tear(self, journals: Journals, writer: int) -> None:
        """Do it where the disk has room."""
        self.memory.faults.clear()
        super().tear(journals, writer)


class InFolder(Stored):
    def __init__(self) -> None:
        super().__init__()
        self._folder = TemporaryDirectory()
        self.storage = FolderStorage(Path(self._folder.name) / "orders")

    def teardown(self) -> None:
        """Remove it."""
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
        """Open its journals."""
        broker = Broker(self._gateway.url, retry_for=0)
        return Journals(broker, partitions=2)

    def read(self, journals: Journals, position: Checkpoint | None) -> CommittedReader:
        """Read, of each journal some bytes at a time."""
        return journals.read_committed(position=position, ring=1)

    def close(self, journals: Journals) -> None:
        """Close the connections."""
        journals.close()

    @rule(fault=st.sampled_from(["lost", "dropped"]))
    def lose(self, fault: str) -> None:
        """Have the answer to the next append lost, or the append."""
        self._gateway.faults["PUT"].append(fault)

    def teardown(self) -> None:
        """End it."""
        super().teardown()
        self._stack.close()


@pytest.mark.parametrize(
    ("machine", "examples"), [(InMemory, 100), (InFolder, 12), (AtBroker, 12)]
)
def test_each_message_once(machine: type[JournalMachine], examples: int) -> None:
    """Whoever dies, and wherever; a reader's work is what its position covers."""
    run_state_machine_as_test(
        machine,
        settings=settings(deadline=None, max_examples=examples, stateful_step_count=40),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_message_once_at_length() -> None:
    """A thousand runs of the machine."""
    run_state_machine_as_test(
        InMemory,
        settings=settings(deadline=None, max_examples=1000, stateful_step_count=50),
    )
