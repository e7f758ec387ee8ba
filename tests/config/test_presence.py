"""Which files are looked for, and where; ``test_wrong.py`` has more of the errors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from etlstage.config.loader import examine
from etlstage.config.reading import UNCHANGED, Changes
from etlstage.errors import ConfigError
from etlstage.pipeline.delivery.folder import edge_folder
from etlstage.pipeline.delivery.record import CommitRecord

MINIMAL = """\
name: papers
extract: {worker: {command: [seq, "3"]}}
load: {worker: {command: [cat]}}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Name a pipeline file."""
    return tmp_path / "p.yaml"


def errors_of(
    path: Path, content: str, changes: Changes = UNCHANGED, *, loads: bool = True
) -> list[str]:
    """Return what is wrong with a file, without places and folders; maybe nothing."""
    path.write_text(content)
    try:
        examine(path, changes, loads=loads)
    except ConfigError as error:
        here = f"{path.parent}/"
        return [p.replace(here, "").split(": ", 1)[1] for p in error.problems]
    return []


def program(path: Path, text: str = "#!/bin/sh\n") -> None:
    """Write a program."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def transform(worker: str) -> str:
    """Return a pipeline with one transform stage."""
    return f"{MINIMAL}transform: [{{worker: {{{worker}}}}}]\n"


@pytest.mark.parametrize(
    "worker",
    [
        "command: [./run.sh, nowhere]",
        "command: [./tool], cwd: bin",
        "command: [tool], env: {PATH: bin}",
        "command: [tool], env: {PATH: .}, cwd: bin",
        "command: [python, -u, -B, clean.py]",
        "command: [python, ../clean.py], cwd: bin",
        "command: [python, package]",
        "command: [python, -m, nowhere]",
        "command: [sh, -c, nowhere]",
        "command: [sh, -eu, clean.py]",
        "command: [sh]",
        "command: ['{eom}']",
        "command: [python, '{eom}']",
        "command: [sleep, nowhere]",
    ],
)
def test_what_is_there_is_no_problem(path: Path, worker: str) -> None:
    """Paths are seen from the worker's folder; unclear arguments are not checked."""
    for name in ("run.sh", "clean.py", "bin/tool", "package/__main__.py"):
        program(path.parent / name)
    assert errors_of(path, transform(worker)) == []


@pytest.mark.parametrize(
    ("session", "sought"),
    [
        ("", True),
        ("engine: spark", True),
        ("engine: spark\nspark: {master: 'local-cluster[2,1,1024]'}", True),
        ("engine: spark\nspark: {master: 'spark://host:7077'}", False),
        ("engine: spark\nspark: {remote: 'sc://host'}", False),
        ("spark: {remote: 'sc://host'}", True),
    ],
)
def test_programs_of_other_machines_are_not_sought(
    path: Path, session: str, sought: bool
) -> None:
    """On engine local workers run here, wherever Spark is."""
    absent = "transform[0].worker.command[0]: there is no file x"
    unknown = "transform[0].worker.group: there is no group 'wjxzq'"
    worker = transform("command: [./x], group: wjxzq")
    assert errors_of(path, f"{worker}{session}\n") == [absent, unknown] * sought


@pytest.mark.parametrize("engine", ["local", "spark"])
def test_programs_in_an_archive(path: Path, engine: str) -> None:
    """Archives are unpacked on executors, but not for engine local."""
    (path.parent / "tools.zip").write_text("")
    content = transform("command: [tools/x]") + f"engine: {engine}\n"
    said = ["transform[0].worker.command[0]: there is no file tools/x"]
    expected = said if engine == "local" else []
    content += "spark: {archives: ['tools.zip#tools']}\n"
    assert errors_of(path, content) == expected


FRAMES = """\
name: frames
engine: {engine}
{session}
extract: {{spark: {{format: {format}, path: {source}}}}}
load: {{spark: {{path: {target}, mode: {mode}}}}}
"""
FRAME = {"engine": "local", "session": "", "format": "json", "source": "in"}
FRAME |= {"target": "new", "mode": "error"}


