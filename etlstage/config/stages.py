"""
The keys of a stage, and how they become a stage.

They are the settings of :class:`~etlstage.stage.Stage` and of the worker's dialect, in
the places that their definitions name. Paths are relative to the file's folder, except
that paths in a command are relative to ``cwd``, where the worker runs: by default the
same folder. As the first word of a command, ``python`` and ``python3`` are the
interpreter that runs etlstage, so that a worker finds ``etlstage.worker`` whatever the
PATH is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from etlstage.config.document import Document
from etlstage.config.end import Keys, SinkKeys, SourceKeys, ends
from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.protocol.base import Dialect
from etlstage.protocol.registry import DEFAULT, dialect_class, dialect_names
from etlstage.settings.definition import (
    Definition,
    Place,
    Section,
    Setting,
    broken,
    placed,
    readable,
    section_in,
    settings_of,
)
from etlstage.settings.kind import Choice, Instance, ListOf, Maybe, Schema, Text
from etlstage.settings.problem import Invalid, Loc, Problem, unexpected
from etlstage.settings.schema import documentation, json_schema
from etlstage.stage import ErrorPolicy, Stage, WorkerProgram
from etlstage.stage.stage import PYTHONS
from etlstage.supervisor.contract import with_schema

__all__ = (
    "StageKeys",
    "Stages",
    "command_at",
    "command_of",
    "stage_of",
    "stage_section",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageKeys(Keys):
    """The written keys of a stage; each kind of stage has a subclass with its own."""

    kind: ClassVar[StageKind]
    place: ClassVar[Place]
    frame: ClassVar[Place] = Place(0)
    """The place of a stage whose end is not a worker, if the kind may have one."""
    name: Annotated[str, Place(0)]
    """Name of the stage in reports, logs and errors."""
    stage: Annotated[Stage | None, Instance(Stage), Place(0)] = None
    """Its worker, with paths as they are written; None: it has none."""
    on_error: Annotated[ErrorPolicy, Place(0)] = field(default_factory=ErrorPolicy)
    """What becomes of a message that can't be processed."""

    @property
    def dialect(self) -> Dialect:
        """The dialect of its worker, which must exist."""
        assert self.stage is not None
        return self.stage.dialect


def stage_of(keys: StageKeys, folder: Path) -> Stage:
    """
    Return the stage of a worker, with paths relative to the file's folder.

    Raises:
        ConfigError: If the schema of its contract can't be read.

    """
    assert keys.stage is not None
    worker = keys.stage.program
    cwd = folder / (worker.cwd or "")
    worker = replace(worker, command=command_of(worker.command, cwd), cwd=cwd)
    return with_schema(replace(keys.stage, worker=worker), folder)


def command_of(command: Sequence[str], cwd: Path | None) -> tuple[str, ...]:
    """Return a command as it is started; the program's path is relative to ``cwd``."""
    program, *arguments = command
    if program in PYTHONS:
        program = sys.executable
    elif "/" in program and cwd is not None:
        program = str(cwd / program)
    return (program, *arguments)


def command_at(document: Document, loc: Loc) -> Loc:
    """Return where the worker's command of the stage at ``loc`` is written."""
    at = (*loc, "worker", "command")
    return at if at in document.values else at[:-1]


class Stages(ListOf):
    """Stages, which are named by their numbers where they have no names."""

    def read(self, value: Any) -> Any:  # noqa: ANN401, D102 - as in Kind
        if isinstance(value, list | tuple):
            value = [_named(item, i) for i, item in enumerate(value, 1)]
        return super().read(value)


def _named(stage: Any, number: int) -> Any:  # noqa: ANN401 - whatever a user wrote
    if isinstance(stage, Mapping) and stage.get("name") is None:
        return {**stage, "name": f"transform-{number}"}
    return stage


def stage_section(model: type[StageKeys], *, others: bool = False) -> Section:
    """Return the section that reads a stage; ``others``: with third-party ends."""
    return _StageSection(model, others=others)


