"""
What a pipeline file names, and what there is of it on this machine.

Programs and scripts are sought where their worker will run: in its ``cwd``, on the PATH
that it will have. What may be elsewhere is not sought: programs of executors on other
machines, and what a session that is not local reads and writes.

Looks at the data as it was written, whatever its shape, as ``rules.py`` does.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from etlstage.config.document import Document, Value
from etlstage.config.rules import mapping, shipped_files, stage_names
from etlstage.config.stages import SCHEME
from etlstage.errors import guess
from etlstage.settings.definition import broken
from etlstage.settings.problem import Loc, Problem
from etlstage.settings.units import of_files
from etlstage.stage.stage import PYTHONS
from etlstage.transport.identity import UnknownIdentity, look_up

__all__ = ("executors_here", "missing", "on_path", "search_path")

INTERPRETERS: Final = (
    (re.compile(r"(python|pypy)[0-9.]*"), "-u -B -E -I -O -OO -s -S"),
    (re.compile(r"(ba|da|z|k|a)?sh"), "-e -u -x -eu -ex -ux -eux"),
    (re.compile(r"node|ruby|perl|Rscript|php|lua[0-9.]*"), ""),
)
"""Programs whose first argument is a script, and flags that may stand before it."""

SCRIPTS: Final = {".sh": "sh", ".js": "node", ".mjs": "node", ".rb": "ruby"}
"""What runs a script that does not say it."""

HEAD: Final = 4096  # bytes of a program that are looked at
FILE_SYSTEM: Final = "spark.hadoop.fs.defaultFS"
CONFIGURED: Final = ("HADOOP_CONF_DIR", "SPARK_CONF_DIR")
"""What may say that a path without a scheme is not one of this machine."""

MANY: Final = set("*?[{")
"""In a path that stands for any number of files."""


def missing(document: Document, *, loads: bool) -> Iterator[Problem]:
    """
    Yield what is not there, and output that is there and should not be.

    Args:
        document: The pipeline file.
        loads: Whether it is to load.

    """
    look = _Look(document)
    yield from look.shipped()
    for loc, _ in stage_names(document.data):
        if look.runs_here(loc):
            yield from look.program((*loc, "worker"))
            yield from look.identity((*loc, "worker"))
    if look.reads_here:
        yield from look.source()
        if loads:
            yield from look.output()
    yield from look.partitions()


def executors_here(document: Document) -> bool:
    """Return whether Spark's executors are on this machine."""
    session = mapping(document.data.get("spark"))
    master = str(session.get("master") or "local").partition("[")[0]
    return session.get("remote") is None and master in ("local", "local-cluster")


