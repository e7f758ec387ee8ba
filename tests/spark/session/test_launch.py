from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from etlstage.spark.session.java import Java
from etlstage.spark.session.launch import launching

from .test_java import fake_java

pytestmark = pytest.mark.process

TELL = 'echo "out $*"; echo "err $*" >&2; echo "home ${JAVA_HOME-unset}" >&2'


def run_java(*words: str) -> str:
    """Run the java that JAVA_HOME points to; return its stdout."""
    program = os.path.join(os.environ["JAVA_HOME"], "bin", "java")
    done = subprocess.run([program, *words], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(autouse=True)
def _no_java_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)


def test_jvm_writes_into_the_log(tmp_path: Path) -> None:
    """Neither stdout nor stderr of the JVM reaches ours."""
    java = Java(fake_java(tmp_path, TELL), 17, has_vector=True)
    log = tmp_path / "it's a.log"
    with launching(java, log, python=None):
        assert run_java("-cp", "x", "Submit") == ""
    assert log.read_text() == "out -cp x Submit\nerr -cp x Submit\nhome unset\n"


def test_launcher_keeps_its_stdout(tmp_path: Path) -> None:
    """Spark's launcher prints the command line to stdout; only its stderr is logged."""
    java = Java(fake_java(tmp_path, TELL), 17, has_vector=True)
    log = tmp_path / "log"
    main = "org.apache.spark.launcher.Main"
    with launching(java, log, python=None):
        assert run_java("-cp", "x", main, "a b") == f"out -cp x {main} a b\n"
    assert log.read_text().startswith(f"err -cp x {main} a b\n")


def test_jvm_has_a_session_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signals to our process group don't reach it; without setsid it still runs."""
    script = 'echo $$; cut -d" " -f6 /proc/$$/stat'
    java = Java(fake_java(tmp_path, script), 17, has_vector=True)
    with launching(java, tmp_path / "apart", python=None):
        run_java("x")
    own, its_session = (tmp_path / "apart").read_text().split()
    assert own == its_session
    monkeypatch.setattr("shutil.which", lambda name: None)
    with launching(java, tmp_path / "log", python=None):
        run_java("x")
    assert (tmp_path / "log").read_text().split()[1] == str(os.getsid(0))


def test_jvm_that_starts_is_known_to_the_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pid is known even if we are killed while it starts (issue 23)."""
    java = Java(fake_java(tmp_path, 'echo "$$"'), 17, has_vector=True)
    monkeypatch.setenv("_PYSPARK_DRIVER_CONN_INFO_PATH", "/nowhere/x")
    log = tmp_path / "log"
    with launching(java, log, python=None):
        run_java("x")
        started = Path(os.environ["JAVA_HOME"]) / "started"
        assert started.read_text().splitlines() == [
            log.read_text().strip(),
            "/nowhere/x",
        ]


def test_jvm_of_who_was_killed_is_not_started(tmp_path: Path) -> None:
    """The killed process's watchdog would not know its pid (issue 23)."""
    java = Java(fake_java(tmp_path, TELL), 17, has_vector=True)
    log = tmp_path / "log"
    with launching(java, log, python=None):
        # It has another parent than us, as if we had been killed.
        program = '"$JAVA_HOME/bin/java" x; echo "status $?"'
        said = subprocess.run(
            ["/bin/sh", "-c", program], capture_output=True, check=True
        )
    assert said.stdout == b"status 1\n"
    assert not log.exists()


@pytest.mark.parametrize(
    "option",
    [
        ("--add-modules=jdk.incubator.vector",),
        ("--add-modules", "jdk.incubator.vector"),
    ],
)
def test_missing_module_is_not_asked_for(tmp_path: Path, option: tuple[str]) -> None:
    """Only this option is removed, in both spellings."""
    script = """for word; do echo "<$word>"; done"""
    java = Java(fake_java(tmp_path, script), 25, has_vector=False)
    log = tmp_path / "log"
    with launching(java, log, python=None):
        run_java("-Xmx1g", *option, "--add-modules", "other", "a b", "", "*")
    expected = "<-Xmx1g>\n<--add-modules>\n<other>\n<a b>\n<>\n<*>\n"
    assert log.read_text() == expected


def test_environment_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All variables have their former values, and the shim is removed."""
    monkeypatch.setenv("JAVA_HOME", "/some/where")
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.delenv("SPARK_LOCAL_IP", raising=False)
    java = Java(fake_java(tmp_path, TELL), 17, has_vector=True)
    before = dict(os.environ)
    with launching(java, tmp_path / "log", python="/my/python"):
        shim = Path(os.environ["JAVA_HOME"])
        assert os.environ["PYSPARK_PYTHON"] == "/my/python"
        assert os.environ["SPARK_LOCAL_IP"] == "127.0.0.1"
        run_java("x")
    assert dict(os.environ) == before
    assert not shim.exists()
    assert "home /some/where\n" in (tmp_path / "log").read_text()


def test_cluster_keeps_its_own_python(tmp_path: Path) -> None:
    """Without an interpreter to prescribe, only JAVA_HOME is changed."""
    java = Java(fake_java(tmp_path, TELL), 17, has_vector=True)
    before = dict(os.environ)
    with launching(java, tmp_path / "log", python=None):
        assert {**os.environ, "JAVA_HOME": ""} == {**before, "JAVA_HOME": ""}
