"""A third-party end: the lines of a file."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path

from etlstage.config.end import End, SinkKeys, Site, SourceKeys
from etlstage.config.model import ExtractKeys, LoadKeys
from etlstage.config.presence import Look
from etlstage.messages import Position, Run
from etlstage.pipeline.interfaces import Output, Sink, Source
from etlstage.settings.problem import Loc, Problem
from etlstage.settings.units import Argument


class LineSource(Source):
    """Reads lines."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name)
        self._path = path

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield all lines as one run."""
        yield self._path.read_bytes().splitlines()


class LineSink(Sink):
    """Appends lines."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name)
        self._path = path

    async def write(self, run: Run) -> None:
        """Append a run."""
        self.account.received += len(run)
        with self._path.open("ab") as file:
            file.writelines(message + b"\n" for message in run)
        self.account.done += len(run)

    def landed(self) -> str:
        """Return how many lines were appended."""
        return f"{self.account.done} lines"

    def output(self) -> Output:
        """Return the file."""
        return Output("file", str(self._path))


@dataclass(frozen=True, kw_only=True, slots=True)
class LineSourceKeys(SourceKeys):
    """A file whose lines are messages."""

    path: Argument
    """Where it is, relative to the file's folder."""

    def missing(self, loc: Loc, look: Look) -> Iterator[Problem]:
        """Yield a problem if the file does not exist."""
        place = look.path(self.path)
        if place is not None and not place.is_file():
            yield look.absent((*loc, "path"), "file", place)

    def source(self, stage: ExtractKeys, site: Site) -> Source:
        """Return the source that reads the file."""
        return LineSource(stage.name, site.folder / self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class LineSinkKeys(SinkKeys):
    """A file that messages are appended to as lines."""

    path: Argument
    """Where it goes, relative to the file's folder."""

    def about(self, stage: LoadKeys, site: Site) -> Iterator[tuple[str, str]]:
        """Yield the path, for the plan."""
        yield "path", str(site.folder / self.path)

    def sink(self, stage: LoadKeys, site: Site) -> Sink:
        """Return the sink that appends to the file."""
        return LineSink(stage.name, site.folder / self.path)


LINES = End("lines", LineSourceKeys, LineSinkKeys)
