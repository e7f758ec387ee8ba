from __future__ import annotations

import sys
from pathlib import Path

import pytest

from etlstage.config.loader import examine, load
from etlstage.config.reading import Changes
from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.stage import Stage, WorkerProgram

MINIMAL = """\
name: papers
extract: {worker: {command: [seq, "3"]}}
load: {worker: {command: [cat]}}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Name a pipeline file."""
    return tmp_path / "pipeline.yaml"


def errors_of(path: Path, content: str) -> list[str]:
    """Return the problems of a file, without its folder."""
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load(path)
    return [p.replace(f"{path.parent}/", "") for p in caught.value.problems]


def error_of(path: Path, content: str) -> str:
    """Return the only problem of a file, without the file's name."""
    (problem,) = errors_of(path, content)
    return problem.removeprefix("pipeline.yaml:")


def test_minimal_file(path: Path) -> None:
    """Two workers and a name are a pipeline."""
    path.write_text(MINIMAL)
    model, _ = load(path)
    assert model.name == "papers"
    assert model.engine == "local"
    assert model.delivery == "at-least-once"
    assert model.transform == ()
    assert model.load.stage == Stage(
        name="load", worker=WorkerProgram(command=("cat",)), kind=StageKind.LOAD
    )


def test_stage_without_a_name_has_its_number(path: Path) -> None:
    """The extract and load stages are named by their kind."""
    path.write_text(
        f"{MINIMAL}transform: [{{worker: [cat]}}, {{worker: [cat], name: b}}]\n"
    )
    model, _ = load(path)
    names = [stage.name for _, stage in model.stages()]
    assert names == ["extract", "transform-1", "b", "load"]


