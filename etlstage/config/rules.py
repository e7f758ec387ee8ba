"""
Rules across several mappings of a pipeline file.

The keys of one mapping are checked by its class. The rules here also run on a pipeline
that could be read only in part, so that a user sees everything that is wrong at once: a
rule ends where it needs a value that could not be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from etlstage.config.case import CaseKeys
from etlstage.config.end import ends, name_of
from etlstage.errors import guess
from etlstage.pipeline.journal_settings import misordered
from etlstage.settings.definition import broken, judged
from etlstage.settings.problem import Loc, Problem, dotted
from etlstage.stage import Order

if TYPE_CHECKING:
    from etlstage.config.model import (
        ExtractKeys,
        LoadKeys,
        PipelineKeys,
        TransformKeys,
    )
    from etlstage.config.stages import StageKeys

__all__ = ("broken_rules", "case_rules")


def broken_rules(keys: PipelineKeys) -> Iterator[Problem]:
    """
    Yield the contradictions in a file.

    Args:
        keys: What could be read of the file.

    """
    for rule in _RULES:
        yield from judged(rule(keys))


def case_rules(keys: PipelineKeys, cases: Sequence[CaseKeys]) -> Iterator[Problem]:
    """
    Yield what tests need that the pipeline does not have.

    Args:
        keys: What could be read of the pipeline.
        cases: What could be read of its tests, which may be in another file.

    """
    for i, case in enumerate(cases):
        yield from judged(_case(keys, case, ("tests", i)))


def _case(keys: PipelineKeys, case: CaseKeys, here: Loc) -> Iterator[Problem]:
    if case.stage is not None and (unknown := _unknown(keys, case.stage)):
        yield unknown.under(*here, "stage")
        return
    extracts = case.stage in (None, keys.extract.name)
    loads = case.stage in (None, keys.load.name)
    reads, writes = keys.extract.end.rows, keys.load.end.rows
    no_source = not reads and keys.extract.stage is None
    no_sink = not writes and keys.load.stage is None
    if case.stage is not None and ((extracts and no_source) or (loads and no_sink)):
        text = "has no worker that could be tested"
        yield broken((*here, "stage"), text, at_key=False)
        return
    if case.files and loads and no_sink:
        yield broken(
            (*here, "files"),
            "needs a load stage that has a worker, or writes a DataFrame or files",
        )
    if case.input_rows is not None and not (reads and extracts):
        yield broken(
            (*here, "input_rows"),
            "needs an extract stage that reads a DataFrame or files",
        )
    if case.output_rows is not None and not (writes and loads):
        yield broken(
            (*here, "output_rows"),
            "needs a load stage that writes a DataFrame or files",
        )
    if case.stage == keys.extract.name and case.input is not None:
        yield broken((*here, "input"), "an extract stage takes no messages")
    if case.input is None and case.input_rows is None:
        if not extracts:
            yield broken(here, "needs the key input", at_key=False)
        elif reads:
            text = (
                "needs the key input_rows: the extract stage reads a DataFrame or files"
            )
            yield broken(here, text, at_key=False)
        elif no_source:
            text = "needs the key input: the extract stage has no worker"
            yield broken(here, text, at_key=False)


def _faults(keys: PipelineKeys) -> Iterator[Problem]:
    for i, fault in enumerate(keys.faults):
        yield from judged(_fault(keys, fault.stage, ("faults", i, "stage")))


def _fault(keys: PipelineKeys, name: str, loc: Loc) -> Iterator[Problem]:
    if unknown := _unknown(keys, name):
        yield unknown.under(*loc)
    elif any(stage.name == name and stage.stage is None for _, stage in keys.stages()):
        text = "has no worker that could have faults"
        yield broken(loc, text, at_key=False)


def _unknown(keys: PipelineKeys, name: str) -> Problem | None:
    """Return the problem of a name that no stage has; None: a stage has it."""
    names = [stage.name for _, stage in keys.stages()]
    if name in names:
        return None
    expected = f", expected one of {', '.join(names)}"
    return Problem((), f"unknown stage {{got}}{guess(name, names) or expected}", name)


def _engine(keys: PipelineKeys) -> Iterator[Problem]:
    for end in (keys.extract, keys.load):
        yield from judged(_built(end, keys.engine))


def _built(stage: ExtractKeys | LoadKeys, engine: str) -> Iterator[Problem]:
    if engine not in stage.end.engines:
        kind, able = stage.kind.value, " and ".join(stage.end.engines)
        roles = (
            (end.name, end.source if kind == "extract" else end.sink)
            for end in ends().values()
        )
        others = [
            f"{kind}.{name}" for name, role in roles if role and engine in role.engines
        ]
        text = f"works only with engine: {able}; for engine: {engine} use {' or '.join(others)}"
        yield broken((kind, name_of(stage.end)), text)


def _source(keys: PipelineKeys) -> Iterator[Problem]:
    yield from keys.extract.end.wrong(keys.extract, keys)


def _durable(keys: PipelineKeys) -> Iterator[Problem]:
    for number, stage in enumerate(keys.transform):
        yield from judged(_edge(keys, ("transform", number, "durable"), stage))


def _edge(keys: PipelineKeys, loc: Loc, stage: TransformKeys) -> Iterator[Problem]:
    durable = stage.durable
    if durable is None:
        return
    if keys.engine != "local":
        yield broken(loc, f"needs engine local, not {keys.engine}")
    if keys.state is None:
        yield broken(loc, "needs state, a folder for its journals")
    if why := misordered(stage.stage.order, durable.partitions, durable.key):
        yield broken((*loc, "partitions"), why)


def _letters(keys: PipelineKeys) -> Iterator[Problem]:
    if keys.engine == "streaming" and keys.dead_letters is not None:
        text = "is not supported by engine streaming yet: read the files in the state"
        yield broken(("dead_letters",), text)


def _sink(keys: PipelineKeys) -> Iterator[Problem]:
    yield from keys.load.end.wrong(keys.load, keys)


def _delivery(keys: PipelineKeys) -> Iterator[Problem]:
    if keys.delivery == "exactly-once":
        wants = "; it ".join(keys.load.end.not_once(keys.load, keys))
        if wants:
            text = f"exactly-once {wants}; see: etlstage help exactly-once"
            yield broken(("delivery",), text, at_key=False)


def _shipped(keys: PipelineKeys) -> Iterator[Problem]:
    taken: dict[str, Loc] = {}
    for loc, _, name in keys.spark.shipped():
        if name in taken:
            text = (
                f"has the same name as {dotted(taken[name])}: on the executors all are"
                " in one folder"
            )
            yield broken(loc, text, at_key=False)
        taken.setdefault(name, loc)


def _orders(keys: PipelineKeys) -> Iterator[Problem]:
    stages = [(loc, keys_) for loc, keys_ in keys.stages()][1:]
    for number, (loc, stage) in enumerate(stages):
        yield from judged(_order(keys, (*loc, "order"), stage, first=not number))


def _order(
    keys: PipelineKeys, loc: Loc, stage: StageKeys, *, first: bool
) -> Iterator[Problem]:
    worker = stage.stage
    if worker is None or worker.order is not Order.KEY or worker.key is not None:
        return
    if not first:
        text = (
            "needs a key, a JSON pointer such as /id: only the first stage after"
            " the source can use the source's"
        )
        yield broken(loc, text)
    elif not (end := keys.extract.end).keyed:
        key = f", or extract.{name_of(end)}.key" if hasattr(end, "key") else ""
        yield broken(loc, f"needs a key, a JSON pointer such as /id{key}")


def _names(keys: PipelineKeys) -> Iterator[Problem]:
    taken: dict[str, Loc] = {}
    for loc, stage in keys.stages():
        if stage.name in taken:
            text = f"{dotted(taken[stage.name])} has the same name"
            yield broken((*loc, "name"), text, at_key=False)
        taken.setdefault(stage.name, loc)


def _tests(keys: PipelineKeys) -> Iterator[Problem]:
    yield from case_rules(keys, keys.tests)


_RULES: Final = (
    *(
        _engine,
        _source,
        _durable,
        _letters,
        _sink,
        _delivery,
        _shipped,
        _orders,
        _names,
        _faults,
    ),
    _tests,
)
