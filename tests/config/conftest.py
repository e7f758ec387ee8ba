from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """Run async tests on one event loop: what they test is not the loop."""
    return "asyncio"