@pytest.mark.parametrize(
    "values",
    [
        {"source": "i*"},
        {"source": "'{in,out}'"},
        {"source": "'x\\[1]'"},
        {"source": "s3://bucket/in"},
        {"source": "nowhere", "format": "delta"},
        {"source": "nowhere", "session": "spark: {remote: 'sc://host'}"},
        {"source": "nowhere", "session": "spark: {master: yarn}"},
        {
            "source": "nowhere",
            "session": "spark: {config: {spark.hadoop.fs.defaultFS: 'hdfs://a'}}",
        },
        {"target": "out", "mode": "append"},
        {"target": "out", "session": "spark: {remote: 'sc://host'}"},
        {"target": "'s3://bucket/out'"},
        {"target": "out", "engine": "streaming", "session": "state: begun"},
    ],
)
def test_data_that_is_there_or_elsewhere(path: Path, values: dict[str, str]) -> None:
    """Only paths that are certainly on this machine are checked."""
    for name in ("in", "out", "begun/checkpoint"):
        (path.parent / name).mkdir(parents=True)
    assert errors_of(path, FRAMES.format(**(FRAME | values))) == []


@pytest.mark.parametrize(
    ("record", "durable", "expected"),
    [
        (CommitRecord(load="1", epoch=2, ended=False), False, 0),
        (CommitRecord(load="1", position=3), False, 0),
        (CommitRecord(load="1", epoch=2), False, 1),
        (CommitRecord(load="1", ended=False), True, 0),
    ],
)
def test_output_of_an_interrupted_load_is_not_in_its_way(
    path: Path, record: CommitRecord, *, durable: bool, expected: int
) -> None:
    """Otherwise a resumed run would ask to remove what it has loaded (issue 23)."""
    folder = path.parent
    (folder / "out").mkdir()
    state = Path(edge_folder(str(folder / "st"), "s")) if durable else folder / "st"
    state.mkdir(parents=True, mode=0o700)
    replace(record, fence=1).store(state)
    content = f"""\
name: x
state: st
extract: {{worker: {{command: [seq, "3"]}}}}
transform: [{{name: s, worker: {{command: [cat]}}{", durable: true" * durable}}}]
load: {{files: {{path: out, format: text}}}}
"""
    assert len(errors_of(path, content)) == expected


@pytest.mark.parametrize("name", ["HADOOP_CONF_DIR", "SPARK_CONF_DIR"])
def test_data_may_be_where_hadoop_has_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Hadoop's configuration may name another file system for all paths."""
    content = FRAMES.format(**(FRAME | {"source": "nowhere"}))
    assert len(errors_of(path, content)) == 1
    monkeypatch.setenv(name, "/etc/there")
    assert errors_of(path, content) == []


def test_no_path_at_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``PATH``, the system's default is searched."""
    monkeypatch.delenv("PATH")
    assert errors_of(path, transform("command: [sh]")) == []


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"source": "file:HERE/x"}, "extract.spark.path: there is no file or folder"),
        ({"source": "x", "engine": "spark"}, "extract.spark.path: there is no file or"),
        ({"target": "out", "engine": "streaming"}, "load.spark.path: out exists"),
    ],
)
def test_data_that_is_not_there(path: Path, values: dict[str, str], error: str) -> None:
    """Missing input and existing output are reported on every engine, also by URL."""
    for name in ("in", "out"):
        (path.parent / name).mkdir()
    content = FRAMES.format(**(FRAME | values))
    (said,) = errors_of(path, content.replace("HERE", str(path.parent)))
    assert said.startswith(error)


MODES = ("append", "overwrite", "error")

OVERWRITTEN = """\
name: x
extract: {{files: {{path: {source}, format: text}}}}
load: {{{end}: {{path: {target}, format: text, mode: {mode}}}}}
"""


