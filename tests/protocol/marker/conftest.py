from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from etlstage.testing.transcript import BYTEWISE, cut
from tests.protocol.marker.twins import TWINS, using


@pytest.fixture(params=TWINS, scope="module")
def twin(request: pytest.FixtureRequest) -> Iterator[None]:
    """Search boundaries with the compiled scanner, where built, and in Python."""
    with using(request.param):
        yield


@pytest.fixture(params=["in one read", "byte by byte"])
def chop(request: pytest.FixtureRequest) -> Callable[[bytes], list[bytes]]:
    """Cut a stream into reads, in two ways that must give the same result."""
    cuts = () if request.param == "in one read" else BYTEWISE
    return lambda data: list(cut(data, cuts))
