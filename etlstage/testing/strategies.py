"""
Hypothesis strategies for messages, markers, stages, pipelines and faults.

They need the extra ``testing``. Examples shrink towards empty messages or ``b"x"``, a
stream in one piece, and the default markers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, reduce
from typing import Any, Final

from hypothesis import strategies as st

from etlstage.errors import ConfigError
from etlstage.pipeline import Pipeline
from etlstage.protocol.marker import Markers, Mode, escape
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, Order, ReplyContract, Stage
from etlstage.stage.contract import Checker
from etlstage.testing.ends import MemorySink, MemorySource
from etlstage.testing.fault import Fault, FaultKind, FaultPlan, Moment
from etlstage.testing.transcript import cut

__all__ = (
    "DEADLY",
    "HARMLESS",
    "LINE_ENDS",
    "MARKER_SETS",
    "batches",
    "chunkings",
    "cuts",
    "documents",
    "fault_plans",
    "faults",
    "fragments",
    "is_text",
    "json_messages",
    "json_messages_like",
    "markers",
    "messages",
    "messages_like",
    "offsets",
    "pipelines",
    "schema_messages",
    "sendable",
    "sendable_of",
    "stages",
    "text_messages",
)

_TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
_MOST: Final = 4  # items beyond the required ones
_TEXT: Final = st.text(st.characters(codec="utf-8"), max_size=8)
_ANY: Final[st.SearchStrategy[Any]] = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3)
    ),
    max_leaves=5,
)


def documents(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """
    Draw documents that a JSON Schema allows.

    Raises:
        ConfigError: If ``schema`` is not a JSON Schema, has a reference that can't be
            resolved within it, or bounds that allow nothing; or if the package that
            checks schemas is not installed.

    """
    checker = Checker(ReplyContract(schema=schema))
    drawn = _Described(schema).by(schema)
    if drawn.is_empty:
        raise ConfigError("the schema allows no document, expected some to draw")
    return drawn.filter(checker.allows)


class _Described:
    """Builds strategies for the parts of one schema."""

    def __init__(self, whole: Mapping[str, Any]) -> None:
        self._whole = whole
        self._known: dict[str, st.SearchStrategy[Any]] = {}

    def by(self, schema: Any) -> st.SearchStrategy[Any]:  # noqa: ANN401 - any JSON
        """Return the strategy for a part of the schema."""
        if not isinstance(schema, Mapping):
            return _ANY if schema else st.nothing()
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if "$ref" in schema:
            return self._referred(schema["$ref"])
        for key in ("anyOf", "oneOf"):
            if key in schema:
                rest = {k: value for k, value in schema.items() if k != key}
                return st.one_of([self.by(_merged(rest, one)) for one in schema[key]])
        if "allOf" in schema:
            rest = {k: value for k, value in schema.items() if k != "allOf"}
            return self.by(reduce(_merged, schema["allOf"], rest))
        types = schema.get("type", _guessed(schema))
        names = [types] if isinstance(types, str) else types
        return st.one_of([getattr(self, f"_{name}")(schema) for name in names])

    def _referred(self, ref: str) -> st.SearchStrategy[Any]:
        if ref not in self._known:
            at: Any = self._whole
            try:
                assert ref[:1] == "#"
                for step in filter(None, ref[1:].split("/")):
                    at = at[step.replace("~1", "/").replace("~0", "~")]
            except (AssertionError, KeyError, TypeError):
                raise ConfigError(
                    f"the schema refers to {ref}, which is not in it"
                ) from None
            # A schema may refer to itself.
            self._known[ref] = st.deferred(lambda: self.by(at))
        return self._known[ref]

    def _null(self, _: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        return st.none()

    def _boolean(self, _: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        return st.booleans()

    def _integer(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        step = schema.get("multipleOf", 1)
        low, high = _bounds(schema, step, int)
        if _crossed(low, high):
            return st.nothing()
        return st.integers(low, high).map(lambda n: n * step)

    def _number(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        if "multipleOf" in schema:
            return self._integer(schema)
        low, high = _bounds(schema, 1, float)
        if _crossed(low, high):
            return st.nothing()
        return st.floats(low, high, allow_nan=False, allow_infinity=False)

    def _string(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        if "pattern" in schema:
            return st.from_regex(schema["pattern"])
        least = schema.get("minLength", 0)
        most = schema.get("maxLength", least + 8)
        if _crossed(least, most):
            return st.nothing()
        return st.text(st.characters(codec="utf-8"), min_size=least, max_size=most)

    def _array(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        first = [self.by(item) for item in schema.get("prefixItems", ())]
        first = first[: schema.get("maxItems")]
        least = max(0, schema.get("minItems", 0) - len(first))
        most = schema.get("maxItems", len(first) + least + _MOST) - len(first)
        items = self.by(schema.get("items", True))
        if schema.get("items") is False:
            most = 0
        if _crossed(least, most):
            return st.nothing()
        rest = st.lists(items, min_size=least, max_size=most)
        return st.tuples(st.tuples(*first), rest).map(lambda two: [*two[0], *two[1]])

    def _object(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        named = {n: self.by(one) for n, one in schema.get("properties", {}).items()}
        required = set(schema.get("required", ()))
        others = self.by(schema.get("additionalProperties", True))
        must = {name: named.get(name, others) for name in sorted(required)}
        may = {name: one for name, one in named.items() if name not in required}
        fixed = st.fixed_dictionaries(must, optional=may)
        least = max(0, schema.get("minProperties", 0) - len(must))
        more = st.dictionaries(_TEXT, others, min_size=0, max_size=least + 2)
        if schema.get("additionalProperties", True) is False:
            return fixed
        return st.tuples(more, fixed).map(lambda two: {**two[0], **two[1]})


def _guessed(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types that the schema's keywords apply to, or all types."""
    if {"properties", "required", "additionalProperties"} & schema.keys():
        return ("object",)
    if {"items", "prefixItems"} & schema.keys():
        return ("array",)
    return _TYPES


