from __future__ import annotations

import os
from pathlib import Path

import pytest

from etlstage.config.document import MAX_BYTES, Place, read
from etlstage.errors import ConfigError
from etlstage.settings.problem import (
    dotted,
    shortened,
)


def error_of(path: Path, content: bytes | str) -> str:
    """Return what is said about a file with this content, without its folder."""
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        read(path).check()
    return str(caught.value).replace(f"{path.parent}/", "")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Name a pipeline file."""
    return tmp_path / "pipeline.yaml"


def test_scalars_stay_as_written(path: Path) -> None:
    """Text that looks like something else is not turned into it and back."""
    path.write_text("a: [yes, 1.10, 0o17, 2020-01-01, 12:30, '~', ~, null]\n")
    assert read(path).data == {
        "a": ["yes", "1.10", "0o17", "2020-01-01", "12:30", "~", None, None]
    }


def test_long_texts(path: Path) -> None:
    """Folded and literal texts hold what YAML says, and nothing else."""
    path.write_text("a: >-\n  id long,\n  title string\nb: |\n  x\n  y\n")
    assert read(path).data == {"a": "id long, title string", "b": "x\ny\n"}


def test_places_count_from_one(path: Path) -> None:
    """Keys, list items and values each have theirs."""
    path.write_text("a:\n  - b: c\n    d: [e]\n")
    document = read(path)
    assert document.keys[("a",)] == Place(1, 1)
    assert document.keys[("a", 0)] == Place(2, 5)
    assert document.keys[("a", 0, "d")] == Place(3, 5)
    assert document.values[("a", 0, "d", 0)] == Place(3, 9)


def test_byte_order_mark_is_skipped(path: Path) -> None:
    """Editors on Windows write one."""
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read(path).data == {"a": "1"}


def test_aliases_repeat_what_they_name(path: Path) -> None:
    """Anchors save writing the same thing twice."""
    path.write_text("a: &t {stop: 5s}\nb: *t\n")
    assert read(path).data == {"a": {"stop": "5s"}, "b": {"stop": "5s"}}


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("", "pipeline.yaml: is empty, expected a pipeline"),
        ("# only this\n", "pipeline.yaml: is empty, expected a pipeline"),
        (
            "- a\n- b\n",
            (
                "pipeline.yaml:1:1: expected a mapping of keys such as name, extract and"
                " load, got a list"
            ),
        ),
        (
            "hello\n",
            (
                "pipeline.yaml:1:1: expected a mapping of keys such as name, extract and"
                " load, got a single value"
            ),
        ),
        (
            "a: 1\nb: c: d\n",
            "pipeline.yaml:2:5: is not YAML: mapping values are not allowed here",
        ),
        (
            "a: [1\n",
            (
                "pipeline.yaml:2:1: is not YAML: while parsing a flow sequence,"
                " expected ',' or ']', but got '<stream end>'"
            ),
        ),
        (
            "a: {b: ${C}}\n",
            (
                "pipeline.yaml:1:9: is not YAML: while parsing a flow mapping,"
                " expected ',' or '}', but got '{'"
                " (inside [] and {}, ${...} needs quotes around it)"
            ),
        ),
        (
            "a: 1\n--- \nb: 1\n",
            (
                "pipeline.yaml:2:1: is not YAML: expected a single document in the"
                " stream, but found another document"
            ),
        ),
        (b"a: \xff\n", "pipeline.yaml: is not UTF-8 text at byte 3"),
        (
            b"a: \x00\n",
            (
                "pipeline.yaml: is not YAML: unacceptable character #x0000: special"
                ' characters are not allowed in "<unicode string>", position 3'
            ),
        ),
        (
            b"a" * (MAX_BYTES + 1),
            (
                "pipeline.yaml: is too big for a pipeline file, expected no more than"
                " 262144 bytes"
            ),
        ),
        (
            "a: 1\na: 2\n",
            "pipeline.yaml:2:1: a: duplicate key, first written in line 1",
        ),
        ("a: !x 1\n", "pipeline.yaml:1:4: a: tag !x is not supported"),
        ("? [1]\n: 2\n", "pipeline.yaml:1:3: a key can't be a list"),
        ("a:\nb: 1\n", "pipeline.yaml:1:1: a: has no value"),
        ("b:\n  - \n  - 1\n", "pipeline.yaml:2:4: b[0]: has no value"),
        (
            "a: &a [*a]\n",
            (
                "pipeline.yaml: holds more than 50000 values, or more than 50 levels,"
                " once its aliases are written out"
            ),
        ),
    ],
)
def test_file_that_is_no_pipeline(path: Path, content: bytes, error: str) -> None:
    """One clear line each, with a place where there is one."""
    assert error_of(path, content) == error


def test_aliases_of_aliases_are_bounded(path: Path) -> None:
    """A few hundred bytes can stand for gigabytes."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    assert "holds more than 50000 values" in error_of(path, "\n".join(lines))


def test_deep_nesting_is_refused(path: Path) -> None:
    """Deep enough to exhaust the parser's stack."""
    assert error_of(path, "[" * 1000) == "pipeline.yaml: is nested too deeply"


def test_missing_file(path: Path) -> None:
    """The path is shown as the user wrote it."""
    with pytest.raises(ConfigError, match=r"^nowhere/p\.yaml: no such file$"):
        read(Path("nowhere/p.yaml"))


def test_directory(path: Path) -> None:
    """Naming the folder instead of the file is a common slip."""
    with pytest.raises(ConfigError) as caught:
        read(path.parent)
    assert str(caught.value) == (
        f"{path.parent}: is a directory, expected a pipeline file"
    )
    path.write_text("a: 1\n")
    with pytest.raises(ConfigError) as caught:
        read(path.parent)
    assert str(caught.value).endswith(f"(did you mean {path}?)")


def test_unreadable_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, for whom no file is unreadable."""

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(caught.value) == f"{path}: can't be read: permission denied"


def test_pipe_is_read(tmp_path: Path) -> None:
    """``etlstage run <(make-pipeline)`` hands over a pipe."""
    reading, writing = os.pipe()
    os.write(writing, b"a: 1\n")
    os.close(writing)
    try:
        assert read(Path(f"/dev/fd/{reading}")).data == {"a": "1"}
    finally:
        os.close(reading)


def test_named_pipe_is_refused(path: Path) -> None:
    """Nobody may ever write to it (issue 10)."""
    os.mkfifo(path)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(caught.value) == f"{path}: can't be read: it is not a regular file"


def test_repr_hides_the_data(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret must not reach a log through a debugging aid."""
    monkeypatch.setenv("TOKEN", "s3cret")
    path.write_text("a: ${TOKEN}\n")
    assert "s3cret" not in repr(read(path))


def test_location_reads_as_users_write_it() -> None:
    """Keys that are no plain words are quoted."""
    loc = ("spark", "config", "spark.sql.x", 0, "partition-by")
    assert dotted(loc) == "spark.config['spark.sql.x'][0].partition-by"


def test_long_value_is_shortened() -> None:
    """A whole program pasted as a value does not flood the terminal."""
    assert shortened("a" * 61) == repr("a" * 30 + "..." + "a" * 15)
    assert shortened("a\nb") == "'a\\nb'"
