"""
How programs, and etlstage itself, get to Spark's executors.

:func:`ship` runs in the driver. :func:`place` runs in a task, where it finds what was
shipped, and reports a program that is missing.

Spark adds a package that is one zip of pure Python to the path of its Python workers.
Compiled packages can't be shipped like this: PyArrow must be installed on the
executors, as for Spark's own Arrow functions.

Spark puts all files into one folder, each under its base name, and unpacks each archive
there, into a folder of its name. A pipeline file may name files in any folder, so
:class:`Shipment` replaces the words of a command that name a shipped file, or a file in
an archive, by its name on the executors. This is done only in the task: accounts and
dead letters name programs as they are in the driver.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import socket
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from pyspark import SparkFiles, TaskContext
from pyspark.sql import SparkSession

import etlstage
from etlstage.errors import ConfigError, WorkerStartFailed
from etlstage.spark.errors import PACKAGES, explain
from etlstage.stage import Stage
from etlstage.transport.watchdog import discard_scratch, make_scratch

__all__ = (
    "Shipment",
    "place",
    "ship",
)

_DUPLICATES: Final = (
    "DUPLICATED_ARTIFACT",
    "ALREADY_EXISTS",
    # Where executors fetch files from the driver.
    "already registered with a different path",
)


def ship(
    spark: SparkSession,
    *files: str | os.PathLike[str],
    archives: Sequence[str | os.PathLike[str]] = (),
) -> None:
    """
    Send programs, and etlstage itself, to Spark's executors.

    ::

        ship(spark, "clean.py")
        transform(frame, Stage(name="clean", worker=("./clean.py",)))

    Call it before :func:`~etlstage.spark.transform`: a plan has only the packages that
    were shipped when it was made.

    A worker whose command names a shipped file, by a relative path, runs in the folder
    of these files. A worker in Python may import :mod:`etlstage.worker`.

    Args:
        spark: A classic session or one over Spark Connect.
        files: Any files; each may be executed on the executors.
        archives: Each is unpacked into a folder of its name, or of the name after
            ``#``, as in ``tools.tar.gz#tools``.

    Raises:
        ConfigError: If a file does not exist, or was shipped with other content.

    """
    programs, packed = _kept(files), _kept(archives)
    try:
        spark.addArtifacts(str(_packed()), pyfile=True)
        if programs:
            spark.addArtifacts(*programs, file=True)
        if packed:
            spark.addArtifacts(*packed, archive=True)
    except Exception as error:
        text = explain(error)
        if any(known in str(error) for known in _DUPLICATES):
            text = (
                "a file of this name was already shipped with other content, which the"
                f" session keeps: give it another name, or start a new session ({text})"
            )
        raise ConfigError(f"can't ship: {text}") from error


def _kept(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """
    Return copies of files.

    A classic session reads a file when an executor asks for it, and if the file has
    changed, all tasks fail from then on. A cluster accepts a file again only by the
    path that it knows, so the path of a copy is derived from its content.
    """
    found = [_parted(os.fspath(path)) for path in paths]
    for path, _, _ in found:
        if os.path.isdir(path):
            raise ConfigError(
                f"can't ship {path}: it is a folder; make an archive of it"
            )
        if not os.path.isfile(path):
            raise ConfigError(f"can't ship {path}: it does not exist")
    return [str(_copy(path)) + mark + name for path, mark, name in found]


def _parted(path: str) -> tuple[str, str, str]:
    """Split ``#`` and the name after it from a path; folders may contain ``#``."""
    folder, name = os.path.split(path)
    name, mark, there = name.partition("#")
    return os.path.join(folder, name), mark, there


def _copy(path: str) -> Path:
    with tempfile.TemporaryDirectory(dir=_folder()) as folder:
        copy = Path(shutil.copy(path, folder))
        with copy.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        kept = _folder() / digest / copy.name
        kept.parent.mkdir(exist_ok=True)
        return copy.replace(kept)


@cache
def _folder() -> Path:
    """Return the folder of the copies; it is removed at the end of the process."""
    folder = make_scratch("ship")
    atexit.register(discard_scratch, folder)
    return folder


# --- etlstage in a zip ----------------------------------------------------------------


@cache  # PySpark puts the zip on our own path, where modules would be found then
def _packed() -> Path:
    """Return a zip that Python can import: that which etlstage runs from, if any."""
    home = Path(etlstage.__file__).parents[1]
    if home.is_file():
        return home
    path = _folder() / "etlstage.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, source in sorted(_modules()):
            # Without a time stamp, so that the same content makes the same zip.
            packed.writestr(zipfile.ZipInfo(name), source.read_bytes())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    # Spark rejects a name that it knows with other content.
    return path.rename(path.with_name(f"etlstage-{digest}.zip"))


def _modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            continue
        origin = Path(spec.origin)
        if spec.submodule_search_locations is None:
            yield origin.name, origin
            continue
        for path in origin.parent.rglob("*.py"):
            yield str(path.relative_to(origin.parent.parent)), path


# --- in a task ------------------------------------------------------------------------


