"""Programs that can't be started, and what those that can are given."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Unpack

import pytest

from etlstage.errors import ConfigError, WorkerStartFailed
from etlstage.protocol.marker import Markers
from etlstage.supervisor import AsyncSupervisor, Stage
from tests.supervisor.workers import Settings, command, outputs, plain, stage


async def refusal(run: Stage) -> str:
    """Return why a stage can't start; check that the error is naked."""
    with pytest.raises(WorkerStartFailed) as caught:
        async with AsyncSupervisor(run):
            raise AssertionError("it started")
    assert caught.value.stage == run.name
    return str(caught.value)


def stage_of(*words: object, **settings: Unpack[Settings]) -> Stage:
    """Return a stage, called ``clean``, with this command."""
    settings["name"] = "clean"
    return Stage(command=tuple(map(str, words)), **settings)


# --- programs that can't be started --------------------------------------------------


async def test_program_that_is_not_on_the_path() -> None:
    """The text names the stage, the worker and the program as it was written."""
    assert await refusal(stage_of("no-such-program", "a b")) == (
        "stage clean: can't start worker clean-1: there is no program"
        " 'no-such-program' on PATH; check the command;"
        " command: no-such-program 'a b'"
    )


async def test_path_is_that_of_the_worker() -> None:
    """A PATH given by ``env`` is the one that is searched."""
    text = await refusal(stage_of("sh", env={"PATH": "/nowhere"}))

    assert "there is no program 'sh' on PATH" in text


async def test_file_that_does_not_exist(tmp_path: Path) -> None:
    """The text names the file."""
    file = tmp_path / "clean.sh"

    assert await refusal(stage_of(file)) == (
        f"stage clean: can't start worker clean-1: there is no file {file};"
        f" check the command; command: {file}"
    )


async def test_file_that_is_not_executable(tmp_path: Path) -> None:
    """The remedy can be copied into a shell, whatever the name is."""
    file = tmp_path / "my clean.sh"
    file.write_text("#!/bin/sh\n")

    assert f"{file} is not executable; run: chmod +x {shlex.quote(str(file))};" in (
        await refusal(stage_of(file))
    )


async def test_folder_as_a_program(tmp_path: Path) -> None:
    """No chmod helps."""
    assert f"{tmp_path} is a folder, not a program; check the command" in (
        await refusal(stage_of(tmp_path))
    )


async def test_script_without_interpreter_line(tmp_path: Path) -> None:
    """The text says how to name the interpreter."""
    file = tmp_path / "clean.py"
    file.write_text("print()\n")
    file.chmod(0o755)

    assert (
        f"{file} has no #! line that names its interpreter; add one, or name it in the"
        f" command, as in [{Path(sys.executable).name}, {file}]"
    ) in await refusal(stage_of(file))


async def test_script_whose_interpreter_is_missing(tmp_path: Path) -> None:
    """The file is there; the error is in its first line."""
    file = tmp_path / "clean.sh"
    file.write_text("#!/no/such/interpreter\n")
    file.chmod(0o755)

    assert f"the interpreter in the first line of {file} does not exist" in (
        await refusal(stage_of(file))
    )


async def test_script_is_looked_for_in_the_working_directory(tmp_path: Path) -> None:
    """A relative path is relative to ``cwd``, also in the text."""
    file = tmp_path / "clean.sh"
    file.write_text("#!/no/such/interpreter\n")
    file.chmod(0o755)

    assert "the interpreter in the first line of ./clean.sh does not exist" in (
        await refusal(stage_of("./clean.sh", cwd=tmp_path))
    )


async def test_working_directory_that_does_not_exist(tmp_path: Path) -> None:
    """It is not mistaken for a missing program."""
    folder = tmp_path / "nowhere"

    assert f"working directory {folder} does not exist; check cwd" in (
        await refusal(stage_of("sh", cwd=folder))
    )


async def test_command_with_a_nul() -> None:
    """What the system can't be told is an error of the stage, too."""
    assert "embedded null byte" in await refusal(stage_of("sh", "a\0b"))


async def test_command_that_is_too_long() -> None:
    """Other errors have the system's words."""
    text = await refusal(stage_of("sh", *["x" * 100_000] * 100))

    assert text.startswith(
        "stage clean: can't start worker clean-1: Argument list too long; command: sh"
    )


