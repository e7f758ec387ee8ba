"""
The worker that a command is about: a command line, or a stage of a pipeline file.

Its options are named like the keys of a pipeline file, and read in the same way.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final, NamedTuple

from etlstage.cli.failure import naming
from etlstage.config.lookup import StageFile
from etlstage.config.model import ExtractKeys, LoadKeys, TransformKeys
from etlstage.config.reading import set_values
from etlstage.config.stages import StageKeys, stage_of, stage_section
from etlstage.errors import ConfigError, InputDamaged, guess
from etlstage.messages import Position, StageKind
from etlstage.pipeline.interfaces import Source
from etlstage.pipeline.secret import Secrets
from etlstage.protocol.registry import DEFAULT, dialect_class
from etlstage.settings.problem import Invalid, Loc, dotted
from etlstage.stage import Stage
from etlstage.supervisor.process import absent, runs, script
from etlstage.telemetry.log import NAME
from etlstage.telemetry.terminal import harmless

__all__ = (
    "Options",
    "Program",
    "lines_of",
    "messages_of",
    "program_of",
    "silence",
)

_KEYS: Final[Mapping[str, type[StageKeys]]] = {
    "transform": TransformKeys,
    "extract": ExtractKeys,
    "load": LoadKeys,
}


class Options(NamedTuple):
    """The options for a worker; None means the default."""

    kind: str | None = None
    batch: str | None = None
    mode: str | None = None
    offsets: str | None = None
    markers: str | None = None
    stage: str | None = None
    dialect: str | None = None

    @property
    def given(self) -> dict[str, object]:
        """The options that were given, except the stage."""
        return {
            name: value
            for name, value in self._asdict().items()
            if value is not None and name != "stage"
        }


class Program(NamedTuple):
    """A worker."""

    stage: Stage
    ranges: bool
    """Whether it is asked for ranges of offsets."""
    secrets: Secrets
    """The texts of its file that must not be shown."""

    def shown(self, text: str) -> str:
        """Return a text about it as it may be shown on a terminal."""
        return harmless(self.secrets.conceal(text))


def program_of(
    words: Sequence[str], options: Options, values: Sequence[str] = ()
) -> Program:
    """
    Return the worker that a command is about.

    Args:
        words: The command of the worker; or with a stage, the file that defines it.
        options: The worker's settings.
        values: Keys of its stage to set, each as in ``timeout.message=10s``.

    Raises:
        ConfigError: If anything is wrong, or contradicts itself.

    """
    if options.stage is None:
        return _of_command(words, options, values)
    if options.given:
        wrong = next(iter(options.given))
        raise ConfigError(f"--{wrong} can't be used with --stage: the file sets it")
    if len(words) != 1:
        raise ConfigError("--stage needs one FILE, and no command")
    file = StageFile.read(Path(words[0]))
    stage = file.worker(options.stage)
    file.check_presence(options.stage)
    offsets = file.keys.extract.offsets
    ranged = offsets is not None and offsets.by == "supervisor"
    return Program(stage, ranged and stage.kind is StageKind.EXTRACT, file.secrets)


def silence() -> None:
    """Disable logging: the findings of a command show what its workers did."""
    logging.getLogger(NAME).disabled = True


def lines_of(file: Path) -> list[bytes]:
    """
    Return the messages of a file, one per line.

    Raises:
        ConfigError: If it can't be read, or has none.

    """
    with naming(f"{file} can't be read"):
        *lines, rest = file.read_bytes().split(b"\n")
    messages = [*lines, *([rest] if rest else [])]
    if not messages:
        raise ConfigError(f"{file} has no messages; write one per line")
    return messages


async def messages_of(source: Source) -> AsyncGenerator[bytes, None]:
    """Yield the messages of a source, without positions and damaged parts."""
    async with aclosing(source.runs()) as runs:
        async for run in runs:
            for message in () if isinstance(run, Position | InputDamaged) else run:
                yield message


def _of_command(
    words: Sequence[str], options: Options, values: Sequence[str]
) -> Program:
    kind = options.kind or _kind_for(options.dialect)
    if kind not in _KEYS:
        raise ConfigError(
            f"--kind: unknown kind {kind!r}{guess(kind, _KEYS)}, expected"
            f" {', '.join(_KEYS)}"
        )
    if not words:
        raise ConfigError("expected the command of a worker, as in -- ./worker")
    _check_words(words)
    spoken: dict[str, Any] = {}
    written: dict[str, Any] = {"worker": {"command": list(words)}, "dialect": spoken}
    written["name"] = "worker"
    if options.dialect is not None:
        name, _, settings = options.dialect.partition(":")
        pairs = _pairs("dialect", settings) if settings else {}
        spoken |= {"name": name, **{key: _plain(text) for key, text in pairs.items()}}
    if options.markers is not None:
        spoken |= _pairs("markers", options.markers)
    if options.batch is not None:
        spoken["driver"], _, size = options.batch.partition(":")
        written["batch"] = {"size": _whole(size)} if size else {}
    modes = "mode" in _keys_of(spoken.get("name", DEFAULT), StageKind(kind))
    # Offsets need a worker that is asked, which in some dialects depends on the mode.
    if options.mode is not None or (options.offsets is not None and modes):
        spoken["mode"] = options.mode or "cyclic"
    if options.offsets is not None:
        written["offsets"] = {"by": options.offsets}
    document = set_values(written, values)
    try:
        keys: StageKeys = stage_section(_KEYS[kind]).read(written)
    except Invalid as error:
        said = []
        for problem in error.problems:
            text = problem.shown(instead=document.placeholder(problem))
            said.append(f"{_option(problem.loc, options)}: {text}")
        raise ConfigError("; ".join(said)) from None
    stage = stage_of(keys, Path.cwd())
    return Program(stage, options.offsets == "supervisor", Secrets())


def _check_words(words: Sequence[str]) -> None:
    """Raise ConfigError for a pipeline file without --stage, or a missing script."""
    first = Path(words[0])
    if len(words) == 1 and first.suffix in (".yaml", ".yml") and os.path.isfile(first):
        *names, last = StageFile.read(first).stages
        raise ConfigError(
            f"{first} is a pipeline: choose one of its stages by --stage NAME:"
            f" {', '.join(names)} or {last}"
        )
    at = script(words)
    if at is not None and not runs(path := Path(words[at])):
        raise ConfigError(absent("file", path))


def _kind_for(spoken: str | None) -> str:
    """Return the first kind of stage that a dialect fits."""
    name = DEFAULT if spoken is None else spoken.partition(":")[0]
    for kind in _KEYS:
        try:
            dialect = dialect_class(name).section(StageKind(kind)).read({})
        except (ConfigError, Invalid):
            break  # reported later, with everything else
        if dialect.problem(StageKind(kind)) is None:
            return kind
    return "transform"


def _keys_of(name: str, kind: StageKind) -> Collection[str]:
    """Return the settings of a dialect, if there is one of that name."""
    try:
        return dialect_class(name).section(kind).keys
    except ConfigError:
        return ()  # reported later, with everything else


def _pairs(option: str, text: str) -> dict[str, str]:
    """Return ``a=b,c=d`` as a mapping."""
    pairs = [part.partition("=") for part in text.split(",")]
    for name, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"--{option}: expected NAME=TEXT,..., got {name!r}")
    return {name: value for name, _, value in pairs}


def _plain(text: str) -> object:
    """Return a value as in a file: a number, true or false, else a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--batch: expected DRIVER[:SIZE], got :{text}") from None


def _option(loc: Loc, options: Options) -> str:
    """Return the option that has set the value at ``loc``."""
    keys = [str(key) for key in loc]
    if keys[:1] == ["worker"]:
        return "command"
    if keys[:1] != ["dialect"]:
        if keys[:1] and keys[0] not in options.given:
            return f"--set {dotted(loc)}"
        return f"--{keys[0]}" if keys else "worker"
    of = {"mode": "--mode", "driver": "--batch"}.get(keys[-1])
    if of is not None:
        return of
    in_markers = options.dialect is None or (
        options.markers is not None and f"{keys[-1]}=" in options.markers
    )
    return ".".join(
        [f"--{'markers' if in_markers else 'dialect'}", *keys[1:]]
    ).removesuffix(".name")
