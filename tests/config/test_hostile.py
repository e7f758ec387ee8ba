"""Hostile files: none takes long to read, and none raises an unexpected error."""
# ruff: noqa: ANN401 - whatever YAML holds

from __future__ import annotations

import copy
import difflib
import random
from collections.abc import Iterator
from contextlib import suppress
from cProfile import Profile
from functools import cache
from importlib.metadata import entry_points
from io import StringIO
from pathlib import Path
from time import thread_time
from typing import Any, Final
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from ruamel.yaml.dumper import SafeDumper
from ruamel.yaml.error import StringMark, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from etlstage.config.loader import cases_of, examine
from etlstage.config.plan import plan_of
from etlstage.errors import ConfigError

ENDS: Final = """\
extract: {worker: {command: [echo]}}
load: {worker: {command: [echo]}}
"""
MOST: Final = 5_000_000
"""Function calls that take a usual processor about a second."""
SHORTEST: Final = 1e-8
"""Seconds; no call in Python is as short on any processor."""
WRONG: Final = sorted((Path(__file__).parent / "wrong").glob("*.yaml"))


def problems_of(path: Path) -> list[str]:
    """
    Return what is wrong with a file, found in fewer than ``MOST`` calls.

    They are counted where there has been time for as many: it triples the time.
    """
    begun = thread_time()
    problems = read(path)
    if thread_time() - begun > MOST * SHORTEST:
        with Profile() as profile:
            read(path)
        assert sum(entry.callcount for entry in profile.getstats()) < MOST
    return problems


def read(path: Path) -> list[str]:
    """Return what is wrong with a file."""
    try:
        keys, document = examine(path)
        cases_of(keys, document)
        plan_of(keys, document)
    except ConfigError as error:
        return [problem.replace(f"{path.parent}/", "") for problem in error.problems]
    return []


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            f"name: p\n{ENDS}spark:\n  a0: &a0 {{k: v}}\n"
            + "".join(
                f"  a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 26)
            ),
            id="merges of merges",
        ),
        pytest.param(
            "name:\n  a0: &a0 {k: v}\n"
            + "".join(
                f"  a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(6))}}}\n"
                for i in range(1, 10)
            )
            + ENDS,
            id="mappings of mappings",
        ),
        pytest.param(
            f"name: p\n{ENDS}x-a: &a {'b' * 60_000}\ntests: [{'*a, ' * 9000}]\n",
            id="a long text many times",
        ),
    ],
)
def test_small_file_that_stands_for_a_large_one(text: str, tmp_path: Path) -> None:
    """The limits count aliases as if they were written out (issue 23)."""
    (tmp_path / "p.yaml").write_text(text)
    (problem,) = problems_of(tmp_path / "p.yaml")
    assert "once its aliases are written out" in problem


def test_many_unknown_keys(tmp_path: Path) -> None:
    """Only the first are compared with known keys: all would take long (issue 23)."""
    text = "".join(f"key{i}: 1\n" for i in range(1000))
    (tmp_path / "p.yaml").write_text(f"name: p\n{ENDS}{text}")
    with patch("difflib.get_close_matches", wraps=difflib.get_close_matches) as compare:
        problems = read(tmp_path / "p.yaml")
    assert compare.call_count <= 20
    assert len(problems) == 21
    assert problems[-1].endswith("unknown key, and 979 more")


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("worker: [no{}]", id="program"),
        pytest.param("worker: [python, no{}.py]", id="script"),
        pytest.param("worker: [./no{}]", id="path"),
        pytest.param("worker: {{command: [./f0], cwd: dir{}}}", id="folder"),
        pytest.param("worker: [./f0], expect: {{schema: no{}.json}}", id="schema"),
    ],
)
def test_many_missing_files(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first are compared with existing names: all take long (issue 23)."""
    for i in range(1000):
        (tmp_path / f"f{i}").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    stages = "".join(f"- {{name: s{i}, {stage.format(i)}}}\n" for i in range(100))
    ends = ENDS.replace("[echo]", "[./f0]")
    (tmp_path / "p.yaml").write_text(f"name: p\n{ends}transform:\n{stages}")
    with patch("difflib.get_close_matches", wraps=difflib.get_close_matches) as compare:
        problems = read(tmp_path / "p.yaml")
    assert 0 < sum(len(call.args[1]) for call in compare.call_args_list) < 60_000
    assert len([text for text in problems if "there is no" in text]) == 100


def test_many_secrets_where_they_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error is not compared with each secret: it takes too long (issue 23)."""
    monkeypatch.setenv("SECRET", "hush")
    tests = "".join(["- ${SECRET}\n"] * 5000)
    (tmp_path / "p.yaml").write_text(f"name: p\n{ENDS}tests:\n{tests}")
    problems = problems_of(tmp_path / "p.yaml")
    assert len(problems) == 5000
    assert problems[-1].endswith("expected a mapping, got an interpolated value")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            f"  offsets: {{by: supervisor, start: {'9' * 5000}}}",
            "extract.offsets.start: expected a number of up to 1000 digits, got '99",
        ),
        (
            f"  offsets: {{by: supervisor, step: {'9' * 5000}}}",
            "extract.offsets.step: expected a number of up to 1000 digits, got '99",
        ),
        (f"  timeout: {{start: {'9' * 5000}s}}", "expected a duration such as 500ms"),
        (f"  worker: {{command: [cat], limits: {{cpu: {'9' * 5000}}}}}", "a duration"),
    ],
)
def test_number_that_is_too_long(line: str, problem: str, tmp_path: Path) -> None:
    """Python refuses to parse a number that long (issue 23)."""
    text = f"name: p\nextract:\n  dialect: {{mode: cyclic}}\n{line}\nload: {{worker: {{command: [cat]}}}}\n"
    (tmp_path / "p.yaml").write_text(text)
    problems = problems_of(tmp_path / "p.yaml")
    assert any(problem in said for said in problems), problems


