"""
Options of ``format("etlstage")``, and rules across them.

Spark passes options as text, and Python gets their names in lower case. So no name here
has a capital, and names that must keep theirs, such as environment variables, are
inside a value. The options of a stage, and of its dialect, are its settings, with the
names of the pipeline file; this module adds those that only a read or a write has.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from etlstage.errors import ConfigError, guess
from etlstage.messages import StageKind
from etlstage.protocol.base import Shape
from etlstage.protocol.registry import DEFAULT, dialect_class
from etlstage.settings.definition import (
    Place,
    Setting,
    placed,
    section_in,
    settings_of,
)
from etlstage.settings.kind import (
    Kind,
    ListOf,
    MapOf,
    Maybe,
)
from etlstage.settings.problem import (
    Invalid,
    unexpected,
)
from etlstage.settings.units import (
    Command,
    Count,
)
from etlstage.spark.ship.artifact import place
from etlstage.stage import OffsetPolicy, RestartPolicy, Stage, WorkerProgram
from etlstage.stage.stage import PYTHONS

__all__ = ("SPARKS_OWN", "Reading", "SharedFolder", "Writing", "reading", "writing")


class SharedFolder(Kind):
    """A folder that all executors see."""

    def read(self, value: Any) -> Path:  # noqa: ANN401
        """Return the folder."""
        scheme, colon, rest = str(value).partition(":/")
        if colon and scheme != "file":
            wanted = "a folder that all executors can access, or a file: URI"
            raise unexpected(wanted, value)
        # Tasks have another working directory than the driver.
        return Path("/" + rest.lstrip("/")) if colon else Path(value).absolute()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """Options that only a read has."""

    max_per_batch: Count | None = None
    """Maximum number of offsets in one batch of a stream."""
    partitions: Count | None = None
    """Number of tasks; by default 1 for a plain stage, and one for each step for a
    cyclic one."""
    values: Literal["string", "binary"] = "string"
    """Type of column ``value`` if no schema is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Write:
    """Options that only a write has."""

    path: Annotated[Path | None, SharedFolder()] = None
    """Target folder of staged files."""
    commit: Command = ()
    """Program that makes a write final."""
    abort: Command = ()
    """Program that undoes a write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading(_Read):
    """The settings of a read."""

    stage: Stage
    offsets: OffsetPolicy | None = None
    """Offsets of a cyclic stage."""
    place: Callable[[Stage], Stage] = place
    """Makes the stage that runs in a task from ``stage``."""

    def __post_init__(self) -> None:
        if self.stage.kind is not StageKind.EXTRACT:
            raise ConfigError(
                f"stage {self.stage.name} is of kind {self.stage.kind.value},"
                " expected extract for a read"
            )
        given = self.offsets is not None and self.offsets.by == "supervisor"
        shape = self.stage.dialect.shape
        if (shape is Shape.MESSAGE) != given:
            mode = "cyclic" if shape is Shape.MESSAGE else "plain"
            raise ConfigError(
                f"stage {self.stage.name}: mode {mode} and the given offsets don't match:"
                " Spark may request a part of the data again, so the supervisor must keep"
                " the offsets of a cyclic stage, and a plain stage has none"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Writing(_Write):
    """The settings of a write."""

    stage: Stage

    @property
    def staged(self) -> bool:
        """Whether the effects of an attempt are final only after a commit."""
        return self.path is not None or bool(self.commit)

    def __post_init__(self) -> None:
        if self.stage.kind is not StageKind.LOAD:
            raise ConfigError(
                f"stage {self.stage.name} is of kind {self.stage.kind.value},"
                " expected load for a write"
            )
        if self.stage.dialect.shape is Shape.COMMITTED:
            raise ConfigError(
                f"a worker of dialect {self.stage.dialect.name} decides by itself when to"
                " commit, but Spark has no position that it could commit"
            )
        if self.path is not None and (self.commit or self.abort):
            raise ConfigError(
                "path can't be used together with commit and abort: either files are"
                " moved, or a program makes the write final"
            )


class _Named(Kind):
    """A dialect: its name, or a JSON object with the name and its settings."""

    def read(self, value: Any) -> tuple[str, dict[str, Any]]:  # noqa: ANN401
        """Return the name, and the settings."""
        settings = {"name": value}
        if str(value).lstrip()[:1] == "{":
            try:
                settings = json.loads(value)
            except ValueError:
                wanted = 'a name, or a JSON object such as {"name": "cocaine"}'
                raise unexpected(wanted, value) from None
        return str(settings.pop("name", DEFAULT)), settings


def reading(options: Mapping[str, str]) -> Reading:
    """
    Return the settings in the options of a read.

    Raises:
        ConfigError: If an option is unknown, can't be read, or contradicts another; all
            that are wrong by themselves are named.

    """
    given = _given(options, _READ)
    own = {name: given.pop(name) for name in _READ_ONLY if name in given}
    offsets = {name: given.pop(name) for name in _OFFSETS if name in given}
    stage = _stage(given, StageKind.EXTRACT)
    cyclic = stage.dialect.shape is Shape.MESSAGE
    for name in _RANGE if not cyclic else ():
        if name in options:
            raise _refusal(f"option {name} is only for mode=cyclic")
    return Reading(
        stage=stage,
        offsets=OffsetPolicy(by="supervisor", **offsets) if cyclic else None,
        **own,
    )


def writing(options: Mapping[str, str]) -> Writing:
    """Return the settings in the options of a write; raises as :func:`reading` does."""
    given = _given(options, _WRITE)
    own = {name: given.pop(name) for name in _WRITE_ONLY if name in given}
    stage = _stage(given, StageKind.LOAD)
    if "path" in own or "commit" in own:
        for name in options:
            if name == "on_error.retries" or name.startswith(("restart.", "recycle.")):
                raise _refusal(
                    f"option {name} can't be used together with path or commit: an"
                    " attempt that has lost its worker is discarded, and Spark starts"
                    " another"
                )
        # What a worker has done with a message that was lost or cancelled is unknown,
        # so no other worker may load that message into the same attempt.
        stage = replace(
            stage,
            restart=RestartPolicy(policy="temporary"),
            on_error=replace(stage.on_error, retries=0),
        )
    return Writing(stage=stage, **own)


def _stage(given: dict[str, Any], kind: StageKind) -> Stage:
    if "command" not in given:
        raise _refusal("option command is missing: set it to the worker's program")
    named, settings = given.pop("dialect", (DEFAULT, {}))
    spoken = {
        key: given.pop(name) for name, key in _spoken(kind).items() if name in given
    }
    if spoken and named != DEFAULT:
        raise _refusal(
            f"option {next(iter(spoken))} belongs to dialect {DEFAULT}: for {named}, give"
            f' the settings in option dialect, as in {{"name": "{named}", ...}}'
        )
    values: dict[str, Any] = {"name": kind.value, "kind": kind}
    for name, value in given.items():
        group, _, key = name.rpartition(".")
        if group:
            values.setdefault(group, {})[key] = value
        else:
            values[name] = value
    batches = "batch" in values or any(map(_in_batch, spoken))
    try:
        section = dialect_class(named).section(kind)
        heartbeat = values.get("timeout", {}).get("heartbeat")
        found = section.read({**spoken, **settings})
        dialect = found.fitted(batches=batches, heartbeat=heartbeat)
    except ConfigError as error:
        raise _refusal(f"option dialect: {error}") from None
    except Invalid as error:
        raise _refusal(
            "; ".join(problem.shown() for problem in error.problems)
        ) from None
    program = {key: values.pop(key) for key in _PROGRAM if key in values}
    if "cwd" in program:
        # Tasks have another working directory than the driver.
        program["cwd"] = program["cwd"].absolute()
    return Stage(**values, worker=WorkerProgram(**program), dialect=dialect)


def _spoken(kind: StageKind) -> dict[str, str]:
    """Return option names with the settings of the default dialect that they set."""
    keys = dialect_class(DEFAULT).section(kind).keys
    return {f"batch.{key}" if _in_batch(key) else key: key for key in keys}


def _in_batch(key: str) -> bool:
    """Return whether a setting of the dialect is about batches."""
    return key == "driver" or key.startswith(("eob_", "bnc_"))


def _given(options: Mapping[str, str], known: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the values of options; an error names all that are wrong by themselves."""
    given: dict[str, Any] = {}
    problems: list[str] = []
    for name, text in options.items():
        if name in SPARKS_OWN and known is _WRITE:
            continue
        if name not in known:
            problems.append(_unknown(name, known))
            continue
        kind = known[name].kind
        try:
            given[name] = kind.read(_parsed(kind, text))
        except Invalid as error:
            instead = "a value that is not shown" if name == "env" else ""
            texts = (problem.shown(instead) for problem in error.problems)
            problems += (f"option {name}: {text}" for text in texts)
    if problems:
        # On one line: Spark shows the last line of an error in its Python processes.
        raise _refusal("; ".join(problems))
    return given


