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

__all__ = ("Broken", "broken_rules", "shipped_files", "stage_names")

WORKER_ONLY: Final = {
    "extract": (
        *("mode", "offsets", "timeout", "restart", "max_message", "max_reply"),
    ),
    "load": (
        *("workers", "order", "key", "window", "batch", "timeout", "restart"),
        *("recycle", "max_message", "max_reply"),
    ),
}
FILES: Final = ("avro", "csv", "json", "orc", "parquet", "text", "xml")
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
    yield from _engine(data)
    session = _mapping(data.get("spark"))
    if "master" in session and "remote" in session:
        yield Broken(("spark", "remote"), "can't be used together with master")
    yield from _shipped(session)
    yield from _batches(data)
    yield from _orders(data)
    yield from _errors(data)
    letters = _mapping(_mapping(data.get("dead_letters")).get("spark"))
    yield from _frame(("dead_letters", "spark"), letters)
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
    yield from _frame((end, "spark"), _mapping(keys.get("spark")))


def _engine(data: Mapping[str, Value]) -> Iterator[Broken]:
    engine = data.get("engine", "local")
    extract, load = _mapping(data.get("extract")), _mapping(data.get("load"))
    if engine in ("spark", "streaming") and "worker" in extract:
        yield from _extract_on_executors(str(engine), extract)
    sink = _mapping(load.get("spark"))
    if engine == "streaming":
        if sink.get("mode") == "overwrite":
            text = (
                "can't be overwrite with engine streaming, which goes on where it was"
            )
            yield Broken(("load", "spark", "mode"), text, at_key=False)
        if "dead_letters" in data:
            text = "is not for engine streaming yet: read the files in the state"
            yield Broken(("dead_letters",), text)
    elif "every" in extract and ("spark" in extract or engine == "spark"):
        text = "is only for a worker on engine local, or for engine streaming"
        yield Broken(("extract", "every"), text)
    if data.get("delivery") == "exactly-once":
        files = sink.get("format", "parquet") in FILES and "path" in sink
        if engine != "streaming" or not files:
            text = (
                "exactly-once needs engine streaming and load.spark with a path and a"
                f" format of files ({', '.join(FILES)})"
            )
            yield Broken(("delivery",), text, at_key=False)


def _extract_on_executors(
    engine: str, extract: Mapping[str, Value]
) -> Iterator[Broken]:
    cyclic = extract.get("mode") == "cyclic"
    by = _mapping(extract.get("offsets")).get("by")
    if cyclic and by != "supervisor":
        text = (
            f"cyclic needs offsets by supervisor with engine {engine}: Spark may ask"
            " for a part of the data again"
        )
        yield Broken(("extract", "mode"), text, at_key=False)
    elif engine == "streaming" and not cyclic:
        text = "needs mode cyclic and offsets by supervisor with engine streaming"
        yield Broken(("extract", "worker"), text)


def _shipped(session: Mapping[str, Value]) -> Iterator[Broken]:
    taken: dict[str, Loc] = {}
    for loc, path in shipped_files(session):
        file, _, there = path.rpartition("/")[2].partition("#")
        name = there or file
        if name in taken:
            text = (
                f"has the name of {dotted(taken[name])}: on the executors all are in"
                " one folder"
            )
            yield Broken(loc, text, at_key=False)
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


def _frame(loc: Loc, keys: Mapping[str, Value]) -> Iterator[Broken]:
    if "path" in keys and "table" in keys:
        yield Broken((*loc, "table"), "can't be used together with path")
    options = {name.lower() for name in _mapping(keys.get("options"))}
    placed = keys.get("path") or keys.get("table") or options & {"path", "paths"}
    default = "" if loc[0] == "extract" else "parquet"
    if keys and not placed and str(keys.get("format", default)).lower() in FILES:
        # Spark takes text that is nowhere for an empty DataFrame.
        yield Broken(loc, "needs the key path or the key table")


def _cycles(extract: Mapping[str, Value]) -> Iterator[Broken]:
    if _mapping(extract.get("timeout")).get("heartbeat") is not None:
        text = "is not for an extract stage, whose idle worker is not watched"
        yield Broken(("extract", "timeout", "heartbeat"), text)
    plain = "worker" in extract and extract.get("mode") != "cyclic"
    if plain and "offsets" in extract:
        yield Broken(("extract", "offsets"), "needs mode: cyclic")
    offsets = _mapping(extract.get("offsets"))
    if offsets.get("by") == "worker":
        for key in SUPERVISOR_OFFSETS:
            if key in offsets:
                yield Broken(("extract", "offsets", key), "needs by: supervisor")


def _batches(data: Mapping[str, Value]) -> Iterator[Broken]:
    for loc, stage in _fed(data):
        batch = _mapping(stage.get("batch"))
        if "bnc_after_last" in batch and batch.get("driver") != "worker":
            yield Broken((*loc, "batch", "bnc_after_last"), "needs driver: worker")


def _orders(data: Mapping[str, Value]) -> Iterator[Broken]:
    frame = _mapping(_mapping(data.get("extract")).get("spark"))
    for number, (loc, stage) in enumerate(_fed(data)):
        if stage.get("order") != "key":
            if "key" in stage and "worker" in stage:
                yield Broken((*loc, "key"), "needs order: key")
        elif "key" in stage:
            continue
        elif number:
            text = (
                "needs a key, a JSON pointer such as /id: only the first stage behind"
                " the source can take the source's"
            )
            yield Broken((*loc, "order"), text)
        elif "key" not in frame:
            text = "needs a key, a JSON pointer such as /id, or extract.spark.key"
            yield Broken((*loc, "order"), text)


def _errors(data: Mapping[str, Value]) -> Iterator[Broken]:
    for loc, stage in _fed(data):
        policy = _mapping(stage.get("on_error"))
        if policy.get("then") == "fail" and "budget" in policy:
            yield Broken((*loc, "on_error", "budget"), "needs then: dead_letter")
        if "retries" in policy and "spark" in stage and "worker" not in stage:
            text = "is only for a worker, not for spark"
            yield Broken((*loc, "on_error", "retries"), text)


def _fed(data: Mapping[str, Value]) -> list[tuple[Loc, Mapping[str, Value]]]:
    """Return the stages that take messages in, in their order."""
    transforms = data.get("transform")
    stages: list[tuple[Loc, Mapping[str, Value]]] = [
        (("transform", i), _mapping(stage))
        for i, stage in enumerate(transforms if isinstance(transforms, list) else ())
    ]
    return [*stages, (("load",), _mapping(data.get("load")))]


def _names(data: Mapping[str, Value]) -> Iterator[Broken]:
    taken: dict[str, Loc] = {}
    for loc, name in stage_names(data):
        if name in taken:
            text = f"{dotted(taken[name])} has the same name"
            yield Broken((*loc, "name"), text, at_key=False)
        taken.setdefault(name, loc)


def _mapping(value: Value) -> Mapping[str, Value]:
    return value if isinstance(value, dict) else {}