def test_everything_at_once_in_the_order_of_the_file(path: Path) -> None:
    """A user can mend all problems in one go."""
    content = """\
name: papers
engine: sparc
delivery: at-most-once
sparc: {}
extract:
  spark: {format: json, path: x, table: y, mesage: z, options: {a: [1]}}
  dialect: {mode: cyclic}
transform:
  - name: clean
    name: clean
    worker:
      command: python clean.py
      env: {A: "${ETLSTAGE_NOPE}", "C=": x}
    workers: 0
    window: lots
    restart: {policy: always, max: -1, never_on: [256], within: 0}
    batch: {size: abc, bytes: 1 mb}
    dialect: {driver: superviser, bnc_after_last: maybe}
  - name: clean
    worker:
  - [1]
load:
  spark: {partition_by: a, mode: appendd}
  workers: 3
"""
    assert errors_of(path, content) == [
        ("pipeline.yaml:2:9: engine: unknown engine 'sparc' (did you mean 'spark'?)"),
        (
            "pipeline.yaml:3:11: delivery: 'at-most-once' is not supported by this"
            " version, expected 'at-least-once' or 'exactly-once'"
        ),
        "pipeline.yaml:4:1: sparc: unknown key (did you mean 'spark'?)",
        "pipeline.yaml:6:34: extract.spark.table: can't be used together with path",
        (
            "pipeline.yaml:6:44: extract.spark.mesage: unknown key"
            " (did you mean 'message'?)"
        ),
        "pipeline.yaml:6:68: extract.spark.options.a: expected text, got a list",
        "pipeline.yaml:7:3: extract.dialect: only valid with `worker`",
        "pipeline.yaml:10:5: transform[0].name: duplicate key, first written on line 9",
        (
            "pipeline.yaml:12:16: transform[0].worker.command: expected a list such as"
            " [python, clean.py], got 'python clean.py'"
        ),
        (
            "pipeline.yaml:13:16: transform[0].worker.env.A: environment variable"
            " ETLSTAGE_NOPE is not set; set it or write ${ETLSTAGE_NOPE:-default}"
        ),
        (
            "pipeline.yaml:13:42: transform[0].worker.env['C=']: is not a valid name"
            " for a variable"
        ),
        "pipeline.yaml:14:14: transform[0].workers: expected 1 or more, got '0'",
        (
            "pipeline.yaml:15:13: transform[0].window: expected a whole number of"
            " messages from 1 up, or auto, got 'lots'"
        ),
        (
            "pipeline.yaml:16:23: transform[0].restart.policy: unknown policy 'always',"
            " expected 'permanent' or 'transient' or 'temporary'"
        ),
        "pipeline.yaml:16:36: transform[0].restart.max: expected 0 or more, got '-1'",
        (
            "pipeline.yaml:16:51: transform[0].restart.never_on[0]: expected 255 or"
            " less, got '256'"
        ),
        "pipeline.yaml:16:65: transform[0].restart.within: expected more than 0, got '0'",
        (
            "pipeline.yaml:17:19: transform[0].batch.size: expected a whole number, got"
            " 'abc'"
        ),
        (
            "pipeline.yaml:17:31: transform[0].batch.bytes: expected a size such as"
            " 512KiB, 1MiB or 10MB, got '1 mb'"
        ),
        (
            "pipeline.yaml:18:23: transform[0].dialect.driver: unknown driver"
            " 'superviser' (did you mean 'supervisor'?)"
        ),
        "pipeline.yaml:18:35: transform[0].dialect.bnc_after_last: needs driver: worker",
        (
            "pipeline.yaml:18:51: transform[0].dialect.bnc_after_last: expected true or"
            " false, got 'maybe'"
        ),
        "pipeline.yaml:19:11: transform[1].name: transform[0] has the same name",
        "pipeline.yaml:20:5: transform[1].worker: has no value",
        "pipeline.yaml:21:5: transform[2]: expected a mapping, got a list",
        "pipeline.yaml:23:3: load.spark: needs the key path or the key table",
        "pipeline.yaml:23:25: load.spark.partition_by: expected a list, got 'a'",
        (
            "pipeline.yaml:23:34: load.spark.mode: unknown mode 'appendd'"
            " (did you mean 'append'?)"
        ),
        "pipeline.yaml:24:3: load.workers: only valid with `worker`",
    ]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (
            MINIMAL.replace("name: papers\n", ""),
            "1:1: name: required key is missing",
        ),
        (
            MINIMAL.replace("papers", "../etc"),
            (
                "1:7: name: expected a name of up to 64 letters, digits, spaces, dots,"
                " dashes and underscores, got '../etc'"
            ),
        ),
        (
            MINIMAL.replace("{worker: {command: [cat]}}", "{}"),
            "3:1: load: needs one of the keys spark, worker, files, journal",
        ),
        (
            MINIMAL.replace(
                "{worker: {command: [cat]}}", "{worker: null, spark: null}"
            ),
            "3:1: load: needs one of the keys spark, worker, files, journal",
        ),
        (
            "engine: streaming\n"
            + MINIMAL.replace('{worker: {command: [seq, "3"]}}', "{worker: null}"),
            "3:1: extract: needs one of the keys spark, worker, files, journal, kinesis",
        ),
        (
            MINIMAL + "transform: [{worker: null}]\n",
            "4:22: transform[0].worker: expected a mapping, got null",
        ),
        (
            MINIMAL.replace("[cat]", "[]"),
            (
                "3:26: load.worker.command: expected a program and its arguments, got an"
                " empty list"
            ),
        ),
        (
            MINIMAL.replace("[cat]", r'["a\0"]'),
            "3:27: load.worker.command[0]: can't contain a NUL byte",
        ),
        (
            MINIMAL.replace("[cat]}", "[cat]}, spark: {}"),
            "3:8: load.worker: can't be used together with spark",
        ),
        (
            MINIMAL + "spark: {master: local, remote: sc://a}\n",
            "4:24: spark.remote: can't be used together with master",
        ),
        (
            MINIMAL + "spark: {remote: host}\n",
            (
                "4:17: spark.remote: expected a Spark Connect server such as"
                " sc://host:15002, got 'host'"
            ),
        ),
        (
            MINIMAL.replace("extract: {", "extract: {offsets: {by: worker}, "),
            (
                "2:11: extract.offsets: needs dialect: {mode: cyclic}, a worker that"
                " answers requests"
            ),
        ),
        (
            MINIMAL.replace("extract: {", "extract: {timeout: {heartbeat: 1s}, "),
            (
                "2:21: extract.timeout.heartbeat: is not for an extract stage, whose"
                " idle worker is not watched"
            ),
        ),
        (
            MINIMAL.replace(
                "extract: {",
                "extract: {dialect: {mode: cyclic}, offsets: {by: supervisor, start: 9, end: 1}, ",
            ),
            ("2:45: extract.offsets: offsets.end is 1, before offsets.start 9"),
        ),
        (
            MINIMAL.replace(
                "extract: {",
                "extract: {dialect: {mode: cyclic}, offsets: {by: worker, end: 9}, ",
            ),
            "2:58: extract.offsets.end: needs by: supervisor",
        ),
        (
            MINIMAL + "transform: [{name: load, worker: {command: [cat]}}]\n",
            "3:1: load.name: transform[0] has the same name",
        ),
        (
            MINIMAL + "transform: [{worker: {command: [cat]}, dialect: {eop: a, eob:"
            ' "", bnc: a}}]\n',
            (
                "4:49: transform[0].dialect: marker eob is empty, expected at least"
                " one byte"
            ),
        ),
        (
            MINIMAL + "transform: {}\n",
            "4:12: transform: expected a list, got an empty mapping",
        ),
        (MINIMAL + "transform: 3\n", "4:12: transform: expected a list, got '3'"),
        (MINIMAL + "state: null\n", ""),
        (
            MINIMAL + "delivery: at-least-onse\n",
            (
                "4:11: delivery: unknown delivery 'at-least-onse'"
                " (did you mean 'at-least-once'?)"
            ),
        ),
        (
            MINIMAL + "delivery: twice\n",
            (
                "4:11: delivery: unknown delivery 'twice',"
                " expected 'at-least-once' or 'exactly-once'"
            ),
        ),
    ],
)
def test_one_problem(path: Path, content: str, error: str) -> None:
    """A missing key is reported at the place of the mapping that lacks it."""
    if not error:
        path.write_text(content)
        load(path)
    else:
        assert error_of(path, content) == error


