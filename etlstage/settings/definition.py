"""
Classes whose fields are settings, and how these are read from a mapping.

A field defines its setting completely: the name, the kind (from the type), the default,
and the documentation below it. A :class:`Place` in the field's annotation restricts
where the setting may be written::

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Timeouts(Definition):
        heartbeat: Annotated[Duration | None, Place.FED] = None

The checks of the constructor are derived from that here; the keys of the pipeline file,
the options of the data source and the JSON Schema are derived elsewhere.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from enum import Enum, Flag, auto
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeVar,
)

from etlstage.errors import ConfigError, guess
from etlstage.settings import kind as kinds
from etlstage.settings.kind import Kind
from etlstage.settings.problem import Invalid, Problem, dotted

__all__ = (
    "HIDDEN",
    "UNREAD",
    "Definition",
    "Place",
    "Section",
    "Setting",
    "Unread",
    "broken",
    "judged",
    "placed",
    "readable",
    "section_in",
    "settings_of",
)

T = TypeVar("T")

UNREAD: Final = object()
"""Takes the place of a given value that could not be read."""


class Unread(AttributeError):
    """Raised when a rule asks for a value that could not be read."""


HIDDEN: Final = "is not valid; not shown, as it may be a secret"
"""Replaces an error text that may quote a value that must not be shown."""

MOST: Final = 20
"""Maximum number of unknown keys of a mapping that are reported one by one."""

_NO_MAPPING: Final = Problem((), "expected a mapping, got {got}")


class Place(Flag):
    """Where a setting of a stage may be written."""

    EXTRACT = auto()
    """An extract stage with a worker."""
    TRANSFORM = auto()
    """A transform stage."""
    LOAD = auto()
    """A load stage with a worker."""
    SOURCE = auto()
    """An extract stage that is a DataFrame."""
    SINK = auto()
    """A load stage that is a DataFrame."""
    READ = auto()
    """An option of the data source, where it reads."""
    WRITE = auto()
    """An option of the data source, where it writes."""

    FED = TRANSFORM | LOAD
    WORKER = EXTRACT | FED
    OPTION = READ | WRITE
    ALL = WORKER | SOURCE | SINK | OPTION


class Setting(NamedTuple):
    """One setting."""

    name: str
    kind: Kind
    default: object = MISSING
    place: Place = Place.ALL
    model: type | None = None
    """The class that documents it."""
    doc: str = ""
    """The documentation, if it is not the class's."""

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is MISSING


Rules: TypeAlias = Callable[[Mapping[str, Any]], Iterable[Problem]]
"""Takes the given values by key, and yields the contradictions among them."""


def no_rules(given: Mapping[str, Any]) -> Iterable[Problem]:
    """Return no problems: all values can be combined."""
    return ()


def broken(loc: tuple[str | int, ...], text: str, *, at_key: bool = True) -> Problem:
    """Return the problem of a rule that is violated."""
    return Problem(loc, text, at_key=at_key)


def readable(model: type[T], given: Mapping[str, Any]) -> T:
    """
    Return an unchecked object with only the values that could be read.

    Rules can then be evaluated all the same: access to any other value raises
    :class:`Unread`, at which :func:`judged` ends.
    """
    made = object.__new__(model)
    for name, setting in settings_of(model).items():
        value = given.get(name, UNREAD if setting.required else setting.default)
        if value is not UNREAD:
            object.__setattr__(made, name, value)
    return made


def judged(rule: Iterable[Problem]) -> Iterator[Problem]:
    """Yield a rule's problems, until it accesses a value that could not be read."""
    with suppress(Unread):
        yield from rule