class _StageSection(Section):
    """The keys of a stage: those of any stage with a worker, and those of its ends."""

    def __init__(
        self,
        model: type[StageKeys],
        *,
        others: bool = False,
        named: Container[str] | None = None,
    ) -> None:
        self._stage = model
        self._others = others
        self._own = {
            name: setting
            for name, setting in settings_of(model).items()
            if setting.place
        }
        self._ends: dict[str, type[SourceKeys | SinkKeys]] = {}
        for name, end in ends(others=others, named=named).items():
            role = end.source if model.kind is StageKind.EXTRACT else end.sink
            if model.frame and role is not None:
                self._ends[name] = role
        super().__init__(
            self._keys(),
            self._made,
            model=model,
            rules=self._broken,
            more={"oneOf": [{"required": [name]} for name in self._ends]}
            if model.frame
            else {},
            moved={"mode": "is now dialect.mode"},
        )

    def read(self, value: Any) -> Any:  # noqa: ANN401 - whatever a user wrote
        """Return the stage; unknown keys make it look for ends of other packages."""
        if self._stage.frame and isinstance(value, Mapping):
            value = {
                key: item
                for key, item in value.items()
                if item is not None or key not in self._ends
            }
            unknown = set(value) - {*self.keys, *self.moved}
            if not self._others and unknown:
                return self._with_others(unknown).read(value)
        return super().read(value)

    def _with_others(self, named: Container[str]) -> _StageSection:
        try:
            return _StageSection(self._stage, others=True, named=named)
        except ConfigError as error:
            raise Invalid(Problem((), str(error)), rest=self._rest({})) from error

    def _keys(self) -> dict[str, Setting]:
        model, keys = self._stage, dict(self._own)
        place = model.place | model.frame
        for name, setting in settings_of(Stage).items():
            if setting.place & place:
                keys[name] = placed(setting, place)
        called, program = keys.pop("name"), keys.pop("worker")
        worker = Section.of(WorkerProgram)
        cwd = "Working directory, relative to the pipeline file's folder."
        worker.keys = {
            **worker.keys,
            "cwd": worker.keys["cwd"]._replace(default=Path(), doc=cwd),
        }
        worker.moved = {
            **dict.fromkeys(_OLD_WORKER, "is now dialect.{key}, beside worker"),
            **_OLD_DIALECT,
        }
        program = program._replace(kind=worker)
        keys["dialect"] = Setting(
            "dialect",
            _Spoken(model.kind),
            DEFAULT,
            place=Place.WORKER,
            doc="Dialect of the worker: its name, or a mapping of the name and settings.",
        )
        if "batch" in keys:
            # Writing the key at all asks for batches.
            moved = dict.fromkeys(_OLD_BATCH, "is now dialect.{key}")
            inner = section_in(keys["batch"].kind)
            assert inner is not None
            inner.moved = moved
            keys["batch"] = keys["batch"]._replace(kind=Maybe(inner), default=None)
        found = {"name": called._replace(kind=Maybe(called.kind), default=None)}
        for name, role in self._ends.items():
            made = program if role.place & Place.WORKER else _setting_of(name, role)
            found[name] = made._replace(kind=Maybe(made.kind), default=None)
        if not model.frame:
            found["worker"] = program
        return {**found, **keys}

    def _made(self, given: Mapping[str, Any]) -> StageKeys:
        return self._of(given, lambda model, values: model(**values))

    def _rest(self, given: Mapping[str, Any]) -> StageKeys:
        return self._of(given, readable)

    def _of(
        self, given: Mapping[str, Any], make: Callable[[type[Any], dict[str, Any]], Any]
    ) -> StageKeys:
        values = {**given, "name": given.get("name") or self._stage.kind.value}
        own = {k: values[k] for k in (*self._own, "name", "on_error") if k in values}
        for name in [name for name in self._ends if given.get(name) is not None][:1]:
            role, end = self._ends[name], values.pop(name)
            if not role.place & Place.WORKER:
                own["end"] = end
                return make(self._stage, own)  # type: ignore[no-any-return]
            own["end"], values["worker"] = role(), end
        dialect = values.get("dialect") or _Spoken(self._stage.kind).read({})
        if isinstance(dialect, Dialect):
            dialect = dialect.fitted(
                # A dialect that always uses batches has them even if no key asks.
                batches=values.get("batch") is not None or dialect.shape.batches,
                heartbeat=getattr(values.get("timeout"), "heartbeat", None),
            )
        values |= {"dialect": dialect, "kind": self._stage.kind}
        if values.get("batch") is None:
            values.pop("batch", None)
        staged = {key: values[key] for key in settings_of(Stage) if key in values}
        own["stage"] = make(Stage, staged)
        return make(self._stage, own)  # type: ignore[no-any-return]

    def _broken(self, given: Mapping[str, Any]) -> Iterable[Problem]:
        written = [name for name in self._ends if name in given]
        if self._stage.frame and len(written) != 1:
            named = "one of the keys " + ", ".join(self._ends)
            if not written:
                yield broken((), f"needs {named}")
            for name in written[1:]:
                yield broken((name,), f"can't be used together with {written[0]}")
            return
        if not self._stage.frame or self._ends[written[0]].place & Place.WORKER:
            yield from Stage.rules({**given, "kind": self._stage.kind})
            spoken = given.get("dialect")
            flaw = isinstance(spoken, Dialect) and spoken.problem(self._stage.kind)
            if flaw:
                yield broken(("dialect",), flaw)
            return
        text, frame = "only valid with `worker`", self._stage.frame
        below = settings_of(self._ends[written[0]])
        for key, value in given.items():
            setting = self.keys[key]
            if key not in self._ends and not setting.place & frame:
                there = f"; write it below {written[0]}" if key in below else ""
                yield broken((key,), text + there)
            elif isinstance(value, ErrorPolicy):
                for name, inner in settings_of(ErrorPolicy).items():
                    changed = getattr(value, name) != inner.default
                    if changed and not inner.place & frame:
                        yield broken((key, name), text)


