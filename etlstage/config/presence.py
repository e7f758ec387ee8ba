"""
Check that what a pipeline file names exists on this machine.

Programs and scripts are looked up where their worker will run: in its ``cwd`` and on
the PATH that it will have. What may be on other machines is not looked up: programs of
remote executors, and what a remote session reads and writes.

Like ``rules.py``, this works with a pipeline that could be read only in part.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from etlstage.config.document import Document
from etlstage.config.end import SCHEME, name_of, without_arrow
from etlstage.config.ends.journal import EdgeSinkKeys
from etlstage.config.model import ExtractKeys, LoadKeys, PipelineKeys
from etlstage.config.parts import parts_of
from etlstage.config.stages import command_at
from etlstage.errors import ConfigError, EtlstageError, guess
from etlstage.pipeline.delivery.folder import EDGES, behind, edge_name
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.protocol.base import Limits, Side
from etlstage.settings.definition import broken, judged
from etlstage.settings.problem import Loc, Problem, dotted
from etlstage.stage import Stage, WorkerProgram
from etlstage.stage.stage import PYTHONS
from etlstage.supervisor.contract import checker_of, with_schema
from etlstage.supervisor.process import (
    HEAD,
    absent_from_path,
    interpreter_in,
    names,
    runs,
    script,
    search_path,
    uninterpreted,
)
from etlstage.transport.launcher import UnknownIdentity, look_up

if TYPE_CHECKING:
    from etlstage.pipeline.edge import DurableEdge

__all__ = ("Look", "missing", "unspoken")

SCRIPTS: Final = {".sh": "sh", ".js": "node", ".mjs": "node", ".rb": "ruby"}
"""The programs to suggest for scripts without a shebang."""

COMPARED: Final = 50_000
"""Number of existing names after which no more are compared with missing ones."""

FILE_SYSTEM: Final = "spark.hadoop.fs.defaultFS"
CONFIGURED: Final = ("HADOOP_CONF_DIR", "SPARK_CONF_DIR")
"""Environment variables of Spark settings that may place such paths elsewhere."""


def missing(
    keys: PipelineKeys, document: Document, *, loads: bool
) -> Iterator[Problem]:
    """
    Yield what does not exist, and output that exists and should not.

    Args:
        keys: What could be read of the pipeline file.
        document: The file.
        loads: Whether anything is to be loaded.

    """
    look = Look(keys, document, loads=loads)
    yield from judged(look.shipped())
    yield from judged(look.jars())
    if loads and "state" in document.data:
        yield from judged(_state(look))
        yield from judged(_edges(keys, look))
    for end in (keys.extract, keys.load):
        yield from judged(_absent(end, look))
        yield from judged(look.worker(end.stage, (end.kind.value,)))
    for i, stage in enumerate(getattr(keys, "transform", ())):
        yield from judged(look.worker(stage.stage, ("transform", i)))
        # A stage that could not be read has no attribute durable.
        if getattr(stage, "durable", None) is not None:
            yield from without_arrow(("transform", i, "durable"))


def _state(look: Look) -> Iterator[Problem]:
    yield from look.unmakeable(("state",), look.state)


def _edges(keys: PipelineKeys, look: Look) -> Iterator[Problem]:
    """Yield what can't be changed while messages wait in journals."""
    left = {waiting.name: waiting for waiting in behind(look.state)}
    if not left:
        return
    numbers = {s.name: n for n, s in enumerate(keys.transform) if s.durable is not None}
    for edge in look.edges():
        left.pop(edge.behind.name, None)
        if (changed := edge.changed()) is not None:
            loc = ("transform", numbers[edge.stage], "durable", changed.setting)
            yield broken(loc, str(changed), at_key=False)
    for folder in left.values():
        from etlstage.pipeline.edge import DurableEdge  # few need Arrow

        stage = folder.name.removeprefix(EDGES.removesuffix("*"))
        before = _before(stage, folder, look.state)
        if waiting := DurableEdge(stage, before, folder).busy():
            text = f"stage {stage} was durable, and {waiting}"
            yield broken(("state",), text, at_key=False)


