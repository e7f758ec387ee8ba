"""
What keys in several mappings of a pipeline file say together.

What the keys of one mapping say is checked by its class. These rules look at the data
as it was written, whatever its shape, so that a user sees everything that is wrong at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from etlstage.config.document import Value
from etlstage.config.end import SinkKeys, SourceKeys, ends
from etlstage.config.stages import StageKeys, written_end
from etlstage.errors import guess
from etlstage.settings.definition import Place, broken
from etlstage.settings.problem import Loc, Problem, dotted
from etlstage.stage import Order

if TYPE_CHECKING:
    from etlstage.config.model import PipelineKeys

__all__ = (
    "broken_rules",
    "case_rules",
    "command_at",
    "mapping",
    "shipped_files",
    "stage_names",
)

ENDS: Final = ("extract", "load")
"""The stages that have an end of the pipeline."""


def broken_rules(keys: PipelineKeys, data: Mapping[str, Value]) -> Iterator[Problem]:
    """
    Yield what contradicts itself in a file.

    Args:
        keys: What could be read of it; None where it could not.
        data: The file as it was written.

    """
    yield from _engine(keys)
    yield from _shipped(mapping(data.get("spark")))
    yield from _orders(keys, data)
    yield from _names(data)
    yield from _faults(data)


def case_rules(data: Mapping[str, Value], cases: Value) -> Iterator[Problem]:
    """
    Yield what tests ask of a pipeline that it has not.

    Args:
        data: The pipeline.
        cases: Its tests, which may stand in another file.

    """
    stages = {name: loc for loc, name in stage_names(data)}
    reads, writes = (
        role is not None and role.rows for role in map(_end_in(data), ENDS)
    )
    for i, item in enumerate(cases if isinstance(cases, list) else ()):
        case, here = mapping(item), ("tests", i)
        name = case.get("stage")
        if isinstance(name, str) and name not in stages:
            expected = f", expected one of {', '.join(stages)}"
            text = f"unknown stage {{got}}{guess(name, stages) or expected}"
            yield Problem((*here, "stage"), text, name)
            continue
        stage = stages.get(str(name))
        extracts, loads = stage in (None, ("extract",)), stage in (None, ("load",))
        if "input_rows" in case and not (reads and extracts):
            yield broken((*here, "input_rows"), "needs a DataFrame to extract")
        if "output_rows" in case and not (writes and loads):
            yield broken((*here, "output_rows"), "needs a DataFrame to load")
        if stage == ("extract",) and "input" in case:
            yield broken((*here, "input"), "an extract stage takes no messages")
        if "input" not in case and "input_rows" not in case:
            if not extracts:
                yield broken(here, "needs the key input", at_key=False)
            elif reads:
                text = "needs the key input_rows: the extract stage is a DataFrame"
                yield broken(here, text, at_key=False)


def _end_in(
    data: Mapping[str, Value],
) -> Callable[[str | int], type[SourceKeys | SinkKeys] | None]:
    def find(key: str | int) -> type[SourceKeys | SinkKeys] | None:
        name = written_end(data.get(str(key)))
        if key not in ENDS or name is None:
            return None
        end = ends(others=True)[name]
        return end.source if key == "extract" else end.sink

    return find


def _faults(data: Mapping[str, Value]) -> Iterator[Problem]:
    stages = {name: loc for loc, name in stage_names(data)}
    faults = data.get("faults")
    for i, item in enumerate(faults if isinstance(faults, list) else ()):
        name, loc = mapping(item).get("stage"), ("faults", i, "stage")
        if isinstance(name, str) and name not in stages:
            expected = f", expected one of {', '.join(stages)}"
            text = f"unknown stage {{got}}{guess(name, stages) or expected}"
            yield Problem(loc, text, name)
        elif (
            end := _end_in(data)(stages.get(str(name), ("",))[0])
        ) is not None and not (end.place & Place.WORKER):
            text = "is a DataFrame: there is no worker that could have faults"
            yield broken(loc, text, at_key=False)


def stage_names(data: Mapping[str, Value]) -> Iterator[tuple[Loc, str]]:
    """Yield each stage's location and name, its own or the default."""
    places: list[tuple[Loc, str, Value]] = [
        (("extract",), "extract", data.get("extract"))
    ]
    transforms = data.get("transform")
    for i, stage in enumerate(transforms if isinstance(transforms, list) else ()):
        places.append((("transform", i), f"transform-{i + 1}", stage))
    places.append((("load",), "load", data.get("load")))
    for loc, default, stage in places:
        name = mapping(stage).get("name")
        yield loc, name if isinstance(name, str) else default


