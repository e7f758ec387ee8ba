from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """Run async tests on asyncio only: they don't test the event loop."""
    return "asyncio"
