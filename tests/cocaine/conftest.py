from __future__ import annotations

from pathlib import Path

import pytest

from tests.cocaine.framework import WORKER, installed


@pytest.fixture(scope="session")
def framework(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the command of a published framework's worker, with rare heartbeats."""
    script = tmp_path_factory.mktemp("framework") / "worker.py"
    script.write_text(WORKER)
    return (installed(), str(script), "20")


@pytest.fixture
def pipeline(tmp_path: Path, framework: tuple[str, ...]) -> Path:
    """Return a pipeline whose stage is that worker."""
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        f"""\
name: framework
extract:
  worker: {{command: [sh, -c, "printf 'one\\ntwo\\nthree\\n'"]}}
transform:
  - name: app
    worker: {{command: {list(framework)!r}}}
    dialect: {{name: cocaine, event: echo}}
load:
  worker: {{command: [python, load.py]}}
"""
    )
    (tmp_path / "load.py").write_text(LOAD)
    return file


LOAD = """\
import sys
for line in sys.stdin.buffer:
    with open("loaded", "ab") as file:
        file.write(line)
    sys.stdout.buffer.write(b"\\0")
    sys.stdout.flush()
"""
