from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from etlstage.testing.process import waits_for_stdin
from etlstage.transport import process as table
from etlstage.transport.process import descendants, resident_bytes, session_members

SCRIPT = "set -m; setsid -w sleep 3600 & sleep 3600 & echo; wait"


@contextmanager
def started() -> Iterator[int]:
    """Start a shell that leads a session, with two jobs; one leaves the session."""
    process = subprocess.Popen(
        ["/bin/bash", "-c", SCRIPT], stdout=subprocess.PIPE, start_new_session=True
    )
    pids = {process.pid}
    try:
        assert process.stdout is not None
        process.stdout.readline()
        while not any(os.getsid(p) == p for p in descendants(process.pid)):
            os.sched_yield()
        pids |= set(descendants(process.pid))
        yield process.pid
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # it ends with the process it waits for
                os.kill(pid, 9)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_descendants_are_found_in_whatever_session() -> None:
    """Children and theirs; not the process itself."""
    with started() as pid:
        found = descendants(pid)
        assert len(found) == 3  # setsid forks, for it leads a group
        assert {os.getsid(one) == pid for one in found} == {True, False}
        assert pid not in found


def test_members_of_a_session_are_found_in_whatever_group() -> None:
    """Not its leader, which is known."""
    with started() as pid:
        members = session_members(pid)
        assert sorted(members) == sorted(
            one for one in descendants(pid) if os.getsid(one) == pid
        )
        assert len(members) == 2


def test_process_that_is_gone_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found on systems other than Linux, either."""
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    assert descendants(process.pid) == []
    assert session_members(process.pid) == []
    monkeypatch.setattr(table, "_listing", lambda _: ["1"])
    assert descendants(process.pid) == []
    monkeypatch.setattr(table, "_listing", lambda _: [])
    assert session_members(os.getsid(0)) == []


def test_memory_of_a_process() -> None:
    """All memory that it has touched counts; a process that is gone has None."""
    before = resident_bytes(os.getpid())
    assert before is not None
    # Not on the heap, which may reuse freed memory.
    with mmap.mmap(-1, 50_000_000, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as touched:
        for _ in range(50):
            touched.write(b"x" * 1_000_000)
        after = resident_bytes(os.getpid())
        assert after is not None
        assert after - before > len(touched) * 0.9

    process = subprocess.Popen(["/bin/true"])
    process.wait()
    assert resident_bytes(process.pid) is None


def test_process_that_only_reads_its_stdin() -> None:
    """It writes nothing more; a process with a child, or a busy one, may."""
    pipe = subprocess.PIPE
    with subprocess.Popen(["/bin/cat"], stdin=pipe, stdout=pipe) as process:
        while not waits_for_stdin(process.pid):
            os.sched_yield()
        process.kill()
    assert not waits_for_stdin(process.pid)
    assert not waits_for_stdin(os.getpid())
    script = "sleep 3600 & echo; read line; kill %1"
    with subprocess.Popen(
        ["/bin/bash", "-c", script], stdin=pipe, stdout=pipe
    ) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        assert not waits_for_stdin(shell.pid)
        shell.communicate(b"\n")
