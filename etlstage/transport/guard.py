"""
The watchdog's own program: wait for the end of the host, then kill what it left behind.

``watchdog.py`` starts it as a separate program, so it imports nothing of this package,
and coverage does not see it.

stdin is a socket to the host, which sends these lines:

    ``?``     a worker is about to be started
    ``+PID``  it was started, and leads that process group
    ``!``     it could not be started
    ``-PID``  that group is dead
    ``*PID START``  a Java process, and when it was started: it should end with the
              host by itself, or else is ended
    ``>PATH`` a folder or file, as hexadecimal digits, to remove after the host's end
    ``<PATH`` that folder or file is gone
    ``.``     is the watchdog alive? answered with the same line

At the end of stdin the groups are killed, and two sorts of processes that are no
longer in them: members of the sessions that the workers lead, such as the jobs of a
shell; and processes that have inherited the mark of the host in their environment, such
as a daemon that made a session of its own. The mark also identifies a worker that was
so early in its start that it is neither registered nor has its parent-death signal yet.
A process that has left the group *and* has cleaned its environment survives.

If the host ends while no worker runs, only Java is killed. A Java process that is just
starting is known by what the script that starts it leaves in its folder. The folders
are removed when no process is left that might write there.

Between the end of the host and the kill, which follows within a millisecond or so, a
dead group's number could in theory be reused.
"""

from __future__ import annotations

import os
import signal
import sys
from time import sleep

__all__ = ("STARTED", "Guard", "lives", "remove", "stat_of")

STARTED = "started"
"""File in a folder for Java, with its pid and the file by which PySpark awaits it."""

_PAUSE = 0.05  # seconds between two looks at the process table
_LOOKS = 20
_JAVA = 100  # pauses that Java has to end


