from __future__ import annotations

import re
import site
import socket
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from etlstage.errors import ConfigError
from etlstage.spark import ship, transform
from etlstage.spark.errors import PACKAGES, explain
from etlstage.spark.ship.artifact import Shipment, _packed
from etlstage.stage import Stage, WorkerProgram
from tests.spark.driver import Driver, Failed

pytestmark = pytest.mark.spark

UPPER = (
    "#!/bin/sh\nwhile read -r line; do echo $line | tr a-z A-Z; printf '\\0'; done\n"
)


def values(spark: SparkSession, *command: str, cwd: Path | None = None) -> list[str]:
    """Return the results of a stage for one row."""
    frame = spark.range(0, 1, 1, 1).selectExpr("concat('row ', id) as text")
    made = transform(
        frame, Stage(name="t", worker=WorkerProgram(command=command, cwd=cwd))
    )
    return [row.value for row in made.collect()]


def failure(spark: SparkSession, *command: str, cwd: Path | None = None) -> str:
    """Return the explained error of such a stage."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 - its text is the point
        values(spark, *command, cwd=cwd)
    return explain(raised.value)


def test_shipped_program_runs(spark: SparkSession, tmp_path: Path) -> None:
    """In the folder where Spark puts it, although it was not executable."""
    program = tmp_path / "upper.sh"
    program.write_text(UPPER)
    ship(spark, program)
    program.write_text("changed since")
    assert values(spark, "./upper.sh") == ["ROW 0"]
    assert values(spark, "sh", "upper.sh") == ["ROW 0"]


def test_shipped_archive_is_unpacked(spark: SparkSession, tmp_path: Path) -> None:
    """Into a folder named after ``#``, or like the archive."""
    (tmp_path / "upper").write_text(UPPER)
    (tmp_path / "upper").chmod(0o755)
    for name in ("one.tar.gz", "two.tar.gz"):
        with tarfile.open(tmp_path / name, "w:gz") as archive:
            archive.add(tmp_path / "upper", "bin/upper")
    ship(spark, archives=[f"{tmp_path}/one.tar.gz#tools", f"{tmp_path}/two.tar.gz"])
    assert values(spark, "tools/bin/upper") == ["ROW 0"]
    assert values(spark, "two.tar.gz/bin/upper") == ["ROW 0"]


