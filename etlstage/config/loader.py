"""
Load a pipeline file as a checked model.

All errors in a file are reported at once, each with its line and column, and
interpolated values are never shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

from etlstage.config.case import CaseKeys, CasesKeys
from etlstage.config.document import Document
from etlstage.config.model import PipelineKeys
from etlstage.config.presence import missing, unspoken
from etlstage.config.reading import UNCHANGED, Changes, read
from etlstage.config.rules import broken_rules, case_rules
from etlstage.settings.definition import Definition, Section
from etlstage.settings.problem import Invalid, Loc, Problem

__all__ = ("LoadedCase", "cases_of", "examine", "load", "readable_keys")

M = TypeVar("M", bound=Definition)


def load(
    path: str | Path, changes: Changes = UNCHANGED
) -> tuple[PipelineKeys, Document]:
    """
    Read and check a pipeline file, without looking for what it names.

    Returns:
        The model, and the document, which has the places for errors found later.

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
        loads: Whether a run is to load, so that its output must not exist already.

    Raises:
        ConfigError: If anything is wrong or missing; one line for each.

    """
    document = read(Path(path), changes)
    keys, _ = _checked(document, lambda keys: missing(keys, document, loads=loads))
    for loc, error in unspoken(keys, document):
        document.complain(loc, error)
    document.check()
    return keys, document


class LoadedCase(NamedTuple):
    """A test, and where it is written."""

    keys: CaseKeys
    document: Document
    loc: Loc

    def where(self, key: str = "") -> str:
        """Return the file, line and column of the test, or of one of its keys."""
        return self.document.where((*self.loc, key) if key else self.loc)


def cases_of(keys: PipelineKeys, document: Document) -> list[LoadedCase]:
    """
    Return the tests of a pipeline: its own, and those of the file beside it.

    The file beside ``pipeline.yaml`` is ``pipeline.test.yaml``.

    Raises:
        ConfigError: If anything in that file is wrong; one line for each.

    """
    found = [(keys.tests, document)]
    beside = document.path.with_suffix(f".test{document.path.suffix}")
    if os.path.isfile(beside):
        others = read(beside)
        made, problems = _read(CasesKeys, others)
        others.finish([*problems, *case_rules(keys, made.tests)])
        found.append((made.tests, others))
    return [
        LoadedCase(case, source, ("tests", i))
        for cases, source in found
        for i, case in enumerate(cases)
    ]


def readable_keys(document: Document, needed: Collection[str] = ()) -> PipelineKeys:
    """
    Return what can be read of a pipeline file, whatever is wrong with the rest.

    Args:
        document: The file.
        needed: The keys that must be valid.

    Raises:
        ConfigError: If one of them is not; one line for each.

    """
    keys, problems = _read(PipelineKeys, document)
    document.finish(p for p in problems if p.loc and p.loc[0] in needed)
    return keys


def _checked(
    document: Document, more: Callable[[PipelineKeys], Iterable[Problem]] | None = None
) -> tuple[PipelineKeys, Document]:
    keys, problems = _read(PipelineKeys, document)
    problems += broken_rules(keys)
    problems += more(keys) if more is not None else ()
    document.finish(problems)
    return keys, document


def _read(model: type[M], document: Document) -> tuple[M, list[Problem]]:
    """Return the model of a document, as far as it could be read, and the problems."""
    try:
        return Section.of(model).read(document.data), []
    except Invalid as error:
        return error.rest, [*error.problems]  # type: ignore[return-value]
