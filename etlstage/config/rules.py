"""
What keys in several mappings of a pipeline file say together.

What the keys of one mapping say is checked by its class. These rules look at the data
as it was written, whatever its shape, so that a user sees everything that is wrong at
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from etlstage.config.document import Value
from etlstage.config.stages import named
from etlstage.errors import guess
from etlstage.settings.definition import broken
from etlstage.settings.problem import (
    Loc,
    Problem,
    dotted,
)
from etlstage.settings.units import FILES, local_path, of_files

__all__ = (
    "broken_rules",
    "case_rules",
    "mapping",
    "shipped_files",
    "stage_names",
)


def broken_rules(data: Mapping[str, Value]) -> Iterator[Problem]:
    """Yield what contradicts itself in a file."""
    yield from _cycles(named(mapping(data.get("extract"))))
    yield from _engine(data)
    session = mapping(data.get("spark"))
    yield from _shipped(session)
    yield from _orders(data)
    yield from _names(data)
    yield from case_rules(data, data.get("tests"))
    yield from _faults(data)


def case_rules(data: Mapping[str, Value], cases: Value) -> Iterator[Problem]:
    """
    Yield what tests ask of a pipeline that it has not.

    Args:
        data: The pipeline.
        cases: Its tests, which may stand in another file.

    """
    stages = {name: loc for loc, name in stage_names(data)}
    reads = "spark" in named(mapping(data.get("extract")))
    writes = "spark" in named(mapping(data.get("load")))
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


def _faults(data: Mapping[str, Value]) -> Iterator[Problem]:
    stages = {name: loc for loc, name in stage_names(data)}
    faults = data.get("faults")
    for i, item in enumerate(faults if isinstance(faults, list) else ()):
        name, loc = mapping(item).get("stage"), ("faults", i, "stage")
        if isinstance(name, str) and name not in stages:
            expected = f", expected one of {', '.join(stages)}"
            text = f"unknown stage {{got}}{guess(name, stages) or expected}"
            yield Problem(loc, text, name)
        elif "spark" in named(mapping(data.get(str(stages.get(str(name), ("",))[0])))):
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


def _engine(data: Mapping[str, Value]) -> Iterator[Problem]:
    engine = data.get("engine", "local")
    extract, load = named(mapping(data.get("extract"))), mapping(data.get("load"))
    if engine in ("spark", "streaming") and "worker" in extract:
        yield from _extract_on_executors(str(engine), extract)
    sink = mapping(load.get("spark"))
    if engine == "streaming":
        if sink.get("mode") == "overwrite" and _is_far(sink):
            text = (
                "can't be overwrite with engine streaming, but for a path of this machine"
                " or a table: a stream adds to what is there"
            )
            yield broken(("load", "spark", "mode"), text, at_key=False)
        if "dead_letters" in data:
            text = "is not for engine streaming yet: read the files in the state"
            yield broken(("dead_letters",), text)
    elif "every" in extract and ("spark" in extract or engine == "spark"):
        text = "is only for a worker on engine local, or for engine streaming"
        yield broken(("extract", "every"), text)
    programs = [key for key in ("commit", "abort") if key in load]
    if data.get("delivery") != "exactly-once":
        for key in programs:
            yield broken(("load", key), "needs delivery: exactly-once")
    elif engine == "local" and "worker" in named(load):
        yield from _commits(data, load)
    else:
        wants = "; it ".join(
            (
                *_sink_not_once(str(engine), data, sink),
                *_not_once(str(engine), data, extract),
            )
        )
        if wants:
            yield broken(("delivery",), f"exactly-once {wants}", at_key=False)


def _sink_not_once(
    engine: str, data: Mapping[str, Value], sink: Mapping[str, Value]
) -> Iterator[str]:
    """Yield why a DataFrame can't be loaded once, and what would do."""
    if str(sink.get("format")).lower() == "jdbc":
        options = {name.lower() for name in mapping(sink.get("options"))}
        if not {"url", "dbtable"} <= options:
            yield "needs load.spark.options with url and dbtable"
        if "remote" in mapping(data.get("spark")):
            yield (
                "needs a session with a JVM of its own for a database: over Spark Connect"
                " there is no transaction; use spark.master"
            )
    elif not of_files(sink.get("format", "parquet")) or "path" not in sink:
        formats = ", ".join(FILES)
        workers = (
            ", or engine local, where a worker may have load.commit and load.abort"
            if not sink
            else ""
        )
        yield (
            f"needs load.spark with a path and a format of files ({formats}), or format"
            f" jdbc{workers}"
        )
    if _is_far(sink):
        yield (
            "needs a path of this machine, where an epoch can be renamed, such as that"
            " of a file system that is mounted"
        )


