"""Programs that can't be started, and what a started program is given."""

from __future__ import annotations

import os
import pwd
import re
import resource
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import anyio
import pytest

from etlstage.errors import ConfigError, WorkerStartFailed
from etlstage.messages import StageKind
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage, WorkerProgram
from etlstage.stage.policy import ResourceLimits, Timeouts
from etlstage.supervisor import AsyncSupervisor
from etlstage.supervisor.process import missing, script, spawn, substituted
from etlstage.testing import ScriptedLaunch, ScriptedWorker
from etlstage.transport import (
    Child,
    Launch,
    LaunchRequest,
    TermsRefused,
    Wire,
    launch_over_pipes,
)
from tests.patience import HANG
from tests.staged import staged
from tests.supervisor.acts import acting, in_memory, script_of
from tests.supervisor.workers import Settings, outputs, plain, stage


async def refusal(run: Stage, launch: Launch = launch_over_pipes) -> str:
    """Return why a stage can't start; check that the error is not in a group."""
    with pytest.raises(WorkerStartFailed) as caught:
        async with AsyncSupervisor(run, launch=launch):
            raise AssertionError("it started")
    assert caught.value.stage == run.name
    return str(caught.value)


def stage_of(*words: object, **settings: object) -> Stage:
    """Return a stage, called ``clean``, with this command."""
    return staged(tuple(map(str, words)), name="clean", **settings)


# --- programs that can't be started --------------------------------------------------


async def test_program_that_is_not_on_the_path() -> None:
    """The error names the stage, the worker, and the program as it was written."""
    assert await refusal(stage_of("no-such-program", "a b")) == (
        "stage clean: can't start worker clean-1: there is no program"
        " 'no-such-program' on PATH; check the command;"
        " command: no-such-program 'a b'"
    )


async def test_program_in_the_folder_is_what_was_meant(tmp_path: Path) -> None:
    """As with ``etlstage try worker.py`` (issue 27)."""
    (tmp_path / "clean.py").touch()
    text = await refusal(stage_of("clean.py", cwd=tmp_path))
    assert "no program 'clean.py' on PATH (did you mean './clean.py'?); check" in text


async def test_path_is_that_of_the_worker() -> None:
    """If ``env`` has a PATH, that one is searched."""
    text = await refusal(stage_of("sh", env={"PATH": "/nowhere"}))

    assert "there is no program 'sh' on PATH" in text


