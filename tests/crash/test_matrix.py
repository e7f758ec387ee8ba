"""A sample of ``python -m tests.crash``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.matrix import Case, Kill, check, prepare, start


@pytest.mark.spark
@pytest.mark.slow  # two starts of Spark, and one of its workers for each
@pytest.mark.timeout(300)
def test_what_was_not_recorded_is_loaded_once_again(tmp_path: Path) -> None:
    """Its process was killed between the sink and the record (issue 14)."""
    case = Case(order="none", messages=1000, epoch=500)
    prepare(tmp_path, case)
    code, said = start(tmp_path, case, Kill("process", ("written", "0")))
    assert code == -9, said
    code, said = start(tmp_path, case)
    assert code == 0, said
    check(tmp_path, case)