class Definition:
    """
    Base of the classes whose fields are settings; they are frozen dataclasses.

    Raises:
        ConfigError: If a value is wrong, or contradicts another; all are reported.

    """

    __slots__ = ()
    label: ClassVar[tuple[str, ...]] = ()
    """The keys that lead to it in a stage, for errors of the constructor."""
    more: ClassVar[kinds.Schema] = {}
    """Additional entries of the JSON Schema."""

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        given: dict[str, Any] = {}
        for name, setting in settings_of(type(self)).items():
            value = getattr(self, name)
            if type(value) is type(setting.default) and value == setting.default:
                continue
            given[name] = UNREAD
            try:
                given[name] = setting.kind.read(value)
            except Invalid as error:
                problems += (p.under(name) for p in _in_python(error, setting))
            else:
                object.__setattr__(self, name, given[name])
        problems += self.rules(given)
        if problems:
            raise ConfigError([self._line(problem) for problem in problems])

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Raise Unread for an unread field, or a property that needs one."""
            found = name in settings_of(type(self)) or hasattr(type(self), name)
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise (Unread if found else AttributeError)(text)

    def __repr__(self) -> str:
        """Show only non-default values; the defaults of Stage take a kilobyte."""
        shown = [
            f"{name}={_shown(value)}"
            for name, setting in settings_of(type(self)).items()
            if (value := getattr(self, name)) != setting.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def plain(self) -> dict[str, object]:
        """Return all settings as plain JSON, as people write them."""
        return {
            name: setting.kind.written(getattr(self, name))
            for name, setting in settings_of(type(self)).items()
        }

    def shown(self, name: str) -> str:
        """Return a setting as people write it; ``never`` if it is switched off."""
        written = settings_of(type(self))[name].kind.written(getattr(self, name))
        return "never" if written is None else str(written)

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """
        Return the contradictions among the values.

        Args:
            given: The values that were written, by key, without the defaults.

        """
        return ()

    @classmethod
    def unfold(cls, value: Any) -> Any:
        """Return the mapping that a short form stands for."""
        return value

    @classmethod
    def short_forms(cls) -> list[kinds.Schema]:
        """Describe the short forms that :meth:`unfold` takes."""
        return []

    def _line(self, problem: Problem) -> str:
        loc = dotted((*self.label, *problem.loc))
        return f"{loc}: {problem.shown()}" if loc else problem.shown()


def _shown(value: object) -> str:
    # @dataclass generates a __repr__ that shadows the one of Definition.
    return Definition.__repr__(value) if isinstance(value, Definition) else repr(value)


class Section(Kind):
    """
    A mapping with known keys.

    Args:
        keys: The settings by their keys.
        make: Makes the object that the mapping stands for from the given values.
        model: The class of that object.
        rules: Yields the contradictions among the given values.
        more: Additional entries of its JSON Schema.
        moved: Hints for keys that were moved elsewhere.

    """

    def __init__(
        self,
        keys: Mapping[str, Setting],
        make: Callable[[dict[str, Any]], Any] = dict,
        *,
        model: type | None = None,
        rules: Rules = no_rules,
        more: kinds.Schema | None = None,
        moved: Mapping[str, str] | None = None,
    ) -> None:
        self.moved: Mapping[str, str] = moved or {}
        self.keys: Mapping[str, Setting] = keys
        self.model: type | None = model
        self.more: kinds.Schema = more or {}
        self._make = make
        self._rules = rules

    @property
    def short(self) -> list[kinds.Schema]:
        """The short forms that are accepted in place of the mapping."""
        model = self.model
        found = isinstance(model, type) and issubclass(model, Definition)
        return model.short_forms() if found else []  # type: ignore[union-attr]

    @classmethod
    def of(cls, model: type[Definition], place: Place = Place.ALL) -> Section:
        """Return the section for ``model``, with the keys that apply at a place."""
        return cls(
            {
                name.removesuffix("_"): placed(setting, place)
                for name, setting in settings_of(model).items()
                if setting.place & place
            },
            lambda given: model(**_named(model, given)),
            model=model,
            rules=model.rules,
            more=model.more,
        )

    def read(self, value: Any) -> Any:
        if self.model is not None and isinstance(value, self.model):
            return value
        if isinstance(self.model, type) and issubclass(self.model, Definition):
            value = self.model.unfold(value)
        if not isinstance(value, Mapping):
            raise Invalid(_NO_MAPPING._replace(value=value), rest=self._rest({}))
        problems: list[Problem] = []
        given: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        unknown = [key for key in value if key not in self.keys]
        problems += (broken((key,), self._unknown(key)) for key in unknown[:MOST])
        if len(unknown) > MOST:
            more = len(unknown) - MOST - 1
            text = f"unknown key, and {more:,} more" if more else "unknown key"
            problems.append(broken((unknown[MOST],), text))
        for key, item in value.items():
            setting = self.keys.get(key)
            if setting is None:
                continue
            given[key] = UNREAD
            try:
                given[key] = setting.kind.read(item)
            except Invalid as error:
                problems += (problem.under(key) for problem in error.problems)
                rest |= {} if error.rest is None else {key: error.rest}
        # A required key that was only misspelt has been reported as unknown.
        meant = {guess(key, self.keys) for key in unknown[:MOST]}
        for key, setting in self.keys.items():
            missing = setting.required and key not in value
            if missing and guess(key, [key]) not in meant:
                problems.append(Problem((key,), "required key is missing"))
            if missing and isinstance(setting.kind, Section):
                rest[key] = setting.kind._rest({})
        problems += self._rules(given)
        if problems:
            raise Invalid(*problems, rest=self._rest({**given, **rest}))
        try:
            return self._make(given)
        except ConfigError as error:
            problems = [Problem((), text, hidden=HIDDEN) for text in error.problems]
            raise Invalid(*problems, rest=self._rest(given)) from None

    def _rest(self, given: Mapping[str, Any]) -> Any:
        """Return an object of the values that could be read; None: there is none."""
        model = self.model
        if isinstance(model, type) and issubclass(model, Definition):
            return readable(model, _named(model, given))
        if any(value is UNREAD for value in given.values()):
            return None
        try:
            return self._make(dict(given))
        except (ConfigError, Invalid, TypeError, ValueError, KeyError):
            return None

    def deeper(self, key: str) -> Iterator[str]:
        """Yield the dotted places of a key in nested mappings."""
        for name, setting in self.keys.items():
            inner = section_in(setting.kind)
            if inner is not None:
                if key in inner.keys:
                    yield f"{name}.{key}"
                yield from (f"{name}.{place}" for place in inner.deeper(key))

    def _unknown(self, key: str) -> str:
        if key in self.moved:
            return self.moved[key].replace("{key}", key)
        deeper = list(self.deeper(key))
        if len(deeper) == 1:
            return f"unknown key (did you mean {deeper[0]!r}?)"
        expected = f", expected one of {', '.join(self.keys)}"
        return f"unknown key{guess(key, self.keys) or expected}"


def section_in(kind: Kind) -> Section | None:
    """Return the section that a kind or its items are, optional or not, or None."""
    while isinstance(kind, kinds.Maybe | kinds.ListOf):
        kind = kind.kind if isinstance(kind, kinds.Maybe) else kind.item
    return kind if isinstance(kind, Section) else None


def settings_of(model: type[Any]) -> Mapping[str, Setting]:
    """Return the settings of a class by the names of its fields."""
    found = _SETTINGS.get(model)
    if found is None:
        found = _SETTINGS[model] = _read_settings(model)
    return found


_SETTINGS: Final[dict[type[Any], Mapping[str, Setting]]] = {}


def _read_settings(model: type[Any]) -> Mapping[str, Setting]:
    hints = typing.get_type_hints(model, include_extras=True)
    return {
        field.name: _setting(model, field.name, hints[field.name], field)
        for field in fields(model)
    }


def _setting(model: type, name: str, hint: Any, field: Any) -> Setting:
    default = field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    notes = getattr(hint, "__metadata__", ())
    places = [note for note in notes if isinstance(note, Place)]
    return Setting(
        name,
        _kind_of(hint, name),
        default,
        places[0] if places else Place.ALL,
        model,
    )


def _kind_of(hint: Any, noun: str) -> Kind:
    notes = getattr(hint, "__metadata__", ())
    for note in notes:
        if isinstance(note, Kind):
            return note
        if isinstance(note, kinds.Noun):
            noun = note.noun
    if notes:
        return _kind_of(hint.__origin__, noun)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (one,) = (arg for arg in inner if arg is not types.NoneType)
        return kinds.Maybe(_kind_of(one, noun))
    if origin is Literal:
        return kinds.Choice(noun, {word: word for word in inner})
    if origin in (tuple, frozenset):
        return kinds.ListOf(_kind_of(inner[0], noun), origin)
    if origin is not None:
        return kinds.MapOf(_kind_of(inner[1], noun))
    if issubclass(hint, Definition):
        return Section.of(hint)
    if issubclass(hint, Enum):
        return kinds.Choice(noun, {member.value: member for member in hint})
    plain: dict[type, Kind] = {
        str: kinds.Text(),
        bool: kinds.Flag(),
        int: kinds.Whole(),
        Path: kinds.FOLDER,
    }
    return plain.get(hint) or kinds.Instance(hint)


def placed(setting: Setting, place: Place) -> Setting:
    """Return the setting; nested settings are reduced to those valid at a place."""
    inner = setting.kind
    model = inner.model if type(inner) is Section else None
    if model is not None and issubclass(model, Definition):
        return setting._replace(kind=Section.of(model, place))
    return setting


def _named(model: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by field name; some fields have a trailing ``_``."""
    names = settings_of(model)
    return {key if key in names else f"{key}_": item for key, item in given.items()}


def _in_python(error: Invalid, setting: Setting) -> Iterator[Problem]:
    """Yield the problems; where no mapping was given, name the expected class."""
    section = section_in(setting.kind)
    for problem in error.problems:
        if section is None or section.model is None or problem.text != _NO_MAPPING.text:
            yield problem
        else:
            keys = ", ".join(section.keys)
            name = section.model.__name__
            text = f"expected {name}, or a mapping of {keys}, got {{got}}"
            yield problem._replace(text=text)