@pytest.mark.parametrize(
    ("source", "target", "file"),
    [
        ("in", "in", "in/a=1/f"),
        ("in/a=1/f", "in", "in/a=1/f"),
        ("'in/*/f'", "in", "in/a=1/f"),
        ("in", "in/a=1", "in/a=1/f"),
        ("in", "link", "in/a=1/f"),
        ("link", "in/../in", "link/a=1/f"),
        ("links", "in", "links/f"),
        ("links", "links", "links/f"),
        ("in", "file:HERE/in", "in/a=1/f"),
    ],
)
@pytest.mark.parametrize("end", ["files", "spark"])
def test_input_is_not_overwritten(
    path: Path, source: str, target: str, file: str, end: str
) -> None:
    """The first epoch would remove what is not read yet (issue 23)."""
    input_with_links(path.parent)
    target = target.replace("HERE", str(path.parent))
    content = OVERWRITTEN.format(
        source=source, target=target, end=end, mode="overwrite"
    )
    shown = target.removeprefix(f"file:{path.parent}/")
    (error,) = errors_of(path, content)
    assert error == (
        f"load.{end}.path: mode overwrite of {shown} would remove {file}, a file that"
        " the extract stage reads: set another folder"
    )
    assert errors_of(path, content, loads=False) == []


@pytest.mark.parametrize(
    ("source", "target", "removed"),
    [
        ("in", "in", True),
        ("in", "in/a=1", True),
        ("in", "out", False),
        ("'in/*'", "in", True),
        ("link", "in", True),
    ],
)
def test_input_that_can_not_all_be_read(
    path: Path, source: str, target: str, *, removed: bool
) -> None:
    """It is an error of the input, which is not overwritten either (issue 23)."""
    input_with_links(path.parent)
    (path.parent / "in/a=1/lock").symlink_to("user@host.1")
    content = OVERWRITTEN.format(
        source=source, target=target, end="files", mode="overwrite"
    )
    first, *others = errors_of(path, content)
    lock = "link/a=1/lock" if source == "link" else "in/a=1/lock"
    assert first == (
        f"extract.files.path: can't read {lock}: no such file or directory"
    )
    assert [error.partition(" would remove ")[2] for error in others] == [
        f"{lock}, a file that the extract stage reads: set another folder"
    ][:removed]


def test_input_that_is_a_pipe(path: Path) -> None:
    """It is an error of the file, and never opened (issue 23)."""
    (path.parent / "in").mkdir()
    os.mkfifo(path.parent / "in/pipe")
    content = OVERWRITTEN.format(source="in", target="out", end="files", mode="append")
    (error,) = errors_of(path, content)
    assert error.startswith(
        "extract.files.path: can't read in/pipe: it is not a regular file"
    )


@pytest.mark.parametrize(
    ("target", "removed"),
    [
        (".", "p.yaml, the pipeline file"),
        ("'file:'", "p.yaml, the pipeline file"),
        ("..", "p.yaml, the pipeline file"),
        ("here", "p.yaml, the pipeline file"),
        ("bin", "other/../bin/clean.py, a file in the command of stage clean"),
        ("tools", "other/cwd/../../tools/tool, a file in the command of stage tool"),
        ("other", "other, the folder of stage clean"),
        ("other/cwd", "other/cwd, the folder of stage tool"),
        ("awk", "other/../awk/a.awk, a file in the command of stage clean"),
        ("conf", "conf/test.yaml, an overlay"),
        ("schemas", "schemas/s.json, the schema of stage clean"),
        ("in/new", ""),
    ],
)
@pytest.mark.parametrize("end", ["files", "spark"])
def test_pipeline_is_not_overwritten(
    path: Path, target: str, removed: str, end: str
) -> None:
    """Output never replaces the folder of the file, or of its programs (issue 23)."""
    files = ("bin/clean.py", "awk/a.awk", "tools/tool", "in/f", "other/cwd/f")
    for name in files:
        (path.parent / name).parent.mkdir(parents=True, exist_ok=True)
        program(path.parent / name)
    for name, text in (("conf/test.yaml", "drain: 5s\n"), ("schemas/s.json", "{}")):
        (path.parent / name).parent.mkdir()
        (path.parent / name).write_text(text)
    (path.parent / "here").symlink_to(".")
    content = OVERWRITTEN.format(source="in", target=target, end=end, mode="overwrite")
    content += """\
transform:
- name: clean
  worker: {command: [python, ../bin/clean.py, -f, ../awk/a.awk], cwd: other}
  expect: {schema: schemas/s.json}
- {name: tool, worker: {command: [../../tools/tool, f], cwd: other/cwd}}
"""
    changes = Changes([path.parent / "conf/test.yaml"], ["state=st"])
    found = errors_of(path, content, changes)
    errors = [error.split(": ", 1)[1] for error in found]
    assert [error.split(" would remove ")[-1] for error in errors] == [
        f"{removed}: set another folder"
    ][: bool(removed)]
    assert errors_of(path, content, loads=False) == []


