"""
Read the text of a pipeline file as data.

Other files and single values may be laid over it: mappings are merged, lists of named
items are merged by name, and of anything else the last value wins. A replaced value is
discarded together with its errors. This module knows YAML, and about pipelines only
where they hold a JSON Schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, StringMark
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from etlstage.config.document import (
    Document,
    FilePlace,
    LocatedProblem,
    SourceText,
    Value,
    excerpt,
)
from etlstage.config.interpolation import Interpolator, read_file
from etlstage.errors import ConfigError, guess, os_reason
from etlstage.messages import counted
from etlstage.settings.problem import Loc, dotted

__all__ = ("UNCHANGED", "Changes", "read", "set_values")

MAX_BYTES: Final = 256 * 1024
"""ruamel.yaml takes about four seconds per megabyte."""
MAX_NODES: Final = 50_000
"""Bounds a small file whose aliases of aliases expand to a huge one."""
MAX_TEXT: Final = 4 * MAX_BYTES
"""Characters; aliases of a long text count each time."""
MAX_DEPTH: Final = 50

_PAIR: Final = re.compile("[\ud800-\udbff][\udc00-\udfff]")
"""A character as JSON escapes it, which YAML reads as two."""
SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""Quoted escapes can produce one, which can't be encoded in a name or in output."""

MERGE: Final = "tag:yaml.org,2002:merge"

SCHEMA: Final = ("expect", "schema")
"""The keys of an inline JSON Schema, whose scalars have the types of JSON."""
TYPED: Final = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("int", "float", "bool", "null")
)
"""The tags of scalars that are not text in JSON."""
YAML_TYPES: Final = YAML(typ="safe", pure=True)
"""Recognizes and converts such scalars."""

TAGS: Final = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in (
        *("str", "int", "float", "bool", "null", "timestamp", "merge", "value"),
        *("map", "seq"),
    )
)


class Changes(NamedTuple):
    """What is laid over a pipeline file."""

    overlays: Sequence[Path] = ()
    """Files, in the order in which they are laid over."""
    values: Sequence[str] = ()
    """Single values over the files, each as in ``transform[0].workers=4``."""
    warn: Callable[[str], object] = str
    """Called with a warning for a list that loses items."""


UNCHANGED: Final = Changes()


def read(path: Path, changes: Changes = UNCHANGED) -> Document:
    """
    Read a pipeline file.

    Problems with single values are in the document; see :meth:`Document.check`.

    Args:
        path: The file; relative paths are relative to its folder.
        changes: What is laid over it.

    Raises:
        ConfigError: If there is no such file, or it is not a YAML mapping.

    """
    folder = path.absolute().parent
    document = Document(path, folder)
    reader = _Reader(document, Interpolator(folder), changes.warn)
    for file in (path, *changes.overlays):
        text = _text(file)
        node = _compose(str(file), text)
        if node is None:
            raise ConfigError(f"{file}: is empty, expected a pipeline")
        document.sources.append(SourceText(str(file), text.splitlines()))
        if isinstance(node, MappingNode):
            reader.add(node)
        else:
            why = "expected a mapping of keys such as name, extract and load"
            why = f"{why}, got {KINDS[type(node)]}"
            document.problems = [LocatedProblem(reader.place(node), (), why)]
            document.check()
    for change in changes.values:
        # Without "=" the text may be a lone value, such as a password: do not show it.
        place, found, _ = change.partition("=")
        document.sources.append(SourceText(f"--set {place}" if found else "--set"))
        try:
            _set(document, reader, change)
        except ConfigError as error:
            at = FilePlace(1, 1, len(document.sources) - 1)
            document.problems.append(LocatedProblem(at, (), str(error)))
    return document


def set_values(data: dict[str, Any], values: Sequence[str]) -> Document:
    """
    Set single values in data that does not come from a file; return where they are.

    Args:
        data: A mapping like that of a file.
        values: Each as in ``timeout.message=10s``.

    Raises:
        ConfigError: If a value has another form, or no place in the data.

    """
    folder = Path.cwd()
    document = Document(folder, folder)
    document.data = data
    reader = _Reader(document, Interpolator(folder), str)
    for change in values:
        key = change.partition("=")[0]
        document.sources.append(SourceText(f"--set {key}"))
        try:
            _set(document, reader, change)
        except ConfigError as error:
            raise ConfigError(f"--set {key}: {error}") from None
    document.check()
    return document


