"""Systems that are drawn load what is due, whatever is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.systems.run import run

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("seed", range(8))
def test_systems_load_what_is_due(tmp_path: Path, seed: int) -> None:
    """More of them: ``python -m tests.systems``."""
    ran = run(seed, tmp_path)
    assert not ran.wrong, str(ran)