def place(stage: Stage, *, remedy: str | None = None) -> Stage:
    """
    Return ``stage`` as it runs on this executor; unchanged outside of a Spark task.

    Args:
        stage: As it was made in the driver.
        remedy: How errors advise to send a missing program; by default :func:`ship`.

    Raises:
        WorkerStartFailed: If its program is missing; the text names the host.

    """
    if TaskContext.get() is None:
        return stage
    folder = SparkFiles.getRootDirectory()
    worker = stage.program
    if worker.cwd is None and any(_is_shipped(folder, word) for word in worker.command):
        worker = replace(worker, cwd=Path(folder).absolute())
    packed = Path(etlstage.__file__).absolute().parents[1]
    if packed.is_file():
        # etlstage was shipped as a zip, where workers in Python find the SDK.
        inherited = worker.env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
        path = f"{packed}{os.pathsep}{inherited}" if inherited else str(packed)
        worker = replace(worker, env={**worker.env, "PYTHONPATH": path})
    stage = replace(stage, worker=worker)
    _check_program(stage, remedy)
    return stage


def _is_shipped(folder: str, word: str) -> bool:
    if os.path.isabs(word) or word in ("", ".", ".."):
        return False
    return os.path.isfile(os.path.join(folder, word))


def _check_program(stage: Stage, remedy: str | None) -> None:
    worker, program = stage.program, stage.program.command[0]
    name = os.path.basename(program)
    call = "" if remedy else f" and call it './{name}'"
    remedy = remedy or f"ship it with etlstage.spark.ship(spark, {name!r})"
    host = socket.gethostname()
    if os.sep not in program:
        path = worker.env.get("PATH", os.environ.get("PATH"))
        if shutil.which(program, path=path) is None:
            raise WorkerStartFailed(
                f"stage {stage.name}: there is no program {program!r} on PATH on host"
                f" {host}: install it there, or {remedy}{call}",
                stage=stage.name,
            )
        return
    folder = str(worker.cwd or os.getcwd())
    path = os.path.join(folder, program)
    if not os.path.exists(path):
        where = "" if os.path.isabs(program) else f" in {folder}"
        raise WorkerStartFailed(
            f"stage {stage.name}: there is no program {program!r}{where} on host {host}:"
            f" put it there, or {remedy}",
            stage=stage.name,
        )
    if not os.path.isdir(path) and not os.access(path, os.X_OK):
        raise WorkerStartFailed(
            f"stage {stage.name}: {path} is not executable on host {host}: run chmod +x"
            f" there, or {remedy}",
            stage=stage.name,
        )


class Shipment:
    """
    Files for the executors.

    Args:
        folder: What paths are relative to, and where workers run: here, and on
            executors that have this folder.
        files: Paths.
        archives: Paths; each may have ``#`` and a name after it.

    """

    def __init__(
        self,
        folder: Path,
        *,
        files: Sequence[str] = (),
        archives: Sequence[str] = (),
    ) -> None:
        self._folder = folder.absolute()
        self._files = [str(self._folder / path) for path in files]
        self._archives = [str(self._folder / path) for path in archives]
        self._python = sys.executable
        names = {path: os.path.basename(path) for path in self._files}
        for path in self._archives:
            file, _, there = os.path.basename(path).partition("#")
            name = there or file
            names[str(self._folder / name)] = name
        self._names = {os.path.normpath(path): name for path, name in names.items()}

    def send(self, spark: SparkSession) -> None:
        """
        Ship the files and etlstage, before a plan is made; blocks.

        Executors within this process see everything that is here, so without files or
        archives nothing is shipped to them.

        Raises:
            ConfigError: If that can't be done.

        """
        within = str(spark.conf.get("spark.master", "")).partition("[")[0] == "local"
        if self._files or self._archives or not within:
            ship(spark, *self._files, archives=self._archives)

    def place(self, stage: Stage) -> Stage:
        """Return ``stage`` as it runs in a task; raises as :func:`place`."""
        worker = stage.program
        program, *arguments = worker.command
        if program == self._python:
            program = sys.executable
        there = [self._name(worker.cwd, word) for word in worker.command]
        if any(there):
            first, *rest = there
            program = f"./{first}" if first else program
            arguments = [
                name or word for name, word in zip(rest, arguments, strict=True)
            ]
            worker = replace(worker, cwd=None)
        elif worker.cwd == self._folder and not self._folder.is_dir():
            worker = replace(worker, cwd=None)
        worker = replace(worker, command=(program, *arguments))
        stage = replace(stage, worker=worker)
        return place(stage, remedy="name it in spark.files")

    def _name(self, cwd: Path | None, word: str) -> str | None:
        """Return the name on executors of what ``word`` names here, if it was sent."""
        path = os.path.normpath((cwd or self._folder) / word)
        for known in _above(path):
            if known in self._names:
                name = self._names[known] + path[len(known) :]
                # Other words may look as if they were in an archive.
                sent = os.path.isfile(os.path.join(SparkFiles.getRootDirectory(), name))
                return name if sent else None
        return None


def _above(path: str) -> Iterator[str]:
    yield path
    while (parent := os.path.dirname(path)) != path:
        yield parent
        path = parent
