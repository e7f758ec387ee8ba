"""
From a pipeline file to a checked model.

All that is wrong with a file is reported at once, each with its line and column,
and what was interpolated is never shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from etlstage.config.document import Document
from etlstage.config.model import PipelineKeys
from etlstage.config.presence import missing
from etlstage.config.reading import UNCHANGED, Changes, read
from etlstage.config.rules import broken_rules
from etlstage.settings.definition import Section
from etlstage.settings.problem import (
    Invalid,
    Problem,
)

__all__ = ("examine", "load")


def load(
    path: str | Path, changes: Changes = UNCHANGED
) -> tuple[PipelineKeys, Document]:
    """
    Read and check a pipeline file; nothing of what it names is looked for.

    Returns:
        The model, and the document for the places of what is found wrong later.

    Raises:
        ConfigError: If anything is wrong; one line for each.

    """
    return _checked(read(Path(path), changes))


def examine(
    path: str | Path, changes: Changes = UNCHANGED, *, loads: bool = True
) -> tuple[PipelineKeys, Document]:
    """
    Read and check a pipeline file, and look for what it names on this machine.

    Args:
        path: The file.
        changes: What is laid over it.
        loads: Whether it is to load, so that its output must not be there already.

    Raises:
        ConfigError: If anything is wrong, or is not there; one line for each.

    """
    document = read(Path(path), changes)
    return _checked(document, list(missing(document, loads=loads)))


def _checked(
    document: Document, more: Sequence[Problem] = ()
) -> tuple[PipelineKeys, Document]:
    model: PipelineKeys | None = None
    try:
        model = Section.of(PipelineKeys).read(document.data)
    except Invalid as error:
        for problem in error.problems:
            _complain(document, problem)
    for problem in (*broken_rules(document.data), *more):
        _complain(document, problem)
    document.check()
    if model is None:
        raise AssertionError("unreachable: errors without a problem")
    return model, document


def _complain(document: Document, problem: Problem) -> None:
    hidden = "an interpolated value" if document.secret(problem.loc) else ""
    text = problem.say(instead=hidden)
    document.complain(problem.loc, text, at_key=problem.at_key)
