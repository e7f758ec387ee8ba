"""What a worker imports, which delays every start and restart."""

from __future__ import annotations

import subprocess
import sys

from tests.worker.conftest import ENVIRONMENT

SLOW = {
    "_json",
    "anyio",
    "argparse",
    "asyncio",
    "concurrent",
    "ctypes",
    "dataclasses",
    "datetime",
    "inspect",
    "json",
    "logging",
    "multiprocessing",
    "pathlib",
    "pydantic",
    "random",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "ssl",
    "structlog",
    "subprocess",
    "tempfile",
    "threading",
    "traceback",
    "urllib",
    "yaml",
}


def _imported(code: str, stdin: bytes = b"") -> set[str]:
    listing = "import sys; sys.stderr.write('\\n' + ' '.join(sys.modules))"
    # Without the site packages, whose .pth files import what they like.
    result = subprocess.run(
        [sys.executable, "-S", "-c", f"{code}\n{listing}"],
        input=stdin,
        capture_output=True,
        env=ENVIRONMENT,
        check=True,
    )
    return set(result.stderr.decode().splitlines()[-1].split())


def test_import_brings_nothing_slow() -> None:
    """Importing any of these takes as long as everything that the SDK needs."""
    assert _imported("import etlstage.worker") & SLOW == set()


def test_import_brings_nothing_but_the_standard_library_and_the_dialect() -> None:
    """A worker runs where only Python and this package are installed."""
    roots = {name.partition(".")[0] for name in _imported("import etlstage.worker")}
    assert roots - sys.stdlib_module_names - {"__main__", "sitecustomize"} == {
        "etlstage"
    }
    ours = {n for n in _imported("import etlstage.worker") if n.startswith("etlstage.")}
    assert {
        name
        for name in ours
        if not name.startswith(("etlstage.worker", "etlstage.protocol"))
    } - {"etlstage._speedups"} == {
        "etlstage.errors",
        "etlstage.messages",
        "etlstage.speedups",
    }


def test_work_brings_nothing_slow_either() -> None:
    """Nor do messages written ahead, a skipped message, and a dropped tail."""
    code = (
        "from etlstage import worker\n"
        "worker.transform(lambda m: [m] if m else [1 / 0], on_error='skip')"
    )
    # CPython itself imports some of them to print a traceback.
    assert _imported(code, b"a\nb\nc") & SLOW == set()
    ready = "import os; os.environ['ETLSTAGE_STATUS'] = '/dev/null'\n"
    assert _imported(ready + code, b"a\nb\nc") & SLOW == set()
