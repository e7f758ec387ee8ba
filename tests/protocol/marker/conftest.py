from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(params=["in one read", "byte by byte"])
def chop(request: pytest.FixtureRequest) -> Callable[[bytes], list[bytes]]:
    """Cut a stream into reads: both ways mean the same."""
    whole = request.param == "in one read"
    return lambda data: (
        [data] if whole else [data[at : at + 1] for at in range(len(data))]
    )
