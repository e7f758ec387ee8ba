"""
From a pipeline file to a checked model.

All that is wrong with a file is reported at once, each with its line and column,
and what was interpolated is never shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from etlstage.config.case import CaseKeys, CasesKeys
from etlstage.config.document import Document
from etlstage.config.model import PipelineKeys
from etlstage.config.presence import missing, unspoken
from etlstage.config.reading import UNCHANGED, Changes, read
from etlstage.config.rules import broken_rules, case_rules
from etlstage.settings.definition import Definition, Section
from etlstage.settings.problem import (
    Invalid,
    Loc,
    Problem,
)

__all__ = ("Case", "cases_of", "examine", "load")

M = TypeVar("M", bound=Definition)


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
    keys, _ = _checked(document, missing(document, loads=loads))
    for loc, error in unspoken(keys, document):
        document.complain(loc, error)
    document.check()
    return keys, document


class Case(NamedTuple):
    """A test, and where it stands."""

    keys: CaseKeys
    document: Document
    loc: Loc

    def where(self, key: str = "") -> str:
        """Return the file, line and column of the test, or of one of its keys."""
        return self.document.where((*self.loc, key) if key else self.loc)


def cases_of(keys: PipelineKeys, document: Document) -> list[Case]:
    """
    Return the tests of a pipeline: its own, and those of the file beside it.

    That of ``pipeline.yaml`` is ``pipeline.test.yaml``.

    Raises:
        ConfigError: If anything in that file is wrong; one line for each.

    """
    found = [(keys.tests, document)]
    beside = document.path.with_suffix(f".test{document.path.suffix}")
    if beside.is_file():
        others = read(beside)
        problems = case_rules(document.data, others.data.get("tests"))
        found.append((_made(CasesKeys, others, problems).tests, others))
    return [
        Case(case, source, ("tests", i))
        for cases, source in found
        for i, case in enumerate(cases)
    ]


def _checked(
    document: Document, more: Iterable[Problem] = ()
) -> tuple[PipelineKeys, Document]:
    section = Section(Section.of(PipelineKeys).keys, model=PipelineKeys)
    problems = [*case_rules(document.data, document.data.get("tests")), *more]
    values: Any = {}
    try:
        values = section.read(document.data)
    except Invalid as error:
        problems += error.problems
        values = error.rest
    # What can't be read is as if it were not there, and what goes with it is told.
    rest = PipelineKeys.of(values)
    _finish(document, [*problems, *broken_rules(rest, document.data)])
    return PipelineKeys(**values), document


def _made(model: type[M], document: Document, problems: Iterable[Problem]) -> M:
    """Return what a document stands for, unless anything is wrong with it."""
    made: M | None = None
    try:
        made = Section.of(model).read(document.data)
    except Invalid as error:
        problems = (*error.problems, *problems)
    _finish(document, problems)
    if made is None:
        raise AssertionError("unreachable: errors without a problem")
    return made


def _finish(document: Document, problems: Iterable[Problem]) -> None:
    """Report all problems at once; raises ConfigError if there are any."""
    for problem in problems:
        hidden = "an interpolated value" if document.secret(problem.loc) else ""
        if hidden and document.set_apart(problem.loc):
            hidden = document.secrets.get(problem.loc, hidden)
        text = problem.say(instead=hidden)
        document.complain(problem.loc, text, at_key=problem.at_key)
    document.check()