STEP: Final = re.compile(
    r"""\[(?P<index>[0-9]{1,9})\] | \[(?P<quote>['"]?)(?P<quoted>[^]'"]+)(?P=quote)\]
    | (?:^|\.)(?P<key>[^].['"]+)""",
    re.VERBOSE,
)
"""One step of a place: an index, or a key, in brackets if it contains dots."""


def _set(document: Document, reader: _Reader, change: str) -> None:
    """Lay a single value over what was read; raises ConfigError if it has no place."""
    place, found, text = change.partition("=")
    steps = list(STEP.finditer(place))
    if not found or "".join(step[0] for step in steps) != place or not steps:
        raise ConfigError("expected a place and a value such as transform[0].workers=4")
    wanted: Loc = tuple(
        int(step["index"]) if step["index"] else step["quoted"] or step["key"]
        for step in steps
    )
    node, loc = _node_of(text), ()  # type: tuple[Node, Loc]
    at: Any = document.data
    for n, name in enumerate(wanted):
        step = _step(at, name, loc)
        loc = (*loc, step)
        if n == len(wanted) - 1:
            break
        if step not in at and isinstance(step, str):
            if isinstance(wanted[n + 1], int):
                raise ConfigError(f"there is no {dotted(loc)}{guess(step, at)}")
            document.keys[loc] = reader.place(node)
            at[step] = {}
        at = at[step]
    document.keys[loc] = reader.place(node)
    at[loc[-1]] = reader.value(node, loc)
    document.forget({loc})


def _step(at: Value, step: str | int, loc: Loc) -> str | int:
    """Return the key or index in ``at`` for a step; raises ConfigError if none."""
    where = dotted(loc) or "the file"
    if isinstance(at, dict) and isinstance(step, str):
        return step
    if isinstance(at, list) and isinstance(step, int):
        if step >= len(at):
            raise ConfigError(f"{where} has {counted(len(at), 'item')}, counted from 0")
        return step
    if isinstance(at, list):
        names = [item.get("name") if isinstance(item, dict) else None for item in at]
        if step in names:
            return names.index(step)
        close = guess(str(step), [name for name in names if isinstance(name, str)])
        text = f"{where} has no item named {step!r}{close}"
        raise ConfigError(text if close else f"{text}; write {where}[0]")
    kind = "a mapping" if isinstance(at, dict) else "a single value"
    raise ConfigError(f"{where} is {kind}")


def _node_of(text: str) -> Node:
    """Return a text as a node: parsed if it looks like YAML, else a string."""
    if text.startswith(("[", "{", '"', "'")) or text == "null":
        node = _compose("the value", text)
        assert node is not None
        return node
    mark = StringMark("", 0, 0, 0, text, 0)
    return ScalarNode("tag:yaml.org,2002:str", text, mark, mark)


KINDS: Final[dict[type[Node], str]] = {
    ScalarNode: "a single value",
    SequenceNode: "a list",
    MappingNode: "a mapping",
}