def test_dialect_that_is_no_word(tmp_path: Path) -> None:
    """A mapping in place of a name is reported like any other mistake (issue 23)."""
    text = ENDS.replace("worker", "dialect: {a: b}, worker", 1)
    (tmp_path / "p.yaml").write_text(f"name: p\n{text}")
    (problem,) = problems_of(tmp_path / "p.yaml")
    assert problem.startswith("p.yaml:2:21: extract.dialect.a: unknown key")


HOSTILE: Final[tuple[Any, ...]] = (
    *(None, True, 0, -1, 1.5, "", " ", "a", "\0", "\x1b[0m", "é", "\ud800", "\u2028"),
    *("9" * 5000, int("9" * 400), "1e999", "nan", "-inf", "1" * 300 + "h", "٣", "0x1f"),
    *("${", "${}", "${HOME}", "${file:/dev/zero}", "${file:.}", "${NOPE:-x}", "$$"),
    *(
        "a" * 5000,
        "/" + "a" * 300,
        "a/" * 3000,
        "../" * 50,
        "/dev/null",
        "~",
        "*",
        "[a",
    ),
    *("(" * 3000, "a{99999999999}", "(a*)*" * 20, "\\", "%", "1%", "{start}", "{", "}"),
    *([], {}, [[]], [None], {"": None}, {"a": {"a": {"a": "b"}}}, [{"a": "b"}] * 30),
    *(
        {"name": "marker"},
        {"cocaine": {}},
        ["sh"],
        ["python"],
        {"\0": "\0"},
        {"=": "a"},
    ),
    *("local", "spark", "streaming", "exactly-once", "supervisor", "cyclic", "cocaine"),
)


@cache
def corpus() -> list[Any]:
    """Return the data of the files in ``wrong/``, which are nearly right."""
    found = []
    for path in WRONG:
        with suppress(YAMLError):
            data = YAML(typ="safe", pure=True).load(path.read_text())
            found += [data] if isinstance(data, dict) else []
    return found


