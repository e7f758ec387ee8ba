"""Where a worker learns its markers."""

from __future__ import annotations

import re

import pytest

from etlstage.errors import ConfigError
from etlstage.protocol.marker import Markers
from etlstage.worker.marking import find_markers
from tests.worker.conftest import Start


def test_defaults() -> None:
    """There is no err by default: the supervisor might not understand a refusal."""
    assert find_markers([], {}) == Markers(err=None)


@pytest.mark.parametrize(
    ("arguments", "environment", "err"),
    [
        ([], {"ETLSTAGE_ERR": r"\025"}, b"\x15"),
        ([], {"ETLSTAGE_ERR": ""}, None),
        (["--end-of-refusal", r"\25"], {}, b"\x15"),
        (["--end-of-refusal="], {"ETLSTAGE_ERR": r"\025"}, None),
    ],
)
def test_err_is_known_where_it_was_given(
    arguments: list[str], environment: dict[str, str], err: bytes | None
) -> None:
    """An empty value means that there is no err, as for ``{err}``."""
    assert find_markers(arguments, environment).err == err


def test_environment() -> None:
    """The texts are unescaped."""
    environment = {
        "ETLSTAGE_EOM": r"\036",
        "ETLSTAGE_EOP": r"\x06",
        "ETLSTAGE_EOB": "EOB",
        "ETLSTAGE_BNC": r"\u00e9",
        "ETLSTAGE_ERR": "ERR",
        "EOM": "x",
    }
    assert find_markers([], environment) == Markers(
        b"\x1e", b"\x06", b"EOB", "é".encode(), b"ERR"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["-e", r"\036", "-E", r"\006", "--end-of-batch", "EOB"],
        ["--end-of-message", r"\036", r"--end-of-process=\6", "--end-of-batch=EOB"],
    ],
)
def test_arguments(arguments: list[str]) -> None:
    """There are two ways to write them."""
    assert find_markers(arguments, {}) == Markers(b"\x1e", b"\x06", b"EOB", err=None)


def test_last_argument_counts() -> None:
    """A later argument overrides an earlier one."""
    assert find_markers(["-e", "x", "-e", "y"], {}).eom == b"y"


def test_arguments_win_over_the_environment() -> None:
    """Each marker is looked up by itself."""
    environment = {"ETLSTAGE_EOM": "a", "ETLSTAGE_EOP": "b"}
    markers = find_markers(
        ["--end-of-process=c", "--batch-not-complete=="], environment
    )
    assert markers == Markers(b"a", b"c", bnc=b"=", err=None)


def test_arguments_of_others_are_left_alone() -> None:
    """The rest of the command line is the worker's own."""
    arguments = ["in.txt", "-v", "--end", "x", "-e=x", "-ex", "--out=-e", "-"]
    assert find_markers(arguments, {}) == Markers(err=None)


def test_arguments_end_at_two_dashes() -> None:
    """What follows are file names."""
    assert find_markers(["--", "-e", "x"], {}) == Markers(err=None)


@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        (["-e"], {}, "argument -e: expected a marker"),
        (["-e", ""], {}, "marker eom is empty, expected at least one byte"),
        ([r"--end-of-batch=\q"], {}, r"argument --end-of-batch: can't read the escape"),
        ([], {"ETLSTAGE_BNC": r"\x0"}, "ETLSTAGE_BNC: can't read the escape"),
        (["-E", "ab", "-e", "b"], {}, "marker eom 'b' is a part of eop 'ab'"),
    ],
)
def test_wrong_markers_are_reported(
    arguments: list[str], environment: dict[str, str], complaint: str
) -> None:
    """The error names the argument, the variable or the marker."""
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        find_markers(arguments, environment)


def test_worker_takes_markers_from_its_environment(start: Start) -> None:
    """That is how a supervisor passes them."""
    stage = start(
        "worker.transform(lambda message: [message])",
        env=Markers(b"<m>", b"<p>").environment(),
    )
    stage.ask(b"a\n<m>", b"a\n<m><p>")
    assert stage.finish() == (b"", 0)


def test_worker_takes_markers_from_its_arguments(start: Start) -> None:
    """Arguments win, and stay in ``sys.argv`` for the worker's own parser."""
    stage = start(
        """
        import sys
        worker.transform(lambda message: [message, sys.argv[2].encode()])
        """,
        *("in.txt", "-e", ";"),
        env={"ETLSTAGE_EOM": ".", "ETLSTAGE_EOP": ","},
    )
    stage.ask(b"a.;", b"a.;-e;,")
    assert stage.finish() == (b"", 0)


def test_worker_that_sets_its_markers_looks_for_no_others(start: Start) -> None:
    """Its own ``-e`` may mean something else."""
    stage = start(
        """
        markers = worker.Markers(eop=b"!")
        worker.transform(lambda message: [message], markers=markers)
        """,
        *("-e", ""),
        env={"ETLSTAGE_EOM": ""},
    )
    stage.ask(b"a\n", b"a\n!")
    assert stage.finish() == (b"", 0)


@pytest.mark.parametrize(
    ("call", "arguments", "complaint"),
    [
        ("transform(f)", ("-e", ""), "marker eom is empty, expected at least one byte"),
        (
            "load(f)",
            ("-E", r"\n"),
            (
                r"eop is eom (\012), so each reply must be one message; a load stage,"
                " and on_error='skip', give empty replies: choose another eop"
            ),
        ),
        ("load_batch(f)", ("-E", r"\n"), r"eop is eom (\012)"),
        ("transform(f, on_error='skip')", ("-E", r"\n"), r"eop is eom (\012)"),
        ("transform_batch(f, on_error='skip')", ("-E", r"\n"), r"eop is eom (\012)"),
    ],
)
def test_worker_refuses_markers_in_one_line(
    start: Start, call: str, arguments: tuple[str, ...], complaint: str
) -> None:
    """They are not the author's mistake, so there is no traceback."""
    stage = start(f"def f(m):\n    return []\nworker.{call}", *arguments)
    assert stage.read_to_end() == (b"", 2)
    assert stage.stderr.startswith(f"etlstage.worker: {complaint}")
    assert stage.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("call", "asked", "complaint"),
    [
        (
            "transform(f)",
            "supervisor-driven batch",
            (
                "the stage has mode supervisor-driven batch, this worker single: change"
                " the keys batch and dialect of the stage, or make the worker with"
                " transform_batch() or load_batch()"
            ),
        ),
        ("transform_batch(f)", "single", "make the worker with transform() or load()"),
        (
            "load_batch(f)",
            "worker-driven batch",
            "load_batch(), with driver='worker'",
        ),
        ("extract(f)", "cyclic", "make the worker with extract_cycle()"),
        ("extract_cycle(f)", "plain", "make the worker with extract()"),
    ],
)
def test_worker_of_another_mode_than_its_stage_refuses(
    start: Start, call: str, asked: str, complaint: str
) -> None:
    """It would wait for ever, or fail at each message."""
    stage = start(
        f"def f(*_):\n    return []\nworker.{call}", env={"ETLSTAGE_MODE": asked}
    )
    assert stage.read_to_end() == (b"", 2)
    assert complaint in stage.stderr
    assert stage.stderr.count("\n") == 1