@pytest.mark.parametrize(
    ("command", "cwd", "problem"),
    [
        ("{folder}/absent", None, "there is no file {folder}/absent; check the"),
        (
            "{folder}/not me.sh",
            None,
            "{folder}/not me.sh is not executable; run: chmod +x '{folder}/not me.sh';",
        ),
        ("{folder}", None, "{folder} is a folder, not a program; check the command"),
        (
            "{folder}/bare.py",
            None,
            (
                "{folder}/bare.py has no #! line that names its interpreter; add one, or"
                " name it in the command, as in [{python}, {folder}/bare.py]"
            ),
        ),
        (
            "{folder}/lost.sh",
            None,
            "of {folder}/lost.sh does not exist: '/no/such'",
        ),
        # A relative path is relative to ``cwd``, and shown as it is.
        (
            "./lost.sh",
            "{folder}",
            "the interpreter in the first line of ./lost.sh does not exist: '/no/such'",
        ),
        (
            "./windows.sh",
            "{folder}",
            (
                "the interpreter in the first line of ./windows.sh does not exist:"
                r" '/bin/sh\r'; save the file with Unix line ends"
            ),
        ),
        ("sh", "{folder}/nowhere", "directory {folder}/nowhere does not exist; check"),
        ("sh", "{folder}/bare.py", "directory {folder}/bare.py is not a folder; check"),
    ],
    ids=[
        *("no file", "not executable", "folder", "no interpreter line"),
        *("no interpreter", "in its folder", "Windows line ends"),
        *("no cwd", "cwd is a file"),
    ],
)
async def test_file_that_can_not_be_run(
    tmp_path: Path, command: str, cwd: str | None, problem: str
) -> None:
    """The error tells what is wrong, with a remedy that can be copied."""
    (tmp_path / "not me.sh").write_text("#!/bin/sh\n")
    programs = {
        "bare.py": "print()\n",
        "lost.sh": "#!/no/such\n",
        "windows.sh": "#!/bin/sh\r\n",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    names = {"folder": str(tmp_path), "python": Path(sys.executable).name}
    folder = None if cwd is None else Path(cwd.format(**names))

    text = await refusal(stage_of(command.format(**names), cwd=folder))

    assert text.startswith("stage clean: can't start worker clean-1: ")
    assert problem.format(**names) in text


async def test_command_that_is_too_long() -> None:
    """Other errors have the system's text."""
    text = await refusal(stage_of("sh", *["x" * 100_000] * 100))

    assert text.startswith(
        "stage clean: can't start worker clean-1: Argument list too long; command: sh"
    )


@pytest.mark.core
async def test_extract_program_that_does_not_exist() -> None:
    """In plain mode, too, although the first round would start it."""
    with pytest.raises(WorkerStartFailed, match="can't start its workers: there is no"):
        async with AsyncSupervisor(
            Stage(
                name="e",
                worker=("no-such-program",),
                kind=plain("extract").kind,
                dialect=plain("extract").dialect,
            )
        ) as supervisor:
            await anext(supervisor.extract())


# --- what the worker is given --------------------------------------------------------


async def request_of(**settings: Unpack[Settings]) -> LaunchRequest:
    """Return the request with which a worker is launched."""
    run = stage("echo", **settings)
    launch = ScriptedLaunch(script_of(run))
    async with AsyncSupervisor(run, launch=launch) as supervisor:
        assert outputs(await supervisor.submit([b"x"])) == [(b"x",)]
    (worker,) = launch.workers
    return worker.request


@in_memory
async def test_environment_is_an_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's secrets do not reach the worker; variables in ``env`` do."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    monkeypatch.setenv("TZ", "Europe/Prague")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    seen = (await request_of(env={"MODEL": "large"})).env

    assert "s3cret" not in seen.values()
    assert seen["TZ"] == "Europe/Prague"
    assert seen["MODEL"] == "large"
    assert "VIRTUAL_ENV" not in seen


@in_memory
async def test_markers_are_in_the_environment() -> None:
    """They are escaped, as NUL can't be passed; Python workers don't buffer."""
    markers = Markers(eop=b"\0END\0", eob=b"EOB")
    seen = (await request_of(dialect=MarkerDialect(markers=markers))).env

    assert {name: seen[name] for name in seen if name.startswith("ETLSTAGE_E")} == {
        "ETLSTAGE_EOM": r"\012",
        "ETLSTAGE_EOP": r"\000END\000",
        "ETLSTAGE_EOB": "EOB",
        "ETLSTAGE_ERR": r"\025",
    }
    assert seen["ETLSTAGE_BNC"] == r"\005"
    assert seen["PYTHONUNBUFFERED"] == "1"


async def launched(run: Stage, *, start: int = 1) -> dict[str, str]:
    """Return the environment that a launched worker prints."""
    output = await printed(run, start=start)
    pairs = [entry.partition("=") for entry in output.split("\0")]
    return {name: value for name, _, value in pairs if name}


async def printed(run: Stage, *, start: int = 1) -> str:
    """Return the output of a worker that is launched without input."""
    wire, child = spawn(run, "clean-2", launch_over_pipes, stdin=False, start=start)
    output = b""
    try:
        with anyio.fail_after(HANG):
            while (data := wire.read(65536)) != b"":
                output += data or b""
                await wire.readable()
    finally:
        child.kill()
        wire.close()
        child.close()
    return output.decode()


async def test_worker_is_given_its_name() -> None:
    """With its stage, and the number of its start."""
    seen = await launched(stage_of("env", "-0"))
    assert seen["ETLSTAGE_STAGE"] == "clean"
    assert seen["ETLSTAGE_WORKER"] == "clean-2"
    assert seen["ETLSTAGE_START"] == "1"
    assert "ETLSTAGE_STATUS" in seen
    assert "ETLSTAGE_HEARTBEAT" not in seen

    # In this dialect a worker has to beat in any case.
    seen = await launched(stage_of("env", "-0", dialect=CocaineDialect(heartbeat=1.5)))
    assert seen["ETLSTAGE_HEARTBEAT"] == "1.5"

    seen = await launched(stage_of("env", "-0"), start=3)
    assert seen["ETLSTAGE_START"] == "3"


@in_memory
async def test_env_comes_before_everything_else() -> None:
    """Variables that the user sets take precedence."""
    request = await request_of(env={"PYTHONUNBUFFERED": "", "HOME": "/nowhere"})
    seen = request.env

    assert seen["PYTHONUNBUFFERED"] == ""
    assert seen["HOME"] == "/nowhere"


async def test_markers_replace_placeholders() -> None:
    """Anywhere in an argument, even several; other braces are left alone."""
    words = ("-e", "{eom}", "--eop={eop},{eob}", "{bnc}", "{other}", "${PATH}", "{}")
    dialect = MarkerDialect(markers=Markers(eom=b"{bnc}", eob=b"\\"))
    run = Stage(name="t", worker=("sh", "-c", 'printf "%s\n" "$@"', *words))
    seen = await printed(replace(run, dialect=dialect))

    assert seen.splitlines() == [
        "{bnc}",
        r"--eop=\000,\134",
        r"\005",
        "{other}",
        "${PATH}",
        "{}",
    ]


@in_memory
async def test_worker_that_may_not_refuse_is_given_no_err() -> None:
    """ERR is missing in its environment, and empty in its command."""
    dialect = MarkerDialect(markers=Markers(err=None))
    run = Stage(name="t", worker=("true", "[{err}]"), dialect=dialect)
    assert substituted(run) == ("true", "[]")
    seen = (await request_of(dialect=dialect)).env
    assert seen["ETLSTAGE_EOM"] == r"\012"
    assert "ETLSTAGE_ERR" not in seen


async def test_working_directory(tmp_path: Path) -> None:
    """The worker runs there."""
    async with AsyncSupervisor(stage("where", cwd=tmp_path)) as supervisor:
        assert outputs(await supervisor.submit([b"x"])) == [(bytes(tmp_path),)]


async def test_markers_of_many_bytes_work_end_to_end() -> None:
    """Even if they contain NUL, and the pipe cuts them anywhere."""
    markers = Markers(b"\0\0", b"<eop>", b"<eob>", b"<bnc>")
    messages = [b"a\n" * 7 + b"%d" % n for n in range(9999)]
    async with AsyncSupervisor(
        stage("echo", dialect=MarkerDialect(markers=markers))
    ) as supervisor:
        results = await supervisor.submit(messages)

    assert outputs(results) == [(m,) for m in messages]


@in_memory
async def test_eop_may_be_eom() -> None:
    """Then each message has exactly one output, empty or not."""
    run = stage("echo", dialect=MarkerDialect(markers=Markers(eop=b"\n")))
    async with acting(run) as supervisor:
        results = await supervisor.submit([b"one", b"", b"two"])

    assert outputs(results) == [(b"one",), (b"",), (b"two",)]


# --- the terms on which a worker runs -------------------------------------------------


def shell(script: str, **settings: object) -> Stage:
    """Return a stage, called ``clean``, that runs a shell script."""
    return staged(("sh", "-c", script), name="clean", **settings)


async def test_limits_are_those_of_the_worker() -> None:
    """Each limit by its name."""
    limits = ResourceLimits(
        memory=512 * 1024 * 1024, cpu=100, open_files=64, core=0, nice=2
    )
    script = "ulimit -v; ulimit -t; ulimit -n; ulimit -c; nice; umask"
    seen = await printed(shell(script, limits=limits, umask=0o27))

    nice = min(os.getpriority(os.PRIO_PROCESS, 0) + 2, 19)
    assert seen.split() == ["524288", "100", "64", "0", str(nice), "0027"]


async def test_limit_that_is_refused() -> None:
    """The error names it as the stage does, and the value that would be granted."""
    run = stage_of("true", limits=ResourceLimits(open_files=1 << 60))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    assert (
        f"limits.open_files {1 << 60} is refused (Operation not permitted): only"
        f" root may exceed {hard}; lower it, or raise the limit of this process;"
        " command: true"
    ) in await refusal(run)


@pytest.mark.core
@pytest.mark.parametrize(
    ("settings", "what", "problem"),
    [
        (
            {"limits": ResourceLimits(nice=-5)},
            "nice=-5",
            "limits.nice -5 is refused (Operation not permitted); it needs root;",
        ),
        (
            {"user": "0"},
            "user=0",
            "can't run it as user 0 (Operation not permitted); run as root, or remove",
        ),
        ({"user": "0"}, "groups=0", "can't run it as user 0 (Operation"),
        ({"group": "0"}, "group=0", "can't run it as group 0 (Operation"),
    ],
)
async def test_terms_that_are_refused(
    settings: dict[str, object],
    what: str,
    problem: str,
) -> None:
    """As the system refuses them to users other than root."""

    def refuse(_request: LaunchRequest, /) -> tuple[Wire, Child]:
        raise TermsRefused(1, "Operation not permitted", what)

    assert problem in await refusal(stage_of("true", **settings), refuse)


@pytest.mark.core
async def test_user_and_group_that_do_not_exist() -> None:
    """The error names what to check."""
    assert "can't start worker clean-1: there is no user 'no-one'; command" in (
        await refusal(stage_of("true", user="no-one"))
    )
    assert "clean-1: there is no group 'no-one'; command" in (
        await refusal(stage_of("true", group="no-one"))
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be somebody else")
async def test_user_has_his_own_groups_and_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of root's is left; ``env`` still has precedence."""
    monkeypatch.setenv("HOME", "/root")
    nobody = pwd.getpwnam("nobody")
    seen = await printed(
        shell('id -u; id -g; id -G; echo "$HOME $USER $LOGNAME"', user="nobody")
    )
    assert seen.splitlines() == [
        str(nobody.pw_uid),
        str(nobody.pw_gid),
        " ".join(map(str, os.getgrouplist("nobody", nobody.pw_gid))),
        f"{nobody.pw_dir} nobody nobody",
    ]
    run = shell("id -g; echo $HOME", user="nobody", group="12345", env={"HOME": "/x"})
    assert (await printed(run)).split() == ["12345", "/x"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may have another group")
async def test_group_alone_has_no_supplementary_groups() -> None:
    """The host's may be root's (issue 10)."""
    assert await printed(shell("id -u; id -G", group="12345")) == "0\n12345\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be somebody else")
async def test_another_user_can_open_the_status() -> None:
    """Its pipe must belong to that user."""
    script = 'echo > "$ETLSTAGE_STATUS" && echo done'
    assert await printed(shell(script, user="nobody", ready=True)) == "done\n"


@pytest.mark.parametrize(
    ("settings", "heartbeat"),
    [
        ({"ready": True}, None),
        ({"timeout": Timeouts(heartbeat=1.5)}, "1.5"),
        ({"timeout": Timeouts(heartbeat=60.0), "ready": True}, "60"),
    ],
)
async def test_status_is_there_when_it_is_asked_for(
    settings: dict[str, object], heartbeat: str | None
) -> None:
    """As a file, with the interval at which something must be written."""
    told = shell('echo x > "$ETLSTAGE_STATUS"; env -0', **settings)
    wire, child = spawn(told, "clean-1", launch_over_pipes)
    try:
        assert child.status is not None
        with anyio.fail_after(HANG):
            await child.status.readable()
            assert child.status.read(10) == b"x\n"
            await wire.readable()
    finally:
        child.kill()
        output = wire.read(65536) or b""
        wire.close()
        child.close()
    seen = dict(line.split("=", 1) for line in output.decode().split("\0") if line)
    assert seen.get("ETLSTAGE_HEARTBEAT") == heartbeat


# --- what a stage must be ------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"name": ""}, "stage: name: expected a name of up to 64 letters"),
        ({"command": ()}, "worker.command: expected a program and its arguments"),
        (
            {"command": "python clean.py"},
            r"worker.command: expected a list such as \[python, clean.py\], got 'python cl",
        ),
        ({"workers": 0}, "stage s: workers: expected 1 or more, got 0"),
        (
            {"window": 0},
            "stage s: window: expected a whole number of messages from 1 up, or auto",
        ),
        (
            {"dialect": plain("extract").dialect},
            "stage s: mode plain does not fit kind transform",
        ),
        (
            {"kind": plain("extract").kind},
            "stage s: mode single does not fit kind extract",
        ),
    ],
)
def test_stage_that_contradicts_itself(
    settings: dict[str, object], problem: str
) -> None:
    """It is refused when it is constructed."""
    with pytest.raises(ConfigError, match=problem):
        staged(("sh",), **{"name": "s"} | settings)


