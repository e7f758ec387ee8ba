from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from etlstage.config.quantity import Duration, Size, Window

DURATION: TypeAdapter[float] = TypeAdapter(Duration)
SIZE: TypeAdapter[int] = TypeAdapter(Size)
WINDOW: TypeAdapter[int | None] = TypeAdapter(Window)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30.0),
        ("500ms", 0.5),
        ("2m", 120.0),
        ("1.5h", 5400.0),
        ("10", 10.0),
        (".5", 0.5),
        ("2 s", 2.0),
        (3, 3.0),
    ],
)
def test_duration(text: object, seconds: float) -> None:
    """A number alone is seconds."""
    assert DURATION.validate_python(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1MiB", 1048576),
        ("512KiB", 524288),
        ("10MB", 10_000_000),
        ("1.5kB", 1500),
        ("2GiB", 2147483648),
        ("7B", 7),
        ("0.1", 1),
        (100, 100),
    ],
)
def test_size(text: object, size: int) -> None:
    """A number alone is bytes."""
    assert SIZE.validate_python(text) == size


@pytest.mark.parametrize("text", ["", "s", "-1s", "1 week", "1e3", "inf", "nan", "0s"])
def test_what_is_no_duration(text: str) -> None:
    """Nothing is guessed, and no time at all is not a duration."""
    with pytest.raises(ValidationError):
        DURATION.validate_python(text)


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1mib", "1TiB", "0", "1 M"])
def test_what_is_no_size(text: str) -> None:
    """Units are case-sensitive: 1 Mb and 1 MB differ by eight elsewhere."""
    with pytest.raises(ValidationError):
        SIZE.validate_python(text)


def test_window() -> None:
    """A window is a number of messages, or left to the supervisor."""
    assert WINDOW.validate_python("8") == 8
    assert WINDOW.validate_python("auto") is None
    for text in ("0", "-1", "1.5", "many", ""):
        with pytest.raises(ValidationError):
            WINDOW.validate_python(text)