class _Look:
    """One look at the machine."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._folder = document.folder
        self._data = document.data
        session = mapping(self._data.get("spark"))
        config = mapping(session.get("config"))
        within = executors_here(document)
        elsewhere = FILE_SYSTEM in config or any(map(os.environ.get, CONFIGURED))
        self.reads_here = within and not elsewhere
        """Whether a path without a scheme is one of this machine."""
        self._executors_here = within
        self._on_executors = self._data.get("engine") in ("spark", "streaming")
        # On executors an archive is there with its contents, here it is one file.
        self._unpacked = [
            os.path.normpath(self._folder / _there(path))
            for loc, path in shipped_files(session)
            if loc[1] == "archives" and self._on_executors
        ]

    def runs_here(self, loc: Loc) -> bool:
        """Return whether the workers of a stage run on this machine."""
        return self._executors_here or not self._on_executors

    # --- programs -------------------------------------------------------------------

    def shipped(self) -> Iterator[Problem]:
        """Yield what is to be sent to executors and can't be."""
        for loc, path in shipped_files(mapping(self._data.get("spark"))):
            folder, slash, name = path.rpartition("/")
            place = self._folder / (folder + slash + name.partition("#")[0])
            if place.is_dir():
                yield broken(loc, "is a folder: make an archive of it", at_key=False)
            elif not place.is_file():
                yield self._absent(loc, "file", place)

    def program(self, loc: Loc) -> Iterator[Problem]:
        """Yield what keeps the worker at ``loc`` from being started."""
        worker = mapping(self._at(loc))
        command, cwd = worker.get("command"), worker.get("cwd")
        if not isinstance(command, list) or not all(_is_text(w) for w in command):
            return
        if cwd is not None and not _is_text(cwd):
            return
        folder = self._folder / str(cwd or "")
        if cwd and not folder.is_dir():
            yield self._absent((*loc, "cwd"), "folder", folder)
            return
        words = [str(word) for word in command]
        if not words or any(self._is_unpacked(folder, word) for word in words):
            return
        hides = self._document.secret((*loc, "cwd"))
        for problem in (
            *self._program((*loc, "command", 0), words[0], folder, worker),
            *self._script((*loc, "command"), words, folder),
        ):
            yield problem._replace(text=problem.hidden) if hides else problem

    def identity(self, loc: Loc) -> Iterator[Problem]:
        """Yield whom the worker at ``loc`` should run as, if there is nobody."""
        worker = mapping(self._at(loc))
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
            text = _flaw_on_path(program, folder, str(path))
        if text:
            hidden = "can't be run here; not shown, as it was interpolated"
            yield Problem(loc, text, hidden=hidden)

    def _script(self, loc: Loc, command: list[str], folder: Path) -> Iterator[Problem]:
        name = os.path.basename(command[0])
        flags = [f.split() for known, f in INTERPRETERS if known.fullmatch(name)]
        words = ((i, w) for i, w in enumerate(command) if i and w not in flags[0])
        i, word = next(words, (0, "-")) if flags else (0, "-")
        # What begins with a dash may have the program behind it, as -c and -m do.
        if not word.startswith("-") and "{" not in word:
            script = folder / word
            if not script.is_file() and not (script / "__main__.py").is_file():
                yield self._absent((*loc, i), "file", script, seen_from=folder)

    def _is_unpacked(self, folder: Path, word: str) -> bool:
        path = os.path.normpath(folder / word)
        return any(f"{path}/".startswith(f"{known}/") for known in self._unpacked)

    # --- data -----------------------------------------------------------------------

    def source(self) -> Iterator[Problem]:
        """Yield the input, if it is files and there are none."""
        loc: Loc = ("extract", "spark", "path")
        frame = mapping(mapping(self._data.get("extract")).get("spark"))
        place, kind = self._path(frame), str(frame.get("format") or "parquet")
        if place is None or not (of_files(kind) or kind.lower() == "binaryfile"):
            return
        if {"{", "\\"} & set(str(frame["path"])):
            return  # Hadoop knows alternatives and escapes, glob does not.
        if not MANY & set(str(frame["path"])):
            if not place.exists():
                yield self._absent(loc, "file or folder", place)
        elif not glob.glob(str(place)):
            yield self._absent(loc, "file that matches", place)

    def output(self) -> Iterator[Problem]:
        """Yield the output, if there must be none and there is."""
        frame = mapping(mapping(self._data.get("load")).get("spark"))
        place = self._path(frame)
        if place is None or frame.get("mode", "error") != "error":
            return
        if self._data.get("engine") == "streaming" and self._has_begun():
            return
        if place.exists():
            text = "exists already: remove it, or set mode to append or overwrite"
            yield Problem(
                ("load", "spark", "path"),
                f"{place} {text}",
                hidden=f"what is there {text}",
            )

    def partitions(self) -> Iterator[Problem]:
        """Yield columns by which to partition that the schema does not have."""
        frame = mapping(mapping(self._data.get("load")).get("spark"))
        wanted, schema = frame.get("partition_by"), frame.get("schema")
        columns = ["value"] if schema is None else _columns(str(schema))
        for i, name in enumerate(wanted if isinstance(wanted, list) else ()):
            if columns and _is_text(name) and name not in columns:
                loc = ("load", "spark", "partition_by", i)
                expected = f", expected one of {', '.join(columns)}"
                yield Problem(
                    loc,
                    f"no column {{got}} in the schema{guess(str(name), columns) or expected}",
                    name,
                    hidden=f"no such column in the schema{expected}",
                )

    def _path(self, frame: Mapping[str, Value]) -> Path | None:
        """Return where files are, if it is on this machine."""
        path = frame.get("path")
        if not _is_text(path) or not path or frame.get("table") is not None:
            return None
        path = str(path).removeprefix("file://").removeprefix("file:")
        return None if SCHEME.match(path) else self._folder / path

    def _has_begun(self) -> bool:
        state = self._data.get("state") or f".etlstage/{self._data.get('name')}"
        return (self._folder / str(state) / "checkpoint").exists()

    # --- what both need -------------------------------------------------------------

    def _absent(
        self, loc: Loc, what: str, place: Path, *, seen_from: Path | None = None
    ) -> Problem:
        hidden = f"there is no such {what.removesuffix(' that matches')}"
        text = f"there is no {what} {place.absolute()}"
        beside = seen_from and self._folder / os.path.relpath(place, seen_from)
        if beside and beside.is_file():
            text += f"; {beside} is not in cwd, from where a command is seen"
        elif place.parent.is_dir():
            text += guess(place.name, os.listdir(place.parent))
        return Problem(loc, text, hidden=hidden)

    def _flaw(self, program: str, folder: Path) -> str | None:
        if not (path := folder / program).exists():
            return self._absent((), "file", path, seen_from=folder).text
        return _flaw(program, path)

    def _at(self, loc: Loc) -> Value:
        found: Value = self._data
        for step in loc:
            if isinstance(found, dict):
                found = found.get(str(step))
            elif isinstance(found, list) and isinstance(step, int):
                found = found[step]
            else:
                return None
        return found