def _before(stage: str, folder: Path, state: Path) -> Path:
    """Return the state directory of the part that ended at a removed edge."""
    others = [other for other in (*behind(state), state) if other != folder]
    # The part that reads from the edge has an account of it, too. And what is left of
    # an earlier edge, removed before this one, may have an account that has ended.
    records = {
        other: record
        for other in others
        if edge_name(stage) in (record := CommitRecord.latest(other)).accounts
    }
    return max(records, key=lambda other: records[other].interrupted, default=state)


def _absent(stage: ExtractKeys | LoadKeys, look: Look) -> Iterator[Problem]:
    yield from stage.end.missing((stage.kind.value, name_of(stage.end)), look)


def unspoken(keys: PipelineKeys, document: Document) -> Iterator[tuple[Loc, str]]:
    """Yield the dialects that can't be used here because a package is missing."""
    for loc, stage in keys.stages():
        if Look(keys, document).runs_here and stage.stage is not None:
            try:
                stage.stage.dialect.open(Side.SUPERVISOR, Limits())
            except ConfigError as error:
                yield (*loc, "dialect"), str(error)


class Look:
    """Looks up what a pipeline needs on this machine."""

    def __init__(
        self, keys: PipelineKeys, document: Document, *, loads: bool = True
    ) -> None:
        self.keys = keys
        """What could be read of the file."""
        self.loads = loads
        """Whether anything is to be loaded."""
        self._document = document
        self.folder: Path = document.folder
        """The folder of the file."""
        self.engine: str = getattr(keys, "engine", "local")
        """The engine that runs the stages."""
        self._compared = 0

    @property
    def reads_here(self) -> bool:
        """Whether a path without a scheme is one of this machine."""
        session = self.keys.spark
        elsewhere = any(map(os.environ.get, CONFIGURED))
        return session.here and FILE_SYSTEM not in session.config and not elsewhere

    @property
    def runs_here(self) -> bool:
        """Whether workers run on this machine."""
        return self.engine == "local" or self.keys.spark.here

    # --- programs -------------------------------------------------------------------

    def shipped(self) -> Iterator[Problem]:
        """Yield the problems of files and archives that can't be sent to executors."""
        for loc, path, _ in self.keys.spark.shipped():
            place = self.folder / path
            if os.path.isdir(place):
                yield broken(loc, "is a folder: make an archive of it", at_key=False)
            elif not os.path.isfile(place):
                yield self.absent(loc, "file", place)

    def jars(self) -> Iterator[Problem]:
        """Yield the jars that do not exist, which Spark only warns of."""
        listed = self.keys.spark.config.get("spark.jars", "")
        jars = listed.split(",") if self.keys.spark.here else []
        for jar in jars:
            place = jar.strip().removeprefix("file://").removeprefix("file:")
            # A relative path is relative to the directory in which Spark's JVM was
            # started, our own. Spark expands patterns, and other schemes are remote.
            named = place and "*" not in place and not SCHEME.match(place)
            if named and not os.path.isfile(place):
                relative = not os.path.isabs(place)
                remedy = "; relative paths are resolved from where etlstage is started"
                yield self.absent(
                    ("spark", "config", "spark.jars"),
                    "file",
                    Path(place),
                    remedy=remedy if relative else "",
                )

    def worker(self, stage: Stage | None, loc: Loc) -> Iterator[Problem]:
        """Yield what keeps the worker of the stage at ``loc`` from being started."""
        if stage is not None:
            yield from judged(self._contract(stage, (*loc, "expect")))
        if self.runs_here and stage is not None:
            at = (*loc, "worker")
            yield from judged(self._worker(stage.program, at))
            yield from judged(self._identity(stage.program, at))

    def _contract(self, stage: Stage, loc: Loc) -> Iterator[Problem]:
        """Yield why replies can't be checked against the contract of a stage."""
        try:
            checker_of(with_schema(stage, self.folder, self._names))
        except ConfigError as error:
            text = str(error).partition("expect.schema")[2].removeprefix(": ").strip()
            yield Problem((*loc, "schema"), text, hidden="can't be used")

    def _worker(self, worker: WorkerProgram, loc: Loc) -> Iterator[Problem]:
        at = command_at(self._document, loc[:-1])
        folder = self.folder / (worker.cwd or "")
        if worker.cwd is not None and not os.path.isdir(folder):
            yield self.absent((*loc, "cwd"), "folder", folder)
            return
        words = list(worker.command)
        if any(self._is_unpacked(folder, word) for word in words):
            return
        hides = self._document.secret((*loc, "cwd"))
        for problem in chain(
            judged(self._program((*at, 0), words[0], folder, worker)),
            self._script(at, words, folder),
        ):
            yield problem._replace(text=problem.hidden) if hides else problem

    def _identity(self, worker: WorkerProgram, loc: Loc) -> Iterator[Problem]:
        user, group = worker.user, worker.group
        # Each is looked up alone, the user with a valid group, to report both problems.
        for key, who in (("user", (user, group and "0")), ("group", (None, group))):
            try:
                look_up(*who)
            except UnknownIdentity as error:
                hidden = f"there is no such {key}"
                yield Problem((*loc, key), str(error), hidden=hidden)

    def _program(
        self, loc: Loc, program: str, folder: Path, worker: WorkerProgram
    ) -> Iterator[Problem]:
        if program in PYTHONS or "{" in program:
            return
        if "/" in program:
            text = self._flaw(program, folder)
        else:
            path = worker.env.get("PATH", search_path())
            text = absent_from_path(program, folder, path, PYTHONS, self._names)
        if text:
            hidden = "can't be run here; not shown, as it may be a secret"
            yield Problem(loc, text, hidden=hidden)

    def _script(self, loc: Loc, command: list[str], folder: Path) -> Iterator[Problem]:
        if (i := script(command)) is not None and not runs(folder / command[i]):
            yield self.absent((*loc, i), "file", folder / command[i], seen_from=folder)

    def _is_unpacked(self, folder: Path, word: str) -> bool:
        """Return whether a word is a path in an archive, unpacked on executors."""
        if self.engine == "local":
            return False
        path = os.path.normpath(folder / word)
        return any(
            f"{path}/".startswith(f"{os.path.normpath(self.folder / name)}/")
            for loc, _, name in self.keys.spark.shipped()
            if loc[1] == "archives"
        )

    # --- paths ----------------------------------------------------------------------

    def path(self, path: str) -> Path | None:
        """Return the place of a path, or None if it is not on this machine."""
        path = path.removeprefix("file://").removeprefix("file:")
        return None if SCHEME.match(path) else self.folder / path

    @property
    def state(self) -> Path:
        """Where runs keep their state."""
        return self.folder / (self.keys.state or f".etlstage/{self.keys.name}")

    def needed(self) -> Iterator[tuple[Loc, Path, str]]:
        """Yield what a load must not remove: the key of it, if any, its path, its role."""
        # Values that were set have no lines.
        files = [source.name for source in self._document.sources if source.lines]
        for n, file in enumerate(files):
            yield (), Path(file), "an overlay" if n else "the pipeline file"
        source = self.keys.extract.end
        key = "extract", name_of(source), "path"
        for read in source.reads(self):
            yield key, read, "a file that the extract stage reads"
        for loc, stage in self.keys.stages():
            if stage.stage is None:
                continue
            hides = self.hides((*loc, "name"))
            who = dotted(loc) if hides else f"stage {stage.name}"
            if isinstance(schema := stage.stage.expect.schema, Path):
                at = *loc, "expect", "schema"
                yield at, self.folder / schema, f"the schema of {who}"
            if self.runs_here:
                program, at = stage.stage.program, (*loc, "worker")
                folder = self.folder / (program.cwd or "")
                yield at, folder, f"the folder of {who}"
                for word in program.command:
                    if os.path.isfile(folder / word):
                        yield at, folder / word, f"a file in the command of {who}"

    def edges(self) -> Iterator[DurableEdge]:
        """Yield the durable edges, in order."""
        # What could not be read is left out of the keys.
        stages = getattr(self.keys, "transform", ())
        if all(getattr(stage, "durable", None) is None for stage in stages):
            return
        for part in parts_of(self.keys):
            if isinstance(end := part.load.end, EdgeSinkKeys):
                before = self.folder / str(part.state)
                yield end.durable(part.transform[-1].name, self.folder, before)

    @property
    def resumes(self) -> bool:
        """Whether a run resumes an interrupted load."""
        edges = [*self.edges()]
        state = edges[-1].behind if edges else self.state
        # Unusable state is reported when a run reads it to resume.
        with suppress(EtlstageError):
            if edges:
                from etlstage.pipeline.edge import is_over  # few need Arrow

                if is_over(edges):
                    return False  # the last part reads on, for another load
            return CommitRecord.latest(state).resumes
        return False

    # --- problems -------------------------------------------------------------------

    def hides(self, loc: Loc) -> bool:
        """Return whether a key's value must not be shown, as it may be a secret."""
        return bool(loc) and self._document.secret(loc)

    def absent(
        self,
        loc: Loc,
        what: str,
        place: Path,
        *,
        seen_from: Path | None = None,
        remedy: str = "",
    ) -> Problem:
        """Return the problem of a missing path, with a suggestion or a remedy."""
        hidden = f"there is no such {what.removesuffix(' that matches')}"
        text = f"there is no {what} {place.absolute()}"
        beside = seen_from and self.folder / os.path.relpath(place, seen_from)
        if beside and os.path.isfile(beside):
            text += f"; {beside} exists, but a command is relative to cwd"
        else:
            others = [name for name in self._names(place.parent) if name != place.name]
            text += guess(place.name, others) or remedy
        return Problem(loc, text, hidden=hidden)

    def _names(self, folder: Path) -> list[str]:
        """Return the names in a folder to compare with one that is missing."""
        if self._compared >= COMPARED:
            return []  # with thousands of problems all of it would take minutes
        found = names(folder)
        self._compared += len(found)
        return found

    def unmakeable(self, loc: Loc, place: Path) -> Iterator[Problem]:
        """Yield why the folder at ``place`` can't be made, or written to."""
        there = place
        while not os.path.lexists(there) and there != there.parent:
            there = there.parent
        if not os.path.isdir(there):
            flaw = "is not a folder"
        elif not os.access(there, os.W_OK | os.X_OK):
            flaw = "can't be written to"
        elif limit := _exceeded(place, there):
            flaw = f"can't have names of more than {limit} bytes"
        else:
            return
        text = f"can't create {place}: " if there != place else ""
        hidden = "can't be created or written to; not shown, as it may be a secret"
        yield Problem(loc, f"{text}{there} {flaw}", hidden=hidden)

    def _flaw(self, program: str, folder: Path) -> str | None:
        if not os.path.exists(path := folder / program):
            return self.absent((), "file", path, seen_from=folder).text
        return _flaw(program, path)


def _exceeded(place: Path, there: Path) -> int | None:
    """Return the limit of ``there``, in bytes, that a name in ``place`` exceeds."""
    limit = os.pathconf(there, "PC_NAME_MAX")
    parts = place.parts[len(there.parts) :]
    longest = max((len(os.fsencode(name)) for name in parts), default=0)
    return limit if 0 < limit < longest else None


def _flaw(program: str, path: Path) -> str | None:
    """Return why the system would not run the file, worded like an error of a start."""
    if os.path.isdir(path):
        return f"{path} is a folder, not a program"
    if not os.access(path, os.X_OK):
        return f"{path} is not executable; run: chmod +x {shlex.quote(str(path))}"
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError:
        return None  # it may be run, but not read
    if head.startswith(b"#!"):
        if (found := interpreter_in(head)) and not os.path.exists(found):
            return uninterpreted(path, found)
    elif b"\0" not in head:
        first = f"[{SCRIPTS.get(path.suffix, 'python')}, {program}]"
        return (
            f"{path} has no #! line that names its interpreter; add one,"
            f" or name it in the command, as in {first}"
        )
    return None