def test_folder_may_have_the_mark_of_archives(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A ``#`` in a folder's name is not taken for the archive's."""
    (folder := tmp_path / "no #1").mkdir()
    (folder / "sharp.sh").write_text(UPPER)
    (folder / "upper").write_text(UPPER)
    with tarfile.open(folder / "sharp.tar.gz", "w:gz") as archive:
        archive.add(folder / "upper", "upper")
    shipment = Shipment(
        folder, files=["sharp.sh"], archives=["sharp.tar.gz#sharp", "sharp.tar.gz"]
    )
    shipment.send(spark)
    assert values(spark, "./sharp.sh") == ["ROW 0"]
    assert values(spark, "sh", "sharp/upper") == ["ROW 0"]
    assert set(shipment._names.values()) == {"sharp.sh", "sharp", "sharp.tar.gz"}


def test_folder_of_the_stage_goes_before(spark: SparkSession, tmp_path: Path) -> None:
    """A ``cwd`` that is set takes precedence."""
    (tmp_path / "here.sh").write_text(UPPER)
    ship(spark, tmp_path / "here.sh")
    (tmp_path / "here.sh").write_text(UPPER.replace("tr a-z A-Z", "tr a-z b-za"))
    assert values(spark, "sh", "here.sh", cwd=tmp_path) == ["spx 0"]
    assert values(spark, "sh", "here.sh") == ["ROW 0"]


def test_other_content_needs_another_name(spark: SparkSession, tmp_path: Path) -> None:
    """Spark would keep using the old content; shipping the same again is harmless."""
    program = tmp_path / "twice.sh"
    program.write_text("one")
    ship(spark, program)
    ship(spark, program)
    program.write_text("two")
    with pytest.raises(ConfigError, match="shipped with other content") as raised:
        ship(spark, program)
    assert "twice.sh" in str(raised.value)


def test_what_is_no_file_is_not_shipped(spark: SparkSession, tmp_path: Path) -> None:
    """The call raises an error with the remedy."""
    with pytest.raises(ConfigError, match=r"can't ship ./nope: it does not exist"):
        ship(spark, "./nope")
    with pytest.raises(ConfigError, match="it is a folder; make an archive"):
        ship(spark, archives=[tmp_path])


def test_program_that_is_not_there_is_reported_with_its_host(
    spark: SparkSession, tmp_path: Path
) -> None:
    """With the place where it was looked for, and how to get it there."""
    host = re.escape(socket.gethostname())
    text = failure(spark, "./nope.py", cwd=tmp_path)
    assert text.endswith(
        f"stage t: there is no program './nope.py' in {tmp_path} on host {host}: put it"
        " there, or ship it with etlstage.spark.ship(spark, 'nope.py')"
    )
    text = failure(spark, "/no/such")
    assert f"there is no program '/no/such' on host {host}: put it there" in text
    text = failure(spark, "nope.py")
    assert f"there is no program 'nope.py' on PATH on host {host}: install it" in text
    assert text.endswith("ship(spark, 'nope.py') and call it './nope.py'")
    (tmp_path / "plain").write_text(UPPER)
    text = failure(spark, "./plain", cwd=tmp_path)
    assert f"{tmp_path}/./plain is not executable on host {host}: run chmod +x" in text


def test_zip_has_what_a_worker_imports(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pure Python, and complete, even after PySpark has put it on our own path."""
    ship(spark)
    monkeypatch.delitem(sys.modules, "idna", raising=False)
    path = _packed()
    with zipfile.ZipFile(path) as packed:
        names = packed.namelist()
    assert names == sorted(names)
    assert {"etlstage/worker/__init__.py", "idna/__init__.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)
    program = (
        f"import sys; sys.path.insert(0, {str(path)!r}); from etlstage import worker"
    )
    command = [sys.executable, "-I", "-S", "-c", f"{program}; print(worker.__file__)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(path))


def bare_python(place: Path) -> str:
    """Return an interpreter that has all packages except those that are shipped."""
    packages = place / "packages"
    packages.mkdir()
    # Debian lists folders that a virtual environment lacks.
    for path in filter(Path.is_dir, map(Path, site.getsitepackages())):
        for entry in path.iterdir():
            if not entry.name.startswith((*PACKAGES, "__editable__", "_virtualenv")):
                (packages / entry.name).symlink_to(entry)
    program = place / "python"
    program.write_text(
        "#!/bin/sh\n"
        'spark=$(printf %s "$PYTHONPATH" | tr : "\\n" | grep -e py4j -e pyspark.zip)\n'
        f"PYTHONPATH=$(printf %s \"$spark\" | tr '\\n' :):{packages}\n"
        f'export PYTHONPATH\nexec {sys.executable} -S "$@"\n'
    )
    program.chmod(0o755)
    return str(program)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_executors_need_neither_program_nor_etlstage(tmp_path: Path) -> None:
    """The error for what is missing there has the remedy, which works."""
    (tmp_path / "clean.py").write_text(
        "import os, etlstage\nfrom etlstage import worker\n"
        "worker.transform(lambda m: (m.upper(), etlstage.__file__.encode(),"
        " *(name.encode() for name in os.environ)))\n"
    )
    command = (sys.executable, "-S", "clean.py")
    program = f"""
    from etlstage.spark import transform
    from etlstage.stage import Stage
    rows = spark.range(0, 1, 1, 1).selectExpr("concat('row ', id) as text")
    made = transform(rows, Stage(name="t", worker={command!r}))
    result = [row.value for row in made.collect()]
    """
    config = {"spark.pyspark.python": bare_python(tmp_path)}
    master = "local-cluster[1,1,1024]"
    remedy = r"no module 'etlstage': call etlstage.spark.ship\(spark\) before"
    with Driver(tmp_path, master=master, config=config) as driver:
        with pytest.raises(Failed, match=remedy):
            driver.run(program)
        driver.run("from etlstage.spark import ship; ship(spark, 'clean.py')")
        upper, origin, *names = driver.run(program)
    assert upper == "ROW 0"
    assert re.search(r"/etlstage-[0-9a-f]{16}\.zip/etlstage/__init__\.py$", origin)
    assert {"PATH", "PYTHONPATH"} <= set(names)
    assert not [n for n in names if "SECRET" in n or "SPARK" in n or n[:4] == "JAVA"]
    assert not [n for n in names if "TOKEN" in n]