@pytest.mark.parametrize(
    ("state", "target", "error", "modes"),
    [
        ("out", "out", "out is the state directory out", MODES),
        ("out/st", "out", "out contains the state directory out/st", MODES),
        ("out/.st", "out", "out contains the state directory out/.st", MODES[1:2]),
        ("out/_a/b", "out", "out contains the state directory out/_a/b", MODES[1:2]),
        ("st", "st/spool-1", "st/spool-1 is in the state directory st", MODES[1:2]),
        (
            "st",
            "link/edge-s/out",
            "link/edge-s/out is in the state directory st",
            MODES[1:2],
        ),
        (
            "st",
            "file:HERE/st/dead_letters",
            "st/dead_letters is in the state directory st",
            MODES[1:2],
        ),
        ("st", "st/out", "", ()),
        ("st", "link/out", "", ()),
        (".", "out", "", ()),
        ("st", "out", "", ()),
        ("out2", "out", "", ()),
    ],
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", ["files", "spark"])
def test_output_is_apart_from_the_state(
    path: Path,
    state: str,
    target: str,
    error: str,
    modes: Sequence[str],
    mode: str,
    end: str,
) -> None:
    """Files of the state would be read as rows, or be replaced by them (issue 23)."""
    for name in ("in", "st"):
        (path.parent / name).mkdir()
    (path.parent / "link").symlink_to("st")
    target = target.replace("HERE", str(path.parent))
    content = OVERWRITTEN.format(source="in", target=target, end=end, mode=mode)
    content += f"state: {state}\n"
    assert (
        errors_of(path, content)
        == [f"load.{end}.path: {error}: set two folders, neither of them in the other"][
            : mode in modes
        ]
    )
    assert errors_of(path, content, loads=False) == []


@pytest.mark.parametrize("name", ["x{1}", "x[1]/a.txt"])
@pytest.mark.parametrize("end", ["files", "spark"])
def test_input_whose_name_is_a_pattern(path: Path, name: str, end: str) -> None:
    """Files that exist are found, but Spark does not read them (issue 23)."""
    place = path.parent / name
    place.parent.mkdir(exist_ok=True)
    place.write_text("a")
    content = f"""\
name: p
extract: {{{end}: {{path: "{name}", format: text}}}}
load: {{worker: {{command: [cat]}}}}
"""
    absent = f"extract.{end}.path: there is no file that matches {name}"
    assert errors_of(path, content) == [absent] * (end == "spark")


@pytest.mark.parametrize("end", ["files", "spark"])
def test_folder_whose_name_is_a_pattern(tmp_path: Path, end: str) -> None:
    """Only the path in the file is a pattern, not the file's folder (issue 23)."""
    folder = tmp_path / "x[1]{a}*"
    folder.mkdir()
    content = f"""\
name: p
extract: {{{end}: {{path: "*.txt", format: text}}}}
load: {{worker: {{command: [cat]}}}}
"""
    absent = f"extract.{end}.path: there is no file that matches *.txt"
    assert errors_of(folder / "p.yaml", content) == [absent]
    (folder / "a.txt").write_text("a")
    assert errors_of(folder / "p.yaml", content) == []


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("path: out", "path: loop", "load.files.path: loop is not a folder"),
        ("state: st", "state: loop", "state: loop is not a folder"),
        ("cwd: bin", "cwd: loop", "transform[0].worker.cwd: there is no folder loop"),
        ("path: in", "path: loop", "extract.files.path: there is no file or folder"),
    ],
)
@pytest.mark.parametrize("mode", ["append", "overwrite"])
def test_link_to_itself(path: Path, old: str, new: str, error: str, mode: str) -> None:
    """It is an error at its key, like a path that does not exist (issue 23)."""
    for name in ("in", "bin"):
        (path.parent / name).mkdir()
    (path.parent / "loop").symlink_to("loop")
    content = OVERWRITTEN.format(source="in", target="out", end="files", mode=mode)
    content += "state: st\ntransform: [{worker: {command: [cat], cwd: bin}}]\n"
    (found,) = errors_of(path, content.replace(old, new))
    assert found.startswith(error)


