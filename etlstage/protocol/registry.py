"""
Which dialects there are; each is imported when it is asked for.

The only place above a dialect that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple

from etlstage.errors import ConfigError, guess
from etlstage.protocol.base import Dialect

__all__ = (
    "DIALECTS",
    "LATER",
    "Translation",
    "default_dialect",
    "dialect_class",
    "dialect_from_plain",
    "translation",
)

DIALECTS: Final = {"marker": "MarkerDialect", "cocaine": "CocaineDialect"}
"""Names, and their classes in ``settings.py`` of the package of that name."""
DEFAULT: Final = "marker"
"""What a stage speaks that names no dialect."""
LATER: Final = ("kcl",)
"""Names that the design knows and this version does not build."""


def dialect_class(name: str) -> type[Dialect]:
    """
    Return what holds the settings of a dialect.

    Raises:
        ConfigError: If there is no such dialect.

    """
    if name not in DIALECTS:
        raise ConfigError(_unknown(name))
    settings = import_module(f"etlstage.protocol.{name}.settings")
    found: type[Dialect] = getattr(settings, DIALECTS[name])
    return found


def default_dialect() -> Dialect:
    """Return the dialect of a stage that names none."""
    return dialect_class(DEFAULT)()


def dialect_from_plain(settings: Mapping[str, object]) -> Dialect:
    """Return the dialect whose settings ``Dialect.plain()`` has made."""
    return dialect_class(str(settings.get("name"))).from_plain(settings)


class Translation(NamedTuple):
    """What was written for another system as the keys of a stage."""

    keys: dict[str, dict[str, object]]
    """Values by mapping and key, such as ``timeout`` and ``start``."""
    dropped: list[str]
    """What has no key here, and why."""


def translation(name: str, *documents: Mapping[str, Any]) -> Translation:
    """
    Return what documents of the system that a dialect is from say, in our words.

    Raises:
        ConfigError: If there is something wrong with them.

    """
    profile = import_module(f"etlstage.protocol.{name}.profile")
    return Translation(*profile.translated(*documents))


def _unknown(name: str) -> str:
    expected = f"expected {' or '.join(map(repr, DIALECTS))}"
    if name in LATER:
        return f"dialect {name!r} is not in this version, {expected}"
    return f"unknown dialect {name!r}{guess(name, DIALECTS) or f', {expected}'}"