def places(data: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each value."""
    items: Any = data.items() if isinstance(data, dict) else enumerate(data)
    for key, item in items:
        yield (*above, key)
        if isinstance(item, dict | list):
            yield from places(item, (*above, key))


def spoiled(data: Any, dice: random.Random) -> Any:
    """Return a copy of data with a few values made hostile, duplicated or deleted."""
    data = copy.deepcopy(data)
    for _ in range(dice.randint(1, 4)):
        all_places = list(places(data))
        if not all_places:
            break
        *above, key = dice.choice(all_places)
        holder = data
        for step in above:
            holder = holder[step]
        match dice.randrange(5):
            case 0 | 1 | 2:
                holder[key] = copy.deepcopy(dice.choice(HOSTILE))
            case 3 if isinstance(holder, dict):
                value = copy.deepcopy(holder[key])
                holder[dice.choice((*places(data),))[-1]] = value
            case _:
                del holder[key]
    return data


def spoil_many(count: int, seed: int, folder: Path, *, written: int = 1) -> None:
    """
    Spoil and read that many files.

    Args:
        count: Number of files.
        seed: Seed of the random damage.
        folder: Where the files are written.
        written: Every file of this many is written and read as text, which costs the
            YAML library twice the time of all code of etlstage. For the others, the
            reader is given the nodes that the text would be composed to.

    """
    dice = random.Random(seed)  # noqa: S311 - no secret
    known, path, other = corpus(), folder / "p.yaml", folder / "q.yaml"
    other.write_text("what is shown of it: this\n")
    for n in range(count):
        data = spoiled(dice.choice(known), dice)
        try:
            if n % written == 0:
                write(path, data)
                problems_of(path)
                continue
            made = node(data)
            with patch("etlstage.config.reading._compose", lambda *_, made=made: made):
                problems_of(other)
        except BaseException as error:
            write(path, data)
            error.add_note(path.read_text(errors="replace"))
            raise


DUMPER: Final = SafeDumper(StringIO())


def write(path: Path, data: Any) -> None:
    """Write data as YAML."""
    with path.open("w", encoding="utf-8", errors="surrogatepass") as file:
        YAML(typ="safe", pure=True).dump(data, file)


def node(data: Any) -> Node:
    """Return the nodes that reading ``data`` as YAML would compose, at one place."""
    # Forget the nodes of earlier data: they are kept by ids that may be reused.
    DUMPER.represented_objects.clear()
    DUMPER.object_keeper.clear()
    made: Node = DUMPER.represent_data(data)
    mark = StringMark("", 0, 0, 0, "", 0)
    seen, left = set[int](), [made]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue  # as an alias
        seen.add(id(one))
        one.start_mark = one.end_mark = mark
        if isinstance(one, MappingNode):
            left += [part for pair in one.value for part in pair]
        elif not isinstance(one, ScalarNode):
            left += one.value
    return made


@pytest.fixture
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look up entry points only once: each unknown key triggers a look-up."""
    monkeypatch.setattr("importlib.metadata.entry_points", cache(entry_points))


def test_spoiled_files(tmp_path: Path) -> None:
    """Mistakes are reported quickly, and nothing unexpected is raised (issue 23)."""
    spoil_many(200, 23, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_packages")
@pytest.mark.parametrize("seed", range(24, 28))
def test_many_spoiled_files(seed: int, tmp_path: Path) -> None:
    """The same for ten thousand files, a quarter of them per seed."""
    spoil_many(2_500, seed, tmp_path, written=10)


SCALARS: Final = (
    *("a", "''", "null", "~", "9", "1e9", ".inf", "0o7", "!!int x", "!x y", "? a", "@"),
    *("${HOME}", "'${'", "|\n b", '"\\ud800"', '"\\0"', "- a", "x: y", "worker", "2s"),
)


ANCHORS: Final = st.sampled_from([f"a{i}" for i in range(4)])
NAMES: Final = ("<<", "name", "worker", "dialect", "k", "a0", "a1")
KEYS: Final = st.sampled_from(NAMES)
LEAVES: Final = st.one_of(
    st.sampled_from(SCALARS),
    ANCHORS.map("*{}".format),
    st.builds("&{} {}".format, ANCHORS, st.sampled_from(SCALARS)),
)


def holding(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return lists and mappings of values, and values with anchors."""
    pairs = st.builds("{}: {}".format, KEYS, inner)
    return st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.lists(pairs, max_size=3).map(lambda items: f"{{{', '.join(items)}}}"),
        st.builds("&{} {}".format, ANCHORS, inner),
    )


NODES: Final = st.recursive(LEAVES, holding, max_leaves=12)
"""Values in YAML that have anchors, aliases of them, and merges."""
SHARED: Final = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)
TOP: Final = (
    *("name", "engine", "delivery", "state", "spark", "extract", "transform", "load"),
    *("tests", "faults", "dead_letters", "x-a"),
)
FILES: Final = st.lists(st.tuples(st.sampled_from(TOP), NODES), max_size=5)


def read_text(tmp_path: Path, written: list[tuple[str, str]]) -> None:
    """Read a file of these keys, followed by valid ones that are required."""
    lines = [f"{key}: {value}" for key, value in written]
    path = tmp_path / "p.yaml"
    path.write_text("\n".join([*lines, "name: p", ENDS]))
    problems_of(path)


@settings(max_examples=30, deadline=None, suppress_health_check=SHARED)
@given(written=FILES)
def test_text_with_anchors(tmp_path: Path, written: list[tuple[str, str]]) -> None:
    """Such a file is read, or its problems are reported, in few calls (issue 23)."""
    read_text(tmp_path, written)


def thrown_node(dice: random.Random, known: list[str], depth: int = 0) -> str:
    """
    Return a random value like those of ``NODES``, ten times as fast as Hypothesis.

    Most aliases are of ``known`` anchors: a file with any other is rejected at once.
    """
    anchor, scalar = f"a{dice.randrange(4)}", dice.choice(SCALARS)
    kind = dice.randrange(6 if depth < 4 else 3)
    if kind == 1:
        if dice.random() < 0.9:
            anchor = dice.choice(known or [""])
        return f"*{anchor}" if anchor else scalar
    if kind in (2, 5):
        text = thrown_node(dice, known, depth + 1) if kind == 5 else scalar
        known.append(anchor)
        return f"&{anchor} {text}"
    inner = [
        thrown_node(dice, known, depth + 1) for _ in range(kind and dice.randrange(4))
    ]
    if kind == 3:
        return f"[{', '.join(inner)}]"
    if kind == 4:
        # Merge keys are favored: merges of merges are rare otherwise.
        keys = (dice.choice((*NAMES, "<<", "<<")) for _ in inner)
        pairs = (f"{key}: {one}" for key, one in zip(keys, inner, strict=True))
        return f"{{{', '.join(pairs)}}}"
    return scalar


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_packages")
@pytest.mark.parametrize("seed", range(4))
def test_many_texts(tmp_path: Path, seed: int) -> None:
    """The same for many files, by a seeded random generator."""
    dice = random.Random(seed)  # noqa: S311 - no secret
    for _ in range(625):
        known: list[str] = []
        count = dice.randrange(6)
        written = [(dice.choice(TOP), thrown_node(dice, known)) for _ in range(count)]
        try:
            read_text(tmp_path, written)
        except BaseException as error:
            error.add_note(repr(written))
            raise
