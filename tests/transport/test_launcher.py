"""How a worker is started over pipes: what it is given, and what is refused."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from etlstage.transport import (
    LaunchRequest,
    LaunchTerms,
    TermsRefused,
    launch_over_pipes,
    launcher,
    shim,
)
from etlstage.transport.launcher import Identity, Launcher, UnknownIdentity, look_up
from etlstage.transport.process import PipeChild, PipeWire
from etlstage.transport.watchdog import WATCHDOG, program, python
from tests.patience import HANG
from tests.supervisor.workers import open_files

ENV = {"PATH": "/usr/bin:/bin"}
MiB = 1024 * 1024

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root may do this")


@pytest.fixture(params=["setpriv", "shim"])
def wrapper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Start programs by setpriv and by the shim, which always starts doubtful ones."""
    if request.param == "shim":
        monkeypatch.setattr(launcher, "_setpriv", lambda: None)
    return str(request.param)


def start(
    *command: str,
    env: Mapping[str, str] = ENV,
    terms: LaunchTerms | None = None,
    stdin: bool = True,
    cwd: Path | None = None,
) -> tuple[PipeWire, PipeChild]:
    """Start a program."""
    terms = terms or LaunchTerms()
    request = LaunchRequest(command, env, cwd=cwd, stdin=stdin, terms=terms)
    return launch_over_pipes(request)


async def output_of(
    *command: str, env: Mapping[str, str] = ENV, terms: LaunchTerms | None = None
) -> str:
    """Return what a program prints on stdout; it must exit with status 0."""
    wire, child = start(*command, stdin=False, env=env, terms=terms)
    said = b""
    try:
        with anyio.fail_after(HANG):
            while (data := wire.read(65536)) != b"":
                said += data or b""
                await wire.readable()
            assert await child.wait() == 0, child.stderr.read(65536)
    finally:
        child.kill()
        wire.close()
        child.close()
    return said.decode()


async def output_of_shell(script: str, *, terms: LaunchTerms | None = None) -> str:
    """Return what a shell script prints."""
    return (await output_of("sh", "-c", script, terms=terms)).strip()


def is_quick(
    command: str,
    *,
    env: Mapping[str, str] = ENV,
    cwd: Path | None = None,
    terms: LaunchTerms | None = None,
) -> bool:
    """Return whether a command is started by setpriv instead of the shim."""
    one = Launcher((command,), env=env, cwd=cwd, terms=terms)
    one.close()
    return one.words[0].endswith("/setpriv")


def bare(*command: str, env: Mapping[str, str] = ENV) -> bytes:
    """Return what a program prints when no wrapper starts it."""
    return subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout


# --- what is the same ----------------------------------------------------------------


@pytest.mark.parametrize(
    "more", [{}, {"LC_CTYPE": "C"}, {"LC_ALL": "C"}, {"X": "\udcff"}]
)
async def test_program_sees_no_wrapper(wrapper: str, more: Mapping[str, str]) -> None:
    """Its arguments and environment are unchanged, except for two added marks."""
    env = {**ENV, **more}
    words = (
        "awk",
        'BEGIN { for (n in ENVIRON) print n "=" ENVIRON[n] }',
        "é",
        "\udcff",
    )
    seen = (await output_bytes(*words, env=env)).splitlines()
    ours = (b"ETLSTAGE_SUPERVISOR=", b"ETLSTAGE_PROCESS=")
    marks = [line for line in seen if line.startswith(ours)]

    assert len(marks) == 2
    assert sorted(set(seen) - set(marks)) == sorted(bare(*words, env=env).splitlines())


async def output_bytes(*command: str, env: Mapping[str, str]) -> bytes:
    """Return the bytes that a program prints."""
    text = await output_of("sh", "-c", '"$@" | od -An -v -tx1', "sh", *command, env=env)
    # The shell adds variables of its own.
    lines = bytes.fromhex(text.replace("\n", "")).splitlines()
    return b"\n".join(line for line in lines if not line.startswith((b"PWD=", b"_=")))


