from __future__ import annotations

from collections.abc import Callable

import pytest

from etlstage.testing.transcript import BYTEWISE, cut


@pytest.fixture(params=["in one read", "byte by byte"])
def chop(request: pytest.FixtureRequest) -> Callable[[bytes], list[bytes]]:
    """Cut a stream into reads: both ways mean the same."""
    cuts = () if request.param == "in one read" else BYTEWISE
    return lambda data: list(cut(data, cuts))
