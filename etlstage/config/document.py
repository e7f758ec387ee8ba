"""
The data of a pipeline file, with the place of everything in it.

All scalars are text, exactly as written: the model decides what is a number. So
``1.10`` in a worker's environment stays ``1.10`` and ``yes`` stays ``yes``. Only those
of an inline JSON Schema have the types of JSON: there, ``1`` is not ``"1"``.
``reading.py`` reads the data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from etlstage.errors import ConfigError, Excerpt
from etlstage.settings.problem import Loc, Problem, dotted

__all__ = ("Document", "FilePlace", "LocatedProblem", "SourceText", "Value", "excerpt")

Value: TypeAlias = "str | float | list[Value] | dict[str, Value] | None"

CREDENTIALS: Final = frozenset(
    {"config", "endpoint", "env", "leases", "options", "remote", "staging"}
)
"""Keys of what may hold credentials; so may any URL."""


class FilePlace(NamedTuple):
    """A point in a file, counted from 1."""

    line: int
    column: int
    source: int = 0
    """Index of the file, or of the value that was set, in the document's sources."""


class SourceText(NamedTuple):
    """Where data come from."""

    name: str
    lines: Sequence[str] = ()
    """The lines, if it is a file."""


class LocatedProblem(NamedTuple):
    """One thing that is wrong with the data."""

    place: FilePlace
    loc: Loc
    text: str


@dataclass
class Document:
    """
    Holds a file's data and the place of each piece of it.

    Attributes:
        path: The file, as the user named it.
        folder: What relative paths are relative to; absolute.
        sources: The file, and what is laid over it.
        keys: Places of mapping keys and list items.
        values: Places of values.
        secrets: Texts as written, where interpolated values must never be shown.
        hidden: All values that were interpolated, with the references to them.
        broken: Locations of invalid values, which have been reported already.

    """

    path: Path
    folder: Path
    sources: list[SourceText] = field(default_factory=list, repr=False)
    data: dict[str, Value] = field(default_factory=dict, repr=False)
    keys: dict[Loc, FilePlace] = field(default_factory=dict)
    values: dict[Loc, FilePlace] = field(default_factory=dict)
    secrets: dict[Loc, str] = field(default_factory=dict)
    hidden: dict[str, str] = field(default_factory=dict, repr=False)
    broken: set[Loc] = field(default_factory=set)
    problems: list[LocatedProblem] = field(default_factory=list)

    def complain(self, loc: Loc, text: str, *, at_key: bool = False) -> None:
        """
        Record a problem, unless the value at ``loc`` has been reported already.

        What is not in the file has the place of the nearest thing around it.
        """
        if loc not in self.broken:
            places = self.keys if at_key else self.values
            place = places.get(loc) or self._nearest(loc)
            self.problems.append(LocatedProblem(place, loc, text))

    def where(self, loc: Loc) -> str:
        """Return the file, line and column of the value at ``loc``."""
        place = self.values.get(loc) or self._nearest(loc)
        return f"{self.sources[place.source].name}:{place.line}:{place.column}"

    def secret(self, loc: Loc) -> bool:
        """Return whether anything at ``loc`` or below was interpolated: a secret."""
        return loc in self._around_secrets

    def placeholder(self, problem: Problem) -> str:
        """Return what the error shows in place of the value; empty: the value."""
        if self.secret(problem.loc):
            return "an interpolated value"
        place = self.values.get(problem.loc)
        if place is None or self.sources[place.source].lines:
            return ""  # a file's line is shown below its error anyway
        private = CREDENTIALS & {*problem.loc} or "://" in str(problem.value)
        return "the value given" if private else ""

    def written(self, loc: Loc) -> list[str]:
        """Return the texts of the list at ``loc`` as they were before interpolation."""
        found: Value = self.data
        for step in loc:
            found = found[step]  # type: ignore[index]
        assert isinstance(found, list)
        return [self.secrets.get((*loc, i), str(t)) for i, t in enumerate(found)]

    def finish(self, problems: Iterable[Problem]) -> None:
        """Report all problems at once; raises ConfigError if there are any."""
        for problem in problems:
            text = problem.shown(instead=self.placeholder(problem))
            self.complain(problem.loc, text, at_key=problem.at_key)
        self.check()

    def check(self) -> None:
        """
        Raise all recorded problems.

        Raises:
            ConfigError: If there are any; one line for each, in the order of the file.

        """
        if self.problems:
            ordered = sorted(
                dict.fromkeys(self.problems),
                key=lambda p: (p.place.source, p.place, str(p.loc)),
            )
            raise ConfigError(
                [self._line(problem) for problem in ordered],
                [excerpt(self.sources[p.place.source].lines, p.place) for p in ordered],
            )

    def forget(self, replaced: Collection[Loc]) -> None:
        """Drop what earlier sources have at the replaced locations, and below."""
        last = len(self.sources) - 1

        def gone(loc: Loc, place: FilePlace | None) -> bool:
            return (place is None or place.source < last) and any(
                loc[:n] in replaced for n in range(1, len(loc) + 1)
            )

        if not replaced:
            return
        self.problems = [p for p in self.problems if not gone(p.loc, p.place)]
        self.broken = {at for at in self.broken if not gone(at, self.values.get(at))}
        for at in [at for at in self.secrets if gone(at, self.values.get(at))]:
            del self.secrets[at]
        for places in (self.keys, self.values):
            for at in [at for at, place in places.items() if gone(at, place)]:
                del places[at]

    @cached_property
    def _around_secrets(self) -> frozenset[Loc]:
        """The locations of secrets, and all that these are below, once all is read."""
        return frozenset(at[:n] for at in self.secrets for n in range(len(at) + 1))

    def _line(self, problem: LocatedProblem) -> str:
        place, loc, text = problem
        source, where = self.sources[place.source], dotted(loc)
        at = f":{place.line}:{place.column}" if source.lines else ""
        if not where or source.name == f"--set {where}":
            return f"{source.name}{at}: {text}"
        return f"{source.name}{at}: {where}: {text}"

    def _nearest(self, loc: Loc) -> FilePlace:
        while loc:
            if loc in self.keys:
                return self.keys[loc]
            loc = loc[:-1]
        return FilePlace(1, 1)


def excerpt(lines: Sequence[str], place: FilePlace) -> Excerpt | None:
    """Return the line of a place, if there is one."""
    if not 0 < place.line <= len(lines):
        return None
    return Excerpt(lines[place.line - 1], place.line, place.column)
