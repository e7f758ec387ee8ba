"""
Is it faster than it was?

``python -m benchmarks --against COMMIT [QUESTION ...]`` passes the same messages
through this package and through that of another commit, in turn. Each has a process of
its own, which is notified to begin a round. The measure is the processor time of our
process, or also of Spark's if the work is done there: on a shared machine it is
reliable, and elapsed time is not.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import etlstage
from benchmarks.harness import Job, Row, compile_c, processor_time
from etlstage import speedups

__all__ = ("compare", "compile_speedups")

HERE = Path(__file__).parents[1]


def compare(commit: str, questions: Sequence[str], rounds: int) -> list[Row]:
    """
    Return processor time and time per message, ours and that of ``commit``.

    Raises:
        SystemExit: If there is no such commit, or a process fails: the other package
            may not have what is asked of it.

    """
    rows = []
    with _checked_out(commit) as folder:
        for question in questions:
            jobs = importlib.import_module(f"benchmarks.{question}").JOBS
            for name, job in jobs.items():
                rows += _compare(commit, folder, question, name, job, rounds)
    return rows


def _compare(
    commit: str, folder: Path, question: str, name: str, job: Job, rounds: int
) -> list[Row]:
    found: dict[Path, list[list[float]]] = {HERE: [], folder: []}
    with ExitStack() as stack:
        sides = {at: stack.enter_context(_side(at, question, name)) for at in found}
        for _ in range(rounds + 1):
            for at, (stdin, stdout) in sides.items():
                with suppress(BrokenPipeError):
                    stdin.write(b"go\n")
                line = stdout.readline()
                if not line:
                    of = "this package" if at == HERE else f"the package of {commit}"
                    sys.exit(f"{question}, {name}: not to be measured with {of}")
                found[at].append(json.loads(line))
    what = "all processes" if job.everywhere else "our process"
    kinds = (f"{name}: processor time, {what}", 1.03), (f"{name}: time", 0)
    rows = []
    for place, (title, target) in enumerate(kinds):
        ours, theirs = (
            [seconds[place] / job.passing * 1e6 for seconds in found[at][1:]]
            for at in (HERE, folder)
        )
        rows.append(
            Row(title, ours, commit, theirs, "µs/message", target, at_most=True)
        )
    return rows


@contextmanager
def _checked_out(commit: str) -> Iterator[Path]:
    """Yield a folder with the package of that commit, and these benchmarks."""
    packed = subprocess.run(
        ["git", "archive", commit, "etlstage"],  # noqa: S607
        cwd=HERE,
        capture_output=True,
    )
    if packed.returncode:
        sys.exit(packed.stderr.decode())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        if speedups.compiled is not None:
            compile_speedups(folder)
        (folder / "benchmarks").symlink_to(HERE / "benchmarks")
        yield folder


def compile_speedups(folder: Path) -> None:
    """Compile the package in ``folder``, unless it is older than its C code."""
    target = folder / "etlstage/_speedups.abi3.so"
    source = target.with_name("_speedups.c")
    if source.exists():
        headers = sysconfig.get_path("include")
        compile_c(source, target, "-O3", "-shared", "-fPIC", f"-I{headers}")


@contextmanager
def _side(
    folder: Path, question: str, name: str
) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    pure = {"ETLSTAGE_PURE": "1"} if speedups.compiled is None else {}
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.against", question, name],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)} | pure,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # nothing is left to be written when it has failed
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdin, process.stdout


# --- in each of the two processes -----------------------------------------------------


def _serve(question: str, name: str) -> None:
    """Run a job for each line of stdin, and print its times as JSON."""
    assert Path(etlstage.__file__).is_relative_to(Path.cwd()), etlstage.__file__
    # Anything else on stdout would be read as a result.
    answers, sys.stdout = sys.stdout, sys.stderr
    job = importlib.import_module(f"benchmarks.{question}").JOBS[name]
    for run in job.make():
        for _ in sys.stdin:
            began, processor = time.perf_counter(), _processor(job)
            run()
            took = _processor(job) - processor, time.perf_counter() - began
            print(json.dumps(took), file=answers, flush=True)


def _processor(job: Job) -> float:
    """Return processor seconds so far, of this process or with its descendants."""
    return processor_time() if job.everywhere else time.process_time()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