class Guard:
    """
    Knows what is to be killed and removed.

    Args:
        variable: Entry of the environment that marks processes started by the host.

    """

    def __init__(self, variable: bytes) -> None:
        self.groups: set[int] = set()
        self.folders: set[str] = set()
        self.java: set[tuple[int, int]] = set()
        self.starting: int = 0
        self.asked: int = 0
        self._variable = variable
        self._rest = b""

    def learn(self, data: bytes) -> None:
        """Process lines from the host."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            sign, number = line[:1], line[1:]
            if sign == b"?":
                self.starting += 1
            elif sign == b"!":
                self.starting -= 1
            elif sign == b"+":
                self.starting -= self.starting > 0
                self.groups.add(int(number))
            elif sign == b"-":
                self.groups.discard(int(number))
            elif sign == b"*":
                pid, start = number.split()
                self.java.add((int(pid), int(start)))
            elif sign == b">":
                self.folders.add(os.fsdecode(bytes.fromhex(number.decode())))
            elif sign == b"<":
                self.folders.discard(os.fsdecode(bytes.fromhex(number.decode())))
            elif sign == b".":
                self.asked += 1

    def end(self) -> None:  # pragma: no cover
        """Kill and remove everything that the host left behind."""
        self.kill()
        waited = [file for folder in self.folders if (file := self._starting(folder))]
        self._end_java()
        for folder in self.folders:
            remove(folder)
        for file in waited:
            _remove_parent(file)

    def _starting(self, folder: str) -> str:  # pragma: no cover
        """Add the Java that is starting; return the file by which PySpark awaits it."""
        if not os.path.basename(folder).startswith("etlstage-java-"):
            return ""
        try:
            with open(os.path.join(folder, STARTED), encoding="utf-8") as note:
                pid, file = note.read().splitlines()
            with open(f"/proc/{pid}/environ", "rb") as environment:
                known = f"_PYSPARK_DRIVER_CONN_INFO_PATH={file}".encode()
                ours = known in environment.read().split(b"\0")
            stat = stat_of(int(pid))
        except (OSError, ValueError):
            return ""
        if ours and stat is not None:  # else its pid may be another process's by now
            self.java.add((int(pid), stat[1]))
        return file

    def _end_java(self) -> None:  # pragma: no cover
        """End the Java processes, and the processes in their sessions."""
        found = left = [java for java in self.java if lives(*java)]
        for pid, _ in found:
            _kill(pid, signal.SIGTERM)
        for _ in range(_JAVA):
            left = [java for java in left if lives(*java)]
            if not left:
                break
            sleep(_PAUSE)
        for pid, _ in left:
            _kill(pid, signal.SIGKILL)
        # Here processes with our mark are not to be killed.
        self.groups, self.starting = {pid for pid, _ in found}, 0
        self._variable = b"no entry"
        self.kill()

    def kill(self) -> None:  # pragma: no cover
        """Kill the groups and strays until none is left."""
        for group in self.groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except OSError:
                continue
        if not self.groups and not self.starting:
            return
        # More than once: a killed process may just have forked, and a process that the
        # host just forked may not have its environment yet.
        quiet = 0
        for _ in range(_LOOKS):
            quiet = 0 if self._kill_strays() else quiet + 1
            if quiet == 5:
                break
            sleep(_PAUSE)

    def _kill_strays(self) -> int:  # pragma: no cover
        killed = 0
        try:
            names = os.listdir("/proc")
        except OSError:
            return 0  # not Linux
        for name in names:
            if name.isdigit() and int(name) != os.getpid():
                killed += self._kill_stray(int(name))
        return killed

    def _kill_stray(self, pid: int) -> bool:  # pragma: no cover
        if not self._is_stray(pid):
            return False
        try:
            process = os.pidfd_open(pid)
        except (OSError, AttributeError):
            return False
        try:
            # Check again: now the pid can't be reused.
            if not self._is_stray(pid):
                return False
            signal.pidfd_send_signal(process, signal.SIGKILL)
        except OSError:
            return False
        else:
            return True
        finally:
            os.close(process)

    def _is_stray(self, pid: int) -> bool:  # pragma: no cover
        try:
            if os.getsid(pid) in self.groups:
                # A zombie stays in its session until it is reaped.
                return lives(pid)
            with open(f"/proc/{pid}/environ", "rb") as environment:
                return self._variable in environment.read().split(b"\0")
        except OSError:
            return False


def _remove_parent(file: str) -> None:  # pragma: no cover
    """Remove the temporary folder of a file; it must contain only files."""
    folder = os.path.dirname(file)
    if not os.path.basename(folder).startswith("tmp"):
        return
    try:
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
    except OSError:
        return


def remove(folder: str) -> None:
    """Remove a folder; a warehouse only if it is empty, as tables are the user's."""
    # Imported late: the host does not wait for the watchdog, but shares its processor.
    from shutil import rmtree

    if os.path.basename(folder).startswith("etlstage-warehouse-"):
        try:
            os.rmdir(folder)
        except OSError:
            return
    if os.path.isfile(folder):
        try:
            os.unlink(folder)
        except OSError:
            return
    # A process that was just killed may have been writing.
    for _ in range(5):
        rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            return


def _kill(pid: int, number: int) -> None:  # pragma: no cover
    try:
        os.kill(pid, number)
    except OSError:
        return


def stat_of(pid: int) -> tuple[bytes, int] | None:
    """
    Return the state of a process, and when it was started, in ticks since boot.

    None: the process is gone, or the system does not provide this.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # After the name, which may contain anything: proc_pid_stat(5).
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


def lives(pid: int, start: int | None = None) -> bool:
    """Return whether a process, started at ``start``, is alive; a zombie is not."""
    stat = stat_of(pid)
    if stat is None or stat[0] in (b"Z", b"X"):
        return False
    return start is None or stat[1] == start


def main(variable: bytes) -> None:  # pragma: no cover
    """Run the watchdog."""
    # A service manager sends these to all processes of a service, including this one,
    # which must outlive the host.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guard = Guard(variable)
    try:
        while data := os.read(0, 65536):
            guard.learn(data)
            if guard.asked:
                guard.asked = 0
                os.write(0, b".")
    except OSError:
        # The host has ended, before it read an answer.
        pass
    guard.end()


if __name__ == "__main__":  # pragma: no cover
    main(os.fsencode(f"ETLSTAGE_SUPERVISOR={sys.argv[1]}"))
