from __future__ import annotations

import pytest

from etlstage.stage.units import duration, size


def test_duration_is_in_seconds() -> None:
    """A number alone is seconds."""
    found = [duration(text) for text in ("30s", "500ms", "2m", "1.5h", "10", ".5")]
    assert found == [30.0, 0.5, 120.0, 5400.0, 10.0, 0.5]


def test_size_is_in_bytes() -> None:
    """Whole ones, and not none."""
    assert [size(text) for text in ("1MiB", "1.5kB", "7B", "0.1")] == [
        1_048_576,
        1500,
        7,
        1,
    ]


@pytest.mark.parametrize("text", ["", "s", "1 week", "-1s", "1e3", "1_0"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    """The error is what is expected, without what was found."""
    with pytest.raises(ValueError, match=r"^a duration such as 500ms, 30s or 2m$"):
        duration(text)
    with pytest.raises(ValueError, match=r"^a size such as 512KiB, 1MiB or 10MB$"):
        size(text)


def test_nothing_is_no_quantity() -> None:
    """Neither a time nor a size of zero is of use."""
    with pytest.raises(ValueError, match=r"^more than 0$"):
        duration("0s")
    with pytest.raises(ValueError, match=r"^more than 0$"):
        size("0")
