"""
Options of ``format("etlstage")``, and what they say together.

Spark hands options over as texts, and Python gets their names in lower case.  So no
name here has a capital, and what must keep its own, as variables do, is inside a
value.  Words are those of the pipeline file.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from etlstage.errors import ConfigError, guess
from etlstage.messages import StageKind
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.worker_source import OffsetPolicy
from etlstage.protocol.base import Shape
from etlstage.protocol.marker import MARKER_NAMES, Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.spark.ship.artifact import place
from etlstage.stage import BatchPolicy, ErrorPolicy, RestartPolicy, Stage, Timeouts
from etlstage.stage import units as quantity
from etlstage.stage.stage import PYTHONS

__all__ = ("Reading", "Writing", "reading", "writing")

Reader: TypeAlias = Callable[[str], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a read is to do."""

    stage: Stage
    offsets: OffsetPolicy | None = None
    """Of a cyclic stage. Without an end the worker is asked for it."""
    initial: bool = False
    """Whether the worker is asked for the first offset, too."""
    partitions: int | None = None
    """Tasks: of a plain stage 1 by default, of a cyclic one a task for each step."""
    max_per_batch: int | None = None
    """How far one batch of a stream reaches, in offsets."""
    binary: bool = False
    """Whether the column ``value`` is binary, where no schema is given."""
    place: Callable[[Stage], Stage] = place
    """Makes of the stage the one that runs in a task."""

    def __post_init__(self) -> None:
        for name in ("partitions", "max_per_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be 1 or more, got {value}")
        if self.stage.kind is not StageKind.EXTRACT:
            raise ConfigError(
                f"stage {self.stage.name} is of kind {self.stage.kind.value},"
                " expected extract: it is to be read from"
            )
        given = self.offsets is not None and self.offsets.by == "supervisor"
        shape = self.stage.dialect.shape
        if (shape is Shape.MESSAGE) != given:
            mode = "cyclic" if shape is Shape.MESSAGE else "plain"
            raise ConfigError(
                f"stage {self.stage.name}: mode {mode} and offsets"
                " don't go together: Spark may ask for a part of the data again, so"
                " offsets of a cyclic stage are kept by the supervisor, and a plain"
                " stage has none"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Writing:
    """What a write is to do."""

    stage: Stage
    path: Path | None = None
    """Where staged files end."""
    commit: tuple[str, ...] = ()
    """Program that makes a write final."""
    abort: tuple[str, ...] = ()
    """Program that undoes a write."""
    report: Path | None = None
    """File for the account of a write."""
    letters: DeadLetters | None = None
    """Those of the run; only with a report."""
    place: Callable[[Stage], Stage] = place
    """Makes of the stage the one that runs in a task."""

    @property
    def staged(self) -> bool:
        """Whether what an attempt does is not final by itself."""
        return self.path is not None or bool(self.commit)

    def __post_init__(self) -> None:
        if self.stage.kind is not StageKind.LOAD:
            raise ConfigError(
                f"stage {self.stage.name} is of kind {self.stage.kind.value},"
                " expected load: it is to be written to"
            )
        if self.path is not None and (self.commit or self.abort):
            raise ConfigError(
                "path can't be used together with commit and abort: either files are"
                " moved, or a program makes the write final"
            )


def reading(options: Mapping[str, str]) -> Reading:
    """
    Return what the options of a read say.

    Raises:
        ConfigError: If one is unknown, can't be read, or contradicts another; all
            that are wrong in themselves are named.

    """
    values = _values(options, _READ, {})
    cyclic = values.pop("mode", "plain") == "cyclic"
    for name in _RANGE if not cyclic else ():
        if name in values:
            raise _refusal(f"option {name} is only for mode=cyclic")
    start, end = values.pop("start", 0), values.pop("end", "latest")
    given = {name: values.pop(name) for name in ("step", "template") if name in values}
    offsets = OffsetPolicy(
        by="supervisor",
        start=0 if start == "initial" else start,
        end=None if end == "latest" else end,
        **given,
    )
    kept = {n: values.pop(n) for n in ("partitions", "max_per_batch") if n in values}
    binary = values.pop("values", "string") == "binary"
    mode = Mode.CYCLIC if cyclic else Mode.PLAIN
    return Reading(
        stage=_stage(values, "extract", mode, kind=StageKind.EXTRACT),
        offsets=offsets if cyclic else None,
        initial=start == "initial",
        binary=binary,
        **kept,
    )


def writing(options: Mapping[str, str]) -> Writing:
    """Return what the options of a write say; raises as :func:`reading` does."""
    values = _values(options, _WRITE, _SPARKS_OWN)
    kept = {n: values.pop(n) for n in ("path", "commit", "abort") if n in values}
    driver = values.pop("batch.driver", None)
    batch = _group(values, "batch.")
    fed: dict[str, Any] = {"batch": BatchPolicy(**batch)}
    mode = Mode.SINGLE
    if driver is not None or batch:
        mode = Mode.BATCH_WORKER if driver == "worker" else Mode.BATCH_SUPERVISOR
    if "window" in values:
        fed["window"] = values.pop("window")
    if "path" in kept or "commit" in kept:
        if "on_error.retries" in values:
            raise _refusal(
                "option on_error.retries can't be used together with path or commit: an"
                " attempt that has lost its worker is thrown away, and Spark makes"
                " another"
            )
        # The next worker would go on where this one was torn off.
        fed["restart"] = RestartPolicy(policy="temporary")
    stage = _stage(values, "load", mode, kind=StageKind.LOAD, **fed)
    return Writing(stage=stage, **kept)


def _stage(
    values: dict[str, Any],
    name: str,
    mode: Mode,
    **fixed: Any,  # noqa: ANN401
) -> Stage:
    markers = {name: values.pop(name) for name in MARKER_NAMES if name in values}
    timeout = Timeouts(**_group(values, "timeout."))
    if "on_error.retries" in values:
        fixed["on_error"] = ErrorPolicy(retries=values.pop("on_error.retries"))
    for limit in ("max_message", "max_reply"):
        if limit in values:
            fixed[f"{limit}_bytes"] = values.pop(limit)
    if "command" not in values:
        raise _refusal("option command is missing: the program of the worker")
    dialect = MarkerDialect(mode=mode, markers=Markers.from_text(**markers))
    return Stage(**{"name": name} | values, dialect=dialect, timeout=timeout, **fixed)


def _group(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values whose names begin with ``prefix``, by the rest of the name."""
    names = [name for name in values if name.startswith(prefix)]
    return {name.removeprefix(prefix): values.pop(name) for name in names}


def _values(
    options: Mapping[str, str], known: Mapping[str, Reader], others: Mapping[str, str]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, text in options.items():
        if name in others:
            continue
        if name not in known:
            problems.append(_unknown(name, known))
            continue
        try:
            values[name] = known[name](text)
        except ValueError as error:
            shown = "set" if name in _HIDDEN else repr(text[:80])
            problems.append(f"option {name} is {shown}, expected {error}")
    if problems:
        # On one line: of an error in its Python processes Spark shows the last.
        raise _refusal("; ".join(problems))
    return values


def _unknown(name: str, known: Mapping[str, Reader]) -> str:
    for other, does in ((_READ, "reading"), (_WRITE, "writing")):
        if name in other:
            return f"option {name} is only for {does}"
    hint = guess(name, known) or f", expected {_all(known)}"
    return f"unknown option {name!r}{hint}"


def _all(known: Mapping[str, Reader]) -> str:
    return "one of " + ", ".join(known)


def _refusal(text: str) -> ConfigError:
    return ConfigError(f"format etlstage: {text}")


# --- how texts are read; each raises ValueError with what is expected ------------


def _command(text: str) -> tuple[str, ...]:
    wanted = 'a JSON list such as ["python", "fetch.py"], or words as for a shell'
    try:
        words = json.loads(text) if text.lstrip()[:1] == "[" else shlex.split(text)
    except ValueError:
        raise ValueError(wanted) from None
    if not words or not all(
        isinstance(word, str) and "\0" not in word for word in words
    ):
        raise ValueError(wanted)
    program, *arguments = words
    return (sys.executable if program in PYTHONS else program, *arguments)


def _environment(text: str) -> dict[str, str]:
    wanted = 'a JSON object of texts such as {"LANG": "C.UTF-8"}'
    try:
        found = json.loads(text)
    except ValueError:
        raise ValueError(wanted) from None
    if not isinstance(found, dict) or not all(
        name and "=" not in name and isinstance(value, str)
        for name, value in found.items()
    ):
        raise ValueError(wanted)
    return found


def _text(text: str) -> str:
    if not text:
        raise ValueError("some text")
    return text


def _folder(text: str) -> Path:
    # Where tasks run is not where the driver runs.
    return Path(_text(text)).absolute()


def _place(text: str) -> Path:
    scheme, colon, rest = text.partition(":/")
    if colon and scheme != "file":
        raise ValueError("a folder that all executors see, or a file: URI")
    return Path("/" + rest.lstrip("/")) if colon else _folder(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("a whole number from 1 up")
    return int(text)


def _count_or_zero(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("a whole number from 0 up")
    return int(text)


def _duration(text: str) -> float | None:
    return None if text == "null" else quantity.duration(text)


def _offset(word: Literal["initial", "latest"]) -> Reader:
    def read(text: str) -> int | str:
        if text == word:
            return text
        if not text.removeprefix("-").isdecimal():
            raise ValueError(f"a whole number, or {word} to ask the worker")
        return int(text)

    return read


def _choice(*words: str) -> Reader:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(" or ".join(words) + guess(text, words))
        return text

    return read


def _flag(text: str) -> bool:
    return bool(_choice("true", "false")(text.lower()) == "true")


_HIDDEN: Final = frozenset({"env"})
_SPARKS_OWN: Final = {"checkpointlocation": "", "queryname": ""}
_RANGE: Final = ("start", "end", "step", "template", "max_per_batch")
_WORKER: Final[Mapping[str, Reader]] = {
    "command": _command,
    "name": _text,
    "env": _environment,
    "cwd": _folder,
    **dict.fromkeys(MARKER_NAMES, _text),
    "ready": _flag,
    "timeout.start": _duration,
    "timeout.message": _duration,
    "timeout.stop": quantity.duration,
    "on_error.retries": _count_or_zero,
    "max_message": quantity.size,
    "max_reply": quantity.size,
}
_READ: Final[Mapping[str, Reader]] = {
    **_WORKER,
    "mode": _choice("plain", "cyclic"),
    "partitions": _count,
    "start": _offset("initial"),
    "end": _offset("latest"),
    "step": _count,
    "template": _text,
    "max_per_batch": _count,
    "values": _choice("string", "binary"),
}
_WRITE: Final[Mapping[str, Reader]] = {
    **_WORKER,
    "path": _place,
    "commit": _command,
    "abort": _command,
    "batch.driver": _choice("worker", "supervisor"),
    "batch.size": _count,
    "batch.bytes": quantity.size,
    "batch.seconds": quantity.duration,
    "window": _count,
}
