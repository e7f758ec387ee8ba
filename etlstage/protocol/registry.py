"""
The dialects that exist; each is imported when it is first asked for.

The supervisor and the pipeline's configuration know dialects only through this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from etlstage.errors import ConfigError, guess
from etlstage.protocol.base import Dialect

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = (
    "DEFAULT",
    "DIALECTS",
    "GROUP",
    "Translation",
    "class_of_entry",
    "default_dialect",
    "dialect_class",
    "dialect_from_plain",
    "dialect_names",
    "entry_at",
    "loaded",
    "translation",
)

DIALECTS: Final = {
    "marker": "MarkerDialect",
    "cocaine": "CocaineDialect",
    "kcl": "KclDialect",
}
"""Names, and the class in ``settings.py`` of the package of that name."""
DEFAULT: Final = "marker"
"""The dialect of a stage that names none."""
GROUP: Final = "etlstage.dialects"
"""The group of entry points by which other packages provide dialects."""

T = TypeVar("T")


def dialect_class(name: str, *, written: bool = False) -> type[Dialect]:
    """
    Return the class with the settings of a dialect.

    Args:
        name: Its name; built-in dialects take precedence.
        written: Whether a user has written the name. Then it is an error if another
            package has a dialect with the name of a built-in one.

    Raises:
        ConfigError: If there is no such dialect, or several packages have one.

    """
    if name not in DIALECTS:
        # The class that is found must be a subclass of the abstract class.
        other = class_of_entry(GROUP, name, Dialect)  # type: ignore[type-abstract]
        if other is None:
            raise ConfigError(_unknown(name))
        return other
    if written and (entry := _entry(GROUP, name)) is not None:
        raise ConfigError(
            f"{entry_at(entry)}: there is already a dialect {name!r}; rename it, or"
            " uninstall the package"
        )
    settings = import_module(f"etlstage.protocol.{name}.settings")
    found: type[Dialect] = getattr(settings, DIALECTS[name])
    return found


def dialect_names() -> list[str]:
    """Return the names of all dialects, those of other packages last."""
    from importlib.metadata import entry_points  # slow to import

    others = {entry.name for entry in entry_points(group=GROUP)}
    return [*DIALECTS, *sorted(others - {*DIALECTS})]


def class_of_entry(group: str, name: str, kind: type[T]) -> type[T] | None:
    """
    Return the class that an entry point of another package names, if there is one.

    Raises:
        ConfigError: If it can't be loaded, names something else, or a class with
            another name, or several packages have one with that name.

    """
    if (entry := _entry(group, name)) is None:
        return None
    found = loaded(entry)
    if (
        isinstance(found, type)
        and issubclass(found, kind)
        and getattr(found, "name", name) == name
    ):
        return found
    raise ConfigError(
        f"{entry_at(entry)}: expected a {kind.__name__} of that name, got {entry.value}"
    )


def loaded(entry: EntryPoint) -> object:
    """
    Return what an entry point of another package names.

    Raises:
        ConfigError: If it can't be imported.

    """
    if entry.pattern.match(entry.value) is None:
        raise ConfigError(
            f"{entry_at(entry)}: expected package.module:name, got {entry.value!r};"
            " correct it where the package declares its entry points"
        )
    try:
        return entry.load()
    except Exception as error:
        raise ConfigError(
            f"{entry_at(entry)}: can't load {entry.value}: {type(error).__name__}:"
            f" {error}; repair the package, or uninstall it"
        ) from error


def entry_at(entry: EntryPoint) -> str:
    """Return what an error begins with: the entry point, its group and package."""
    package = "" if entry.dist is None else f" ({entry.dist.name} {entry.dist.version})"
    return f"entry point {entry.name} of group {entry.group}{package}"


def _entry(group: str, name: str) -> EntryPoint | None:
    from importlib.metadata import entry_points  # slow to import

    entries = list(entry_points(group=group, name=name))
    if len(entries) > 1:
        raise ConfigError(
            f"{entry_at(entries[0])}: there is another one:"
            f" {entry_at(entries[1])}; uninstall one of the packages"
        )
    return entries[0] if entries else None


def default_dialect() -> Dialect:
    """Return the dialect of a stage that names none."""
    return dialect_class(DEFAULT)()


def dialect_from_plain(settings: Mapping[str, object]) -> Dialect:
    """Return the dialect with settings from ``Dialect.plain()``."""
    return dialect_class(str(settings.get("name"))).from_plain(settings)


class Translation(NamedTuple):
    """A configuration for another system, translated into the keys of a stage."""

    keys: dict[str, dict[str, object]]
    """Values by mapping and key, such as ``timeout`` and ``start``."""
    dropped: list[str]
    """What has no key here, and why."""
    extract: Mapping[str, Mapping[str, object]] = {}
    """Keys of the extract stage before it, likewise."""


def translation(name: str, *documents: Mapping[str, Any] | str) -> Translation:
    """
    Translate documents of the system that a dialect comes from into keys of a stage.

    Raises:
        ConfigError: If there is something wrong with the documents.

    """
    settings = import_module(f"etlstage.protocol.{name}.settings")
    return Translation(*settings.translated(*documents))


def _unknown(name: str) -> str:
    known = dialect_names()
    expected = f"expected {' or '.join(map(repr, known))}"
    return f"unknown dialect {name!r}{guess(name, known) or f', {expected}'}"
