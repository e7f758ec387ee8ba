"""What a command names and is not there is found when the supervisor is entered."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from etlstage import (
    AsyncSupervisor,
    MarkerDialect,
    Mode,
    Stage,
    StageKind,
    WorkerProgram,
)
from etlstage.errors import WorkerStartFailed
from etlstage.supervisor.program import missing, script
from etlstage.testing import ScriptedLaunch, ScriptedWorker


def flaw(folder: Path, *command: str, **env: str) -> str | None:
    """Return what is missing of a command that runs in ``folder``."""
    return missing(
        Stage(
            name="t",
            worker=WorkerProgram(command=command, env=env, cwd=folder),
        )
    )


async def test_script_that_is_not_there(tmp_path: Path) -> None:
    """The caller is told at once, and not after six starts (issue 22)."""
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


async def test_extractor_is_sought_before_it_is_asked() -> None:
    """Its program is started when it is wanted; that it is missing is known before."""
    plain = MarkerDialect(mode=Mode.PLAIN)
    stage = Stage(
        name="e", kind=StageKind.EXTRACT, dialect=plain, worker=["no-such-program"]
    )
    with pytest.raises(WorkerStartFailed, match="no program 'no-such-program' on PATH"):
        await AsyncSupervisor(stage).__aenter__()


async def test_only_processes_have_a_program() -> None:
    """What is started by other means may be called anything."""

    async def echo(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            await worker.reply(message)
        return 0

    stage = Stage(name="t", worker=["python3", "no-such-file.py"])
    async with AsyncSupervisor(stage, launch=ScriptedLaunch(echo)) as supervisor:
        assert await supervisor.ask(b"a") == (b"a",)


def test_what_is_missing(tmp_path: Path) -> None:
    """With what may have been meant, as validate says it."""
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
    assert flaw(tmp_path, "rnu.sh", PATH=str(tmp_path)) == (
        "there is no program 'rnu.sh' on PATH (did you mean 'run.sh'?)"
    )
    assert flaw(tmp_path / "gone", "sh") == f"there is no folder {tmp_path}/gone"
    assert flaw(tmp_path, "{program}") is None


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
    """One behind a flag that is not known may be anything."""
    assert script(command.split()) == place