@pytest.mark.parametrize(
    ("target", "mode", "count"),
    [
        (".etlstage", "append", 0),
        (".etlstage", "overwrite", 1),
        (".etlstage", "error", 0),
        (".etlstage/x", "append", 1),
        (".etlstage/x", "overwrite", 1),
    ],
)
def test_default_state_is_not_overwritten(
    path: Path, target: str, mode: str, count: int
) -> None:
    """It has the dead letters of each run, and the lock (issue 23)."""
    content = OVERWRITTEN.format(source="in", target=target, end="files", mode=mode)
    (path.parent / "in").mkdir()
    assert len(errors_of(path, content)) == count


@pytest.mark.parametrize(
    ("target", "more", "error"),
    [
        (".etlstage", "", "the output contains the state directory"),
        ("st", "state: ${SEC}", "the output is the state directory"),
        (".", "", "mode overwrite of . would remove p.yaml, the pipeline file"),
        (
            "in/w",
            "transform: [{name: '${SEC}', worker: {command: [cat], cwd: in/w}}]",
            "mode overwrite of in/w would remove in/w, the folder of transform[0]",
        ),
        (
            "in/w",
            "transform: [{worker: {command: [cat], cwd: 'in/${W}'}}]",
            "mode overwrite would remove the folder of stage transform-1",
        ),
    ],
)
def test_interpolated_values_are_not_shown(
    path: Path, monkeypatch: pytest.MonkeyPatch, target: str, more: str, error: str
) -> None:
    """A name may be a secret; the pipeline file's path is not from a key (issue 23)."""
    monkeypatch.setenv("SEC", "st")
    monkeypatch.setenv("W", "w")
    (path.parent / "in/w").mkdir(parents=True)
    content = OVERWRITTEN.format(
        source="in", target=target, end="files", mode="overwrite"
    ).replace("name: x", "name: '${SEC}'")
    (found,) = errors_of(path, content + more)
    shown = found.replace(str(path.parent), ".").rpartition(": set ")[0]
    assert shown == f"load.files.path: {error}"


def test_journals_are_not_overwritten(path: Path) -> None:
    """A set of journals that is read is not replaced by output (issue 23)."""
    for name in ("in/set", "in/other"):
        (path.parent / name).mkdir(parents=True)
    (path.parent / "in/set/spec.json").touch()
    content = OVERWRITTEN.format(source="", target="in", end="files", mode="overwrite")
    content = content.replace(
        "{files: {path: , format: text}}", "{journal: {path: in/set, reader: r}}"
    )
    (error,) = errors_of(path, content)
    assert "would remove in/set/spec.json, a file that the extract stage" in error
    assert errors_of(path, content.replace("path: in,", "path: in/other,")) == []


