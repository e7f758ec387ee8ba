from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

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
from tests.packages import install


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


NOT_LOADED = "; repair the package, or uninstall it"
BROKEN = {
    "no_such.module:Mine": "can't load no_such.module:Mine: ModuleNotFoundError:"
    f" No module named 'no_such'{NOT_LOADED}",
    "tests.packages:Mine": "can't load tests.packages:Mine: AttributeError:"
    f" module 'tests.packages' has no attribute 'Mine'{NOT_LOADED}",
    "tests packages": "expected package.module:name, got 'tests packages'; correct it"
    " where the package declares its entry points",
    "pathlib:Path": "expected a Dialect of that name, got pathlib:Path",
}
"""Values of entry points, and what is wrong with them."""


@pytest.mark.parametrize("value", BROKEN)
def test_broken_dialect_of_another_package(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the entry point, its package and the cause (issue 23)."""
    install(tmp_path, "theirs", GROUP, mine=value)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        dialect_class("mine")
    where = f"entry point mine of group {GROUP} (theirs 1.0)"
    assert str(caught.value) == f"{where}: {BROKEN[value]}"
    assert "mine" in dialect_names()  # for suggestions, nothing is loaded


def test_dialect_of_two_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of them is meant can't be known, so both are named (issue 23)."""
    for package in ("one", "other"):
        install(tmp_path, package, GROUP, mine=f"{__name__}:Mine")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        dialect_class("mine")
    for package in ("one", "other"):
        assert f"entry point mine of group {GROUP} ({package} 1.0)" in str(caught.value)
    assert str(caught.value).endswith("; uninstall one of the packages")


def test_written_name_of_a_built_in_dialect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user may mean another package's dialect of that name (issue 23)."""
    assert dialect_class("marker", written=True) is MarkerDialect
    install(tmp_path, "theirs", GROUP, marker=f"{__name__}:Mine")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        dialect_class("marker", written=True)
    assert str(caught.value) == (
        f"entry point marker of group {GROUP} (theirs 1.0): there is already a dialect"
        " 'marker'; rename it, or uninstall the package"
    )
    assert dialect_class("marker") is MarkerDialect
