"""Keys that the ends with rows have in common, and the bounds of epochs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from etlstage.config.end import Keys, SinkKeys, Site, SourceKeys, located
from etlstage.errors import guess
from etlstage.messages import counted
from etlstage.pipeline.delivery.delivery import Bounds
from etlstage.pipeline.delivery.folder import EDGES, WAITING
from etlstage.settings.ddl import DDL, columns_of
from etlstage.settings.definition import broken, judged
from etlstage.settings.kind import Choice, Schema
from etlstage.settings.problem import Loc, Problem
from etlstage.settings.units import Count, Duration, Location, Size, local_path

if TYPE_CHECKING:
    from etlstage.config.model import ExtractKeys, LoadKeys, PipelineKeys
    from etlstage.config.presence import Look

__all__ = ("EpochKeys", "RowSinkKeys", "RowSourceKeys", "absent_input", "plain")

MANY: Final = set("*?[{")
"""Characters that make a path a pattern of files."""
_OWN: Final = ("dead_letters", "checkpoint", EDGES, *WAITING)
"""Folders of a state directory that have files of the state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochKeys(Keys):
    """How much is written in one epoch."""

    messages: Count = 1_000_000
    """Maximum number of messages; with exactly-once an epoch may exceed it, see
    etlstage plan."""
    bytes: Size = 128 << 20
    """Maximum number of bytes, unless a single message is longer; with exactly-once an
    epoch may exceed it, see etlstage plan."""
    seconds: Duration = 60.0
    """How long messages wait for an epoch to fill up, with exactly-once."""

    def text(self, pipeline: PipelineKeys) -> str:
        """Return how much an epoch covers on engine local."""
        size = self.shown("bytes")
        return f"{counted(self.messages, 'message')} or {size}{_uncut(pipeline)}"

    def bounds(self) -> Bounds:
        """Return the bounds of an epoch."""
        return Bounds(messages=self.messages, bytes=self.bytes, seconds=self.seconds)


