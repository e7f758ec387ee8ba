"""
What a pipeline file names, and what there is of it on this machine.

Programs and scripts are sought where their worker will run: in its ``cwd``, on the PATH
that it will have. What may be elsewhere is not sought: programs of executors on other
machines, and what a session that is not local reads and writes.

Looks at the data as it was written, whatever its shape, as ``rules.py`` does.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from etlstage.config.document import Document, Value
from etlstage.config.end import SCHEME, ends
from etlstage.config.model import PipelineKeys
from etlstage.config.rules import command_at, mapping, shipped_files, stage_names
from etlstage.config.stages import written_end
from etlstage.errors import ConfigError, guess
from etlstage.protocol.base import Limits, Side
from etlstage.settings.definition import broken
from etlstage.settings.problem import Loc, Problem
from etlstage.stage.stage import PYTHONS
from etlstage.supervisor.process import (
    absent_from_path,
    names,
    runs,
    script,
    search_path,
)
from etlstage.transport.launcher import UnknownIdentity, look_up

__all__ = ("Look", "executors_here", "missing", "unspoken")

SCRIPTS: Final = {".sh": "sh", ".js": "node", ".mjs": "node", ".rb": "ruby"}
"""What runs a script that does not say it."""

HEAD: Final = 4096  # bytes of a program that are looked at
FILE_SYSTEM: Final = "spark.hadoop.fs.defaultFS"
CONFIGURED: Final = ("HADOOP_CONF_DIR", "SPARK_CONF_DIR")
"""What may say that a path without a scheme is not one of this machine."""


def missing(document: Document, *, loads: bool) -> Iterator[Problem]:
    """
    Yield what is not there, and output that is there and should not be.

    Args:
        document: The pipeline file.
        loads: Whether it is to load.

    """
    look = Look(document, loads=loads)
    yield from look.shipped()
    stages = document.data.get("transform")
    for i, stage in enumerate(stages if isinstance(stages, list) else ()):
        if isinstance(stage, dict):
            loc: Loc = ("transform", i, "worker")
            yield from look.worker(_unfolded(stage.get("worker")), loc)
    for key in ("extract", "load"):
        written = mapping(document.data.get(key))
        if (name := written_end(written)) is not None:
            end = ends(others=True)[name]
            role = end.source if key == "extract" else end.sink
            if role is not None:
                yield from role.missing(_unfolded(written[name]), (key, name), look)


def unspoken(keys: PipelineKeys, document: Document) -> Iterator[tuple[Loc, str]]:
    """Yield the dialects that can't be spoken here, for want of a package."""
    stages = (keys.extract, *keys.transform, keys.load)
    for (loc, _), stage in zip(stage_names(document.data), stages, strict=True):
        if Look(document).runs_here and stage.worker is not None:
            try:
                stage.spoken.open(Side.SUPERVISOR, Limits())
            except ConfigError as error:
                yield (*loc, "dialect"), str(error)


def executors_here(document: Document) -> bool:
    """Return whether Spark's executors are on this machine."""
    session = mapping(document.data.get("spark"))
    master = str(session.get("master") or "local").partition("[")[0]
    return session.get("remote") is None and master in ("local", "local-cluster")


