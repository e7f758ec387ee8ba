from __future__ import annotations

from pathlib import Path

import pytest

from etlstage.pipeline.delivery.delivery import Delivery
from tests.cli.conftest import Etlstage

pytestmark = pytest.mark.process


@pytest.fixture
def stored(pipeline: Path) -> list[str]:
    """Return a command that asks before it removes what a run has stored."""
    with Delivery(pipeline.parent / "state") as delivery:
        delivery.begin("r0", stages=["a"], letters={})
        delivery.commit(17)
    return ["state", "reset", "state"]


def test_without_a_terminal(etlstage: Etlstage, stored: list[str]) -> None:
    """The error names the option for unattended jobs (issue 23)."""
    result = etlstage(*stored, code=2)
    assert result.stderr.endswith(
        "etlstage: error: no answer, as there is no terminal to ask on: pass --yes\n"
    )
    assert etlstage(*stored, "--yes").returncode == 0


@pytest.mark.parametrize(("answer", "code"), [("n\n", 1), ("y\n", 0)])
def test_answer(etlstage: Etlstage, stored: list[str], answer: str, code: int) -> None:
    """Answering no changes nothing, and is not an unexpected error (issue 23)."""
    result = etlstage(*stored, given=answer, code=code)
    assert "unexpected" not in result.stderr
    assert ("nothing was changed" in result.stderr) == bool(code)