async def test_arguments_are_passed_on_as_they_are(wrapper: str) -> None:
    """Words that look like options, and the first word, arrive unchanged."""
    words = ["--", "-c", "", "a b", "\n", "é", "--as=1", "deathsig"]
    code = "import sys; print(sys.argv[1:], sys.orig_argv[0])"
    seen = await output_of("python3", "-c", code, *words)

    assert seen == f"{words} python3\n"


async def test_signals_are_as_popen_leaves_them(wrapper: str) -> None:
    """Python ignores some signals, which a program would inherit (``yes | head``)."""
    words = ("grep", "^Sig[BIC]", "/proc/self/status")

    assert await output_of(*words) == bare(*words).decode()


async def test_nothing_but_the_pipes_is_inherited(wrapper: str) -> None:
    """Neither the shim's pipe for reports nor the watchdog's socket is inherited."""
    assert (await output_of("ls", "/proc/self/fd")).split() == ["0", "1", "2", "3"]


async def test_pid_is_that_of_the_program(wrapper: str) -> None:
    """The wrapper is replaced by the program."""
    wire, child = start("sh", "-c", "echo $$ $PPID; read x")
    with anyio.fail_after(HANG):
        await wire.readable()
    assert wire.read(100) == b"%d %d\n" % (child.pid, os.getpid())
    child.kill()
    wire.close()
    child.close()


# --- what can't be started ------------------------------------------------------------


def _no_file(folder: Path) -> Path:
    return folder / "program"


def _empty(folder: Path) -> Path:
    return _write(folder, b"")


def _not_executable(folder: Path) -> Path:
    (folder / "program").write_text("#!/bin/sh\n")
    return folder / "program"


def _no_first_line(folder: Path) -> Path:
    return _write(folder, b"echo hello\n")


def _no_interpreter(folder: Path) -> Path:
    return _write(folder, b"#!/no/such/interpreter -x\n")


def _no_interpreter_of_interpreter(folder: Path) -> Path:
    script = _no_interpreter(folder).rename(folder / "interpreter")
    return _write(folder, b"#!%s\n" % bytes(script))


def _interpreter_is_a_folder(folder: Path) -> Path:
    return _write(folder, b"#!/usr\n")


def _nothing_in_first_line(folder: Path) -> Path:
    return _write(folder, b"#!  \n")


def _folder(folder: Path) -> Path:
    return folder


def _behind_a_file(folder: Path) -> Path:
    return _empty(folder) / "program"


def _broken_link(folder: Path) -> Path:
    (folder / "program").symlink_to(folder / "nowhere")
    return folder / "program"


def _no_loader(folder: Path) -> Path:
    binary = Path("/bin/true").read_bytes()
    at = binary.index(b"/ld-linux")
    return _write(folder, binary[:at] + b"/ld-nowhe" + binary[at + 9 :])


def _other_machine(folder: Path) -> Path:
    binary = Path("/bin/true").read_bytes()
    return _write(folder, binary[:18] + b"\x16\x00" + binary[20:])


def _cut_binary(folder: Path) -> Path:
    return _write(folder, Path("/bin/true").read_bytes()[:50])