@pytest.mark.parametrize(
    ("source", "target", "mode"),
    [
        ("in", "in", "append"),
        ("in", "in/new", "overwrite"),
        ("in", "in/other", "overwrite"),
        ("'in/*/f'", "in/other", "overwrite"),
        ("mixed", "mixed", "overwrite"),
    ],
)
def test_output_beside_input_may_be_overwritten(
    path: Path, source: str, target: str, mode: str
) -> None:
    """Nothing that is read is removed (issue 23)."""
    input_with_links(path.parent)
    content = OVERWRITTEN.format(source=source, target=target, end="files", mode=mode)
    assert errors_of(path, content) == []


def input_with_links(folder: Path) -> None:
    """Make an input, links to it, and one that can't be read."""
    for name in ("in/a=1/f", "in/other/g", "mixed/a=1/f", "mixed/f"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "link").symlink_to("in")
    (folder / "links").mkdir()
    (folder / "links/f").symlink_to("../in/a=1/f")


@pytest.mark.parametrize("written", ['""', '"${NONE}"'])
@pytest.mark.parametrize(
    ("end", "keys"),
    [
        ("extract.files", "path: PATH"),
        ("extract.spark", "path: PATH"),
        ("extract.spark", "path: in, spool: PATH"),
        ("extract.journal", "path: PATH, reader: r"),
        ("load.files", "path: PATH, mode: overwrite"),
        ("load.spark", "path: PATH, mode: overwrite"),
        ("load.journal", "path: PATH"),
    ],
)
def test_empty_path(
    path: Path, monkeypatch: pytest.MonkeyPatch, end: str, keys: str, written: str
) -> None:
    """It would be the folder of the pipeline file (issue 23)."""
    (path.parent / "in").mkdir()
    monkeypatch.setenv("NONE", "")
    kind, name = end.split(".")
    worker = {"extract": '{worker: {command: [seq, "3"]}}'}
    worker["load"] = "{worker: {command: [cat]}}"
    content = MINIMAL.replace(worker[kind], f"{{{name}: {{{keys}}}}}")
    key = "spool" if "spool" in keys else "path"
    assert errors_of(path, content.replace("PATH", written)) == [
        f"{end}.{key}: is empty, expected a path"
    ]


def test_output_is_no_matter_where_nothing_is_loaded(path: Path) -> None:
    """``etlstage diff`` loads nothing, so existing output is no problem."""
    for name in ("in", "out"):
        (path.parent / name).mkdir()
    content = FRAMES.format(**(FRAME | {"target": "out"}))
    assert len(errors_of(path, content)) == 1
    assert errors_of(path, content, loads=False) == []


@pytest.mark.parametrize(
    ("schema", "column", "known"),
    [
        ("id long, year int", "year", True),
        (
            "id long, d decimal(10,2), s struct<a:int,b:array<int>>, year int",
            "year",
            True,
        ),
        ("id: long, `the ``year` int NOT NULL", "the `year", True),
        ("s struct<a:int,year:int>", "year", False),
        ("id long COMMENT 'a < b', year int", "year", True),
    ],
)
def test_columns_of_a_schema(path: Path, schema: str, column: str, known: bool) -> None:
    """The columns of a schema are known without Spark."""
    content = MINIMAL.replace(
        "{worker: {command: [cat]}}",
        f'{{spark: {{path: new, schema: "{schema}", partition_by: ["{column}"]}}}}',
    )
    assert (errors_of(path, content) == []) is known


@pytest.mark.parametrize("end", ["files", "spark"])
def test_column_is_a_folder_once(path: Path, end: str) -> None:
    """Neither Arrow nor Spark can write a folder within its like (issue 23)."""
    keys = 'path: new, schema: "id long, y int, z int", partition_by: [y, z, y]'
    content = MINIMAL.replace("{worker: {command: [cat]}}", f"{{{end}: {{{keys}}}}}")
    assert errors_of(path, content) == [
        f"load.{end}.partition_by[2]: column 'y' appears twice"
    ]


