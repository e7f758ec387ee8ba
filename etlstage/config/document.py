"""
The text of a pipeline file as data, with the place of everything in it.

All scalars stay text, exactly as written: the model says what is a number.
So ``1.10`` in a worker's environment stays ``1.10`` and ``yes`` stays ``yes``.
This file knows YAML and nothing of pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from etlstage.config.interpolation import Interpolator, read_file
from etlstage.errors import ConfigError, Excerpt
from etlstage.settings.problem import (
    Loc,
    dotted,
)

__all__ = ("Document", "Place", "Problem", "Value", "read")

Value: TypeAlias = "str | list[Value] | dict[str, Value] | None"

MAX_BYTES: Final = 256 * 1024
"""ruamel.yaml takes about four seconds per megabyte."""
MAX_NODES: Final = 50_000
"""Aliases of aliases let a small file stand for an endless one."""
MAX_DEPTH: Final = 50

TAGS: Final = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in (
        *("str", "int", "float", "bool", "null", "timestamp", "merge", "value"),
        *("map", "seq"),
    )
)


class Place(NamedTuple):
    """A point in the file, counted from 1."""

    line: int
    column: int


class Problem(NamedTuple):
    """One thing that is wrong with the file."""

    place: Place
    loc: Loc
    text: str


@dataclass
class Document:
    """
    Holds a file's data and where each piece of it stands.

    Attributes:
        path: The file, as the user named it.
        folder: What relative paths are relative to; absolute.
        lines: The text of the file.
        keys: Places of mapping keys and list items.
        values: Places of values.
        secrets: Where something was interpolated, never to be shown; as written.
        hidden: All that was interpolated, and the reference that stands for it.
        broken: Locations already reported, whose value means nothing.

    """

    path: Path
    folder: Path
    lines: list[str] = field(default_factory=list, repr=False)
    data: dict[str, Value] = field(default_factory=dict, repr=False)
    keys: dict[Loc, Place] = field(default_factory=dict)
    values: dict[Loc, Place] = field(default_factory=dict)
    secrets: dict[Loc, str] = field(default_factory=dict)
    hidden: dict[str, str] = field(default_factory=dict, repr=False)
    broken: set[Loc] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)

    def complain(self, loc: Loc, text: str, *, at_key: bool = False) -> None:
        """
        Note a problem, unless the value at ``loc`` has been reported already.

        What is not in the file stands where the nearest thing around it stands.
        """
        if loc not in self.broken:
            places = self.keys if at_key else self.values
            place = places.get(loc) or self._nearest(loc)
            self.problems.append(Problem(place, loc, text))

    def secret(self, loc: Loc) -> bool:
        """Whether anything at ``loc`` or below was interpolated: not to be shown."""
        return any(at[: len(loc)] == loc for at in self.secrets)

    def written(self, loc: Loc) -> list[str]:
        """Return the texts of the list at ``loc`` as they were before interpolation."""
        found: Value = self.data
        for step in loc:
            found = found[step]  # type: ignore[index]
        assert isinstance(found, list)
        return [self.secrets.get((*loc, i), str(t)) for i, t in enumerate(found)]

    def check(self) -> None:
        """
        Assert that there are no problems.

        Raises:
            ConfigError: If there are; one line for each, in the order of the file.

        """
        if self.problems:
            ordered = sorted(set(self.problems), key=lambda p: (p.place, str(p.loc)))
            raise ConfigError(
                [self._line(problem) for problem in ordered],
                [_excerpt(self.lines, problem.place) for problem in ordered],
            )

    def _line(self, problem: Problem) -> str:
        place, loc, text = problem
        where = f"{dotted(loc)}: " if loc else ""
        return f"{self.path}:{place.line}:{place.column}: {where}{text}"

    def _nearest(self, loc: Loc) -> Place:
        while loc:
            if loc in self.keys:
                return self.keys[loc]
            loc = loc[:-1]
        return Place(1, 1)


def read(path: Path) -> Document:
    """
    Read a pipeline file.

    Problems with single values are in the document; see :meth:`Document.check`.

    Args:
        path: The file; relative paths in it are relative to its folder.

    Raises:
        ConfigError: If there is no such file, or it is not a YAML mapping.

    """
    text = _text(path)
    node = _compose(path, text)
    if node is None:
        raise ConfigError(f"{path}: is empty, expected a pipeline")
    folder = path.absolute().parent
    document = Document(path, folder, text.splitlines())
    reader = _Reader(document, Interpolator(folder))
    if not isinstance(node, MappingNode):
        place, kind = _place(node), KINDS[type(node)]
        text = f"expected a mapping of keys such as name, extract and load, got {kind}"
        at = f"{path}:{place.line}:{place.column}"
        raise ConfigError(f"{at}: {text}", [_excerpt(document.lines, place)])
    document.data = reader.mapping(node, ())
    return document


KINDS: Final[dict[type[Node], str]] = {
    ScalarNode: "a single value",
    SequenceNode: "a list",
    MappingNode: "a mapping",
}


def _text(path: Path) -> str:
    try:
        raw = read_file(path, MAX_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        inside = path / "pipeline.yaml"
        hint = f" (did you mean {inside}?)" if inside.is_file() else ""
        raise ConfigError(
            f"{path}: is a directory, expected a pipeline file{hint}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path}: can't be read: {(error.strerror or str(error)).lower()}"
        ) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(
            f"{path}: is too big for a pipeline file, expected no more than"
            f" {MAX_BYTES} bytes"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text at byte {error.start}") from None


def _compose(path: Path, text: str) -> Node | None:
    # Not the round-trip loader: it marks the folds of ">" texts with BEL characters.
    yaml = YAML(typ="safe", pure=True)
    # The second of two equal anchors wins, as YAML says; no warning on stderr.
    yaml.composer.warn_double_anchors = False
    try:
        node: Node | None = yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        said = ", ".join(t for t in (error.context, error.problem) if t)
        place = Place(mark.line + 1, mark.column + 1) if mark else Place(0, 0)
        excerpt = _excerpt(text.splitlines(), place)
        if "flow" in said and excerpt and "${" in excerpt.line:
            said += " (inside [] and {}, ${...} needs quotes around it)"
        raise ConfigError(f"{path}{at}: is not YAML: {said}", [excerpt]) from None
    except YAMLError as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{path}: is not YAML: {said}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply") from None
    return node


def _excerpt(lines: list[str], place: Place) -> Excerpt | None:
    if not 0 < place.line <= len(lines):
        return None
    return Excerpt(lines[place.line - 1], place.line, place.column)


def _place(node: Node) -> Place:
    return Place(node.start_mark.line + 1, node.start_mark.column + 1)


class _Reader:
    """Turns nodes into data and writes down their places."""

    def __init__(self, document: Document, interpolator: Interpolator) -> None:
        self._document = document
        self._interpolator = interpolator
        self._nodes = 0

    def mapping(self, node: MappingNode, loc: Loc) -> dict[str, Value]:
        data: dict[str, Value] = {}
        for key, value in self._pairs(node, loc):
            data[key] = self._value(value, (*loc, key))
        return data

    def _pairs(self, node: MappingNode, loc: Loc) -> Iterator[tuple[str, Node]]:
        keys = self._document.keys
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                self._refuse(key, loc, f"a key can't be {KINDS[type(key)]}")
                continue
            here = (*loc, key.value)
            if here in keys:
                first = keys[here].line
                text = f"duplicate key, first written in line {first}"
                problem = Problem(_place(key), here, text)
                self._document.problems.append(problem)
                continue
            keys[here] = _place(key)
            yield key.value, value

    def _value(self, node: Node, loc: Loc) -> Value:
        document = self._document
        document.values[loc] = _place(node)
        self._nodes += 1
        if self._nodes > MAX_NODES or len(loc) > MAX_DEPTH:
            raise ConfigError(
                f"{document.path}: holds more than {MAX_NODES} values, or more than"
                f" {MAX_DEPTH} levels, once its aliases are written out"
            )
        if node.tag not in TAGS:
            self._refuse(node, loc, f"tag {node.tag} is not supported")
            return None
        if isinstance(node, MappingNode):
            return self.mapping(node, loc)
        if isinstance(node, SequenceNode):
            return [self._item(item, (*loc, i)) for i, item in enumerate(node.value)]
        if isinstance(node, ScalarNode):
            return self._scalar(node, loc)
        raise AssertionError(f"unreachable: a node of type {type(node)}")

    def _item(self, node: Node, loc: Loc) -> Value:
        self._document.keys[loc] = _place(node)
        return self._value(node, loc)

    def _scalar(self, node: ScalarNode, loc: Loc) -> Value:
        document = self._document
        if node.tag == "tag:yaml.org,2002:null":
            if not node.value:
                # A forgotten value's own place is that of whatever comes next.
                document.complain(loc, "has no value", at_key=True)
                document.broken.add(loc)
            return None
        text: str = node.value
        try:
            value = self._interpolator.expand(text)
        except ConfigError as error:
            self._refuse(node, loc, str(error))
            return text
        if value.found:
            document.secrets[loc] = text
            document.hidden.update(value.found)
        return value.text

    def _refuse(self, node: Node, loc: Loc, text: str) -> None:
        self._document.problems.append(Problem(_place(node), loc, text))
        self._document.broken.add(loc)
