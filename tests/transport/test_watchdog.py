"""The watchdog, and folders that do not outlive the process that made them."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from etlstage.transport import watchdog as module
from etlstage.transport.guard import Guard
from etlstage.transport.watchdog import (
    VARIABLE,
    WATCHDOG,
    Watchdog,
    _where,
    discard_scratch,
    make_scratch,
    program,
    python,
    scratch,
    started_at,
    sweep_scratch,
)
from tests.supervisor.workers import ends, open_files, runs

PATH = {"PATH": "/usr/bin:/bin"}


class Kennel:
    """A watchdog, and processes to register with it."""

    def __init__(self) -> None:
        self.watchdog = Watchdog()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, *, env: Mapping[str, str] | None = None, command: str = "sleep 3600"
    ) -> int:
        """Start a script that leads a session; return its pid."""
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"echo; exec {command}"],
            env=env or {},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    def read_pid(self) -> int:
        """Return a PID that the last process prints."""
        return int(self.read_line())

    def read_line(self) -> bytes:
        """Return a line that the last process prints."""
        stdout = self._processes[-1].stdout
        assert stdout is not None
        return stdout.readline()

    def hear(self) -> None:
        """Wait until the watchdog has written something."""
        assert self.watchdog._line is not None
        assert select.select([self.watchdog._line], [], [], 10)[0]

    def registered(self, pid: int) -> int:
        """Register a process as its starter does; return its PID."""
        self.watchdog.expect()
        self.watchdog.register(pid)
        return pid

    def end(self) -> None:
        """Do what the end of this process would do."""
        pid, self.watchdog.pid = self.watchdog.pid, None
        self.watchdog.forget()
        if pid is not None:
            os.waitpid(pid, 0)

    def close(self) -> None:
        """End the watchdog and all processes."""
        self.end()
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def kennel() -> Iterator[Kennel]:
    """Start with a watchdog that does not run yet."""
    kennel = Kennel()
    yield kennel
    kennel.close()


def test_registered_groups_are_killed_at_the_end(kennel: Kennel) -> None:
    """Those that have been unregistered are not."""
    first, second, third = (kennel.registered(kennel.start()) for _ in range(3))
    kennel.watchdog.unregister(second)
    kennel.watchdog.unregister(second)
    assert all(map(runs, (first, second, third)))
    kennel.end()

    assert ends(first)
    assert ends(third)
    assert runs(second)


def test_session_is_killed_with_the_group(kennel: Kennel) -> None:
    """A shell gives each of its jobs a group of its own."""
    script = "/bin/bash -c 'set -m; sleep 3600 & echo $!; wait'"
    leader = kennel.start(command=script, env=PATH)
    job = kennel.read_pid()
    assert os.getpgid(job) == job
    kennel.registered(leader)
    kennel.end()

    assert ends(leader)
    assert ends(job)


def test_marked_processes_are_killed_with_the_groups(kennel: Kennel) -> None:
    """They have left group and session; what bears another mark is not ours."""
    mark = kennel.watchdog.mark
    marked = kennel.start(env={"A": "B", VARIABLE: mark, "C": "D"})
    others = [
        kennel.start(env={VARIABLE: mark + "0"}),
        kennel.start(env={VARIABLE: "0" + mark}),
        kennel.start(env={"X" + VARIABLE: mark}),
        kennel.start(),
    ]
    kennel.registered(kennel.start())
    kennel.end()

    assert ends(marked)
    assert all(map(runs, others))


def test_worker_that_is_being_started_is_killed(kennel: Kennel) -> None:
    """We may die between its start and its registration."""
    kennel.watchdog.expect()
    early = kennel.start(env={VARIABLE: kennel.watchdog.mark})
    kennel.end()

    assert ends(early)


def test_orderly_end_kills_nothing(kennel: Kennel) -> None:
    """A worker that is meant to leave a daemon running may do so."""
    daemon = kennel.start(env={VARIABLE: kennel.watchdog.mark})
    kennel.watchdog.unregister(kennel.registered(kennel.start()))
    kennel.watchdog.expect()
    kennel.watchdog.give_up()
    kennel.end()

    assert runs(daemon)


def test_java_and_folders_go_although_no_worker_runs(
    kennel: Kennel, tmp_path: Path
) -> None:
    """Java is asked to end, and its session ends with it (issue 10)."""
    java = kennel.start(command="/bin/sh -c 'sleep 3600 & echo $!; wait'", env=PATH)
    python_worker = kennel.read_pid()
    other, recycled = kennel.start(), kennel.start()
    daemon = kennel.start(env={VARIABLE: kennel.watchdog.mark})
    folders = [tmp_path / name for name in ("one", "t\nwo", "kept")]
    for folder in folders:
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "message").write_text("secret")
        kennel.watchdog.add_folder(str(folder))
    kennel.watchdog.drop_folder(str(folders[2]))
    kennel.watchdog.drop_folder(str(folders[2]))
    kennel.watchdog.add_java(java)
    kennel.watchdog.add_java(1 << 30)
    start = started_at(recycled)
    assert start is not None
    kennel.watchdog._add(b"*%d %d\n" % (recycled, start - 1))
    kennel.end()

    assert ends(java)
    assert ends(python_worker)
    assert all(map(runs, (other, recycled, daemon)))
    assert [folder.exists() for folder in folders] == [False, False, True]


def test_java_that_starts_ends_too(kennel: Kennel, tmp_path: Path) -> None:
    """It ends before its handshake, whose folder is removed, too (issue 23)."""
    waited = tmp_path / "tmp1"
    waited.mkdir()
    (waited / "connection.info").touch()
    name = "_PYSPARK_DRIVER_CONN_INFO_PATH"
    java = kennel.start(env={name: str(waited / "info")})
    other = kennel.start(env={name: "/another"})
    for folder, pid in (("a", java), ("b", other)):
        shim = tmp_path / f"etlstage-java-{folder}"
        shim.mkdir()
        (shim / "started").write_text(f"{pid}\n{waited / 'info'}\n")
        kennel.watchdog.add_folder(str(shim))
    log = tmp_path / "spark.log"
    log.touch()
    kennel.watchdog.add_folder(str(log))
    kennel.end()

    assert ends(java)
    assert runs(other)
    assert {path.name for path in tmp_path.iterdir()} == set()


def test_java_that_is_deaf_is_killed(
    kennel: Kennel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed after a while (issue 10)."""
    deaf = kennel.start(command="/bin/sh -c 'trap : TERM; echo; while :; do :; done'")
    kennel.read_line()
    start = started_at(deaf)
    guard = Guard(b"X=1")
    guard.learn(b"*%d %d\n" % (deaf, start or 0))
    monkeypatch.setattr("etlstage.transport.guard.sleep", lambda _: None)
    guard.end()

    assert ends(deaf)