class Missing(Choice):
    """What becomes of messages without a column; null is read as the word ``null``."""

    def __init__(self) -> None:
        super().__init__("missing", {"dead_letter": "dead_letter", "null": "null"})

    def read(self, value: Any) -> Any:  # noqa: ANN401 - as Kind has it
        return super().read("null" if value is None else value)

    def schema(self) -> Schema:
        found = super().schema()
        return {"anyOf": [*found["anyOf"], {"type": "null"}]}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSourceKeys(SourceKeys):
    """The keys of an end whose rows become messages."""

    rows: ClassVar[bool] = True
    path: Location | None = None
    """Path to read, relative to the pipeline file's folder."""
    format: str | None = None
    """Format of the rows."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the format."""
    schema_: Annotated[str, DDL] | None = None
    """Columns, as in "id long, title string"; required for a stream of files."""
    message: str | None = None
    """Column that is the message; by default the only column if it is text or binary,
    else all columns as JSON, with nulls."""
    key: str | None = None
    """Column that is the key, for order: key of the next stage."""

    def about(self, stage: ExtractKeys, site: Site) -> Iterator[tuple[str, str]]:
        """Yield where it is, and what a row becomes."""
        if self.path:
            yield "path", located(self.path, site.folder)
        by_default = "the only column if it is text or binary, else all as JSON"
        yield "message", self.message or by_default
        if self.key:
            yield "key", self.key
        if self.schema_:
            yield "schema", " ".join(self.schema_.split())

    @property
    def keyed(self) -> bool:
        """Whether there is a key beside each message."""
        return self.key is not None

    def wrong(self, stage: ExtractKeys, pipeline: PipelineKeys) -> Iterator[Problem]:
        """Yield the problem of ``every`` on an engine that reads only once."""
        if stage.every is not None and pipeline.engine != "streaming":
            text = "is only for a worker on engine local, or for engine streaming"
            yield broken(("extract", "every"), text)

    def cut(self, pipeline: PipelineKeys, messages: int, size: int) -> tuple[int, int]:
        """Return the most messages and bytes of a run, so that epochs keep bounds."""
        once = pipeline.delivery == "exactly-once"
        most = pipeline.load.end.bounds(pipeline.load) if once else Bounds()
        return min(messages, most.messages), min(size, most.bytes)

    def not_once(self, stage: ExtractKeys, pipeline: PipelineKeys) -> Iterator[str]:
        """Yield nothing: each row has a position."""
        yield from ()

    def goes_on(self, stage: ExtractKeys) -> bool:
        """Return True: each row has a position."""
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSinkKeys(SinkKeys):
    """The keys of an end where messages become rows."""

    rows: ClassVar[bool] = True
    path: Location | None = None
    """Path to write, relative to the pipeline file's folder."""
    format: str = "parquet"
    """Format of the rows."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the format."""
    mode: Literal["append", "overwrite", "error"] = "error"
    """What to do if there is output already: add to it (append), replace it
    (overwrite), or fail (error)."""
    schema_: Annotated[str, DDL] | None = None
    """Columns made from messages, which are JSON objects; by default a single column,
    value, the message as text."""
    missing_: Annotated[str, Missing()] = "dead_letter"
    """What becomes of a message that lacks a column which may not be null."""
    extra: Literal["dead_letter", "ignore"] = "ignore"
    """What becomes of a message with a field that is not a column."""
    partition_by: tuple[str, ...] = ()
    """Columns that become folders."""
    epoch: EpochKeys = field(default_factory=EpochKeys)
    """How much is written in one epoch."""

    def found(self, look: Look) -> Path | None:
        """Return where files would be, if that is on this machine."""
        return look.path(self.path) if self.path else None

    def missing(self, loc: Loc, look: Look) -> Iterator[Problem]:
        """Yield output that must not exist or can't be made, and unknown columns."""
        if look.loads and (place := self.found(look)) is not None:
            at = place, (*loc, "path"), look
            yield from judged(self._present(*at))
            yield from [*judged(self._removed(*at))] or judged(self._mingled(*at))
        yield from judged(self._unfolded(loc))

    def _present(self, place: Path, loc: Loc, look: Look) -> Iterator[Problem]:
        # Output of an interrupted load does not keep it from resuming: see the sinks.
        begun = look.engine == "streaming" and os.path.exists(look.state / "checkpoint")
        if self.mode != "error" or not os.path.exists(place) or begun or look.resumes:
            yield from look.unmakeable(loc, place)
            return
        text = "exists already: remove it, or set mode to append or overwrite"
        hidden = f"the output {text}"
        yield Problem(loc, f"{place} {text}", hidden=hidden)

    def _removed(self, place: Path, loc: Loc, look: Look) -> Iterator[Problem]:
        """Yield a problem if the output replaces files that are still needed."""
        if self.mode != "overwrite" or not os.path.isdir(place):
            return
        folder = Path(os.path.realpath(place))
        for at, file, what in look.needed():
            if _is_in(folder, file):
                remedy = f"{what}: set another folder"
                text = f"mode overwrite of {place} would remove {file}, {remedy}"
                hidden = f"mode overwrite would remove {remedy}"
                yield Problem(loc, hidden if look.hides(at) else text, hidden=hidden)
                return

    def _mingled(self, place: Path, loc: Loc, look: Look) -> Iterator[Problem]:
        """Yield a problem if files of the state would be read as rows, or removed."""
        # Unlike resolve(), it raises nothing for a link to itself.
        output, state = (Path(os.path.realpath(path)) for path in (place, look.state))
        replaces = self.mode == "overwrite"
        if output == state:
            how = "is"
        elif output in state.parents:
            # The default state is in .etlstage, which readers skip.
            skipped = look.keys.state is None or _is_hidden(state.relative_to(output))
            if skipped and not replaces:
                return
            how = "contains"
        elif state in output.parents and replaces and _is_own(output, state):
            how = "is in"
        else:
            return
        remedy = "set two folders, neither of them in the other"
        text = f"{place} {how} the state directory {look.state}: {remedy}"
        hidden = f"the output {how} the state directory: {remedy}"
        key = "name" if look.keys.state is None else "state"
        yield Problem(loc, hidden if look.hides((key,)) else text, hidden=hidden)

    def _unfolded(self, loc: Loc) -> Iterator[Problem]:
        """Yield the columns that can't be folders."""
        schema = columns_of(self.schema_ or "value string")
        columns = [column.name for column in schema]
        for i, name in enumerate(self.partition_by):
            if name not in columns:
                expected = f", expected one of {', '.join(columns)}"
                yield Problem(
                    (*loc, "partition_by", i),
                    f"no column {{got}} in the schema{guess(name, columns) or expected}",
                    name,
                    hidden=f"no such column in the schema{expected}",
                )
            elif name in self.partition_by[:i]:
                at = *loc, "partition_by", i
                yield Problem(at, "column {got} appears twice", name)
            elif name.startswith("."):
                text = (
                    "can't be a folder: readers ignore names that begin with a dot;"
                    " rename the column"
                )
                yield broken((*loc, "partition_by", i), text, at_key=False)
        if set(columns) <= set(self.partition_by):
            text = "leaves no column for the files themselves"
            yield broken((*loc, "partition_by"), text)

    def about(self, stage: LoadKeys, site: Site) -> Iterator[tuple[str, str]]:
        """Yield where it goes, what becomes columns, and how much is written at once."""
        if self.path:
            yield "path", located(self.path, site.folder)
        yield "mode", self.mode
        by_default = "value, the message as text"
        yield "columns", " ".join((self.schema_ or by_default).split())
        if self.partition_by:
            yield "folders by", ", ".join(self.partition_by)
        yield "epoch", self._epoch(site.pipeline)
        if self.schema_:
            yield "errors", stage.on_error.text(retries=False)

    def _epoch(self, pipeline: PipelineKeys) -> str:
        if pipeline.engine == "local":
            return self.epoch.text(pipeline)
        what = (
            "a batch of the stream"
            if pipeline.engine == "streaming"
            else "the whole run"
        )
        return f"{what}, undivided"

    def bounds(self, stage: LoadKeys) -> Bounds:
        """Return the bounds of an epoch."""
        return self.epoch.bounds()

    def again(self, engine: str) -> str:
        """Return what the mode does with existing output."""
        texts = {
            "append": "may load some messages twice",
            "overwrite": "replaces what was loaded",
            "error": "is refused if there is output",
        }
        if engine == "local":
            return texts[self.mode]
        return f"{texts[self.mode]}; a run that fails before loading loads nothing"

    def written(self, stage: LoadKeys, site: Site) -> dict[str, Any]:
        """Return the settings of a sink of rows, and for messages that fit no row."""
        return {
            "schema": self.schema_,
            "missing": self.missing_,
            "extra": self.extra,
            "name": stage.name,
            "on_error": stage.on_error,
            "dead_letters": site.letters,
        }


