"""
``etlstage init``: write a pipeline to start from, or examples to copy and change.

All or nothing: no file is written before it is known that no other is in the way.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePath
from typing import Annotated, Final, NamedTuple

import typer

from etlstage.cli.failure import naming
from etlstage.cli.screen import confirm
from etlstage.errors import ConfigError, guess
from etlstage.messages import counted
from etlstage.telemetry.terminal import harmless

__all__ = ("copy_examples", "main")


class Template(NamedTuple):
    """A worker to start from."""

    file: str
    command: str
    """The command, in YAML."""
    build: str = ""
    """The command that builds the program to run."""


WORKERS: Final = {
    "python": Template("worker.py", "[python, worker.py]"),
    "sh": Template("worker.sh", "[sh, worker.sh]"),
    "awk": Template("worker.awk.sh", "[sh, worker.awk.sh]"),
    "node": Template("worker.mjs", "[node, worker.mjs]"),
    "c": Template("worker.c", "[./worker]", "cc -O2 -o {made} {file}"),
    "go": Template("worker.go", "[./worker]", "go build -o {made} {file}"),
}
"""Templates by language."""
TEST: Final = "test_worker.py"
"""Tests the function of the worker in Python."""


def _start(folder: Path, language: str, *, yes: bool) -> int:
    """Write a pipeline, a worker in a language and tests to start from."""
    if language not in WORKERS:
        expected = f", expected {' or '.join(map(repr, WORKERS))}"
        close = guess(language, WORKERS) or expected
        raise ConfigError(f"--worker: unknown language {language!r}{close}")
    files, worker = _examples(folder, "start"), WORKERS[language]
    for other in WORKERS.values():
        if other != worker:
            del files[folder / other.file]
    if language != "python":
        del files[folder / TEST]
    pipeline, file = folder / "pipeline.yaml", folder / worker.file
    command = worker.command.encode()
    files[pipeline] = files[pipeline].replace(b"[python, worker.py]", command)
    _write(folder, files, yes=yes)
    typer.echo(f"a pipeline is in {folder}; change {file}, then:")
    if worker.build:
        made = _quoted(folder / "worker")
        typer.echo(f"  {worker.build.format(made=made, file=_quoted(file))}")
    typer.echo(f"  etlstage test {_quoted(pipeline)}")
    typer.echo(f"  etlstage run {_quoted(pipeline)}")
    return 0


def main(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Target folder; created if missing.")
    ],
    *,
    worker: Annotated[
        str | None,
        typer.Option(
            metavar="LANGUAGE",
            help="Write a pipeline, tests and a worker in python, sh, awk, node, c or go.",
        ),
    ] = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Do not ask if the folder is not empty."),
    ] = False,
) -> int:
    """Write a pipeline to start from, or all examples, into a folder."""
    if worker is not None:
        return _start(folder, worker, yes=yes)
    copy_examples(folder, yes=yes)
    pipelines = sorted(folder.glob("*/pipeline.yaml"))
    typer.echo(f"examples are in {folder}; run one:")
    for pipeline in pipelines:
        typer.echo(f"  etlstage run {_quoted(pipeline)}")
    typer.echo(f"workers to start from: {folder / 'workers'}")
    typer.echo(f"a notebook that joins tables: {folder / 'join' / 'join.py'}")
    typer.echo(f"an HTTP service answered by workers: {folder / 'asgi' / 'app.py'}")
    typer.echo(f"a service on trio: {folder / 'trio' / 'server.py'}")
    typer.echo(f"sessions that are kept open: {folder / 'cocaine' / 'service.py'}")
    return 0


def copy_examples(folder: Path, name: str = "", *, yes: bool = True) -> None:
    """
    Copy examples out of the package.

    Args:
        folder: Target folder; made if it is missing.
        name: Which example; all of them by default, each in its own folder.
        yes: Whether to skip the question that is asked if there are other files.

    Raises:
        ConfigError: If a file is in the way, or can't be written.

    """
    _write(folder, _examples(folder, name), yes=yes)


def _examples(folder: Path, name: str) -> dict[Path, bytes]:
    root = resources.files("etlstage") / "examples" / name
    return {folder / path: file.read_bytes() for path, file in _files(root)}


def _write(folder: Path, files: Mapping[Path, bytes], *, yes: bool) -> None:
    for path in sorted(files):
        # A link is in the way even if nothing is there: the file would be made there.
        if os.path.lexists(path):
            raise ConfigError(
                f"{path} exists already and is not overwritten; name a new directory"
            )
        for above in path.relative_to(folder).parents[:-1]:
            parent = folder / above
            if os.path.lexists(parent) and not os.path.isdir(parent):
                raise ConfigError(
                    f"{parent} exists already and is not a directory; name a new one"
                )
    if not yes and (others := _others(folder)):
        confirm(
            f"{harmless(str(folder))} has {counted(others, 'other file')}:"
            f" add {len(files)} to them?",
            otherwise="nothing was written",
        )
    with naming(f"{folder} can't be written"):
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            if content.startswith(b"#!"):
                # Installed files are not executable, but workers are tried by hand.
                path.chmod(0o755)


def _quoted(path: Path) -> str:
    """Return a path as a word of a shell."""
    return shlex.quote(str(path))


def _others(folder: Path) -> int:
    """Return how many files and folders a folder has, without hidden ones."""
    if not os.path.isdir(folder):
        return 0
    return sum(not path.name.startswith(".") for path in folder.iterdir())


def _files(root: Traversable, *above: str) -> Iterator[tuple[PurePath, Traversable]]:
    """Yield the files below ``root``, except those that only make it a package."""
    for entry in root.iterdir():
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _files(entry, *above, entry.name)
        elif entry.is_file() and entry.name != "__init__.py":
            yield PurePath(*above, entry.name), entry
