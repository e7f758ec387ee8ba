from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import etlstage
from etlstage.errors import ConfigError
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.settings.definition import section_in, settings_of
from etlstage.spark.datasource.options import _READ, _WRITE, reading, writing
from etlstage.stage import OffsetPolicy, PoolPolicy, RestartPolicy, Stage, WorkerProgram
from etlstage.stage.contract import ReplyContract

RUN = {"command": "./run"}


def refusal(**options: str) -> str:
    """Return the error for options of a read."""
    with pytest.raises(ConfigError) as raised:
        reading({name.replace("__", "."): text for name, text in options.items()})
    return str(raised.value)


def test_command_is_words_or_a_list() -> None:
    """There is no shell; ``python`` is the interpreter that runs us."""
    found = reading({"command": "python 'a b.py' -x"}).stage.program.command
    assert found == (sys.executable, "a b.py", "-x")
    found = reading({"command": '["./run", "a  b", "$HOME"]'}).stage.program.command
    assert found == ("./run", "a  b", "$HOME")


def test_options_of_a_read_have_the_words_of_the_file() -> None:
    """Each option of a read is used here at least once."""
    made = reading(
        {
            "command": "./run",
            "name": "fetch",
            "env": '{"Token": "x"}',
            "cwd": "/srv",
            "eom": r"\r\n",
            "ready": "true",
            "timeout.start": "5s",
            "timeout.message": "null",
            "timeout.stop": "500ms",
            "restart.max": "0",
            "restart.never_on": "3",
            "limits.memory": "1GiB",
            "user": "nobody",
            "group": "nogroup",
            "umask": "077",
            "max_message": "1MiB",
            "max_reply": "2MiB",
            "mode": "cyclic",
            "start": "-5",
            "end": "10",
            "step": "3",
            "template": "{start}..{end}",
            "partitions": "2",
            "max_per_batch": "7",
            "values": "binary",
        }
    )
    stage, offsets = made.stage, made.offsets
    assert (stage.name, stage.program.ready) == ("fetch", True)
    assert (stage.program.env, stage.program.cwd) == ({"Token": "x"}, Path("/srv"))
    assert stage.dialect == MarkerDialect(
        mode=Mode.CYCLIC, markers=Markers(eom=b"\r\n")
    )
    timeout = stage.timeout
    assert (timeout.start, timeout.message, timeout.stop) == (5.0, None, 0.5)
    assert stage.program.limits.memory == 2**30
    assert (stage.program.user, stage.program.group, stage.program.umask) == (
        "nobody",
        "nogroup",
        0o77,
    )
    assert stage.restart == RestartPolicy(max=0, never_on=frozenset({3}))
    assert (stage.max_message, stage.max_reply) == (2**20, 2**21)
    assert offsets is not None
    assert (offsets.start, offsets.end, offsets.step) == (-5, 10, 3)
    assert (offsets.by, offsets.template) == ("supervisor", "{start}..{end}")
    assert (made.partitions, made.max_per_batch, made.values) == (2, 7, "binary")


def test_offsets_are_asked_for_by_default_at_the_end_alone() -> None:
    """By default the worker is asked for the end only; ``initial`` asks for a start."""
    made = reading(RUN | {"mode": "cyclic"})
    assert made.offsets is not None
    assert (made.offsets.start, made.offsets.end) == (0, "latest")
    made = reading(RUN | {"mode": "cyclic", "start": "initial", "end": "latest"})
    assert made.offsets is not None
    assert made.offsets.start == "initial"