@pytest.mark.parametrize("key", ["retries", "limits", "dead_letters", "rate"])
def test_keys_that_stand_elsewhere_are_unknown(path: Path, key: str) -> None:
    """A key that would do nothing is refused, not ignored."""
    content = f"{MINIMAL}transform: [{{worker: {{command: [cat]}}, {key}: x}}]\n"
    assert f"transform[0].{key}: unknown key" in error_of(path, content)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("command", "(did you mean 'worker.command'?)"),
        ("eop", "(did you mean 'dialect.eop'?)"),
        ("retries", "(did you mean 'on_error.retries'?)"),
        ("wokers", "(did you mean 'workers'?)"),
        ("share", "(did you mean 'on_error.budget.share'?)"),
    ],
)
def test_key_that_stands_too_high(path: Path, key: str, said: str) -> None:
    """The error suggests where the key belongs, and its value is not judged."""
    content = f"{MINIMAL}transform: [{{{key}: x, on_error: {{retries: 0}}}}]\n"
    missing, unknown = errors_of(path, content)
    assert "transform[0].worker: required key is missing" in missing
    assert f"transform[0].{key}: unknown key" in unknown
    assert said in unknown


def test_key_that_belongs_in_several_places(path: Path) -> None:
    """No place is suggested, as none is likelier than another."""
    error = error_of(path, f"{MINIMAL}command: [cat]\n")
    assert ": command: unknown key, expected one of name, engine" in error


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ("limits: {memory: 0}", "limits.memory: expected more than 0, got '0'"),
        ("limits: {cpu: x}", "limits.cpu: expected a duration such as"),
        ("limits: {open_files: 0}", "limits.open_files: expected 1 or more, got '0'"),
        ("limits: {core: -1}", "limits.core: expected a size such as"),
        ("limits: {nice: 20}", "limits.nice: expected 19 or less, got '20'"),
        ("limits: {disk: 1}", "limits.disk: unknown key, expected one of memory, cpu"),
        ("umask: 888", "umask: expected an octal number such as 022, got '888'"),
        ("umask: 1777", "umask: expected an octal number such as 022, got '1777'"),
        ("ready: perhaps", "ready: expected true or false, got 'perhaps'"),
        ("user: [a]", "user: expected text, got a list"),
    ],
)
def test_problem_of_a_worker(path: Path, keys: str, error: str) -> None:
    """Each key of a worker has an error message of its own."""
    content = f"{MINIMAL}transform: [{{worker: {{command: [cat], {keys}}}}}]\n"
    assert f": transform[0].worker.{error}" in error_of(path, content)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ("timeout: {start: never}", "timeout.start: expected a duration such as"),
        ("timeout: {heartbeat: 0}", "timeout.heartbeat: expected more than 0, got '0'"),
        ("timeout: {stop: null}", "timeout.stop: expected a duration"),
        ("restart: {max: unlimited}", "restart.max: expected a whole number, got"),
        ("restart: {delay: 0}", "restart.delay: expected more than 0, got '0'"),
        ("restart: {never_on: 3}", "restart.never_on: expected a list, got '3'"),
        ("on_error: {retries: -1}", "on_error.retries: expected 0 or more, got '-1'"),
        (
            "on_error: {then: skip}",
            "on_error.then: unknown outcome 'skip', expected 'dead_letter' or",
        ),
        (
            "on_error: {budget: some}",
            "on_error.budget: expected a number of messages such as 20, or a share such",
        ),
        ("on_error: {budget: 101%}", "on_error.budget.share: expected a share such as"),
        ("on_error: {budget: {share: 1}}", "on_error.budget.share: expected a share"),
        ("on_error: {budget: {cuont: 1}}", "on_error.budget.cuont: unknown key"),
        ("on_error: {then: fail, budget: 1}", "budget: needs then: dead_letter"),
        (
            "order: random",
            "order: unknown order 'random', expected 'total' or 'key' or 'none'",
        ),
        ("order: key", "order: needs a key, a JSON pointer such as /id"),
        ("order: key, key: id", "key: expected a JSON pointer such as /id, got 'id'"),
        ("order: key, key: /a~2", "key: expected a JSON pointer such as /id, got"),
        ("key: /id", "key: needs order: key"),
        ("order: none, key: /id", "key: needs order: key"),
        ("recycle: {max_age: 0}", "recycle.max_age: expected more than 0, got '0'"),
        ("recycle: {variance: 0.1}", "recycle.variance: expected a share such as 1%"),
    ],
)
def test_problem_of_a_stage(path: Path, keys: str, error: str) -> None:
    """Each policy of a stage has error messages of its own."""
    content = f"{MINIMAL}transform: [{{worker: {{command: [cat]}}, {keys}}}]\n"
    assert error in error_of(path, content)