def _write(folder: Path, content: bytes) -> Path:
    program = folder / "program"
    program.write_bytes(content)
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("how", ["by its path", "on the path", "in the folder"])
@pytest.mark.parametrize(
    "make",
    [
        _no_file,
        _empty,
        _not_executable,
        _no_first_line,
        _no_interpreter,
        _no_interpreter_of_interpreter,
        _interpreter_is_a_folder,
        _nothing_in_first_line,
        _folder,
        _behind_a_file,
        _broken_link,
        _no_loader,
        _other_machine,
        _cut_binary,
    ],
)
def test_error_is_the_one_of_popen(
    make: Callable[[Path], Path], how: str, tmp_path: Path
) -> None:
    """It is the system's error, no file stays open, and no shell runs the script."""
    program = make(tmp_path)
    env = {"PATH": f"/nowhere:{program.parent}"}
    word, cwd = {
        "by its path": (str(program), None),
        "on the path": (program.name, None),
        "in the folder": (f"./{program.name}", program.parent),
    }[how]
    if cwd is not None and not cwd.is_dir():
        cwd = None
    with pytest.raises(OSError, match="Errno") as plain:
        subprocess.Popen([word, "x"], env=env, cwd=cwd)
    # The shim starts it, whatever other wrapper there is.
    assert not is_quick(word, env=env, cwd=cwd)
    before = open_files()
    with pytest.raises(OSError, match="Errno") as ours:
        start(word, "x", env=env, cwd=cwd)

    assert type(ours.value) is type(plain.value)
    assert ours.value.errno == plain.value.errno
    assert open_files() == before


async def test_search_goes_on_behind_what_can_not_be_run(
    tmp_path: Path, wrapper: str
) -> None:
    """Like the system's search, it is not ended by a folder of that name."""
    (tmp_path / "sh").mkdir()
    env = {"PATH": f"{tmp_path}:/bin"}

    assert await output_of("sh", "-c", "echo found", env=env) == "found\n"
    assert await output_of("/bin/sh", "-c", "echo found", env={}) == "found\n"
    assert await output_of("sh", "-c", "echo found", env={}) == "found\n"


async def test_scripts_run(tmp_path: Path, wrapper: str) -> None:
    """An interpreter may have an argument, or be a script itself."""
    _write(tmp_path, b"#!/bin/sh -e\necho $0 $1\nfalse\necho bad\nexit 0\n")
    inner = (tmp_path / "program").rename(tmp_path / "inner")
    inner.write_bytes(inner.read_bytes().replace(b"false\necho bad\n", b""))
    outer = _write(tmp_path, b"#! %s\t\n" % bytes(inner))

    assert await output_of(str(inner), "x") == f"{inner} x\n"
    assert await output_of(str(outer), "x") == f"{inner} {outer}\n"


def test_what_will_surely_start_is_quick(tmp_path: Path) -> None:
    """Binaries, and scripts that a binary interprets, are quick; doubtful ones not."""
    script = str(_write(tmp_path, b"#!/bin/sh -e\n"))

    assert is_quick("true")
    assert is_quick("/bin/true")
    assert is_quick(sys.executable)
    assert is_quick(script)
    assert is_quick("./program", cwd=tmp_path)
    assert is_quick(
        "true", terms=LaunchTerms(limits={resource.RLIMIT_CORE: 0}, umask=0)
    )
    assert not is_quick("true", env={})
    assert not is_quick("true", terms=LaunchTerms(nice=1))
    assert not is_quick("true", terms=LaunchTerms(user=1))
    assert not is_quick("true", terms=LaunchTerms(limits={resource.RLIMIT_AS: MiB}))
    assert not is_quick("tr\0ue")


def test_binary_is_looked_at_closely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any oddity makes it doubtful; that it needs no loader is none."""
    binary = Path("/bin/true").read_bytes()
    start = int.from_bytes(binary[32:40], "little")
    headers = 56 * int.from_bytes(binary[56:58], "little")
    static = binary[:start] + b"\1".ljust(56, b"\0") * (headers // 56)
    odd = {
        "no table": binary[:32] + b"\0\0\1" + binary[35:],
        "no program": binary[:16] + b"\1" + binary[17:],
        "32 bits": binary[:4] + b"\1" + binary[5:],
    }
    assert is_quick(str(_write(tmp_path, binary)))
    assert is_quick(str(_write(tmp_path, static)))
    for name, content in odd.items():
        assert not is_quick(str(_write(tmp_path, content))), name

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    program = str(_write(tmp_path, binary))
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", refuse)
        assert not is_quick(program)
        assert launcher._own_head.__wrapped__() == b""


def test_setpriv_that_does_not_know_the_signal_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setpriv of busybox, for example, does not know it."""
    monkeypatch.setattr(launcher, "_FOLDERS", (str(tmp_path),))
    assert launcher._setpriv.__wrapped__() is None
    file = tmp_path / "setpriv"
    file.write_text("#!/bin/sh\nexit 1\n")
    file.chmod(0o755)
    assert launcher._setpriv.__wrapped__() is None
    file.write_text("#!/bin/sh\nexit 0\n")
    assert launcher._setpriv.__wrapped__() == str(file)
    monkeypatch.setattr("sys.platform", "darwin")
    assert launcher._setpriv.__wrapped__() is None