def test_dialect_by_its_name_or_with_its_settings() -> None:
    """A dialect's settings are an object; the default's are options (issue 23)."""
    assert writing(RUN | {"dialect": "cocaine"}).stage.dialect == CocaineDialect()
    many = {"dialect": '{"name": "cocaine", "concurrency": 3}'}
    made = reading(RUN | many | {"step": "5", "end": "9"})
    assert made.stage.dialect == CocaineDialect(concurrency=3)
    assert made.offsets == OffsetPolicy(by="supervisor", step=5, end=9)
    beat = writing(RUN | {"dialect": "cocaine", "timeout.heartbeat": "5s"})
    assert beat.stage.dialect == CocaineDialect(heartbeat=5.0)
    plain = reading(RUN | {"dialect": '{"mode": "cyclic"}', "eop": r"\x1f"})
    assert plain.stage.dialect == MarkerDialect(
        mode=Mode.CYCLIC, markers=Markers(eop=b"\x1f")
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dialect": "cocain"}, "unknown dialect 'cocain' (did you mean 'cocaine'?)"),
        ({"dialect": "{"}, "expected a name, or a JSON object such as"),
        ({"dialect": '{"name": "cocaine", "depth": 1}'}, "unknown key"),
        ({"dialect": "cocaine", "eop": "x"}, "option eop belongs to dialect marker"),
        ({"dialect": "kcl"}, "a worker of dialect kcl decides by itself"),
    ],
)
def test_dialect_that_is_refused(options: dict[str, str], text: str) -> None:
    """The error names the option."""
    with pytest.raises(ConfigError, match=re.escape(text)):
        writing(RUN | options)


def test_options_of_a_write() -> None:
    """Any batch option selects a batch mode; Spark's own options are ignored."""
    made = writing(RUN | {"checkpointlocation": "c", "queryname": "q"})
    assert made.stage.dialect == MarkerDialect()
    assert made.stage.on_error.retries == 2
    made = writing(RUN | {"batch.size": "5", "batch.bytes": "1kB", "window": "3"})
    stage = made.stage
    assert stage.dialect == MarkerDialect(mode=Mode.BATCH_SUPERVISOR)
    assert stage.batch.size == 5
    assert (stage.batch.bytes, stage.window) == (1000, 3)
    made = writing(RUN | {"batch.driver": "worker"})
    assert made.stage.dialect == MarkerDialect(mode=Mode.BATCH_WORKER)
    made = writing(RUN | {"commit": "python c.py", "abort": "./a"})
    assert (made.commit, made.abort) == ((sys.executable, "c.py"), ("./a",))


def test_settings_of_a_stage_are_options() -> None:
    """Except those that Spark decides: its tasks are the workers (issue 10)."""
    with pytest.raises(ConfigError) as raised:
        writing(RUN | {"qqq": ""})
    options = str(raised.value).partition("expected one of ")[2].split(", ")
    missing = []
    of_worker = settings_of(WorkerProgram)
    for name, setting in {**settings_of(Stage), **of_worker}.items():
        if name == "worker":
            continue  # its settings are options by their own names
        inner = section_in(setting.kind)
        ats = [name] if inner is None else [f"{name}.{key}" for key in inner.keys]
        missing += [at for at in ats if setting.place and at not in options]
    assert missing == [
        *(f"workers.{key}" for key in settings_of(PoolPolicy)),
        "order",
        "key",
        "on_error.then",
        "on_error.budget",
        *(f"expect.{key}" for key in settings_of(ReplyContract)),  # a load has none
        "on_mismatch",
    ]