FRAMES = """\
name: papers
extract: {spark: {format: json, path: x%s}}
transform: [{worker: {command: [cat]}%s}, {name: two, worker: {command: [cat]}%s}]
load: {spark: {format: json, path: x}%s}
"""


def test_key_of_the_source_is_for_the_first_stage_alone(path: Path) -> None:
    """Replies of a stage carry no key, so later stages can't use the source's."""
    path.write_text(FRAMES % (", key: id", ", order: key", ", order: key, key: /a", ""))
    load(path)
    assert error_of(path, FRAMES % (", key: id", "", ", order: key", "")) == (
        "3:79: transform[1].order: needs a key, a JSON pointer such as /id: only the"
        " first stage after the source can use the source's"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("restart", "{}"),
        ("recycle", "{}"),
        ("order", "none"),
        ("key", "/id"),
        ("timeout", "{}"),
    ],
)
def test_what_a_frame_has_no_use_for(path: Path, key: str, value: str) -> None:
    """A DataFrame stage has no worker, so settings of workers are refused."""
    text = f"load.{key}: only valid with `worker`"
    assert text in error_of(path, FRAMES % ("", "", "", f", {key}: {value}"))


def test_frame_has_an_error_policy(path: Path) -> None:
    """A DataFrame refuses messages that don't fit its schema; retrying can't help."""
    path.write_text(FRAMES % ("", "", "", ", on_error: {budget: 3, then: dead_letter}"))
    load(path)
    text = "load.on_error.retries: only valid with `worker`"
    assert text in error_of(path, FRAMES % ("", "", "", ", on_error: {retries: 1}"))


