"""The names of ``etlstage.testing``, and what is imported for them."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import etlstage.testing


def test_each_name_has_a_home() -> None:
    """It is imported when it is used (issue 12)."""
    for name in etlstage.testing.__all__:
        assert getattr(etlstage.testing, name).__module__.startswith("etlstage.testing")
    assert set(etlstage.testing.__all__) <= set(dir(etlstage.testing))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        etlstage.testing.nothing  # noqa: B018


def test_import_of_the_plugin_brings_nothing() -> None:
    """Each run of pytest imports it, even without tests of workers (issue 12)."""
    code = (
        "import sys, etlstage.testing.plugin; print([n for n in sys.modules"
        " if n.split('.')[0] in ('anyio', 'hypothesis', 'etlstage')])"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert ast.literal_eval(seen.stdout.decode()) == [
        *("etlstage", "etlstage.testing", "etlstage.testing.plugin")
    ]