def _uncut(pipeline: PipelineKeys) -> str:
    """Return how an epoch may exceed its bounds because its source can't be cut."""
    if pipeline.delivery != "exactly-once":
        return ""
    extract = pipeline.extract.name
    if pipeline.extract.offsets is not None:
        return (
            f", but the messages from a range of {pipeline.extract.offsets.step:,}"
            f" offsets of {extract} can't be divided: for smaller epochs set"
            " extract.offsets.step"
        )
    if pipeline.transform:
        return f" of {extract}; outputs of the same message are not divided"
    return ""


def _is_in(folder: Path, path: Path) -> bool:
    """Return whether a path, or what it links to, is a folder without links or in it."""
    # A link in the folder is removed, too, wherever its target is.
    at = os.path.realpath(path), os.path.join(os.path.realpath(path.parent), path.name)
    return any(folder in (Path(found), *Path(found).parents) for found in at)


def _is_hidden(path: Path) -> bool:
    """Return whether readers skip a path, because of a name in it."""
    return any(name.startswith((".", "_")) for name in path.parts)


def _is_own(output: Path, state: Path) -> bool:
    """Return whether the output is in a folder that holds files of the state."""
    first = output.relative_to(state).parts[0]
    return any(fnmatchcase(first, pattern) for pattern in _OWN)


def plain(path: str) -> str:
    """Return a path without a scheme, which files of this machine may have."""
    return str(local_path(path) or path)


def absent_input(
    path: str, place: Path | None, loc: Loc, look: Look
) -> Iterator[Problem]:
    """Yield a problem if a source has no files at ``place``."""
    from etlstage.files.find import matching

    if place is None or "\\" in path:
        return  # Hadoop knows escapes, glob does not.
    if not MANY & set(path):
        if not os.path.exists(place):
            yield look.absent((*loc, "path"), "file or folder", place)
    elif not matching(plain(path), str(look.folder)):
        yield look.absent((*loc, "path"), "file that matches", place)