def _engine(keys: PipelineKeys) -> Iterator[Problem]:
    engine = keys.engine
    for key, stage in (("extract", keys.extract), ("load", keys.load)):
        if stage is not None and engine not in stage.end.engines:
            able = " and ".join(stage.end.engines)
            text = f"can't be {engine}: the end of stage {key} is for engine {able}"
            yield broken(("engine",), text, at_key=False)
    if keys.extract is not None:
        yield from keys.extract.end.wrong(keys.extract, keys)
    if engine == "streaming" and keys.dead_letters is not None:
        text = "is not for engine streaming yet: read the files in the state"
        yield broken(("dead_letters",), text)
    if keys.load is None:
        return
    yield from keys.load.end.wrong(keys.load, keys)
    if keys.delivery == "exactly-once":
        wants = "; it ".join(keys.load.end.not_once(keys.load, keys))
        if wants:
            yield broken(("delivery",), f"exactly-once {wants}", at_key=False)


def _shipped(session: Mapping[str, Value]) -> Iterator[Problem]:
    taken: dict[str, Loc] = {}
    for loc, path in shipped_files(session):
        file, _, there = path.rpartition("/")[2].partition("#")
        name = there or file
        if name in taken:
            text = (
                f"has the name of {dotted(taken[name])}: on the executors all are in"
                " one folder"
            )
            yield broken(loc, text, at_key=False)
        taken.setdefault(name, loc)


def shipped_files(session: Mapping[str, Value]) -> Iterator[tuple[Loc, str]]:
    """
    Yield what is to be sent to executors, each path as it is written.

    A ``#`` in the last part of a path has behind it what it is called there.
    """
    for key in ("files", "archives"):
        paths = session.get(key)
        for i, path in enumerate(paths if isinstance(paths, list) else ()):
            if isinstance(path, str):
                yield ("spark", key, i), path


def _orders(keys: PipelineKeys, data: Mapping[str, Value]) -> Iterator[Problem]:
    stages: list[tuple[Loc, StageKeys | None]] = [
        (("transform", i), stage) for i, stage in enumerate(keys.transform)
    ]
    for number, (loc, stage) in enumerate([*stages, (("load",), keys.load)]):
        if stage is None or stage.order is not Order.KEY or "key" in _at(data, loc):
            continue
        if number:
            text = (
                "needs a key, a JSON pointer such as /id: only the first stage behind"
                " the source can take the source's"
            )
            yield broken((*loc, "order"), text)
        elif keys.extract is None or not keys.extract.end.keyed:
            text = "needs a key, a JSON pointer such as /id, or extract.spark.key"
            yield broken((*loc, "order"), text)


def _at(data: Mapping[str, Value], loc: Loc) -> Mapping[str, Value]:
    """Return the mapping at a place of the file, empty if there is none."""
    found: Any = data
    for step in loc:
        found = found[step]
    return mapping(found)


def _names(data: Mapping[str, Value]) -> Iterator[Problem]:
    taken: dict[str, Loc] = {}
    for loc, name in stage_names(data):
        if name in taken:
            text = f"{dotted(taken[name])} has the same name"
            yield broken((*loc, "name"), text, at_key=False)
        taken.setdefault(name, loc)


def command_at(data: Mapping[str, Value], loc: Loc) -> Loc:
    """Return where the command of the worker of the stage at ``loc`` is written."""
    at = (*loc, "worker")
    alone = isinstance(_at(data, loc).get("worker"), list)
    return at if alone else (*at, "command")


def mapping(value: Value) -> Mapping[str, Value]:
    """Return the value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}