def _text(path: Path) -> str:
    try:
        raw = read_file(path, MAX_BYTES)
    except FileNotFoundError:
        folder = path.parent
        names = [name.name for name in folder.iterdir()] if folder.is_dir() else []
        close = guess(path.name, names)
        raise ConfigError(f"{path}: no such file{close}") from None
    except IsADirectoryError:
        inside = path / "pipeline.yaml"
        hint = f" (did you mean {inside}?)" if inside.is_file() else ""
        raise ConfigError(
            f"{path}: is a directory, expected a pipeline file{hint}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {os_reason(error)}") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(
            f"{path}: is too big for a pipeline file, expected no more than"
            f" {MAX_BYTES} bytes"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text at byte {error.start}") from None


class _Composer(Composer):
    """Composes texts in which a character may be escaped as in JSON."""

    def compose_scalar_node(self, anchor: object) -> Node:
        node: Node = super().compose_scalar_node(anchor)
        if not node.value.isascii():
            node.value = _PAIR.sub(_joined, node.value)
        return node


def _joined(pair: re.Match[str]) -> str:
    return pair[0].encode("utf-16", "surrogatepass").decode("utf-16")


def _compose(name: str, text: str) -> Node | None:
    # Not the round-trip loader: it marks the folds of ">" texts with BEL characters.
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _Composer
    # The second of two equal anchors wins, as in YAML; no warning on stderr.
    yaml.composer.warn_double_anchors = False
    try:
        node: Node | None = yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        why = ", ".join(t for t in (error.context, error.problem) if t)
        place = FilePlace(mark.line + 1, mark.column + 1) if mark else FilePlace(0, 0)
        shown = excerpt(text.splitlines(), place)
        if "flow" in why and shown and "${" in shown.line:
            why += " (inside [] and {}, ${...} needs quotes around it)"
        raise ConfigError(f"{name}{at}: is not YAML: {why}", [shown]) from None
    except ReaderError as error:
        lines = text[: error.position + 1].splitlines(keepends=True)
        place = FilePlace(len(lines), len(lines[-1]))
        raise ConfigError(
            f"{name}:{place.line}:{place.column}: is not YAML: unacceptable character"
            f" #x{error.character:04x}: {error.reason}",
            [excerpt(text.splitlines(), place)],
        ) from None
    except RecursionError:
        raise ConfigError(f"{name}: is nested too deeply") from None
    return node


class _Reader:
    """Turns nodes into data and records their places."""

    def __init__(
        self,
        document: Document,
        interpolator: Interpolator,
        warn: Callable[[str], object],
    ) -> None:
        self._document = document
        self._interpolator = interpolator
        self._warn = warn
        self._nodes = self._text = 0
        self._replaced: set[Loc] = set()

    def place(self, node: Node) -> FilePlace:
        mark, source = node.start_mark, len(self._document.sources) - 1
        return FilePlace(mark.line + 1, mark.column + 1, source)

    def add(self, node: MappingNode) -> None:
        """Lay a file over what was read."""
        self.lay(self._document.data, node, ())
        self._document.forget(self._replaced)
        self._replaced = set()

    def lay(self, data: dict[str, Value], node: MappingNode, loc: Loc) -> None:
        """Merge a mapping node into existing data."""
        document = self._document
        for key, value in self._pairs(node, loc):
            here, below = (*loc, key.value), data.get(key.value)
            if isinstance(below, dict) and isinstance(value, MappingNode):
                self.lay(below, value, here)
                continue
            if isinstance(below, list) and isinstance(value, SequenceNode):
                if self._lay_by_name(below, value, here):
                    continue
                self._tell_dropped(below, value, here)
            if key.value in data:
                self._replaced.add(here)
            document.keys[here] = self.place(key)
            data[key.value] = self.value(value, here)

    def _lay_by_name(self, below: list[Value], node: SequenceNode, loc: Loc) -> bool:
        """Merge list items by name, adding new ones; return False if they can't be."""
        names = [self._name_of(item) for item in node.value]
        known = {
            item.get("name"): i
            for i, item in enumerate(below)
            if isinstance(item, dict)
        }
        if None in names or len({*names}) < len(names) or not known.keys() & {*names}:
            return False
        for name, item in zip(names, node.value, strict=True):
            if name in known:
                at = known[name]
                self.lay(below[at], item, (*loc, at))  # type: ignore[arg-type]
            else:
                below.append(self._item(item, (*loc, len(below))))
        return True

    def _name_of(self, node: Node) -> str | None:
        """Return a mapping's own ``name``, interpolated if possible; None: it has none."""
        for key, value in node.value if isinstance(node, MappingNode) else ():
            if getattr(key, "value", None) == "name" and isinstance(value, ScalarNode):
                with suppress(ConfigError):  # reported when the item is read
                    return self._interpolator.expand(value.value).text
                return str(value.value)
        return None

    def _tell_dropped(self, below: list[Value], node: SequenceNode, loc: Loc) -> None:
        kept = {self._name_of(item) for item in node.value}
        names = [
            str(item.get("name", "an item without a name"))
            for item in below
            if isinstance(item, dict)
        ]
        if dropped := [name for name in names if name not in kept]:
            place = self.place(node)
            source = self._document.sources[place.source].name
            self._warn(
                f"{source}:{place.line}:{place.column}: {dotted(loc)}: replaces the whole"
                f" list, dropping {', '.join(dropped)}; lists are merged by name if all"
                " items have names and at least one of the names exists already"
            )

    def _pairs(
        self, node: MappingNode, loc: Loc, depth: int = 0
    ) -> Iterator[tuple[ScalarNode, Node]]:
        if depth > MAX_DEPTH:
            raise self._too_much()
        seen: dict[str, int] = {}
        merged: list[Node] = []
        for key, value in node.value:
            self._count(key)
            if not isinstance(key, ScalarNode):
                self._refuse(key, loc, f"a key can't be {KINDS[type(key)]}")
                continue
            place = self.place(key)
            if not key.value.isascii() and SURROGATE.search(key.value):
                self._refuse(key, loc, "a key contains a lone surrogate")
                continue
            if key.value in seen:
                text = f"duplicate key, first written on line {seen[key.value]}"
                problem = LocatedProblem(place, (*loc, key.value), text)
                self._document.problems.append(problem)
                continue
            seen[key.value] = place.line
            if key.tag == MERGE:
                merged += value.value if isinstance(value, SequenceNode) else [value]
            elif loc or not key.value.startswith("x-"):
                yield key, value
        # Keys beside << win over merged ones, and an earlier mapping over a later one.
        for other in merged:
            if not isinstance(other, MappingNode):
                text = "<< takes a mapping, as in *name, or a list of them"
                self._refuse(other, loc, text)
                continue
            for key, value in self._pairs(other, loc, depth + 1):
                if key.value not in seen:
                    seen[key.value] = self.place(key).line
                    yield key, value

    def value(self, node: Node, loc: Loc) -> Value:
        document = self._document
        document.values[loc] = self.place(node)
        document.secrets.pop(loc, None)
        document.broken.discard(loc)
        self._count(node)
        if len(loc) > MAX_DEPTH:
            raise self._too_much()
        if node.tag not in TAGS:
            self._refuse(node, loc, f"tag {node.tag} is not supported")
            return None
        if isinstance(node, MappingNode):
            data: dict[str, Value] = {}
            self.lay(data, node, loc)
            return data
        if isinstance(node, SequenceNode):
            return [self._item(item, (*loc, i)) for i, item in enumerate(node.value)]
        if isinstance(node, ScalarNode):
            return self._scalar(node, loc)
        raise AssertionError(f"unreachable: a node of type {type(node)}")

    def _count(self, node: Node) -> None:
        """Count a node; raises ConfigError if there is too much to read quickly."""
        self._nodes += 1
        if isinstance(node, ScalarNode):
            self._text += len(node.value)
        if self._nodes > MAX_NODES or self._text > MAX_TEXT:
            raise self._too_much()

    def _too_much(self) -> ConfigError:
        return ConfigError(
            f"{self._document.sources[-1].name}: holds more than {MAX_NODES} keys and"
            f" values, {MAX_TEXT} characters or {MAX_DEPTH} levels, once its aliases"
            " are written out"
        )

    def _item(self, node: Node, loc: Loc) -> Value:
        self._document.keys[loc] = self.place(node)
        return self.value(node, loc)

    def _scalar(self, node: ScalarNode, loc: Loc) -> Value:
        document = self._document
        if node.tag == "tag:yaml.org,2002:null":
            if not node.value:
                # An omitted value has the place of the next token: use the key's.
                document.complain(loc, "has no value", at_key=True)
                document.broken.add(loc)
            return None
        text: str = node.value
        if not text.isascii() and SURROGATE.search(text):
            self._refuse(node, loc, "is not text: it contains a lone surrogate")
            return ""
        try:
            value = self._interpolator.expand(text)
        except ConfigError as error:
            self._refuse(node, loc, str(error))
            return text
        if value.found:
            document.secrets[loc] = text
            document.hidden.update(value.found)
        if not any(loc[i : i + 2] == SCHEMA for i in range(len(loc) - 2)):
            return value.text
        tag = node.tag
        set_apart = not document.sources[-1].lines
        if not node.style and (value.found or set_apart):
            plain = True, False
            tag = str(YAML_TYPES.resolver.resolve(ScalarNode, value.text, plain))
        if tag not in TYPED or not value.text:
            return value.text
        return self._typed(ScalarNode(tag, value.text, node.start_mark), loc)

    def _typed(self, node: ScalarNode, loc: Loc) -> Value:
        """Return the number, the boolean or the null of a JSON Schema."""
        try:
            found: float | None = YAML_TYPES.constructor.construct_object(node)
            json.dumps(found, allow_nan=False)
        except (ValueError, KeyError):  # or too many digits
            self._refuse(node, loc, "is not a value of JSON; quote it if it is text")
            return None
        return found

    def _refuse(self, node: Node, loc: Loc, text: str) -> None:
        self._document.problems.append(LocatedProblem(self.place(node), loc, text))
        self._document.broken.add(loc)