def test_dead_watchdog_is_replaced_when_it_is_looked_for(
    kennel: Kennel, tmp_path: Path
) -> None:
    """And the new one knows all that the old one did (issue 10)."""
    group = kennel.registered(kennel.start())
    java = kennel.start()
    kennel.watchdog.add_java(java)
    (folder := tmp_path / "folder").mkdir()
    kennel.watchdog.add_folder(str(folder))
    before = kennel.watchdog.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert ends(before)
    kennel.watchdog.check(0.5)
    kennel.watchdog.check(9.0)
    assert kennel.watchdog.pid not in (None, before)
    kennel.end()

    assert ends(group)
    assert ends(java)
    assert not folder.exists()


def test_stopped_watchdog_is_replaced_when_its_answer_is_overdue(
    kennel: Kennel,
) -> None:
    """Until then it is kept, and is asked only once (issue 10)."""
    group = kennel.registered(kennel.start())
    before = kennel.watchdog.pid
    assert before is not None
    os.kill(before, signal.SIGSTOP)
    for now in (0.0, 1.1, 2.2, 2.9):
        kennel.watchdog.check(now)
        assert kennel.watchdog.pid == before
    kennel.watchdog.check(4.0)
    assert kennel.watchdog.pid not in (None, before)
    assert ends(before)
    assert runs(group)
    kennel.end()

    assert ends(group)


def test_watchdog_that_answers_is_kept(kennel: Kennel) -> None:
    """It does not matter if we were away for an hour (issue 10)."""
    group = kennel.registered(kennel.start())
    pid = kennel.watchdog.pid
    for hour in range(5):
        kennel.watchdog.check(hour * 3600.0)
        kennel.hear()
    assert kennel.watchdog.pid == pid
    kennel.end()

    assert ends(group)  # although no one read the last answer


