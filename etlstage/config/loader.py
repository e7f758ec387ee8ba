"""
From a pipeline file to a checked model.

All that is wrong with a file is reported at once, each with its line and column,
and what was interpolated is never shown.
"""

from __future__ import annotations

from pathlib import Path

from etlstage.config.document import Document, read
from etlstage.config.model import PipelineKeys
from etlstage.config.rules import broken_rules, shipped_files
from etlstage.settings.definition import Section
from etlstage.settings.problem import (
    Invalid,
    Problem,
)

__all__ = ("load",)


def load(path: str | Path) -> tuple[PipelineKeys, Document]:
    """
    Read and check a pipeline file.

    Returns:
        The model, and the document for the places of what is found wrong later.

    Raises:
        ConfigError: If anything is wrong; one line for each.

    """
    document = read(Path(path))
    model: PipelineKeys | None = None
    try:
        model = Section.of(PipelineKeys).read(document.data)
    except Invalid as error:
        for problem in error.problems:
            _complain(document, problem)
    for problem in broken_rules(document.data):
        _complain(document, problem)
    _look_for_files(document)
    document.check()
    if model is None:
        raise AssertionError("unreachable: errors without a problem")
    return model, document


def _look_for_files(document: Document) -> None:
    """Complain of what is to be sent to executors and can't be."""
    session = document.data.get("spark")
    for loc, path in shipped_files(session if isinstance(session, dict) else {}):
        folder, slash, name = path.rpartition("/")
        place = document.folder / (folder + slash + name.partition("#")[0])
        if place.is_dir():
            document.complain(loc, "is a folder: make an archive of it")
        elif not place.is_file():
            missing = (
                "such file" if document.secret(loc) else f"file {place.absolute()}"
            )
            document.complain(loc, f"there is no {missing}")


def _complain(document: Document, problem: Problem) -> None:
    hidden = "an interpolated value" if document.secret(problem.loc) else ""
    text = problem.say(instead=hidden)
    document.complain(problem.loc, text, at_key=problem.at_key)
