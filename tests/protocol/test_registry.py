from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from etlstage.errors import ConfigError
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.protocol.registry import (
    DIALECTS,
    GROUP,
    default_dialect,
    dialect_class,
    dialect_names,
    translation,
)


@pytest.mark.parametrize("name", DIALECTS)
def test_dialects_are_found_by_name(name: str) -> None:
    """Each name belongs to the class found by it."""
    assert dialect_class(name).name == name


def test_marker_is_the_default() -> None:
    """With the markers used by the stages that were written for it."""
    assert default_dialect() == MarkerDialect()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("marke", "unknown dialect 'marke' (did you mean 'marker'?)"),
        ("json", "unknown dialect 'json', expected 'marker' or 'cocaine' or 'kcl'"),
    ],
)
def test_unknown_dialect_is_refused(name: str, text: str) -> None:
    """The error names the closest dialect, or all of them."""
    with pytest.raises(ConfigError) as caught:
        dialect_class(name)
    assert str(caught.value) == text


def test_documents_of_another_system_are_translated() -> None:
    """By the dialect of that system (issue 15)."""
    made = translation("cocaine", {"log-output": True}, {"slave": "a"})

    assert made.keys == {
        "worker": {"command": ["./a"]},
        "dialect": {"name": "cocaine"},
    }
    assert made.dropped == ["log-output: what a worker prints is in the log"]


class Mine(MarkerDialect):
    """A dialect of another package."""

    name = "mine"


def test_dialect_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by an entry point; built-in dialects take precedence (issue 23)."""
    points = [
        EntryPoint("mine", f"{__name__}:Mine", GROUP),
        EntryPoint("marker", f"{__name__}:Mine", GROUP),
    ]
    monkeypatch.setattr(
        "importlib.metadata.entry_points",
        lambda group, name=None: [p for p in points if name in (None, p.name)],
    )
    assert dialect_names() == ["marker", "cocaine", "kcl", "mine"]
    assert dialect_class("mine") is Mine
    assert dialect_class("marker") is MarkerDialect
    points[0] = EntryPoint("mine", f"{__name__}:MarkerDialect", GROUP)
    with pytest.raises(ConfigError, match="entry point mine of group"):
        dialect_class("mine")