def test_worker_that_stages_is_not_replaced() -> None:
    """An interrupted worker's files are discarded with its whole attempt."""
    made = writing(RUN | {"path": "file:///out"})
    assert (made.stage.restart.policy, made.path) == ("temporary", Path("/out"))
    assert writing(RUN | {"path": "out"}).path == Path.cwd() / "out"
    assert writing(RUN | {"commit": "c"}).stage.restart.policy == "temporary"
    # A message that was only cancelled, in a dialect that can, is not retried, either.
    assert made.stage.on_error.retries == 0
    assert writing(RUN).stage.restart.policy == "permanent"
    again = {"on_error.retries": "1", "restart.max": "1", "recycle.max_age": "1h"}
    for name, value in again.items():
        told = f"option {name} can't be used together with path or commit"
        with pytest.raises(ConfigError, match=told):
            writing(RUN | {"path": "out", name: value})
    made = writing(RUN | {"path": "out", "on_error.retries_refused": "1"})
    assert made.stage.on_error.retries_refused == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"comand": "x"}, "unknown option 'comand' (did you mean 'command'?)"),
        ({"qqq": "x"}, "unknown option 'qqq', expected one of command, name, "),
        ({"path": "x"}, "option path is only for writing"),
        ({"command": "'"}, "option command: expected a JSON list such as"),
        ({"command": "[1]"}, "option command: expected a JSON list"),
        ({"command": ""}, "option command: expected a JSON list"),
        (
            {"env": '{"A": "secret"'},
            "option env: expected a JSON object of strings",
        ),
        ({"env": '{"A": 1}'}, "option env: expected a JSON object of strings"),
        ({"step": "0"}, "option step: expected 1 or more, got '0'"),
        (
            {"start": "x"},
            "expected a whole number, or initial to ask the worker, got 'x'",
        ),
        ({"end": "initial"}, "expected a whole number, or latest to ask the worker"),
        ({"timeout__message": "soon"}, "expected a duration such as 500ms, 30s or 2m"),
        ({"timeout__stop": "null"}, "30s or 2m, got 'null'"),
        ({"max_message": "big"}, "expected a size such as 512KiB, 1MiB or 10MB"),
        ({"mode": "cycle"}, "unknown mode 'cycle' (did you mean 'cyclic'?)"),
        ({"ready": "yes"}, "option ready: expected true or false, got 'yes'"),
        ({"restart__max": "-1"}, "restart.max: expected 0 or more, got '-1'"),
        ({"on_error__retries": "1"}, "option on_error.retries is only for writing"),
        ({"step": "5"}, "option step is only for mode=cyclic"),
        ({"eom": "x", "eob": "x"}, "markers eom and eob are both 'x'"),
        ({"mode": "cyclic", "start": "5", "end": "2"}, "before offsets.start 5"),
    ],
)
def test_wrong_option_is_reported(options: dict[str, str], why: str) -> None:
    """The error has the value, what was expected, and a suggestion."""
    assert why in refusal(**({"command": "./run"} | options))


def test_all_that_is_wrong_is_reported_at_once() -> None:
    """On one line, as Spark shows only the last line of an error in Python."""
    text = refusal(comand="x", step="no")
    assert "(did you mean 'command'?); option step: expected a whole" in text
    assert "format etlstage: option command is missing" in refusal()


def test_wrong_option_of_a_write_is_reported() -> None:
    """Such as two ways of committing, or a path that is no local folder."""
    with pytest.raises(ConfigError, match="path can't be used together with commit"):
        writing(RUN | {"path": "x", "commit": "y"})
    with pytest.raises(ConfigError, match="expected a folder that all executors can"):
        writing(RUN | {"path": "s3a://x"})
    with pytest.raises(ConfigError, match="option step is only for reading"):
        writing(RUN | {"step": "1"})


def test_manual_has_each_option_in_its_table() -> None:
    """In that of reads, of writes, or of both (issue 11)."""
    page = Path(etlstage.__file__).parent / "docs" / "how-to" / "data-source.md"
    tables = re.findall(
        r"^\| option of .*\n\| -.*\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE
    )
    read, write, both = map(options_in, tables)
    assert read == _READ.keys() - _WRITE.keys()
    assert write == _WRITE.keys() - _READ.keys()
    assert both == _READ.keys() & _WRITE.keys()


def options_in(table: str) -> set[str]:
    """Return the names in the first column, including "the others of" groups."""
    found = set[str]()
    for row in table.splitlines():
        names, _, groups = row.split("|")[1].partition("the others of")
        found |= set(re.findall(r"`([^`]+)`", names))
        for group in re.findall(r"`(\w+)`", groups):
            found |= {name for name in _READ | _WRITE if name.startswith(f"{group}.")}
    return found
