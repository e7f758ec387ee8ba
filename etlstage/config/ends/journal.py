"""Journals as ends; what reads and writes journals is imported only to build them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from etlstage.config.end import (
    End,
    Keys,
    SinkKeys,
    Site,
    SourceKeys,
    unrecorded,
    without_arrow,
)
from etlstage.config.ends.row import EpochKeys
from etlstage.messages import counted
from etlstage.pipeline.delivery.delivery import EDGE_BOUNDS, Bounds
from etlstage.pipeline.delivery.folder import READER
from etlstage.pipeline.journal_settings import (
    Appending,
    reader_problems,
    remote_problems,
    start_of,
    start_problems,
)
from etlstage.settings.definition import Section, broken
from etlstage.settings.kind import Flag, Maybe, Schema
from etlstage.settings.problem import Loc, Problem, unexpected
from etlstage.settings.units import Argument, Count, Location

if TYPE_CHECKING:
    from etlstage.config.model import ExtractKeys, LoadKeys, PipelineKeys
    from etlstage.config.presence import Look
    from etlstage.pipeline.edge import DurableEdge
    from etlstage.pipeline.interfaces import Sink, Source

__all__ = (
    "JOURNAL",
    "Durable",
    "DurableKeys",
    "EdgeSinkKeys",
    "EdgeSourceKeys",
    "JournalSinkKeys",
    "JournalSourceKeys",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalSourceKeys(SourceKeys):
    """A set of journals to read, each committed message once."""

    path: Location
    """Folder of the set, relative to the pipeline file's folder."""
    reader: Argument
    """Name of the reader in the set, which keeps what this reader has not read yet."""
    from_: Argument = "beginning"
    """Where a new reader begins: beginning, end, or a time such as
    2026-11-23T18:00:00Z. Of a transaction that is open there, only the messages after
    that place are read."""
    follow: bool = False
    """Whether to wait for more messages at the end, until stopped."""
    on_damage: Literal["stop", "skip"] = "stop"
    """What to do about damaged bytes and malformed messages: stop, or dead-letter them
    and read what follows (skip)."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return the contradictions among the given values."""
        yield from remote_problems(given)
        yield from reader_problems(given)
        yield from start_problems(given)

    def missing(self, loc: Loc, look: Look) -> Iterator[Problem]:
        """Yield a problem if there is no set of journals."""
        yield from without_arrow(loc)
        place = look.path(self.path)
        if place is not None and not os.path.exists(place / "spec.json"):
            remedy = "; the first pipeline that appends to it creates it"
            yield look.absent((*loc, "path"), "set of journals", place, remedy=remedy)

    def reads(self, look: Look) -> Iterator[Path]:
        """Yield the file that makes the folder a set of journals."""
        place = look.path(self.path)
        yield from [place / "spec.json"] if place else ()

    def text(self) -> str:
        """Return where it is."""
        return f"journals in {self.path}"

    def about(self, stage: ExtractKeys, site: Site) -> Iterator[tuple[str, str]]:
        """Yield where it is, and who reads it."""
        yield "path", str(site.folder / self.path)
        yield "reader", self.reader
        yield "from", f"{self.from_}, if no position is stored"
        yield "end", "waits for more" if self.follow else "ends once all was read"

    def edge(self, stage: ExtractKeys, site: Site) -> str | None:
        """Return where messages wait."""
        return f"journals on disk in {site.folder / self.path}, one run in memory"

    def held(self, engine: str) -> int:
        """Return the bytes held for open transactions: 16 frames."""
        return 64 << 20

    def source(self, stage: ExtractKeys, site: Site) -> Source:
        """Return the source that reads the journals."""
        from etlstage.pipeline.journal_source import CUT, JournalSource

        cut = CUT
        if site.pipeline.delivery == "exactly-once":
            # So that epochs keep to their bounds.
            load = site.pipeline.load
            bounds = load.end.bounds(load)
            cut = bounds.messages, bounds.bytes
        return JournalSource(
            site.folder / self.path,
            name=stage.name,
            reader=self.reader or None,
            start=start_of(self.from_),
            follow=self.follow,
            skips=self.on_damage == "skip",
            cut=cut,
            meter=site.meter,
        )

    def wrong(self, stage: ExtractKeys, pipeline: PipelineKeys) -> Iterator[Problem]:
        """Yield the problem of ``every``: journals have ``follow`` in its place."""
        if stage.every is not None:
            yield broken(
                ("extract", "every"), "is not for journals: use journal.follow"
            )

    def not_once(self, stage: ExtractKeys, pipeline: PipelineKeys) -> Iterator[str]:
        """Yield nothing: each message has a position."""
        yield from ()

    def goes_on(self, stage: ExtractKeys) -> bool:
        """Return True: the next run reads what came since."""
        return True

    def tried(self) -> JournalSourceKeys:
        """Return the keys without the reader, whose position belongs to real runs."""
        return replace(self, reader="", follow=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class DurableKeys(Appending, Keys):
    """
    Journals in the state, in which what leaves a stage waits for the next.

    The pipeline is two then, which run together or apart, and what is waiting outlives
    a run.
    """

    partitions: Count = 1
    """Number of journals; with more than one, messages with different keys may overtake
    each other."""
    keep: str = "read"
    """What is kept besides messages that were not loaded yet: a time such as 7d, a size
    such as 100GiB (a maximum, as whole segments of 64 MiB are dropped), or read for
    nothing."""

    @classmethod
    def unfold(cls, value: Any) -> Any:  # noqa: ANN401 - whatever a user wrote
        """Return true as an empty mapping."""
        return {} if value in ("true", True) else value

    @classmethod
    def short_forms(cls) -> list[Schema]:
        """Describe true and false."""
        return [Flag().schema()]

    def text(self) -> str:
        """Return which journals it has, and what they keep."""
        how = f", by {self.key}, {self.mapping}" if self.key else ""
        kept = "until they are loaded" if self.keep == "read" else f"for {self.keep}"
        limit = f", up to {self.limit} unread" if self.limit else ""
        return (
            f"{counted(self.partitions, 'journal')} on disk{how}; messages kept"
            f" {kept}{limit};"
        )


class Durable(Maybe):
    """The keys of a durable edge, or None if the edge is not durable."""

    def __init__(self) -> None:
        super().__init__(Section.of(DurableKeys))

    def read(self, value: Any) -> Any:  # noqa: ANN401, D102 - as Kind has it
        if isinstance(value, str) and value not in ("true", "false"):
            raise unexpected("true, false or a mapping", value)
        return None if value in ("false", False) else super().read(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalSinkKeys(Appending, SinkKeys):
    """A set of journals to append to, which any number of pipelines read."""

    path: Location
    """Folder of the set, relative to the pipeline file's folder; a new set is
    created."""
    partitions: Count | None = None
    """Number of journals: of a new set, by default 1; must match that of an existing
    set."""
    keep: str | None = None
    """What a new set keeps besides what readers have not read: a time such as 7d, a
    size such as 100GiB (a maximum, as whole segments of 64 MiB are dropped), or read
    for nothing; by default everything."""
    epoch: EpochKeys | None = None
    """How much is appended and committed at once, for exactly-once."""

    def missing(self, loc: Loc, look: Look) -> Iterator[Problem]:
        """Yield why the set can't be made, if it can't."""
        yield from without_arrow(loc)
        if look.loads and (place := look.path(self.path)) is not None:
            yield from look.unmakeable((*loc, "path"), place)

    def text(self) -> str:
        """Return where it is."""
        return f"journals in {self.path}"

    def about(self, stage: LoadKeys, site: Site) -> Iterator[tuple[str, str]]:
        """Yield where it is, and how messages are assigned to its journals."""
        yield "path", str(site.folder / self.path)
        if self.partitions is not None:
            yield "partitions", str(self.partitions)
        yield "journal", f"by {self.key}, {self.mapping}" if self.key else "in turn"
        if self.keep or self.limit:
            limit = f"; up to {self.limit} unread by a reader" if self.limit else ""
            yield "keep", f"{self.keep or 'all'}{limit}"
        if site.pipeline.delivery == "exactly-once":
            yield "epoch", (self.epoch or EpochKeys()).text(site.pipeline)

    def wrong(self, stage: LoadKeys, pipeline: PipelineKeys) -> Iterator[Problem]:
        """Yield the problem of bounds for epochs if there are no epochs."""
        if self.epoch is not None and pipeline.delivery != "exactly-once":
            where = "load", "journal", "epoch"
            yield broken(where, "needs delivery: exactly-once")

    def bounds(self, stage: LoadKeys) -> Bounds:
        """Return the bounds of an epoch."""
        return (self.epoch or EpochKeys()).bounds()

    def held(self, engine: str) -> int:
        """Return the bytes that are appended at once."""
        return 1 << 20

    def sink(self, stage: LoadKeys, site: Site) -> Sink:
        """Return the sink that appends messages."""
        return self._sink(stage, site, notes=False)

    def not_once(self, stage: LoadKeys, pipeline: PipelineKeys) -> Iterator[str]:
        """Yield what the record of epochs needs."""
        yield from unrecorded(pipeline)

    def promise(self, stage: LoadKeys, pipeline: PipelineKeys) -> str | None:
        """Return how an epoch is committed."""
        if pipeline.delivery != "exactly-once":
            return None
        return (
            "exactly once: readers see an epoch once it is recorded, and nothing of an"
            " unrecorded one"
        )

    def notes(self, pipeline: PipelineKeys) -> bool:
        """Return whether the set has the record of a retry."""
        return pipeline.delivery == "exactly-once"

    def retry_sink(self, stage: LoadKeys, site: Site, number: int) -> Sink:
        """Return a sink that stores the record of a retry, too."""
        return self._sink(stage, site, notes=True)

    def _sink(self, stage: LoadKeys, site: Site, *, notes: bool) -> Sink:
        from etlstage.pipeline.journal_sink import JournalSink

        return JournalSink(
            site.folder / self.path,
            name=stage.name,
            notes=notes,
            **self.given("key", "mapping", "partitions", "keep", "limit", "sync"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeSourceKeys(JournalSourceKeys):
    """The journals of a durable edge, read until the half before it has ended."""

    reader: Argument = READER
    """The name of the half after the edge as a reader."""
    follow: bool = True
    """Whether it waits for the half before the edge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeSinkKeys(JournalSinkKeys):
    """The journals of a durable edge, which only its two halves use."""

    def durable(self, stage: str, folder: Path, before: Path) -> DurableEdge:
        """
        Return the edge, which both halves share.

        Args:
            stage: Name of the stage whose messages wait.
            folder: The folder of the file.
            before: State directory of the half that appends.

        """
        from etlstage.pipeline.edge import DurableEdge

        given = self.given("key", "mapping", "keep", "limit", "sync", "partitions")
        return DurableEdge(stage, before, (folder / self.path).parent, **given)

    def _sink(self, stage: LoadKeys, site: Site, *, notes: bool) -> Sink:
        assert site.state is not None
        name = stage.name.partition("/")[0]
        return self.durable(name, site.folder, site.state).sink(notes=notes)

    def bounds(self, stage: LoadKeys) -> Bounds:
        """Return small bounds: the half after the edge waits for each epoch."""
        return EDGE_BOUNDS


JOURNAL: Final = End("journal", JournalSourceKeys, JournalSinkKeys)
"""Append-only logs in a folder."""
