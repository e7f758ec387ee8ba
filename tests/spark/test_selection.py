"""The selection of tests that run again with ``--connect``."""

from __future__ import annotations

import pytest

from tests.spark.conftest import may_connect


@pytest.mark.parametrize("session", ["one of its own"])
def test_parameter_is_no_session(request: pytest.FixtureRequest, session: str) -> None:
    """A test that starts its own sessions would do the same with ``--connect``."""
    assert session
    assert not may_connect(request.node)


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("number", [1])
def test_session_of_all_may_be_over_connect(
    request: pytest.FixtureRequest, number: int
) -> None:
    """Even that of a test with parameters."""
    assert number
    assert may_connect(request.node)