def _merged(first: Any, second: Any) -> Any:  # noqa: ANN401 - any JSON
    """Merge two schemas key by key, an approximation of what ``allOf`` requires."""
    if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
        return second if first is True or isinstance(first, Mapping) else first
    made = {**first, **second}
    if "properties" in first and "properties" in second:
        made["properties"] = {**first["properties"], **second["properties"]}
    if "required" in first and "required" in second:
        made["required"] = [*first["required"], *second["required"]]
    return made


def _bounds(
    schema: Mapping[str, Any], step: float, kind: type[int | float]
) -> tuple[Any, Any]:
    """Return the bounds of a number in multiples of ``step``; None: unbounded."""
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    found = [None if bound is None else bound / step for bound in (low, high)]
    if kind is float:
        return found[0], found[1]
    # Rounded inwards; the schema check filters out an exclusive bound itself.
    low, high = found
    return (
        None if low is None else -int(-low // 1),
        None if high is None else int(high // 1),
    )


def _crossed(low: float | None, high: float | None) -> bool:
    """Return whether bounds allow nothing; None: unbounded."""
    return low is not None and high is not None and low > high


MARKER_SETS: Final = (
    Markers(),
    Markers(eop=b"\n"),
    Markers(b"EOM", b"EOP", b"EOB", b"BNC", b"ERR"),
    Markers(b"\n\n", b"--", b"==", b"..", b"!!"),
    Markers(b"\n\n", b"\n\n", b"==", b"..", b"!!"),
    Markers(b"\n", b"\0", b"EOB", b"BNC", None),
    Markers(b"aab", b"cc", b"xyx", b"ded", b"fgf"),
)
"""Markers of a single byte, of words, of a repeated byte, and markers that end as they
begin; with ``eop == eom`` or not, and with ERR or without."""

HARMLESS: Final = frozenset(
    {
        FaultKind.PAUSE,
        FaultKind.CUT,
        FaultKind.STDERR,
        FaultKind.LEAK,
        FaultKind.IGNORE_SIGTERM,
        FaultKind.GRANDCHILD,
    }
)
"""Kinds that leave every reply correct, given enough time."""

DEADLY: Final = frozenset(
    {
        FaultKind.KILL,
        FaultKind.SEGFAULT,
        FaultKind.ABORT,
        FaultKind.EXIT,
        FaultKind.PARTIAL,
    }
)
"""Kinds that make a worker exit at once, without a reply."""

_SIZES: Final = {
    FaultKind.STDERR: 200_000,
    FaultKind.HUGE: 2_000_000,
    FaultKind.FLOOD: 1000,
    FaultKind.LEAK: 1_000_000,
}
_USUAL: Final = frozenset(kind for kind in FaultKind if not kind.outside)
_POISON: Final = (b"poison",)
LINE_ENDS: Final = (
    *(b"\r", b"\r\n", b"\x0b", b"\x0c", b"\x85", b"\xc2\x85"),
    *(b"\xe2\x80\xa8", b"\xef\xbb\xbf"),
)
"""Bytes at which some line readers end a line; the last one, a byte order mark, begins
a text for some of them."""
_ESCAPES: Final = {b"\\n", b"\\0", b"\\u0000", b"%0A"}


def markers() -> st.SearchStrategy[Markers]:
    """Draw a set of markers; see :data:`MARKER_SETS`."""
    return st.sampled_from(MARKER_SETS)


def fragments(markers: Markers | None = None) -> st.SearchStrategy[bytes]:
    """Draw bytes that trip programs up: parts of markers and characters, escapes."""
    return _fragments(markers or Markers())


# Building and validating a strategy takes longer than drawing from it, and one test
# requests it again for each message.
@cache
def _fragments(markers: Markers) -> st.SearchStrategy[bytes]:
    named = markers.named.values()
    parts = {marker[:n] for marker in named for n in range(1, len(marker))}
    parts |= {marker[n:] for marker in named for n in range(1, len(marker))}
    # Escaped markers: a program may decode them, and then write the marker itself.
    escapes = {escape(marker).encode() for marker in named} | _ESCAPES
    usual = [b"x", b"\x80", b"yy", b"\xc3\xa9", b"\xff", b" ", b'"', b"0"]
    drawn = st.sampled_from(usual) | st.sampled_from(LINE_ENDS)
    drawn |= st.sampled_from(sorted(escapes))
    return drawn | st.sampled_from(sorted(parts)) if parts else drawn


def messages(markers: Markers | None = None) -> st.SearchStrategy[bytes]:
    """
    Draw a message that may be sent, and returned, with these markers.

    It resembles them as much as is allowed: it contains parts of them.
    """
    return _messages(markers or Markers())


@cache
def _messages(markers: Markers) -> st.SearchStrategy[bytes]:
    pieces = fragments(markers) | st.binary(max_size=8)
    return sendable_of(st.lists(pieces, max_size=5).map(b"".join), markers)


def json_messages(markers: Markers | None = None) -> st.SearchStrategy[bytes]:
    """Draw a message that is a JSON document and may be sent with these markers."""
    text = st.text(st.characters(codec="utf-8"), max_size=5)
    finite = st.floats(allow_nan=False, allow_infinity=False)
    simple = st.none() | st.booleans() | st.integers() | finite | text
    document = st.recursive(
        simple,
        lambda inner: (
            st.dictionaries(text, inner, max_size=4) | st.lists(inner, max_size=4)
        ),
        max_leaves=8,
    )
    return sendable_of(st.builds(_written, document, plain=st.booleans()), markers)


def text_messages(markers: Markers | None = None) -> st.SearchStrategy[bytes]:
    """Draw a UTF-8 message, often with characters that some readers end lines at."""
    ends = [end.decode() for end in LINE_ENDS if is_text(end)]
    piece = st.sampled_from(ends) | st.text(st.characters(codec="utf-8"), max_size=8)
    joined = st.lists(piece, max_size=5).map("".join).map(str.encode)
    return sendable_of(joined, markers)


def is_text(message: bytes) -> bool:
    """Return whether a message is UTF-8."""
    try:
        message.decode()
    except UnicodeDecodeError:
        return False
    return True


def schema_messages(
    schema: Mapping[str, Any], markers: Markers | None = None
) -> st.SearchStrategy[bytes]:
    """
    Draw a message that is a JSON document allowed by a JSON Schema.

    Raises:
        ConfigError: As for :func:`documents`.

    """
    drawn = st.builds(_written, documents(schema), plain=st.booleans())
    return sendable_of(drawn, markers)


def sendable_of(
    drawn: st.SearchStrategy[bytes], markers: Markers | None = None
) -> st.SearchStrategy[bytes]:
    """Filter a strategy for messages that may be sent with these markers."""
    return drawn.filter(lambda message: sendable(message, markers or Markers()))


def messages_like(
    sample: Sequence[bytes], markers: Markers | None = None
) -> st.SearchStrategy[bytes]:
    """
    Draw a message of a sample, unchanged or with a few changes.

    Args:
        sample: Messages to start from; those that these markers forbid are ignored.
        markers: The markers of the stage.

    """
    markers = markers or Markers()
    known = [message for message in sample if sendable(message, markers)]
    if not known:
        return messages(markers)
    one = st.sampled_from(known)
    put = st.just(b"") | fragments(markers) | st.binary(max_size=4) | one
    # Position, number of bytes removed, and their replacement.
    change = st.tuples(st.integers(0, max(map(len, known))), st.integers(0, 4), put)
    changed = st.builds(_changed, one, st.lists(change, min_size=1, max_size=3))
    return one | sendable_of(changed, markers)


def json_messages_like(
    sample: Sequence[bytes], markers: Markers | None = None
) -> st.SearchStrategy[bytes]:
    """
    Draw a JSON document of a sample, unchanged or with one of its parts replaced.

    Args:
        sample: Messages to start from; those that these markers forbid are ignored.
        markers: The markers of the stage.

    """
    markers = markers or Markers()
    known = [message for message in sample if sendable(message, markers)]
    others = json_messages(markers)
    if not known:
        return others
    one = st.sampled_from(known)
    changed = st.builds(
        _replaced, one.map(json.loads), st.integers(0, 50), others.map(json.loads)
    ).map(lambda document: _written(document, plain=True))
    return one | sendable_of(changed, markers)


def batches(
    markers: Markers | None = None, *, max_size: int = 5
) -> st.SearchStrategy[list[bytes]]:
    """Draw the messages of one batch, which may be empty."""
    return st.lists(messages(markers), max_size=max_size)


def cuts(length: int) -> st.SearchStrategy[Collection[int]]:
    """Draw the positions at which ``length`` bytes are cut: none, some or all."""
    return _cuts(length)


@lru_cache(1000)
def _cuts(length: int) -> st.SearchStrategy[Collection[int]]:
    if length < 2:
        return st.just(())
    place = st.integers(1, length - 1)
    one = place.map(lambda at: (at,))
    some = st.lists(place, max_size=4, unique=True).map(lambda at: tuple(sorted(at)))
    every = st.integers(1, 5).map(lambda step: range(step, length, step))
    return st.just(()) | one | some | every


def chunkings(data: bytes) -> st.SearchStrategy[list[bytes]]:
    """Draw the pieces in which ``data`` may be read."""
    return cuts(len(data)).map(lambda at: [*cut(data, at)] if data else [])


def offsets(max_value: int = 1000) -> st.SearchStrategy[tuple[int, int]]:
    """Draw the start and the end of a range of offsets, which may be empty."""
    ends = st.tuples(st.integers(0, max_value), st.integers(0, max_value))
    return ends.map(lambda pair: (min(pair), max(pair)))


def stages(
    command: Sequence[str] | Callable[[Mode], Sequence[str]],
    *,
    modes: Sequence[Mode] = (Mode.SINGLE, Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER),
    speaking: st.SearchStrategy[Markers] | None = None,
    **settings: object,
) -> st.SearchStrategy[Stage]:
    """
    Draw a transform stage with drawn settings: workers, window, order and batches.

    Args:
        command: The workers' command, or a function that returns it for a mode.
        modes: The modes that may be drawn.
        speaking: Draws the markers; by default :func:`markers`.
        settings: Settings of :class:`~etlstage.Stage` that are fixed, not drawn.

    """

    def build(mode: Mode, chosen: Markers, **drawn: object) -> Stage:
        words = command(mode) if callable(command) else command
        dialect = MarkerDialect(mode=mode, markers=chosen)
        given = {"name": "t", "dialect": dialect, **drawn, **settings}
        return Stage(worker=words, **given)  # type: ignore[arg-type]

    return st.builds(
        build,
        st.sampled_from(modes),
        markers() if speaking is None else speaking,
        workers=st.integers(1, 3),
        window=st.none() | st.integers(1, 5),
        order=st.sampled_from([Order.TOTAL, Order.NONE]),
        batch=st.builds(BatchPolicy, size=st.integers(1, 4), seconds=st.just(0.05)),
    )


@st.composite
def pipelines(
    draw: st.DrawFn, *drawn: st.SearchStrategy[Stage], max_messages: int = 20
) -> tuple[Pipeline, list[bytes], MemorySink]:
    """
    Draw a pipeline in memory, not yet run, the messages of its source, and its sink.

    Args:
        draw: Passed by Hypothesis.
        drawn: Strategies for its stages, in order; see :func:`stages`.
        max_messages: Maximum number of messages of the source.

    """
    line = [replace(draw(s), name=f"stage{n}") for n, s in enumerate(drawn, 1)]
    spoken = [stage.dialect.markers for stage in line]  # type: ignore[attr-defined]
    fit = messages(spoken[0] if spoken else None).filter(
        lambda message: all(sendable(message, markers) for markers in spoken)
    )
    runs = st.lists(st.lists(fit, max_size=max_messages // 4), max_size=4)
    source, sink = draw(runs), MemorySink()
    pipeline = Pipeline(name="p", source=MemorySource(source), stages=line, sink=sink)
    return pipeline, [message for run in source for message in run], sink


def faults(
    kinds: Collection[FaultKind] = _USUAL,
    *,
    poison: Sequence[bytes] = _POISON,
) -> st.SearchStrategy[Fault]:
    """
    Draw a fault that happens at some message, or in some start of a worker.

    Args:
        kinds: Those that may be drawn; by default those for workers with pipes.
        poison: Messages for which a fault may be drawn that happens each time.

    Raises:
        ValueError: If there are no kinds.

    """
    if not kinds:
        raise ValueError("kinds is empty")
    when = st.one_of(
        st.fixed_dictionaries({"message": st.integers(1, 20)}),
        st.fixed_dictionaries(
            {"message": st.integers(1, 20), "start": st.integers(1, 3)}
        ),
        st.fixed_dictionaries({"probability": st.sampled_from([0.01, 0.05])}),
        st.fixed_dictionaries({"equals": st.sampled_from(list(poison))}),
    )
    start = st.fixed_dictionaries({"start": st.none() | st.integers(1, 3)})
    # In the order of the class, so they shrink towards its first kinds.
    drawn = [kind for kind in FaultKind if kind in kinds]
    return st.sampled_from(drawn).flatmap(
        lambda kind: st.builds(
            _fault, st.just(kind), start if kind.at is not Moment.MESSAGE else when
        )
    )


def fault_plans(
    kinds: Collection[FaultKind] = _USUAL,
    *,
    poison: Sequence[bytes] = _POISON,
    max_faults: int = 3,
) -> st.SearchStrategy[FaultPlan]:
    """Draw a plan of at most ``max_faults`` faults; see :func:`faults`."""
    some = st.lists(faults(kinds, poison=poison), max_size=max_faults)
    return st.builds(FaultPlan, some.map(tuple), st.integers(0, 2**32 - 1))


def _fault(kind: FaultKind, when: dict[str, Any]) -> Fault:
    return Fault(kind, size=_SIZES.get(kind), **when)


def sendable(message: bytes, markers: Markers) -> bool:
    """Return whether no marker begins within ``message`` when its EOM follows."""
    framed = message + markers.eom
    named = markers.named.values()
    return not any(0 <= framed.find(marker) < len(message) for marker in named)


def _changed(message: bytes, changes: Sequence[tuple[int, int, bytes]]) -> bytes:
    for at, gone, put in changes:
        message = message[:at] + put + message[at + gone :]
    return message


def _replaced(document: Any, number: int, put: object) -> object:  # noqa: ANN401 - JSON
    """Return a document with one of its parts, by number, replaced."""
    if isinstance(document, dict | list) and document:
        whole = document if isinstance(document, dict) else dict(enumerate(document))
        number, key = divmod(number, len(whole) + 1)
        if key < len(whole):
            name = [*whole][key]
            whole = {**whole, name: _replaced(whole[name], number, put)}
            return whole if isinstance(document, dict) else [*whole.values()]
    return put


def _written(document: object, *, plain: bool) -> bytes:
    """Return a document as JSON; ``plain``: as ASCII, as are lone surrogates always."""
    try:
        return json.dumps(document, ensure_ascii=plain).encode()
    except UnicodeEncodeError:
        return _written(document, plain=True)