def _parsed(kind: Kind, text: str) -> object:
    """Convert a text where the pipeline file has a list, a mapping or null."""
    if isinstance(kind, Maybe):
        return None if text == "null" else text
    if isinstance(kind, ListOf):
        return _words(text)
    if isinstance(kind, MapOf):
        return _object(text)
    return text


def _words(text: str) -> object:
    wanted = (
        'a JSON list such as ["python", "fetch.py"], or a command line as in a shell'
    )
    try:
        words = json.loads(text) if text.lstrip()[:1] == "[" else shlex.split(text)
    except ValueError:
        raise unexpected(wanted, text) from None
    if not words or not all(isinstance(word, str) for word in words):
        raise unexpected(wanted, text)
    program, *arguments = words
    return [sys.executable if program in PYTHONS else program, *arguments]


def _object(text: str) -> object:
    wanted = 'a JSON object of strings such as {"LANG": "C.UTF-8"}'
    try:
        found = json.loads(text)
    except ValueError:
        raise unexpected(wanted, text) from None
    if not isinstance(found, dict) or not all(
        isinstance(value, str) for value in found.values()
    ):
        raise unexpected(wanted, text)
    return found


def _unknown(name: str, known: Mapping[str, Setting]) -> str:
    for other, does in ((_READ, "reading"), (_WRITE, "writing")):
        if name in other:
            return f"option {name} is only for {does}"
    expected = f", expected one of {', '.join(known)}"
    return f"unknown option {name!r}{guess(name, known) or expected}"


