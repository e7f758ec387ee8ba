"""The preparation of a comparison of two commits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import etlstage
from benchmarks.against import compile_speedups
from etlstage import speedups

pytestmark = pytest.mark.process


@pytest.mark.skipif(speedups.compiled is None, reason="nothing is compiled here")
def test_a_package_from_an_archive_is_compiled(tmp_path: Path) -> None:
    """Else compiled code would be compared with Python (issue 22)."""
    source = Path(etlstage.__file__).parent
    package = tmp_path / "etlstage"
    package.mkdir()
    for name in ("speedups.py", "_speedups.c"):
        shutil.copy(source / name, package)
    (package / "__init__.py").touch()

    compile_speedups(tmp_path)

    asked = "from etlstage import speedups; print(speedups.compiled is not None)"
    done = subprocess.run(
        [sys.executable, "-c", asked],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"


def test_a_package_without_c_code_is_left_alone(tmp_path: Path) -> None:
    """Commits before the C code have nothing to compile."""
    (tmp_path / "etlstage").mkdir()

    compile_speedups(tmp_path)

    assert not any((tmp_path / "etlstage").iterdir())