def test_more_workers_than_a_machine_bears(path: Path) -> None:
    """A thousand processes are allowed; a typing error is not to start a million."""
    text = f"{MINIMAL}transform: [{{worker: {{command: [cat]}}, workers: %s}}]\n"
    line = text.count("\n")
    (error,) = errors_of(path, text % 1001)
    assert error == (
        f"pipeline.yaml:{line}:49: transform[0].workers: expected 1000 or less, got"
        " '1001'"
    )
    path.write_text(text % 1000)
    assert load(path)[0].transform[0].stage.pool.max == 1000


@pytest.mark.parametrize("key", ["on_error", "recycle", "order", "workers"])
def test_what_an_extract_worker_has_no_use_for(path: Path, key: str) -> None:
    """An extract worker gets no messages, so these keys would do nothing."""
    content = MINIMAL.replace('[seq, "3"]}', f'[seq, "3"]}}, {key}: 1')
    assert f"extract.{key}: unknown key" in error_of(path, content)


SPARK_ENDS = """\
name: papers
extract: {spark: {%s}}
load: {spark: {%s}}
"""


def test_files_are_somewhere(path: Path) -> None:
    """File formats need a path, as a key or an option; other formats may not."""
    needs = "needs the key path or the key table"
    nowhere = [
        ("format: text", "format: parquet"),
        ("format: Text, path: null", "mode: append"),
    ]
    for ends in nowhere:
        assert errors_of(path, SPARK_ENDS % ends) == [
            f"pipeline.yaml:2:11: extract.spark: {needs}",
            f"pipeline.yaml:3:8: load.spark: {needs}",
        ]
    path.write_text(SPARK_ENDS % ("format: text, options: {Path: a}", "format: noop"))
    load(path)


def test_format_that_is_no_text(path: Path) -> None:
    """It is reported even where other rules depend on the format."""
    content = SPARK_ENDS % ("path: a", "path: b, format: [parquet], mode: append")
    content += "engine: streaming\ndelivery: exactly-once\n"
    text = "pipeline.yaml:3:33: load.spark.format: expected text, got a list"
    assert text in errors_of(path, content)


def test_frame_for_dead_letters(path: Path) -> None:
    """Dead letters go to either a path or a table."""
    both = f"{MINIMAL}dead_letters: {{spark: {{path: a, table: b}}}}\n"
    assert error_of(path, both) == (
        "4:33: dead_letters.spark.table: can't be used together with path"
    )
    none = f"{MINIMAL}dead_letters: {{}}\n"
    assert "dead_letters.spark: required key is missing" in error_of(path, none)


SECRET = "hunter2"  # noqa: S105


