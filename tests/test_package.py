"""What ``import etlstage`` gives."""

from __future__ import annotations

import importlib.metadata

import pytest

import etlstage


def test_version_is_that_of_the_distribution() -> None:
    """It is read from what is installed (issue 22)."""
    assert etlstage.__version__ == importlib.metadata.version("etlstage")


def test_version_of_a_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not a release."""

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert etlstage.__version__ == "0+unknown"


def test_names_are_the_public_ones() -> None:
    """Nothing that the module itself imports is among them (issue 22)."""
    shown = {name for name in dir(etlstage) if not name.startswith("__")}
    assert shown == set(etlstage.__all__)
    for name in shown:
        assert getattr(etlstage, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'stag'"):
        _ = etlstage.stag