def _refusal(text: str) -> ConfigError:
    return ConfigError(f"format etlstage: {text}")


_PROGRAM: Final = settings_of(WorkerProgram)
"""Settings of the program, which are options without a prefix."""


def _known(kind: StageKind, place: Place, own: type) -> dict[str, Setting]:
    """Return the options of a read or a write, by name."""
    found: dict[str, Setting] = {}
    for name, setting in {**settings_of(Stage), **_PROGRAM}.items():
        if setting.place & place and name != "worker":
            inner = section_in(placed(setting, place).kind)
            if inner is None:
                found[name] = setting
            else:
                found |= {f"{name}.{key}": one for key, one in inner.keys.items()}
    keys = dialect_class(DEFAULT).section(kind).keys
    found |= {name: keys[key] for name, key in _spoken(kind).items()}
    found["dialect"] = Setting("dialect", _Named(), doc="Dialect of the worker.")
    # In the order in which a user thinks of them.
    offsets = _OFFSETS if own is _Read else {}
    return {"command": found.pop("command"), **found, **offsets, **settings_of(own)}


SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname"})
"""Options of a write that are Spark's own."""
_OFFSETS: Final = {
    name: setting for name, setting in settings_of(OffsetPolicy).items() if name != "by"
}
_RANGE: Final = (*_OFFSETS, "max_per_batch")
_READ_ONLY: Final = tuple(settings_of(_Read))
_WRITE_ONLY: Final = tuple(settings_of(_Write))
_READ: Final = _known(StageKind.EXTRACT, Place.READ, _Read)
_WRITE: Final = _known(StageKind.LOAD, Place.WRITE, _Write)
