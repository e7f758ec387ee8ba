from __future__ import annotations

import os
from pathlib import Path

import pytest

from etlstage.config.interpolation import MAX_SECRET_BYTES, Interpolator
from etlstage.errors import ConfigError


@pytest.fixture
def interpolator(tmp_path: Path) -> Interpolator:
    """Look up two variables, one of them empty, and files in a temporary folder."""
    return Interpolator(tmp_path, {"TOKEN": "s3cret", "EMPTY": ""})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${TOKEN}", "s3cret"),
        ("a${TOKEN}b${TOKEN}", "as3cretbs3cret"),
        ("${EMPTY}", ""),
        ("${TOKEN:-other}", "s3cret"),
        ("${NONE:-other}", "other"),
        ("${NONE:-}", ""),
        ("${EMPTY:-other}", "other"),
        ("${NONE:-a:-b\nc}", "a:-b\nc"),
    ],
)
def test_variable_is_put_in(
    interpolator: Interpolator, text: str, expected: str
) -> None:
    """A default stands in for a variable that is not set or empty, as in a shell."""
    found = interpolator.expand(text)
    assert found.text == expected
    assert found.found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("$$", "$"),
        ("$${TOKEN}", "${TOKEN}"),
        ("$.id", "$.id"),
        ("{print $1}", "{print $1}"),
        ("$TOKEN", "$TOKEN"),
        ("100$", "100$"),
    ],
)
def test_other_dollars_are_themselves(
    interpolator: Interpolator, text: str, expected: str
) -> None:
    """Only ``${`` begins a reference, and ``$$`` escapes it."""
    assert interpolator.expand(text) == (expected, {})


def test_what_was_put_in_is_not_expanded_again(tmp_path: Path) -> None:
    """A secret may hold ``${``."""
    assert Interpolator(tmp_path, {"A": "${B}$$"}).expand("${A}").text == "${B}$$"


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_file_is_put_in_without_its_last_newline(
    interpolator: Interpolator, tmp_path: Path, end: str
) -> None:
    """Secrets mounted as files end in a newline that is not part of them."""
    (tmp_path / "token").write_bytes(b"line\nlast" + end.encode())
    found = interpolator.expand("<${file:token}>")
    assert found.text == "<line\nlast>"


def test_what_was_put_in_has_a_reference(
    interpolator: Interpolator, tmp_path: Path
) -> None:
    """The reference is shown in place of a value that must not be shown."""
    (tmp_path / "token").write_text("hunter2")
    assert interpolator.expand("${TOKEN:-x}/${file:token}/$${A}").found == {
        "s3cret": "${TOKEN:-x}",
        "hunter2": "${file:token}",
    }


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "${NONE}",
            "environment variable NONE is not set; set it or write ${NONE:-default}",
        ),
        ("x ${TOKEN", "'${' has no '}'; write '$${' for '${' itself"),
        (
            "${NONE:-${TOKEN}}",
            "'${' within a reference: set the variable, or default, to plain text",
        ),
        (
            "${x%.*}",
            (
                "expected ${NAME}, ${NAME:-default} or ${file:path};"
                " write '$${' for '${' itself"
            ),
        ),
        (
            "${}",
            (
                "expected ${NAME}, ${NAME:-default} or ${file:path};"
                " write '$${' for '${' itself"
            ),
        ),
        ("${file:none}", "file none can't be read: no such file or directory"),
        ("${file:.}", "file . can't be read: is a directory"),
        ("${file:pipe}", "file pipe can't be read: it is not a regular file"),
        ("${file:/dev/zero}", "file /dev/zero can't be read: it is not a regular file"),
        ("${file:bytes}", "file bytes is not UTF-8 text at byte 1"),
        ("${file:big}", "file big is too big, expected no more than 65536 bytes"),
    ],
)
def test_reference_that_cant_be_resolved(
    interpolator: Interpolator, tmp_path: Path, text: str, error: str
) -> None:
    """Each error names the cause; a pipe without a writer does not block (issue 10)."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"a\xff")
    (tmp_path / "big").write_bytes(b"a" * (MAX_SECRET_BYTES + 1))
    with pytest.raises(ConfigError) as caught:
        interpolator.expand(text)
    assert str(caught.value) == error