def flaw(folder: Path, *command: str, **env: str) -> str | None:
    """Return what is missing for a command that runs in ``folder``."""
    return missing(
        Stage(
            name="t",
            worker=WorkerProgram(command=command, env=env, cwd=folder),
        )
    )


@pytest.mark.core
async def test_script_that_is_not_there(tmp_path: Path) -> None:
    """This is an error at once, not after six starts (issue 22)."""
    (tmp_path / "clean.py").touch()
    stage = Stage(
        name="clean",
        worker=WorkerProgram(command=["python3", "claen.py"], cwd=tmp_path),
    )
    with pytest.raises(WorkerStartFailed) as caught:
        await AsyncSupervisor(stage).__aenter__()
    assert str(caught.value) == (
        f"stage clean: can't start its workers: there is no file {tmp_path}/claen.py"
        " (did you mean 'clean.py'?); command: python3 claen.py"
    )
    assert caught.value.stage == "clean"


@pytest.mark.core
async def test_extractor_is_sought_before_it_is_asked() -> None:
    """It would only be started when needed, but a missing program is known before."""
    plain = MarkerDialect(mode=Mode.PLAIN)
    stage = Stage(
        name="e", kind=StageKind.EXTRACT, dialect=plain, worker=["no-such-program"]
    )
    with pytest.raises(WorkerStartFailed, match="no program 'no-such-program' on PATH"):
        await AsyncSupervisor(stage).__aenter__()