@pytest.mark.parametrize(
    "line",
    [
        'engine: "${S}"',
        'delivery: "${S}"',
        'transform: "${S}"',
        'transform: [{worker: {command: "${S}"}}]',
        'transform: [{worker: {command: [cat]}, dialect: "${S}"}]',
        'transform: [{worker: {command: [cat]}, dialect: {eom: "${S}", eob: "${S}"}}]',
        'transform: [{worker: {command: [cat]}, dialect: {eom: "${S}\\\\q"}}]',
        'transform: [{worker: {command: [cat]}, workers: "${S}"}]',
        'transform: [{worker: {command: [cat]}, window: "${S}"}]',
        'transform: [{worker: {command: [cat]}, timeout: {stop: "${S}"}}]',
        'transform: [{worker: {command: [cat]}, max_message: "${S}"}]',
        'transform: [{worker: {command: [cat]}, name: "!${S}"}]',
        'transform: [{worker: {command: [cat]}, dialect: {eob_then_eom: "${S}"}}]',
        'spark: {config: ["${S}"]}',
    ],
)
@pytest.mark.parametrize("source", ["variable", "file"])
def test_interpolated_values_are_never_shown(
    path: Path, monkeypatch: pytest.MonkeyPatch, line: str, source: str
) -> None:
    """Whatever is wrong with a secret, the error does not repeat it."""
    monkeypatch.setenv("S", SECRET)
    if source == "file":
        (path.parent / "secret").write_text(SECRET)
        line = line.replace("${S}", "${file:secret}")
    (problem,) = errors_of(path, MINIMAL + line + "\n")
    assert problem.startswith("pipeline.yaml:4:")
    assert SECRET not in problem