async def test_extract_program_that_does_not_exist() -> None:
    """In plain mode it is started by the first round."""
    with pytest.raises(WorkerStartFailed, match="can't start worker e-1: there is no"):
        async with AsyncSupervisor(
            Stage(
                name="e",
                command=("no-such-program",),
                kind=plain("extract").kind,
                mode=plain("extract").mode,
            )
        ) as supervisor:
            await anext(supervisor.extract())


# --- what the worker is given --------------------------------------------------------


async def seen_by_worker(**settings: Unpack[Settings]) -> dict[str, str]:
    """Return the environment of a worker."""
    async with AsyncSupervisor(stage("variables", **settings)) as supervisor:
        ((_, *words),) = outputs(await supervisor.submit([b"x"]))
    pairs = [word.decode().partition("=") for word in words]
    return {name: value for name, _, value in pairs}


async def test_environment_is_an_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret of ours does not reach the worker; what is named in ``env`` does."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    monkeypatch.setenv("TZ", "Europe/Prague")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    seen = await seen_by_worker(env={"MODEL": "large"})

    assert "s3cret" not in seen.values()
    assert seen["TZ"] == "Europe/Prague"
    assert seen["MODEL"] == "large"
    assert "VIRTUAL_ENV" not in seen


async def test_markers_are_in_the_environment() -> None:
    """Escaped, so that NUL can travel; Python workers don't buffer."""
    markers = Markers(eop=b"\0END\0", eob=b"EOB")
    seen = await seen_by_worker(markers=markers)

    assert {name: seen[name] for name in seen if name.startswith("ETLSTAGE")} == {
        "ETLSTAGE_EOM": r"\012",
        "ETLSTAGE_EOP": r"\000END\000",
        "ETLSTAGE_EOB": "EOB",
        "ETLSTAGE_BNC": r"\005",
    }
    assert seen["PYTHONUNBUFFERED"] == "1"


async def test_env_comes_before_everything_else() -> None:
    """Whoever names a variable means it."""
    seen = await seen_by_worker(env={"PYTHONUNBUFFERED": "", "HOME": "/nowhere"})

    assert seen["PYTHONUNBUFFERED"] == ""
    assert seen["HOME"] == "/nowhere"


async def test_markers_replace_placeholders() -> None:
    """Anywhere in an argument, several in one; other braces are left alone."""
    words = ("-e", "{eom}", "--eop={eop},{eob}", "{bnc}", "{other}", "${PATH}", "{}")
    run = Stage(
        name="t",
        command=(*command("arguments"), *words),
        markers=Markers(eom=b"{bnc}", eob=b"\\"),
    )
    async with AsyncSupervisor(run) as supervisor:
        ((*seen,),) = outputs(await supervisor.submit([b"x"]))

    assert [bytes.fromhex(word.decode()) for word in seen] == [
        b"-e",
        b"{bnc}",
        b"--eop=\\000,\\134",
        b"\\005",
        b"{other}",
        b"${PATH}",
        b"{}",
    ]


async def test_working_directory(tmp_path: Path) -> None:
    """The worker runs there."""
    async with AsyncSupervisor(stage("where", cwd=tmp_path)) as supervisor:
        assert outputs(await supervisor.submit([b"x"])) == [(bytes(tmp_path),)]


async def test_markers_of_many_bytes_work_end_to_end() -> None:
    """With NUL in them, and cut anywhere by the pipe."""
    markers = Markers(b"\0\0", b"<eop>", b"<eob>", b"<bnc>")
    messages = [b"a\n" * 7 + b"%d" % n for n in range(9999)]
    async with AsyncSupervisor(stage("echo", markers=markers)) as supervisor:
        results = await supervisor.submit(messages)

    assert outputs(results) == [(m,) for m in messages]


async def test_eop_may_be_eom() -> None:
    """Each message has exactly one output then, empty or not."""
    run = stage("one_to_one", markers=Markers(eop=b"\n"))
    async with AsyncSupervisor(run) as supervisor:
        results = await supervisor.submit([b"one", b"", b"two"])

    assert outputs(results) == [(b"one",), (b"",), (b"two",)]


# --- what a stage must be ------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"name": ""}, "a stage needs a name"),
        ({"command": ()}, "stage s: command is empty"),
        ({"workers": 0}, "stage s: workers must be 1 or more, got 0"),
        ({"window": 0}, "stage s: window must be 1 or more, got 0"),
        (
            {"mode": plain("extract").mode},
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
    """It is refused when it is made."""
    with pytest.raises(ConfigError, match=problem):
        Stage(**{"name": "s", "command": ("sh",)} | settings)  # type: ignore[arg-type]