def _not_once(
    engine: str, data: Mapping[str, Value], extract: Mapping[str, Value]
) -> Iterator[str]:
    """Yield why messages can't be read and recorded once, and what would do."""
    if engine == "streaming":
        return
    if "state" not in data:
        yield "needs state, a folder where it is recorded what was loaded"
    if "dead_letters" in data:
        yield "can't be kept for dead_letters: read their files in the state"
    by = mapping(extract.get("offsets")).get("by")
    if engine == "local" and "worker" in extract and by != "supervisor":
        yield (
            "needs positions from which extraction can go on: use mode cyclic and"
            " offsets by supervisor"
        )


def _is_far(sink: Mapping[str, Value]) -> bool:
    """Return whether files go to another machine, where they can't be renamed."""
    path = sink.get("path")
    return "table" not in sink and isinstance(path, str) and local_path(path) is None


def _commits(data: Mapping[str, Value], load: Mapping[str, Value]) -> Iterator[Problem]:
    """Yield why a load worker can't load messages once, and what would do."""
    if "commit" not in load or "abort" not in load:
        text = (
            "exactly-once needs load.commit and load.abort, programs that make an epoch"
            " final and undo it; without them a load worker loads at least once"
        )
        yield broken(("delivery",), text, at_key=False)
    if "state" not in data:
        text = "exactly-once needs state, a folder where it is recorded what was loaded"
        yield broken(("delivery",), text, at_key=False)


def _extract_on_executors(
    engine: str, extract: Mapping[str, Value]
) -> Iterator[Problem]:
    cyclic = extract.get("mode") == "cyclic"
    by = mapping(extract.get("offsets")).get("by")
    if cyclic and by != "supervisor":
        text = (
            f"cyclic needs offsets by supervisor with engine {engine}: Spark may ask"
            " for a part of the data again"
        )
        yield broken(("extract", "mode"), text, at_key=False)
    elif engine == "streaming" and not cyclic:
        text = "needs mode cyclic and offsets by supervisor with engine streaming"
        yield broken(("extract", "worker"), text)


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


def _cycles(extract: Mapping[str, Value]) -> Iterator[Problem]:
    plain = "worker" in extract and extract.get("mode") != "cyclic"
    if plain and "offsets" in extract:
        yield broken(("extract", "offsets"), "needs mode: cyclic")


def _orders(data: Mapping[str, Value]) -> Iterator[Problem]:
    frame = mapping(mapping(data.get("extract")).get("spark"))
    for number, (loc, stage) in enumerate(_fed(data)):
        if stage.get("order") != "key" or "key" in stage:
            continue
        if number:
            text = (
                "needs a key, a JSON pointer such as /id: only the first stage behind"
                " the source can take the source's"
            )
            yield broken((*loc, "order"), text)
        elif "key" not in frame:
            text = "needs a key, a JSON pointer such as /id, or extract.spark.key"
            yield broken((*loc, "order"), text)


def _fed(data: Mapping[str, Value]) -> list[tuple[Loc, Mapping[str, Value]]]:
    """Return the stages that take messages in, in their order."""
    transforms = data.get("transform")
    stages: list[tuple[Loc, Mapping[str, Value]]] = [
        (("transform", i), mapping(stage))
        for i, stage in enumerate(transforms if isinstance(transforms, list) else ())
    ]
    return [*stages, (("load",), mapping(data.get("load")))]


def _names(data: Mapping[str, Value]) -> Iterator[Problem]:
    taken: dict[str, Loc] = {}
    for loc, name in stage_names(data):
        if name in taken:
            text = f"{dotted(taken[name])} has the same name"
            yield broken((*loc, "name"), text, at_key=False)
        taken.setdefault(name, loc)


def mapping(value: Value) -> Mapping[str, Value]:
    """Return the value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}