@in_memory
async def test_only_processes_have_a_program() -> None:
    """With another launch, the command may be anything."""

    async def echo(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            await worker.reply(message)
        return 0

    stage = Stage(name="t", worker=["python3", "no-such-file.py"])
    async with AsyncSupervisor(stage, launch=ScriptedLaunch(echo)) as supervisor:
        assert await supervisor.ask(b"a") == (b"a",)


@pytest.mark.core
def test_what_is_missing(tmp_path: Path) -> None:
    """With a suggestion, as in ``validate``."""
    run = tmp_path / "run.sh"
    run.write_text("#!/bin/sh\n")
    run.chmod(stat.S_IRWXU)
    assert flaw(tmp_path, "./run.sh") is None
    assert flaw(tmp_path, "./rnu.sh") == (
        f"there is no file {tmp_path}/rnu.sh (did you mean 'run.sh'?)"
    )
    assert flaw(tmp_path, "run.sh") == (
        "there is no program 'run.sh' on PATH (did you mean './run.sh'?)"
    )
    assert flaw(tmp_path, ".") == "there is no program '.' on PATH, only a folder here"
    assert flaw(tmp_path, "rnu.sh", PATH=str(tmp_path)) == (
        "there is no program 'rnu.sh' on PATH (did you mean 'run.sh'?)"
    )
    assert flaw(tmp_path / "gone", "sh") == f"there is no folder {tmp_path}/gone"
    assert flaw(tmp_path, "{program}") is None


@pytest.mark.core
@pytest.mark.parametrize(
    ("command", "place"),
    [
        ("python3 clean.py", 1),
        ("/usr/bin/python3.11 -u clean.py x", 2),
        ("bash -eu run.sh", 2),
        ("python3 -m clean", None),
        ("sh -c true", None),
        ("node {script}", None),
        ("python3", None),
        ("cat clean.py", None),
    ],
)
def test_which_word_is_a_script(command: str, place: int | None) -> None:
    """A word after an unknown flag may be anything."""
    assert script(command.split()) == place


async def test_repr_shows_what_is_outstanding() -> None:
    """Its name, its pid, and the number of exchanges that it has not answered."""
    async with AsyncSupervisor(stage("echo")) as supervisor:
        assert supervisor._pool is not None
        (running,) = supervisor._pool._running.values()
        text = repr(running)

    assert re.fullmatch(
        r"<WorkerProcess 't-1' <PipeChild pid=\d+ running> owed=0>", text
    )
