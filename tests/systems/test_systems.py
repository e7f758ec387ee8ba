"""Randomly drawn systems load what they must, whatever is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.forked import Forks
from tests.systems.run import run

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("seed", range(8))
def test_systems_load_what_is_due(tmp_path: Path, forks: Forks, seed: int) -> None:
    """A sample; ``python -m tests.systems`` runs more."""
    ran = run(seed, tmp_path, forks)
    assert not ran.wrong, str(ran)
