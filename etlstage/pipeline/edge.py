"""
The journals between two halves of a pipeline that is cut at a durable edge.

The half before the edge appends to the journals, and the half after it reads them, as
with any other journals. This module has what concerns both: it counts the messages that
wait there, and ensures that their distribution over the journals changes only while no
messages wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any, Final, Literal, NamedTuple

from etlstage.errors import EtlstageError, StateUnusable
from etlstage.journal import Journals, RunMessage
from etlstage.journal.errors import OffsetGone
from etlstage.journal.reader import begun_in, checkpoint_of
from etlstage.journal.run import RunFraming
from etlstage.messages import counted
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.delivery.folder import JOURNALS, READER, edge_name, make_ours
from etlstage.pipeline.delivery.holder import unheld
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.journal_sink import JournalSink
from etlstage.pipeline.journal_source import CUT, JournalSource
from etlstage.sequencing import Checkpoint

__all__ = (
    "Changed",
    "DurableEdge",
    "Waiting",
    "is_over",
)

# Labels of the journals: how messages are distributed over them.
_LABELS: Final = ("partitions", "key", "mapping")
_LOCK: Final = "edge.lock"
"""File in the folder of the journals that is locked while a half makes them ready."""
_LOOKS: Final = 3
"""Number of attempts to count what waits, besides a last one."""


class Waiting(NamedTuple):
    """What waits in the journals of an edge."""

    messages: int = 0
    bytes: int = 0
    """Bytes of the journals, including uncommitted ones and frame headers."""
    seconds: float = 0.0
    """Seconds since the oldest was appended."""

    def __str__(self) -> str:
        if not self.messages:
            return "no messages wait"
        wait = "waits" if self.messages == 1 else "wait"
        size = f"{self.bytes:,} bytes, the oldest for {self.seconds:.0f} s"
        return f"{counted(self.messages, 'message')} {wait} ({size})"


class Changed(NamedTuple):
    """A setting that is not the one under which waiting messages were appended."""

    setting: str
    was: str
    wanted: str
    why: str

    def __str__(self) -> str:
        return f"was {self.was}, and {self.why}"


class _EdgeSink(JournalSink):
    """Appends to the journals of an edge, which are moved with the state directory."""

    @property
    def recorded(self) -> str:
        """The edge: its journals are wherever the state directory is."""
        return f"edge {self.name}"


class DurableEdge:
    """
    The journals between two halves of a pipeline.

    Args:
        stage: Name of the stage whose messages they hold.
        before: State directory of the half that appends.
        behind: State directory of the half that reads.
        partitions: Number of journals to which messages are appended.
        key: See :class:`~etlstage.pipeline.journal_sink.JournalSink`.
        mapping: Likewise.
        keep: Likewise.
        limit: Likewise.
        sync: Likewise.

    """

    def __init__(
        self,
        stage: str,
        before: Path,
        behind: Path,
        *,
        partitions: int = 1,
        key: str | None = None,
        mapping: Literal["modulo", "rendezvous"] = "modulo",
        keep: str | None = "read",
        limit: str | None = None,
        sync: str = "commit",
    ) -> None:
        self.stage = stage
        self.before = before
        self.behind = behind
        self.path: Path = behind / JOURNALS
        self._mapped: dict[str, Any] = {
            "key": key,
            "mapping": mapping,
            "most": partitions,
        }
        by = (key or "", mapping) if partitions > 1 else ("", "")
        self._wanted = dict(zip(_LABELS, (str(partitions), *by), strict=True))
        self._settings = {"keep": keep, "limit": limit}
        self._sync = sync

    def sink(self, *, notes: bool = False) -> JournalSink:
        """Return the sink of the half before the edge, see :class:`JournalSink`."""
        return _EdgeSink(
            self.path,
            name=edge_name(self.stage),
            sync=self._sync,
            notes=notes,
            **self._mapped,
        )

    def source(self, cut: tuple[int, int] = CUT) -> JournalSource:
        """Return the source of the half after the edge; it ends when the other does."""
        name = edge_name(self.stage)
        return JournalSource(self.path, name=name, reader=READER, follow=True, cut=cut)

    @property
    def exists(self) -> bool:
        """Whether the journals exist."""
        return (self.path / "spec.json").exists()

    @property
    def waits(self) -> bool:
        """Whether the half after the edge has messages to load, or was interrupted."""
        return CommitRecord.latest(self.behind).interrupted or bool(
            self.unread().messages
        )

    @property
    def unfinished(self) -> bool:
        """Whether messages wait, or a load that has an epoch was interrupted."""
        record = CommitRecord.latest(self.behind)
        interrupted = bool(record.epoch) and record.interrupted
        return interrupted or bool(self.unread().messages)

    def settle(self) -> None:
        """Record that the load that ended in the half before the edge is over."""
        with Delivery(self.before) as delivery:
            delivery.settle()

    @property
    def idle(self) -> bool:
        """Whether the half after the edge runs a load of which nothing is left."""
        record = CommitRecord.latest(self.behind)
        if record.ended or not record.epoch or self.unread().messages:
            return False
        with unheld(self.behind) as free:
            return not free

    def renew(self) -> None:
        """
        Let the half after the edge begin another load with what is appended next.

        Raises:
            StateHeld: If that half is running, and continues the previous load.

        """
        # If nothing was loaded there is nothing to do, and that half may be running
        # already, for the load that is about to begin.
        if CommitRecord.latest(self.behind).epoch:
            with Delivery(self.behind) as delivery:
                delivery.renew()

    def changed(self) -> Changed | None:
        """Return the changed setting that can't be changed now, if there is one."""
        if not self.exists:
            return None
        with Journals.open(self.path, create=False) as journals:
            found = _labels(journals)
        for name, wanted in self._wanted.items():
            if found[name] != wanted:
                why = self.busy()
                return (
                    Changed(name, found[name] or "none", wanted, why) if why else None
                )
        return None

    def prepare(self) -> None:
        """
        Create the journals, or adapt them to the settings; commit what is recorded.

        May be called while a run of either half is in progress.

        Raises:
            StateUnusable: If the settings have changed while messages wait, or the
                state can't be used.
            JournalError: If the journals can't be used.

        """
        if (changed := self.changed()) is not None:
            raise StateUnusable(
                f"stage {self.stage}: durable.{changed.setting} {changed}"
            )
        make_ours(self.before)
        make_ours(self.behind)
        with Journals.open(
            self.path,
            content_type=RunFraming.content_type,
            partitions=None if self.exists else int(self._wanted["partitions"]),
            labels=self._wanted,
            **self._settings,
        ) as journals:
            journals.set_retention(**self._settings)
            if _labels(journals) != self._wanted:
                with Delivery(self.before), Delivery(self.behind):
                    missing = int(self._wanted["partitions"]) - len(journals.select())
                    journals.add_partitions(max(0, missing), labels=self._wanted)
            # Both halves may start at the same time, and only one can use the name.
            with journals.storage.locked(_LOCK):
                if READER not in {one.name for one in journals.readers()}:
                    # From now on the journals keep what this reader has not read.
                    journals.read_committed(READER).close()
        self.acknowledge()

    def acknowledge(self) -> bool:
        """
        Commit what the half before the edge has recorded, unless it is running.

        A running half does so by itself. Appending the acknowledgement of its last
        epoch again would also roll back what it has appended since.

        Returns:
            Whether no run of that half is in progress, in any process.

        """
        with unheld(self.before) as free:
            if free and (intents := _intents(CommitRecord.latest(self.before))):
                with Journals.open(self.path, create=False) as journals:
                    for journal, intent in intents:
                        journals.append(journal, bytes.fromhex(intent))
        return free

    def unread(self) -> Waiting:
        """
        Return what is committed there and not recorded as loaded.

        Raises:
            JournalError: If the journals can't be read.

        """
        for _ in range(_LOOKS):
            # The half after the edge has released data since we read its record.
            with suppress(OffsetGone):
                return self._unread()
        return self._unread()

    def _unread(self) -> Waiting:
        if not self.exists:
            return Waiting()
        record, messages, size, seconds = CommitRecord.latest(self.behind), 0, 0, 0.0
        position, begun = Checkpoint({}, []), dict[tuple[str, int], int]()
        if record.position is not None:
            position = checkpoint_of(record.position)
            begun = begun_in(record.position)
        with Journals.open(self.path, create=False) as journals:
            for spec in journals.select():
                log = journals.log(spec.name)
                begin = max(position.offsets.get(spec.name, 0), log.first())
                size += log.end() - begin
                if (first := next(log.groups(begin, skip=True), None)) is not None:
                    seconds = max(seconds, time() - first.time / 1e9)
            if size:
                reader = journals.read_committed(position=position, on_error=_pass)
                while (envelope := reader.poll()) is not None:
                    assert isinstance(envelope.message, RunMessage)
                    messages += len(envelope.message.run)
                    messages -= begun.get((envelope.journal, envelope.begin), 0)
        return Waiting(messages, size, seconds) if messages else Waiting()

    def full(self) -> bool:
        """Return whether so much waits that no more is appended."""
        with Journals.open(self.path, create=False) as journals:
            return not journals.has_room()

    def busy(self) -> str:
        """Return why settings can't be changed now; empty if they can."""
        before, behind = map(CommitRecord.latest, (self.before, self.behind))
        waiting = self.unread()
        # Without an epoch the half behind has loaded nothing that could be half done.
        began = bool(behind.epoch)
        # Without the edge its state directory is that of another part, or of all.
        if edge_name(self.stage) not in before.accounts:
            before = CommitRecord()
        if waiting.messages and before.ended and (behind.ended or not began):
            return f"{waiting}: load them first, with --only-behind {self.stage}"
        if before.interrupted or (began and behind.interrupted):
            return "a run was interrupted: complete it first, with the old settings"
        return ""


def is_over(edges: Sequence[DurableEdge]) -> bool:
    """
    Return whether the load of a pipeline with these edges is over.

    The next run then begins another one. A load that has read nothing yet is not over.

    Raises:
        StateUnusable: If a record can't be read.
        JournalError: If the journals can't be read.

    """
    record = CommitRecord.latest(edges[0].before)
    if not record.epoch or record.resumes:
        return False
    return not any(edge.unfinished for edge in edges)


def _labels(journals: Journals) -> dict[str, str]:
    labels = journals.partitions()[0].labels
    return {name: labels.get(name, "") for name in _LABELS}


def _intents(record: CommitRecord) -> Iterable[tuple[str, str]]:
    return record.intents if isinstance(record.intents, list) else ()


def _pass(_error: EtlstageError) -> None:
    """Skip damage: the pipeline that reads the journals reports it."""
