"""
The keys of a stage, and from them to the stage.

They are the settings of :class:`~etlstage.stage.Stage` and of the dialect that the
worker speaks, where those say that they are written.
Paths are relative to the file's folder, but those in a command to ``cwd``, where the
worker runs: by default the same. As the first word of a command, ``python`` and
``python3`` are the interpreter that runs etlstage, so that a worker finds
``etlstage.worker`` whatever the PATH says.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from etlstage.messages import StageKind
from etlstage.protocol.base import Dialect
from etlstage.protocol.registry import DEFAULT, DIALECTS, LATER, dialect_class
from etlstage.settings.definition import (
    Place,
    Section,
    Setting,
    broken,
    placed,
    section_in,
    settings_of,
)
from etlstage.settings.kind import (
    Choice,
    Instance,
    Maybe,
    Schema,
)
from etlstage.settings.problem import (
    Problem,
)
from etlstage.settings.schema import documentation, json_schema
from etlstage.stage import BatchPolicy, ErrorPolicy, Order, Stage
from etlstage.stage.stage import PYTHONS

__all__ = ("StageKeys", "command_of", "located", "named", "stage_of", "stage_section")

SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


@dataclass(frozen=True, kw_only=True)
class StageKeys:
    """What was written of a stage; each kind has a class with the keys it adds."""

    kind: ClassVar[StageKind]
    place: ClassVar[Place]
    frame: ClassVar[Place] = Place(0)
    """Where the stage is a DataFrame, if it may be one."""
    dialect: Annotated[type[Dialect], Instance(type), Place(0)]
    """What its worker speaks."""
    written: Annotated[Mapping[str, Any], Instance(dict), Place(0)]
    """Settings of the stage and of the dialect, by key."""

    @property
    def order(self) -> Order:
        """In which order replies are passed on."""
        order: Order = self.written.get("order", Order.TOTAL)
        return order

    @property
    def on_error(self) -> ErrorPolicy:
        """What becomes of a message that can't be processed."""
        policy: ErrorPolicy = self.written.get("on_error", ErrorPolicy())
        return policy


def located(path: str, folder: Path) -> str:
    """Return ``path`` seen from the file's folder; one with a scheme is as it is."""
    return path if SCHEME.match(path) else str(folder / path)