@pytest.mark.parametrize("end", ["files", "spark"])
def test_column_is_left_for_the_files(path: Path, end: str) -> None:
    """Neither Arrow nor Spark can write rows without columns (issue 23)."""
    keys = 'path: new, schema: "id long, y int", partition_by: [y, id]'
    content = MINIMAL.replace("{worker: {command: [cat]}}", f"{{{end}: {{{keys}}}}}")
    assert errors_of(path, content) == [
        f"load.{end}.partition_by: leaves no column for the files themselves"
    ]


SECRET = "hunter2"  # noqa: S105


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (
            transform('command: ["./${S}"]'),
            (
                "transform[0].worker.command[0]: can't be run here; not shown, as it"
                " may be a secret"
            ),
        ),
        (
            transform('command: [python, "${S}"]'),
            "transform[0].worker.command[1]: there is no such file",
        ),
        (
            transform('command: [./x], cwd: "${S}"'),
            "transform[0].worker.cwd: there is no such folder",
        ),
        (
            transform('command: [python, x], cwd: "${S}/.."'),
            "transform[0].worker.command[1]: there is no such file",
        ),
        (
            MINIMAL.replace("{worker: {command: [cat]}}", '{spark: {path: "${S}"}}'),
            (
                "load.spark.path: the output exists already: remove it, or set mode to"
                " append or overwrite"
            ),
        ),
    ],
)
def test_what_was_interpolated_is_not_shown(
    path: Path, monkeypatch: pytest.MonkeyPatch, content: str, error: str
) -> None:
    """Errors about any key hide interpolated values."""
    monkeypatch.setenv("S", SECRET)
    if "/.." in content or "load: {spark" in content:
        (path.parent / SECRET).mkdir()
    assert errors_of(path, content) == [error]


def test_shape_does_not_matter(path: Path) -> None:
    """A file of wrong shapes has its mistakes reported; nothing is looked for."""
    content = """\
name: x
spark: []
extract: {spark: [], worker: {command: cat}}
transform: [[], {worker: {command: [[]], env: []}}, {worker: {command: [./x], cwd: []}}]
load: {spark: {path: [], partition_by: [[]], schema: []}}
"""
    said = "\n".join(errors_of(path, content))
    assert "there is no" not in said
    assert os.linesep in said