def test_interpolated_number(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable can set a number, too."""
    monkeypatch.setenv("N", "3")
    path.write_text(
        f"{MINIMAL}transform: [{{worker: {{command: [cat]}}, workers: '${{N}}'}}]\n"
    )
    assert load(path)[0].transform[0].stage.pool.max == 3


def test_unset_variable_is_not_reported_twice(path: Path) -> None:
    """Its text is not a number either, but that is not the user's mistake."""
    content = (
        f"{MINIMAL}transform: [{{worker: {{command: [cat]}}, workers: '${{NO_N}}'}}]\n"
    )
    assert "NO_N is not set" in error_of(path, content)


def test_interpolated_word_is_only_called_unknown(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user still learns what was expected."""
    monkeypatch.setenv("S", SECRET)
    assert error_of(path, f"{MINIMAL}engine: ${{S}}\n") == (
        "4:9: engine: unknown engine, expected 'local' or 'spark' or 'streaming'"
    )


def test_interpolated_number_that_is_none(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error shows a placeholder instead of the value."""
    monkeypatch.setenv("S", SECRET)
    content = (
        f"{MINIMAL}transform: [{{worker: {{command: [cat]}}, workers: '${{S}}'}}]\n"
    )
    assert error_of(path, content) == (
        "4:49: transform[0].workers: expected a whole number, got an interpolated value"
    )


ENGINES = """\
name: papers
engine: {engine}
delivery: {delivery}
extract: {{{extract}}}
load: {{{load}}}
"""
FRAME = "spark: {path: in}"
EXACTLY = (
    "exactly-once needs load.spark with a path and a format of files (avro, csv, json,"
    " orc, parquet, text, xml), or format jdbc"
)


@pytest.mark.parametrize(
    ("engine", "delivery", "extract", "sink", "problems"),
    [
        ("spark", "at-least-once", FRAME, FRAME, []),
        ("streaming", "exactly-once", f"{FRAME}, every: 5s", FRAME, []),
        (
            "streaming",
            "at-least-once",
            FRAME,
            "spark: {path: out, mode: overwrite}",
            [],
        ),
        # Spark ignores the case of a format, too (issue 11).
        ("streaming", "exactly-once", FRAME, "spark: {path: out, format: JSON}", []),
        (
            "spark",
            "at-least-once",
            "worker: {command: [cat]}",
            "worker: {command: [cat]}",
            [],
        ),
        (
            "spark",
            "at-least-once",
            "worker: {command: [cat]}, dialect: {mode: cyclic}",
            FRAME,
            [
                (
                    "extract.worker: needs offsets: {by: supervisor} with engine"
                    " spark: Spark may request a part of the data again"
                )
            ],
        ),
        (
            "streaming",
            "at-least-once",
            "worker: {command: [cat]}",
            FRAME,
            [
                (
                    "extract.worker: needs dialect: {mode: cyclic} and offsets: {by:"
                    " supervisor} with engine streaming"
                )
            ],
        ),
        (
            "spark",
            "exactly-once",
            f"{FRAME}, every: 5s",
            FRAME,
            [
                (
                    "delivery: exactly-once needs state, a folder that records what"
                    " was loaded"
                ),
                "extract.every: is only for a worker on engine local, or for engine streaming",
            ],
        ),
        ("local", "exactly-once", FRAME, f"{FRAME}}}\nstate: s\nx-more: {{", []),
        ("spark", "exactly-once", FRAME, f"{FRAME}}}\nstate: s\nx-more: {{", []),
        (
            "spark",
            "exactly-once",
            "worker: {command: [cat]}",
            "worker: {command: [cat]}}\nstate: s\nx-more: {",
            [
                (
                    f"delivery: {EXACTLY}, or engine local, where a worker may have"
                    " load.commit and load.abort"
                )
            ],
        ),
        (
            "local",
            "exactly-once",
            FRAME,
            "spark: {format: JDBC, options: {Url: u, dbTable: t}}}\nstate: s\nx-more: {",
            [],
        ),
        (
            "local",
            "exactly-once",
            FRAME,
            "spark: {format: jdbc, options: {query: q}}}\nspark: {remote: 'sc://host'",
            [
                (
                    "delivery: exactly-once needs load.spark.options with url and"
                    " dbtable; it needs a session with its own JVM for a database:"
                    " Spark Connect has no transactions; use spark.master; it needs state,"
                    " a folder that records what was loaded"
                )
            ],
        ),
        (
            "streaming",
            "exactly-once",
            FRAME,
            "spark: {format: jdbc, mode: overwrite, options: {url: u, dbtable: t}}",
            [],
        ),
        (
            "local",
            "exactly-once",
            "worker: {command: [cat]}, dialect: {mode: cyclic}",
            "spark: {path: 's3a://out'}",
            [
                (
                    "delivery: exactly-once needs a path on this machine, where an epoch"
                    " can be renamed, such as that of a mounted file system; it needs"
                    " state, a folder that records what was loaded; it needs positions"
                    " from which extraction can resume: use dialect: {mode: cyclic} and"
                    " offsets: {by: supervisor}"
                ),
            ],
        ),
        (
            "streaming",
            "exactly-once",
            FRAME,
            "spark: {path: 's3a://out', format: delta, mode: overwrite}",
            [
                (
                    f"delivery: {EXACTLY}; it needs a path on this machine, where an"
                    " epoch can be renamed, such as that of a mounted file system"
                ),
                (
                    "load.spark.mode: can't be overwrite with engine streaming and a"
                    " path on another machine: a stream adds to existing output"
                ),
            ],
        ),
    ],
)
def test_engines_have_rules(
    path: Path, engine: str, delivery: str, extract: str, sink: str, problems: list[str]
) -> None:
    """What an engine can't do is reported before anything starts."""
    content = ENGINES.format(
        engine=engine, delivery=delivery, extract=extract, load=sink
    )
    if not problems:
        path.write_text(content)
        load(path)
        return
    found = errors_of(path, content)
    seen = [p.split(": ", 1)[1] for p in found]
    see = "; see: etlstage help exactly-once"
    assert all(("exactly-once needs" in p) == p.endswith(see) for p in seen)
    assert [p.removesuffix(see) for p in seen] == problems


def test_what_is_sent_to_executors_is_a_list(path: Path) -> None:
    """Files and archives are lists of paths, kept as they are written."""
    (folder := path.parent / "no #1").mkdir()
    (folder / "tools.tar.gz").write_text("")
    path.write_text(MINIMAL + 'spark: {archives: ["no #1/tools.tar.gz#tools"]}\n')
    model, _ = load(path)
    assert model.spark.archives == ("no #1/tools.tar.gz#tools",)
    assert model.spark.files == ()
    content = MINIMAL + "spark: {files: clean.py}\n"
    text = "4:16: spark.files: expected a list, got 'clean.py'"
    assert error_of(path, content) == text


def test_dialect_without_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dialect whose package is not installed is reported (issue 23)."""
    text = (
        "name: p\nextract: {worker: {command: [echo]}}\nload:\n"
        "  worker: {command: [cat]}\n  dialect: cocaine\n"
    )
    (tmp_path / "p.yaml").write_text(text)
    examine(tmp_path / "p.yaml")
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(ConfigError) as caught:
        examine(tmp_path / "p.yaml")
    assert str(caught.value) == (
        f"{tmp_path}/p.yaml:5:12: load.dialect: dialect 'cocaine' needs msgpack:"
        " pip install 'etlstage[cocaine]'"
    )
    # With a remote master, only the executors need the package.
    (tmp_path / "p.yaml").write_text(
        f"{text}engine: spark\nspark: {{master: spark://127.0.0.1:7077}}\n"
    )
    examine(tmp_path / "p.yaml")


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("load.workers=three", ": expected a whole number, got 'three'"),
        ("load.workers=${NOPE:-0}", ": expected 1 or more, got an interpolated value"),
        (
            "load.worker=[./uper]",
            ": load.worker[0]: there is no file HERE/uper (did you mean 'upper'?)",
        ),
        (
            "load.worker=[python, uper]",
            ": load.worker[1]: there is no file HERE/uper (did you mean 'upper'?)",
        ),
        (
            "spark.remote=hunter2",
            (
                ": expected a Spark Connect server such as sc://host:15002, got the"
                " value given"
            ),
        ),
        (
            "spark=sc://h;token=hunter2",
            ": expected a mapping, got the value given",
        ),
        ("transfrom[0].workers=4", ": there is no transfrom"),
    ],
)
def test_value_that_was_set(path: Path, value: str, error: str) -> None:
    """An error shows a value of ``--set``, but no credentials and URLs (issue 26)."""
    path.write_text(MINIMAL)
    (path.parent / "upper").write_text("")
    with pytest.raises(ConfigError) as caught:
        examine(path, Changes(values=[value]))
    error = error.replace("HERE", str(path.parent))
    assert str(caught.value) == f"--set {value.partition('=')[0]}{error}"


def test_rule_about_what_could_not_be_read_is_silent(path: Path) -> None:
    """Rules skip values that could not be read, but still use what is known."""
    path.write_text(
        "name: p\n"
        "extract: {worker: [seq, '3'], dialect: {mode: cyclc}, offsets: {by: worker}}\n"
        "transform: [{name: a, worker: [cat], order: key, workers: 0.5}]\n"
        "load: {worker: [cat], order: key}\n"
        "tests: [{name: t, stage: b, input: [[a]]}, {name: u, stage: c, input: {}}]\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(path)
    problems = [problem.partition(": ")[2] for problem in caught.value.problems]
    key = "needs a key, a JSON pointer such as /id"
    first = "only the first stage after the source can use the source's"
    assert problems == [
        "extract.dialect.mode: unknown mode 'cyclc' (did you mean 'cyclic'?)",
        f"transform[0].order: {key}",
        "transform[0].workers: expected a whole number, got '0.5'",
        f"load.order: {key}: {first}",
        "tests[0].stage: unknown stage 'b', expected one of extract, a, load",
        "tests[1].stage: unknown stage 'c', expected one of extract, a, load",
        "tests[1].input: expected a list, got an empty mapping",
    ]


@pytest.mark.parametrize(
    ("keys", "end", "redoes"),
    [
        ("engine: local", "path: b, mode: append", False),
        ("engine: streaming", "path: b, mode: append", True),
        ("engine: streaming", "path: s3a://b/c, mode: append", True),
        ("engine: streaming", "table: b, mode: append", False),
    ],
)
def test_retry_that_replaces_what_it_has_loaded(
    path: Path, keys: str, end: str, *, redoes: bool
) -> None:
    """At least once, a stream's files are replaced epoch by epoch (issue 23)."""
    path.write_text(f"{SPARK_ENDS % ('path: a, format: text', end)}{keys}\n")
    made, _ = load(path)
    assert made.load.end.redoes(made) is redoes