def _is_text(value: Value) -> bool:
    return isinstance(value, str) and "\0" not in value


def _there(path: str) -> str:
    """Return what something that is sent is called there."""
    file, _, name = path.rpartition("/")[2].partition("#")
    return name or file


def search_path() -> str:
    """Return the PATH of a worker that is given no other."""
    return os.environ.get("PATH", os.defpath)


def on_path(program: str, folder: Path, path: str) -> str | None:
    """Return the program that a name on the PATH stands for, seen from ``folder``."""
    return shutil.which(program, path=os.pathsep.join(_folders(folder, path)))


def _folders(folder: Path, path: str) -> list[str]:
    # A relative folder of the PATH is seen from where the worker runs.
    return [os.path.join(folder, name) for name in path.split(os.pathsep)]


def _flaw_on_path(program: str, folder: Path, path: str) -> str | None:
    if on_path(program, folder, path):
        return None
    folders = _folders(folder, path)
    if any(os.path.isfile(os.path.join(place, program)) for place in folders):
        return f"the program {program!r} on PATH is not executable"
    if (folder / program).exists():
        close = f" (did you mean {'./' + program!r}?)"
    else:
        there = {n for f in folders if os.path.isdir(f) for n in os.listdir(f)}
        close = guess(program, there | set(PYTHONS))
    return f"there is no program {program!r} on PATH{close}"


def _flaw(program: str, path: Path) -> str | None:
    """Return why the system would not run the file, in the words of its start."""
    if path.is_dir():
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


def _columns(schema: str) -> list[str]:
    """Return the names of the columns of a schema; none if it is not understood."""
    names, depth, part = [], 0, ""
    if "'" in schema or '"' in schema:
        return []  # a comment may hold anything
    for character in f"{schema},":
        depth += (character in "<(") - (character in ">)")
        if character == "," and not depth:
            names.append(part)
            part = ""
        else:
            part += character
    found = [re.match(r"\s*(?:`((?:[^`]|``)+)`|(\w+))[\s:]+\w", name) for name in names]
    if not all(found):
        return []
    return [(m[1] or m[2]).replace("``", "`") for m in found if m]