def named(stage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of an end of a pipeline without the one that it is not."""
    ends = ("spark", "worker")
    return {k: v for k, v in stage.items() if v is not None or k not in ends}


def stage_of(keys: StageKeys, name: str, folder: Path) -> Stage:
    """Return the stage that the keys describe; it has a worker."""
    worker, written = keys.written["worker"], dict(keys.written)
    batch = written.pop("batch", None)
    values = {
        setting.name: source[setting.name]
        for setting in settings_of(Stage).values()
        if setting.name in (source := worker if setting.group else written)
    }
    if batch is not None:
        own = settings_of(BatchPolicy)
        values["batch"] = BatchPolicy(**{k: batch[k] for k in batch if k in own})
    values["dialect"] = keys.dialect.from_keys(keys.kind, _flat(keys.written))
    values["cwd"] = cwd = folder / (worker.get("cwd") or "")
    values["command"] = command_of(worker["command"], cwd)
    return Stage(**values | {"kind": keys.kind, "name": name})


def command_of(command: tuple[str, ...], cwd: Path | None) -> tuple[str, ...]:
    """Return a command as it is started; a path in it is seen from ``cwd``."""
    program, *arguments = command
    if program in PYTHONS:
        program = sys.executable
    elif "/" in program and cwd is not None:
        program = str(cwd / program)
    return (program, *arguments)


def stage_section(model: type[StageKeys]) -> Section:
    """Return what reads the keys of a stage as ``model``."""
    return _StageSection(model, DEFAULT)


class _StageSection(Section):
    """The keys of a stage whose worker speaks a certain dialect."""

    def __init__(self, model: type[StageKeys], dialect: str) -> None:
        self._stage = model
        self._dialect = dialect
        self._own = {
            name: setting
            for name, setting in settings_of(model).items()
            if setting.place
        }
        needs = [{"required": ["spark"]}, {"required": ["worker"]}]
        super().__init__(
            self._keys(),
            self._made,
            model=model,
            rules=self._broken,
            more={"oneOf": needs} if model.frame else {},
        )

    def read(self, value: Any) -> Any:  # noqa: ANN401 - whatever a user wrote
        """Return what was written; the dialect says which keys there are."""
        if self._stage.frame and isinstance(value, Mapping):
            value = named(value)
        worker = value.get("worker") if isinstance(value, Mapping) else None
        dialect = worker.get("dialect") if isinstance(worker, Mapping) else None
        if dialect in DIALECTS and dialect != self._dialect:
            return _StageSection(self._stage, dialect).read(value)
        return super().read(value)

    def _keys(self) -> dict[str, Setting]:
        model, groups = self._stage, {"": dict(self._own), "worker": {}}
        for name, setting in settings_of(Stage).items():
            if setting.place & (model.place | model.frame):
                group = groups[setting.group]
                group[name] = placed(setting, model.place | model.frame)
        keys, worker = groups[""], groups["worker"]
        worker["dialect"] = Setting(
            "dialect",
            Choice("dialect", {name: name for name in DIALECTS}, later=LATER),
            DEFAULT,
            doc="What the worker speaks.",
        )
        if "batch" in keys:
            batch = section_in(keys["batch"].kind)
            assert batch is not None
            groups["batch"] = dict(batch.keys)
        for at, setting in dialect_class(self._dialect).keys(model.kind).items():
            group_name, _, key = at.rpartition(".")
            groups[group_name][key] = setting._replace(place=Place.WORKER)
        if "batch" in keys:
            # That it is written asks for batches.
            asked = Maybe(self._group("batch", groups["batch"]))
            keys["batch"] = keys["batch"]._replace(kind=asked, default=None)
        called, cwd = keys["name"], worker["cwd"]
        keys["name"] = called._replace(kind=Maybe(called.kind), default=None)
        worker["cwd"] = cwd._replace(
            default=Path(), doc="Working directory, relative to the file's folder."
        )
        program = Setting(
            "worker",
            self._group("worker", worker),
            doc="The program, and how its process is to run.",
        )
        if model.frame:
            program = program._replace(kind=Maybe(program.kind), default=None)
        return {"name": keys.pop("name"), "worker": program, **keys}

    def _group(self, name: str, keys: Mapping[str, Setting]) -> Section:
        dialect = dialect_class(self._dialect)
        rules = partial(dialect.key_rules, name)
        return Section(keys, rules=rules, more=self._others(name, keys))

    def _others(self, group: str, keys: Mapping[str, Setting]) -> Schema:
        """Describe the keys of a mapping with those that other dialects have there."""
        found = {
            key: setting._replace(doc=f"Dialect {name}: {documentation(setting)}")
            for name in DIALECTS
            for at, setting in dialect_class(name).keys(self._stage.kind).items()
            if (key := at.removeprefix(f"{group}.")) != at and key not in keys
        }
        if not found:
            return {}
        return {"properties": json_schema(Section({**keys, **found}))["properties"]}

    def _made(self, given: dict[str, Any]) -> StageKeys:
        own = {name: given.pop(name) for name in self._own if name in given}
        dialect = dialect_class(self._dialect)
        return self._stage(dialect=dialect, written=given, **own)

    def _broken(self, given: Mapping[str, Any]) -> Iterable[Problem]:
        if self._stage.frame:
            yield from self._ends(given)
        if "worker" in given:
            yield from Stage.rules({**given, "kind": self._stage.kind})

    def _ends(self, given: Mapping[str, Any]) -> Iterable[Problem]:
        if "worker" in given:
            if "spark" in given:
                yield broken(("worker",), "can't be used together with spark")
            return
        if "spark" not in given:
            yield broken((), "needs the key spark or the key worker")
            return
        text, frame = "only valid with `worker`", self._stage.frame
        for key, value in given.items():
            setting = self.keys[key]
            if key != "spark" and not setting.place & frame:
                yield broken((key,), text)
            elif isinstance(value, ErrorPolicy):
                for name, inner in settings_of(ErrorPolicy).items():
                    changed = getattr(value, name) != inner.default
                    if changed and not inner.place & frame:
                        yield broken((key, name), text)


def _flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by key, those of mappings by ``mapping.key``."""
    flat: dict[str, Any] = {}
    for key, value in given.items():
        if value is None:
            continue
        flat[key] = value
        if key in ("worker", "batch") and isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
    return flat