def test_what_can_not_be_sent_to_executors(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each problem names its place and the path, unless that is a secret."""
    monkeypatch.setenv("S", "hush")
    (path.parent / "bin").mkdir()
    for name in ("clean.py", "bin/clean.py", "bin/x.zip", "tools.tar.gz"):
        (path.parent / name).write_text("")
    content = (
        MINIMAL
        + "spark:\n"
        + '  files: [clean.py, nope.py, "${S}", bin, bin/clean.py]\n'
        + '  archives: ["tools.tar.gz#tools", "bin/x.zip#clean.py", "no #1/a.zip#b"]\n'
    )
    there = "there is no file"
    twice = (
        "has the same name as spark.files[0]: on the executors all are in one folder"
    )
    assert errors_of(path, content) == [
        f"spark.files[1]: {there} nope.py",
        "spark.files[2]: there is no such file",
        "spark.files[3]: is a folder: make an archive of it",
        f"spark.files[4]: {twice}",
        f"spark.archives[1]: {twice}",
        f"spark.archives[2]: {there} no #1/a.zip",
    ]


def test_command_alone_is_sought_where_it_stands(path: Path) -> None:
    """The error is at the word that the user wrote."""
    path.write_text(f"{MINIMAL}transform: [{{worker: [python, nope.py]}}]\n")
    with pytest.raises(ConfigError) as caught:
        examine(path)
    (problem,) = caught.value.problems
    assert ":4:31: transform[0].worker[1]: there is no file" in problem


FOLDERS = (
    ("load.spark.path", "{spark: {path: PATH, mode: append}}", ""),
    ("load.spark.path", "{spark: {path: PATH}}", ""),
    ("load.files.path", "{files: {path: PATH, format: csv, mode: overwrite}}", ""),
    ("load.journal.path", "{journal: {path: PATH}}", ""),
    ("state", "{worker: {command: [cat]}}", "state: PATH\n"),
)


@pytest.mark.parametrize(("loc", "load", "more"), FOLDERS)
def test_folder_that_can_not_be_made(
    path: Path, monkeypatch: pytest.MonkeyPatch, loc: str, load: str, more: str
) -> None:
    """Otherwise the run would fail only after processing everything (issue 23)."""
    content = MINIMAL.replace("{worker: {command: [cat]}}", load) + more
    (path.parent / "file").write_text("")
    below = content.replace("PATH", "file/out")
    (error,) = errors_of(path, below)
    assert error == f"{loc}: can't create file/out: file is not a folder"
    assert errors_of(path, below, loads=False) == []
    monkeypatch.setenv("S", "file/out")
    hidden = "can't be created or written to; not shown, as it may be a secret"
    assert errors_of(path, content.replace("PATH", '"${S}"')) == [f"{loc}: {hidden}"]
    assert errors_of(path, content.replace("PATH", "new/out")) == []
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode)
    )
    (error,) = errors_of(path, content.replace("PATH", "out"))
    assert error.startswith(f"{loc}: can't create out: ")
    assert error.endswith(" can't be written to")


@pytest.mark.parametrize(("loc", "load", "more"), FOLDERS)
def test_folder_whose_name_is_too_long(
    path: Path, loc: str, load: str, more: str
) -> None:
    """It can't be made, even in a folder that does not exist yet (issue 24)."""
    content = MINIMAL.replace("{worker: {command: [cat]}}", load) + more
    assert errors_of(path, content.replace("PATH", f"new/{'x' * 255}/out")) == []
    name = "x" * 256
    (error,) = errors_of(path, content.replace("PATH", f"new/{name}/out"))
    assert error.startswith(f"{loc}: can't create new/{name}/out: ")
    assert error.endswith(" can't have names of more than 255 bytes")


def with_jars(jars: object, more: str = "") -> str:
    """Return a pipeline whose Spark session has these jars."""
    return f"{MINIMAL}spark: {{config: {{spark.jars: '{jars}'}}{more}}}\n"


def test_jar_of_a_driver_is_there(path: Path) -> None:
    """Spark only warns about a missing jar, so etlstage reports it (issue 27)."""
    (path.parent / "postgresql.jar").touch()
    jar = path.parent / "postgres.jar"
    there = path.parent / "postgresql.jar"
    (error,) = errors_of(path, with_jars(f"{there}, file:{jar}"))
    assert error == (
        "spark.config['spark.jars']: there is no file postgres.jar (did you mean"
        " 'postgresql.jar'?)"
    )
    for jars in (there, "hdfs:/a.jar", path.parent / "*.jar", "*.jar", ""):
        assert errors_of(path, with_jars(jars)) == []
    assert errors_of(path, with_jars(jar, ", master: 'spark://host:7077'")) == []


def test_relative_jar_is_seen_from_where_spark_starts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark resolves it against the working directory, not the file's (issue 23)."""
    (path.parent / "beside.jar").touch()
    started = path.parent / "started"
    started.mkdir()
    (started / "postgresql.jar").touch()
    monkeypatch.chdir(started)
    assert errors_of(path, with_jars("postgresql.jar, file:postgresql.jar")) == []
    (error,) = errors_of(path, with_jars("beside.jar"))
    assert error == (
        "spark.config['spark.jars']: there is no file started/beside.jar; relative paths"
        " are resolved from where etlstage is started"
    )
    (error,) = errors_of(path, with_jars("postgres.jar"))
    assert error.endswith("started/postgres.jar (did you mean 'postgresql.jar'?)")
