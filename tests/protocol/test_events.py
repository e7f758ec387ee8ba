from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.process
def test_worker_start_loads_nothing_heavy() -> None:
    """A worker imports the dialect at every start; each module costs milliseconds."""
    code = (
        "import sys; before = set(sys.modules); import etlstage.protocol.marker;"
        "print({'dataclasses', 'inspect', 'asyncio', 'logging', 'anyio', 'pydantic'}"
        " & (set(sys.modules) - before))"
    )
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert loaded == "set()\n"
