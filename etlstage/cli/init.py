"""
``etlstage init``: a pipeline to start from, or examples that users copy and change.

All or nothing: no file is written before it is known that none is in the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePath
from typing import Annotated, Final

import typer

from etlstage.cli.options import new_app
from etlstage.config.schema import SCHEMA_FILE, schema_text
from etlstage.errors import ConfigError, guess

__all__ = ("app", "copy_examples", "init")

app = new_app()

WORKERS: Final = {"python": "worker.py", "sh": "worker.sh", "node": "worker.mjs"}
"""What a pipeline may start with, by the program that runs it."""
TEST: Final = "test_worker.py"
"""Calls the function of the worker in Python."""


def _start(folder: Path, language: str) -> int:
    """
    Write a pipeline, a worker and tests to start from; return the exit code.

    Args:
        folder: Where to; made if it is missing.
        language: What runs the worker.

    Raises:
        ConfigError: If there is no worker in that language, a file is in the way, or
            can't be written.

    """
    if language not in WORKERS:
        expected = f", expected {' or '.join(map(repr, WORKERS))}"
        close = guess(language, WORKERS) or expected
        raise ConfigError(f"--worker: unknown language {language!r}{close}")
    files = _examples(folder, "start")
    for other in WORKERS.values():
        if other != WORKERS[language]:
            del files[folder / other]
    if language != "python":
        del files[folder / TEST]
    pipeline = folder / "pipeline.yaml"
    command = f"[{language}, {WORKERS[language]}]".encode()
    files[pipeline] = files[pipeline].replace(b"[python, worker.py]", command)
    _write(folder, files)
    typer.echo(f"a pipeline is in {folder}; change {folder / WORKERS[language]}, then:")
    typer.echo(f"  etlstage test {pipeline}")
    typer.echo(f"  etlstage run {pipeline}")
    return 0


@app.command("init")
def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Target folder; created if missing.")
    ],
    *,
    worker: Annotated[
        str | None,
        typer.Option(
            metavar="LANGUAGE",
            help="Only a pipeline, a worker in python, sh or node, and tests.",
        ),
    ] = None,
) -> int:
    """Copy example pipelines, workers and data into a folder."""
    if worker is not None:
        return _start(folder, worker)
    copy_examples(folder)
    pipelines = sorted(folder.glob("*/pipeline.yaml"))
    typer.echo(f"examples are in {folder}; run one:")
    for pipeline in pipelines:
        typer.echo(f"  etlstage run {pipeline}")
    typer.echo(f"workers to start from: {folder / 'workers'}")
    typer.echo(f"a notebook that joins tables: {folder / 'join' / 'join.py'}")
    typer.echo(f"an HTTP service answered by workers: {folder / 'asgi' / 'app.py'}")
    typer.echo(f"a service on trio: {folder / 'trio' / 'server.py'}")
    typer.echo(f"sessions that are kept open: {folder / 'cocaine' / 'service.py'}")
    return 0


def copy_examples(folder: Path, name: str = "") -> None:
    """
    Copy examples out of the package.

    Args:
        folder: Where to; made if it is missing.
        name: Which example; all of them by default, each in its own folder.

    Raises:
        ConfigError: If a file is in the way, or can't be written.

    """
    _write(folder, _examples(folder, name))


def _examples(folder: Path, name: str) -> dict[Path, bytes]:
    """Return what to write where: examples, and the schema beside each pipeline."""
    root = resources.files("etlstage") / "examples" / name
    files = {folder / path: file.read_bytes() for path, file in _files(root)}
    schema = schema_text().encode()
    # The first line of a pipeline file sends editors there.
    return files | {
        path.with_name(SCHEMA_FILE): schema
        for path in files
        if path.name == "pipeline.yaml"
    }


def _write(folder: Path, files: Mapping[Path, bytes]) -> None:
    for path in sorted(files):
        if path.exists():
            raise ConfigError(
                f"{path} exists already and is not overwritten; name a new directory"
            )
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        raise ConfigError(f"{folder} can't be written: {said}") from None


def _files(root: Traversable, *above: str) -> Iterator[tuple[PurePath, Traversable]]:
    """Yield the files below ``root``, without what only makes them a package."""
    for entry in root.iterdir():
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _files(entry, *above, entry.name)
        elif entry.is_file() and entry.name != "__init__.py":
            yield PurePath(*above, entry.name), entry
