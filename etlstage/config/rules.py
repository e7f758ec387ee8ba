"""
What the keys of a pipeline file say together.

pydantic checks each key by itself, and stops at a mapping's own rules when one of
its keys is wrong. These rules look at the data as it was written, whatever its
shape, so that a user sees everything that is wrong at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from etlstage.config.document import Loc, Value, dotted

__all__ = ("Broken", "broken_rules", "stage_names")

WORKER_ONLY: Final = {
    "extract": ("mode", "offsets", "every", "timeout", "max_message", "max_reply"),
    "load": ("workers", "window", "batch", "timeout", "max_message", "max_reply"),
}
SUPERVISOR_OFFSETS: Final = ("start", "step", "end", "template")


class Broken(NamedTuple):
    """A rule that does not hold."""

    loc: Loc
    text: str
    at_key: bool = True


def broken_rules(data: Mapping[str, Value]) -> Iterator[Broken]:
    """Yield what contradicts itself in a file."""
    for end in ("extract", "load"):
        if isinstance(data.get(end), dict):
            yield from _end(end, _mapping(data[end]))
    yield from _cycles(_mapping(data.get("extract")))
    session = _mapping(data.get("spark"))
    if "master" in session and "remote" in session:
        yield Broken(("spark", "remote"), "can't be used together with master")
    yield from _batches(data)
    yield from _names(data)


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
        name = _mapping(stage).get("name")
        yield loc, name if isinstance(name, str) else default


def _end(end: str, keys: Mapping[str, Value]) -> Iterator[Broken]:
    if "spark" in keys and "worker" in keys:
        yield Broken((end, "worker"), "can't be used together with spark")
    elif "spark" not in keys and "worker" not in keys:
        yield Broken((end,), "needs the key spark or the key worker")
    if "spark" in keys and "worker" not in keys:
        for key in WORKER_ONLY[end]:
            if key in keys:
                yield Broken((end, key), "is only for a worker, not for spark")
    frame = _mapping(keys.get("spark"))
    if "path" in frame and "table" in frame:
        yield Broken((end, "spark", "table"), "can't be used together with path")


def _cycles(extract: Mapping[str, Value]) -> Iterator[Broken]:
    plain = "worker" in extract and extract.get("mode") != "cyclic"
    if plain and "offsets" in extract:
        yield Broken(("extract", "offsets"), "needs mode: cyclic")
    offsets = _mapping(extract.get("offsets"))
    if offsets.get("by") == "worker":
        for key in SUPERVISOR_OFFSETS:
            if key in offsets:
                yield Broken(("extract", "offsets", key), "needs by: supervisor")


def _batches(data: Mapping[str, Value]) -> Iterator[Broken]:
    transforms = data.get("transform")
    stages: list[tuple[Loc, Value]] = [(("load",), data.get("load"))]
    for i, stage in enumerate(transforms if isinstance(transforms, list) else ()):
        stages.append((("transform", i), stage))
    for loc, stage in stages:
        batch = _mapping(_mapping(stage).get("batch"))
        if "bnc_after_last" in batch and batch.get("driver") != "worker":
            yield Broken((*loc, "batch", "bnc_after_last"), "needs driver: worker")


def _names(data: Mapping[str, Value]) -> Iterator[Broken]:
    taken: dict[str, Loc] = {}
    for loc, name in stage_names(data):
        if name in taken:
            text = f"{dotted(taken[name])} has the same name"
            yield Broken((*loc, "name"), text, at_key=False)
        taken.setdefault(name, loc)


def _mapping(value: Value) -> Mapping[str, Value]:
    return value if isinstance(value, dict) else {}
