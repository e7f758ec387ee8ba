"""
``etlstage init``: examples that users copy and change.

All or nothing: no file is written before it is known that none is in the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePath

import typer

from etlstage.config.schema import SCHEMA_FILE, schema_text
from etlstage.errors import ConfigError

__all__ = ("copy_examples", "init")


def init(folder: Path) -> int:
    """Copy all examples into ``folder``; return the exit code."""
    copy_examples(folder)
    pipelines = sorted(folder.glob("*/pipeline.yaml"))
    typer.echo(f"examples are in {folder}; run one:")
    for pipeline in pipelines:
        typer.echo(f"  etlstage run {pipeline}")
    typer.echo(f"workers to start from: {folder / 'workers'}")
    typer.echo(f"a notebook that joins tables: {folder / 'join' / 'join.py'}")
    typer.echo(f"an HTTP service answered by workers: {folder / 'asgi' / 'app.py'}")
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
    root = resources.files("etlstage") / "examples" / name
    files = {folder / path: file.read_bytes() for path, file in _files(root)}
    schema = schema_text().encode()
    # The first line of a pipeline file sends editors there.
    files |= {
        path.with_name(SCHEMA_FILE): schema
        for path in files
        if path.name == "pipeline.yaml"
    }
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