def _setting_of(name: str, role: type[Definition]) -> Setting:
    return Setting(name, Section.of(role), doc=" ".join((role.__doc__ or "").split()))


_OLD_BATCH: Final = ("driver", "eob_then_eom", "bnc_after_last", "eob_after_full")
_OLD_WORKER: Final = (
    *("protocol", "event", "concurrency", "encoding", "payload", "concat"),
    *("terminate", "seal", "handshake"),
)
_OLD_DIALECT: Final = {
    "dialect": "is now dialect, beside worker",
    "markers": "is now dialect, beside worker",
}
"""Keys of versions that were never released; to be removed with the first release."""


class _Spoken(Section):
    """A dialect, by its name or with its settings; without a name the default one."""

    def __init__(self, kind: StageKind) -> None:
        self._kind = kind
        super().__init__(self._keys(DEFAULT))

    @property
    def short(self) -> list[Schema]:
        """Describe names, and the mappings of dialects other than the default one."""
        names = [name for name in dialect_names() if self._fits(name)]
        others = [
            json_schema(Section(self._keys(name, f"Dialect {name}: ")))
            for name in names
            if name != DEFAULT
        ]
        return [
            Choice("dialect", dict.fromkeys(names)).schema(),
            *({**other, "required": ["name"]} for other in others),
        ]

    def read(self, value: Any) -> Any:  # noqa: ANN401 - whatever a user wrote
        """Return the dialect."""
        if isinstance(value, Dialect):
            return value
        written = value if isinstance(value, Mapping) else {"name": value}
        name = written.get("name", DEFAULT)
        if not isinstance(name, str):
            wanted = "the name of a dialect, or a mapping of its name and settings"
            raise unexpected(wanted, value)
        section = self._section(name, written, ("name",) if written is value else ())
        called = Setting("name", Text(), name)
        section.keys = {"name": called, **section.keys}  # so that errors list it, too
        return section.read({k: v for k, v in written.items() if k != "name"})

    def _fits(self, name: str) -> bool:
        """Return whether the stage can have workers of a dialect, as far as known."""
        try:
            spoken = dialect_class(name).section(self._kind).read({})
        except Invalid:
            return True  # unknown until its settings are known
        return not isinstance(spoken, Dialect) or spoken.problem(self._kind) is None

    def _section(self, name: str, written: Container[str], loc: Loc) -> Section:
        try:
            found = dialect_class(name, written="name" in written)
            return found.section(self._kind)
        except ConfigError as flaw:
            try:
                Choice("dialect", dict.fromkeys(dialect_names(), "")).read(name)
            except Invalid as error:
                raise Invalid(*(p.under(*loc) for p in error.problems)) from None
            raise Invalid(Problem(loc, str(flaw))) from flaw

    def _keys(self, name: str, of: str = "") -> dict[str, Setting]:
        doc = "Name of the dialect."
        called = Setting("name", Choice("dialect", {name: name}), name, doc=doc)
        own = {
            key: setting._replace(doc=f"{of}{setting.doc or documentation(setting)}")
            for key, setting in dialect_class(name).section(self._kind).keys.items()
        }
        return {"name": called, **own}