def test_somebody_elses_watchdog_is_not_looked_for(
    kennel: Kennel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork that has not started anything has no watchdog of its own."""
    monkeypatch.setattr(kennel.watchdog, "_owner", 1)
    kennel.watchdog.check(0.0)
    assert kennel.watchdog.pid is None


def test_it_is_not_running_before_it_is_needed(kennel: Kennel) -> None:
    """Without workers there is no watchdog; starting it twice makes one."""
    assert kennel.watchdog.pid is None
    kennel.watchdog.unregister(1)
    assert kennel.watchdog.pid is None
    kennel.watchdog.start()
    pid = kennel.watchdog.pid
    assert pid is not None
    kennel.watchdog.start()
    assert kennel.watchdog.pid == pid


def test_killed_watchdog_is_replaced(kennel: Kennel) -> None:
    """The next registration starts a new one; nothing is forgotten, or killed early."""
    first = kennel.registered(kennel.start())
    kennel.watchdog.expect()
    early = kennel.start(env={VARIABLE: kennel.watchdog.mark})
    before = kennel.watchdog.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert ends(before)
    second = kennel.start()
    kennel.watchdog.expect()
    kennel.watchdog.register(second)
    assert kennel.watchdog.pid != before
    assert all(map(runs, (first, second, early)))
    kennel.end()

    assert ends(first)
    assert ends(second)
    assert ends(early)


def test_replacement_knows_all_before_it_is_there(
    kennel: Kennel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We may be killed before we could send it anything (issue 10)."""
    group = kennel.registered(kennel.start())
    kennel.watchdog.add_folder("/gone")
    said: list[bytes] = []

    def start(line: socket.socket, _mark: str) -> int:
        said.append(line.recv(4096, socket.MSG_DONTWAIT))
        raise OSError

    monkeypatch.setattr(module, "_spawn", start)
    assert kennel.watchdog.pid is not None
    os.kill(kennel.watchdog.pid, signal.SIGKILL)
    assert ends(kennel.watchdog.pid)
    kennel.watchdog.start()
    assert said == [b"+%d\n>%s\n" % (group, b"/gone".hex().encode())]


def test_replacement_knows_of_a_start_beside_groups(
    kennel: Kennel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No group is taken for the worker that is about to start (issue 22)."""
    group = kennel.registered(kennel.start())
    kennel.watchdog.expect()
    guard = Guard(b"")

    def start(line: socket.socket, _mark: str) -> int:
        guard.learn(line.recv(4096, socket.MSG_DONTWAIT))
        raise OSError

    monkeypatch.setattr(module, "_spawn", start)
    assert kennel.watchdog.pid is not None
    os.kill(kennel.watchdog.pid, signal.SIGKILL)
    assert ends(kennel.watchdog.pid)
    kennel.watchdog.start()
    assert (guard.groups, guard.starting) == ({group}, 1)


def test_watchdog_that_does_not_listen_is_replaced(kennel: Kennel) -> None:
    """We don't wait for one that was stopped, and its replacement kills nothing."""
    group = kennel.registered(kennel.start())
    before = kennel.watchdog.pid
    assert before is not None
    os.kill(before, signal.SIGSTOP)
    for _ in range(100_000):
        kennel.watchdog.expect()
        kennel.watchdog.give_up()
        if kennel.watchdog.pid != before:
            break
    assert kennel.watchdog.pid != before
    assert ends(before)
    assert runs(group)
    kennel.end()

    assert ends(group)


def test_watchdog_that_can_not_be_started_is_done_without(
    kennel: Kennel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers run all the same, and nothing stays open."""

    def refuse(*_: object) -> int:
        raise FileNotFoundError

    before = open_files()
    monkeypatch.setattr(module, "_spawn", refuse)
    kennel.registered(12345)
    kennel.watchdog.unregister(12345)

    assert kennel.watchdog.pid is None
    assert open_files() == before


def test_fork_behind_our_back_is_noticed(
    kennel: Kennel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has another watchdog, and does not touch ours."""
    kennel.watchdog.start()
    pid, mark = kennel.watchdog.pid, kennel.watchdog.mark
    assert pid is not None
    monkeypatch.setattr(kennel.watchdog, "_owner", 1)
    kennel.watchdog.unregister(12345)
    kennel.watchdog.expect()
    kennel.watchdog.give_up()

    assert kennel.watchdog.pid not in (None, pid)
    assert kennel.watchdog.mark != mark
    os.waitpid(pid, 0)


def test_groups_are_killed_without_a_process_table(
    kennel: Kennel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every system has one that can be read."""

    def refuse(_: str) -> list[str]:
        raise FileNotFoundError

    script = "/bin/sh -c 'sleep 3600 & echo $!; wait'"
    leader = kennel.start(command=script, env=PATH)
    child = kennel.read_pid()
    guard = Guard(b"X=1")
    guard.learn(b"?\n+%d\n?\n+%d\n" % (1 << 29, leader))
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        patch.setattr("etlstage.transport.guard.sleep", lambda _: None)
        guard.kill()

    assert ends(leader)
    assert ends(child)


def test_lines_may_be_cut_anywhere() -> None:
    """A socket may split the data between any two bytes."""
    guard = Guard(b"")
    for byte in b"?\n+123\n?\n?\n\n+45\n!\n-123\n?\n":
        guard.learn(bytes([byte]))

    assert guard.groups == {45}
    assert guard.starting == 1


def test_program_in_a_zip_is_given_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark ships packages in zip files, from which Python can't run a single file."""
    ((path,),) = [program("guard")]
    assert os.path.isfile(path)
    monkeypatch.setattr(os.path, "isfile", lambda _: False)
    option, text = program.__wrapped__("guard")

    assert option == "-c"
    assert "class Guard:" in text


def test_program_that_embeds_python_is_not_run_as_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server would start a second time; its prefix's interpreter is used instead."""
    monkeypatch.setattr("sys.executable", "/usr/sbin/uwsgi")
    monkeypatch.setattr("sys.exec_prefix", "/usr")
    monkeypatch.setattr(os, "access", lambda path, _: path == "/usr/bin/python3")

    assert python.__wrapped__()[0] == "/usr/bin/python3"
    monkeypatch.setattr("sys.exec_prefix", "/nowhere")
    with pytest.raises(
        OSError, match="there is no Python: neither /usr/sbin/uwsgi nor"
    ):
        python.__wrapped__()


def test_watchdog_that_somebody_else_has_reaped_is_replaced(kennel: Kennel) -> None:
    """Its PID may be another process's by now, so nothing is killed."""
    kennel.watchdog.start()
    pid = kennel.watchdog.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    kennel.start(command="/bin/sh -c 'sleep 3600 & echo $!; wait'", env=PATH)
    kennel.watchdog.pid = stranger = kennel.read_pid()
    kennel.watchdog.start()

    assert kennel.watchdog.pid not in (None, stranger)
    assert runs(stranger)
    os.kill(stranger, signal.SIGKILL)


def test_ours_is_one() -> None:
    """Its mark has the PID of this process."""
    assert WATCHDOG.mark.startswith(f"{os.getpid()}.")


US = os.getpid()
NOBODY = 1 << 30  # no pid is that large


def folder(place: Path, pid: int, start: int, *, kind: str = "spool") -> Path:
    """Make a folder with a name as from that process."""
    path = place / f"etlstage-{kind}-{pid}-{start}-{_where()}-abc_123"
    path.mkdir()
    (path / "message").write_text("secret")
    return path


def known(path: Path) -> bool:
    """Return whether the watchdog would remove a folder."""
    return b">%s\n" % os.fsencode(path).hex().encode() in WATCHDOG._others


def test_folder_names_its_owner(tmp_path: Path) -> None:
    """It is private, known to the watchdog, and gone after its use (issue 10)."""
    path = make_scratch("spool", tmp_path)
    assert path.parent == tmp_path
    named = re.fullmatch(r"etlstage-spool-(\d+)-(\d+)-(\w{8})-\w+", path.name)
    assert named is not None
    assert (int(named[1]), int(named[2])) == (US, started_at(US))
    assert path.stat().st_mode & 0o777 == 0o700
    assert known(path)
    (path / "deep").mkdir()
    discard_scratch(path)
    assert not path.exists()
    assert not known(path)


def test_folder_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made among the temporary files, and removed at the end."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch("staging") as path:
        assert path.parent == tmp_path
        (path / "x").write_text("y")
    assert list(tmp_path.iterdir()) == []


def test_relative_folder_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog has another working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    path = make_scratch("spool", Path("here"))
    assert path.parent == tmp_path / "here"
    discard_scratch(path)


def test_what_the_dead_left_is_removed(tmp_path: Path) -> None:
    """Dead processes' folders go even if a PID is reused; others stay (issue 10)."""
    start = started_at(US)
    assert start is not None
    dead = folder(tmp_path, NOBODY, 1)
    recycled = folder(tmp_path, US, start - 1)
    ours = folder(tmp_path, US, start)
    others = [tmp_path / "etlstage-spool-abc", tmp_path / f"{dead.name}.old"]
    far = tmp_path / dead.name.replace(_where(), "0" * 8)
    for path in (*others, far):
        path.mkdir()
    link = tmp_path / dead.name.replace("abc", "link")
    link.symlink_to(others[0])
    file = tmp_path / dead.name.replace("abc", "file")
    file.write_text("x")
    discard_scratch(make_scratch("java", tmp_path))

    assert not dead.exists()
    assert not recycled.exists()
    assert all(path.exists() for path in (ours, *others, far, link, file))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_others_left_is_theirs(tmp_path: Path) -> None:
    """Root leaves folders of other users alone, although it could remove them."""
    path = folder(tmp_path, NOBODY, 1)
    os.chown(path, 12345, 12345)
    sweep_scratch(tmp_path)
    assert path.exists()


def test_table_in_a_warehouse_is_the_users(tmp_path: Path) -> None:
    """A warehouse that is not empty is kept."""
    full = folder(tmp_path, NOBODY, 1, kind="warehouse")
    empty = folder(tmp_path, NOBODY, 2, kind="warehouse")
    (empty / "message").unlink()
    sweep_scratch(tmp_path)
    assert full.exists()
    assert not empty.exists()


def test_place_that_can_not_be_read_is_left_alone(tmp_path: Path) -> None:
    """It may be for writing only, or not there."""
    sweep_scratch(tmp_path / "nowhere")