def test_worker_whose_parent_died_before_it_asked_does_not_start() -> None:
    """The parent-death signal would never be sent."""
    report, said = os.pipe()
    words = [*python(), *program("shim"), str(said)]
    for parent, status in ((os.getpid(), 0), (1, -signal.SIGKILL)):
        done = subprocess.run(
            [*words, str(parent), "deathsig", "--", "true"],
            pass_fds=[said],
            check=False,
        )
        assert done.returncode == status
    os.close(said)
    assert os.read(report, 100) == b""
    os.close(report)


async def test_program_without_python_runs_plainly(
    wrapper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only terms that the shim alone can set are an error."""

    def refuse() -> tuple[str, ...]:
        raise OSError(errno.ENOSYS, "there is no Python")

    monkeypatch.setattr(launcher, "python", refuse)
    assert await output_of("echo", "x") == "x\n"
    assert (
        await output_of_shell("umask", terms=LaunchTerms(umask=0o27, limits={}))
        == "0027"
    )
    with pytest.raises(FileNotFoundError):
        start("no-such-program")
    for terms in (LaunchTerms(nice=1), LaunchTerms(limits={resource.RLIMIT_AS: MiB})):
        with pytest.raises(OSError, match="there is no Python"):
            start("echo", "x", terms=terms)


# --- terms ----------------------------------------------------------------------------


LIMITS = {
    resource.RLIMIT_AS: 512 * MiB,
    resource.RLIMIT_CPU: 100,
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_CORE: 0,
}


async def test_limits_are_seen_by_the_program(wrapper: str) -> None:
    """Soft and hard limits are set; SIGXCPU comes a second before SIGKILL."""
    terms = LaunchTerms(limits=LIMITS)
    assert is_quick("sh", terms=terms) == (wrapper == "setpriv")
    script = "for l in v t n c; do ulimit -S$l; ulimit -H$l; done"
    seen = (await output_of_shell(script, terms=terms)).split()

    assert seen == ["524288", "524288", "100", "101", "64", "64", "0", "0"]


async def test_hard_limit_of_ours_is_not_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At our hard limit there is no second more for a SIGXCPU, and no need of root."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    terms = LaunchTerms(limits={resource.RLIMIT_CPU: 100})
    assert is_quick("sh", terms=terms)
    assert await output_of_shell("ulimit -Ht", terms=terms) == "100"
    assert not is_quick("sh", terms=LaunchTerms(limits={resource.RLIMIT_CPU: 101}))


async def test_limits_that_are_not_named_stay(wrapper: str) -> None:
    """They are inherited from us."""
    terms = LaunchTerms(limits={resource.RLIMIT_NOFILE: 64})
    script = "ulimit -v; ulimit -t; ulimit -c"

    assert (await output_of_shell(script, terms=terms)) == bare(
        "sh", "-c", script
    ).decode().strip()


async def test_end_by_the_cpu_limit_shows_what_it_was(wrapper: str) -> None:
    """The status is SIGXCPU; SIGKILL would not show the reason."""
    terms = LaunchTerms(limits={resource.RLIMIT_CPU: 1})
    wire, child = start("sh", "-c", "while :; do :; done", terms=terms)
    with anyio.fail_after(HANG):
        assert await child.wait() == -signal.SIGXCPU
    child.kill()
    wire.close()
    child.close()


async def test_niceness_is_added_to_ours(wrapper: str) -> None:
    """The sum is at most 19."""
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    seen = await output_of_shell("nice", terms=LaunchTerms(nice=3))

    assert int(seen) == min(ours + 3, 19)


async def test_umask(wrapper: str) -> None:
    """A mask of zero is set, too."""
    assert await output_of_shell("umask", terms=LaunchTerms(umask=0)) == "0000"
    assert await output_of_shell("umask", terms=LaunchTerms(umask=0o27)) == "0027"


@root_only
async def test_user_and_groups(wrapper: str) -> None:
    """None of our IDs is left; the program may open its pipes by name."""
    terms = LaunchTerms(user=54321, group=12345, groups=(12345, 12346))
    script = "id -u; id -g; id -G; grep ^Uid /proc/$$/status"
    seen = (await output_of_shell(script, terms=terms)).split()
    assert seen[:4] == ["54321", "12345", "12345", "12346"]
    assert seen[5:] == ["54321"] * 4
    assert await output_of_shell("echo x > /dev/stdout", terms=terms) == "x"
    alone = await output_of_shell("id -g; id -G", terms=LaunchTerms(group=12345))
    assert alone.split()[0] == "12345"


@root_only
async def test_pipes_are_the_users_before_its_program_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a quick program can't open them (seen once in hundreds of starts)."""
    WATCHDOG.start()
    popen, owners = subprocess.Popen, list[int]()

    def started(*words: Any, **settings: Any) -> Any:  # noqa: ANN401
        if settings["stdout"] != subprocess.DEVNULL:  # that of the watchdog
            pipes = (settings[name] for name in ("stdout", "stderr"))
            owners.extend(os.fstat(pipe).st_uid for pipe in pipes)
        return popen(*words, **settings)

    monkeypatch.setattr(subprocess, "Popen", started)
    terms = LaunchTerms(user=54321, group=12345, groups=())
    assert await output_of("true", terms=terms) == ""
    assert owners == [54321, 54321]


@root_only
async def test_user_gets_no_new_privileges(wrapper: str) -> None:
    """A set-user-ID program would undo the change; otherwise it may run (issue 10)."""
    script = "grep ^NoNewPrivs /proc/$$/status"
    ours = await output_of_shell(script)
    other = LaunchTerms(user=54321, group=12345, groups=())
    assert (await output_of_shell(script, terms=other)).split() == ["NoNewPrivs:", "1"]
    alone = LaunchTerms(group=12345, groups=())
    assert await output_of_shell(script, terms=alone) == ours


@root_only
async def test_parent_death_signal_survives_a_change_of_user(wrapper: str) -> None:
    """A change of user clears a signal that is set before it."""
    code = (
        "import ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n));"
        " print(n.value)"
    )
    for terms in (
        LaunchTerms(user=54321, group=12345, groups=()),
        LaunchTerms(nice=0),
        LaunchTerms(),
    ):
        seen = await output_of("/usr/bin/python3", "-c", code, terms=terms)
        assert int(seen) == signal.SIGKILL


@root_only
def test_program_that_the_user_may_not_run(tmp_path: Path) -> None:
    """The user's permissions count, not ours."""
    program = shutil.copy("/bin/true", tmp_path / "program")
    os.chmod(program, 0o700)
    with pytest.raises(PermissionError):
        start(str(program), terms=LaunchTerms(user=54321, group=12345, groups=()))


def refused(terms: LaunchTerms) -> tuple[str, int | None]:
    """Return which of the terms is refused, and by what error; nothing stays open."""
    before = open_files()
    with pytest.raises(TermsRefused) as caught:
        start("true", stdin=False, terms=terms)
    assert open_files() == before
    return str(caught.value.filename), caught.value.errno


@pytest.mark.parametrize(
    ("terms", "what", "number"),
    [
        (
            LaunchTerms(limits={resource.RLIMIT_NOFILE: 1 << 60}),
            "limit=7,",
            errno.EPERM,
        ),
        (LaunchTerms(user=1 << 40), f"user={1 << 40}", errno.EINVAL),
        (LaunchTerms(group=(1 << 32) - 1), f"group={(1 << 32) - 1}", errno.EINVAL),
    ],
)
def test_terms_that_no_one_may_set(terms: LaunchTerms, what: str, number: int) -> None:
    """The error names the term that the system refuses."""
    found, why = refused(terms)

    assert found.startswith(what)
    assert why == number


@root_only
@pytest.mark.parametrize(
    "setting", ["groups=0", "user=0", "group=0", "nice=-1", "limit=7,1048576,1048576"]
)
def test_terms_that_only_root_may_set(setting: str) -> None:
    """The error for another user names the refused setting."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        # Not by a Process: that user may be unable to read Python's files.
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
            os.setgroups([])
            os.setgid(12345)
            os.setuid(54321)
            shim.main([str(writing), "1", "locale=", setting, "--", "true"])
        finally:
            os._exit(0)
    os.close(writing)
    assert os.read(reading, 100).decode() == f"{errno.EPERM} {setting}"
    os.close(reading)
    os.waitpid(pid, 0)


US = pwd.getpwuid(os.getuid())
OURS = grp.getgrgid(US.pw_gid)


def test_no_user_named_is_ourselves() -> None:
    """Without user and group nothing is changed."""
    assert look_up(None, None) == Identity()


@pytest.mark.parametrize("user", [US.pw_name, str(US.pw_uid)])
def test_user_brings_his_groups(user: str) -> None:
    """The primary one and the others; by name or number."""
    groups = tuple(os.getgrouplist(US.pw_name, US.pw_gid))

    assert look_up(user, None) == Identity(
        US.pw_uid, US.pw_gid, groups, US.pw_name, US.pw_dir
    )


def test_group_may_be_another_one() -> None:
    """The user's supplementary groups are kept."""
    identity = look_up(US.pw_name, "12345")

    assert identity.group == 12345
    assert identity.groups is not None
    assert 12345 in identity.groups


@pytest.mark.parametrize("group", [OURS.gr_name, str(OURS.gr_gid)])
def test_group_alone(group: str) -> None:
    """By name or number; the user stays, our supplementary groups don't (issue 10)."""
    assert look_up(None, group) == Identity(None, OURS.gr_gid, ())


def test_number_without_an_entry_needs_a_group() -> None:
    """It would keep our group, which may be root's."""
    assert look_up("54321", "12345") == Identity(54321, 12345, ())
    with pytest.raises(
        UnknownIdentity, match="user 54321 has no passwd entry and so no group; name"
    ):
        look_up("54321", None)


def test_unknown_names_are_reported() -> None:
    """The error suggests a similar name (issue 11)."""
    name, group = US.pw_name, OURS.gr_name
    with pytest.raises(UnknownIdentity, match=f"no user '{name}_' .*'{name}'"):
        look_up(f"{name}_", None)
    with pytest.raises(UnknownIdentity, match=f"no group '{group}_' .*'{group}'"):
        look_up(None, f"{group}_")


@pytest.mark.parametrize("digits", [str(2**32 - 1), "9" * 5000])
def test_numbers_beyond_the_last_are_refused(digits: str) -> None:
    """The first means "leave it" to Linux, and Python can't parse the second."""
    with pytest.raises(UnknownIdentity, match=r"^user \d+(\.{3})? is above the hi"):
        look_up(digits, "0")
    with pytest.raises(UnknownIdentity, match=r"^group \d+(\.{3})? is above the hi"):
        look_up(None, digits)
