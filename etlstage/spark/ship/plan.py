"""
What a run sends to Spark's executors, and where its commands find it there.

Spark puts all files into one folder, each under its last name alone, and unpacks each
archive there, into a folder of its name. Here they are wherever they are: so the words
of a command that name one of them, or something in an archive, get the name that it
has there. A stage stays as it is until it is in a task: accounts and dead letters
speak of the programs that are here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pyspark import SparkFiles
from pyspark.sql import SparkSession

from etlstage.spark.ship.artifact import place, ship
from etlstage.stage import Stage

__all__ = ("Shipment",)


class Shipment:
    """
    Files for the executors.

    Args:
        folder: What paths are relative to, and where workers run: here, and on
            executors that have this folder.
        files: Paths.
        archives: Paths; each may have ``#`` and a name behind it.

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

        Executors within this process have all that there is here: to these, nothing
        goes but what was asked for.

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
        """Return how what is called ``word`` here is called there, if it was sent."""
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