class Look:
    """One look at the machine."""

    def __init__(self, document: Document, *, loads: bool = True) -> None:
        self.loads = loads
        """Whether anything is to be loaded."""
        self._document = document
        self._folder = document.folder
        self._data = document.data
        session = mapping(self._data.get("spark"))
        config = mapping(session.get("config"))
        within = executors_here(document)
        elsewhere = FILE_SYSTEM in config or any(map(os.environ.get, CONFIGURED))
        self.reads_here: bool = within and not elsewhere
        """Whether a path without a scheme is one of this machine."""
        self.engine: str = str(self._data.get("engine", "local"))
        """What runs the stages."""
        self._executors_here = within
        self._on_executors = self._data.get("engine") in ("spark", "streaming")
        # On executors an archive is there with its contents, here it is one file.
        self._unpacked = [
            os.path.normpath(self._folder / _there(path))
            for loc, path in shipped_files(session)
            if loc[1] == "archives" and self._on_executors
        ]

    @property
    def runs_here(self) -> bool:
        """Whether workers run on this machine."""
        return self._executors_here or not self._on_executors

    # --- programs -------------------------------------------------------------------

    def shipped(self) -> Iterator[Problem]:
        """Yield what is to be sent to executors and can't be."""
        for loc, path in shipped_files(mapping(self._data.get("spark"))):
            folder, slash, name = path.rpartition("/")
            place = self._folder / (folder + slash + name.partition("#")[0])
            if os.path.isdir(place):
                yield broken(loc, "is a folder: make an archive of it", at_key=False)
            elif not os.path.isfile(place):
                yield self.absent(loc, "file", place)

    def worker(self, written: Mapping[str, Value], loc: Loc) -> Iterator[Problem]:
        """Yield what keeps the worker at ``loc`` from being started."""
        if self.runs_here:
            yield from self._worker(written, loc)
            yield from self._identity(written, loc)

    def _worker(self, worker: Mapping[str, Value], loc: Loc) -> Iterator[Problem]:
        at = command_at(self._data, loc[:-1])
        command, cwd = worker.get("command"), worker.get("cwd")
        if not isinstance(command, list) or not all(_is_text(w) for w in command):
            return
        if cwd is not None and not _is_text(cwd):
            return
        folder = self._folder / str(cwd or "")
        if cwd and not os.path.isdir(folder):
            yield self.absent((*loc, "cwd"), "folder", folder)
            return
        words = [str(word) for word in command]
        if not words or any(self._is_unpacked(folder, word) for word in words):
            return
        hides = self._document.secret((*loc, "cwd"))
        for problem in (
            *self._program((*at, 0), words[0], folder, worker),
            *self._script(at, words, folder),
        ):
            yield problem._replace(text=problem.hidden) if hides else problem

    def _identity(self, worker: Mapping[str, Value], loc: Loc) -> Iterator[Problem]:
        user, group = (
            str(worker[key]) if _is_text(worker.get(key)) else None
            for key in ("user", "group")
        )
        # Each on its own, the user with a group that is right: all is told at once.
        for key, who in (("user", (user, group and "0")), ("group", (None, group))):
            try:
                look_up(*who)
            except UnknownIdentity as error:
                hidden = f"there is no such {key}"
                yield Problem((*loc, key), str(error), hidden=hidden)

    def _program(
        self, loc: Loc, program: str, folder: Path, worker: Mapping[str, Value]
    ) -> Iterator[Problem]:
        if program in PYTHONS or "{" in program:
            return
        if "/" in program:
            text = self._flaw(program, folder)
        else:
            path = mapping(worker.get("env")).get("PATH", search_path())
            text = absent_from_path(program, folder, str(path), PYTHONS)
        if text:
            hidden = "can't be run here; not shown, as it was interpolated"
            yield Problem(loc, text, hidden=hidden)

    def _script(self, loc: Loc, command: list[str], folder: Path) -> Iterator[Problem]:
        if (i := script(command)) is not None and not runs(folder / command[i]):
            yield self.absent((*loc, i), "file", folder / command[i], seen_from=folder)

    def _is_unpacked(self, folder: Path, word: str) -> bool:
        path = os.path.normpath(folder / word)
        return any(f"{path}/".startswith(f"{known}/") for known in self._unpacked)

    # --- paths ----------------------------------------------------------------------

    def path(self, path: str) -> Path | None:
        """Return where a path leads, if that is on this machine."""
        if not path or "\0" in path:
            return None
        path = path.removeprefix("file://").removeprefix("file:")
        return None if SCHEME.match(path) else self._folder / path

    @property
    def state(self) -> Path:
        """Where runs keep their state."""
        name = self._data.get("state") or f".etlstage/{self._data.get('name')}"
        return self._folder / str(name)

    # --- what both need -------------------------------------------------------------

    def absent(
        self, loc: Loc, what: str, place: Path, *, seen_from: Path | None = None
    ) -> Problem:
        """Return the problem of a path that leads nowhere."""
        hidden = f"there is no such {what.removesuffix(' that matches')}"
        text = f"there is no {what} {place.absolute()}"
        beside = seen_from and self._folder / os.path.relpath(place, seen_from)
        if beside and os.path.isfile(beside):
            text += f"; {beside} is not in cwd, from where a command is seen"
        else:
            text += guess(place.name, names(place.parent))
        return Problem(loc, text, hidden=hidden)

    def _flaw(self, program: str, folder: Path) -> str | None:
        if not os.path.exists(path := folder / program):
            return self.absent((), "file", path, seen_from=folder).text
        return _flaw(program, path)


def _unfolded(worker: Value) -> Mapping[str, Value]:
    return {"command": worker} if isinstance(worker, list) else mapping(worker)


def _is_text(value: Value) -> bool:
    return isinstance(value, str) and "\0" not in value


def _there(path: str) -> str:
    """Return what something that is sent is called there."""
    file, _, name = path.rpartition("/")[2].partition("#")
    return name or file


def _flaw(program: str, path: Path) -> str | None:
    """Return why the system would not run the file, in the words of its start."""
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
        words = os.fsdecode(head[2:].partition(b"\n")[0]).split()
        if words and not os.path.exists(words[0]):
            return f"the interpreter in the first line of {path} does not exist"
    elif b"\0" not in head:
        first = f"[{SCRIPTS.get(path.suffix, 'python')}, {program}]"
        return (
            f"{path} has no #! line that names its interpreter; add one,"
            f" or name it in the command, as in {first}"
        )
    return None
