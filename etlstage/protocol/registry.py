"""
The dialects that exist; each is imported when it is first asked for.

The supervisor and the pipeline's configuration know dialects only through this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple, TypeVar

from etlstage.errors import ConfigError, guess
from etlstage.protocol.base import Dialect

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


def dialect_class(name: str) -> type[Dialect]:
    """
    Return the class with the settings of a dialect.

    Raises:
        ConfigError: If there is no such dialect.

    """
    if name not in DIALECTS:
        # The class that is found must be a subclass of the abstract class.
        other = class_of_entry(GROUP, name, Dialect)  # type: ignore[type-abstract]
        if other is None:
            raise ConfigError(_unknown(name))
        return other
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
        ConfigError: If it names something else, or a class with another name.

    """
    from importlib.metadata import entry_points

    for entry in entry_points(group=group, name=name):
        found: object = entry.load()
        if (
            isinstance(found, type)
            and issubclass(found, kind)
            and getattr(found, "name", name) == name
        ):
            return found
        raise ConfigError(
            f"entry point {name} of group {group}: expected a {kind.__name__} of that"
            f" name, got {entry.value}"
        )
    return None


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
