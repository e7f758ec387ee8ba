"""
The five markers, and how they are written down.

A marker may be any bytes, NUL among them, but neither an environment variable nor
an argument can hold NUL: there it is text, with backslash escapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Final, NamedTuple, Self

from etlstage.errors import ConfigError

__all__ = ("MARKER_NAMES", "Markers", "escape", "unescape")

MARKER_NAMES: Final = ("eom", "eop", "eob", "bnc", "err")
"""End of message, end of process, end of batch, batch not complete, error."""

_SIMPLE = {"n": 10, "r": 13, "t": 9, "a": 7, "b": 8, "f": 12, "v": 11}
_OCTAL = "01234567"
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")


class _Fields(NamedTuple):
    eom: bytes
    eop: bytes
    eob: bytes
    bnc: bytes
    err: bytes | None


class Markers(_Fields):
    """
    The markers of one session.

    The protocol's source names no default values; these are what the stages written
    for it use. ``eop == eom`` means that each message has exactly one reply.
    ERR is an addition of etlstage: it ends a refusal, in place of EOP. If it is None,
    no worker can refuse, and the byte is ordinary data.

    Raises:
        ConfigError: If a marker is empty, or a boundary could be read in two ways.

    """

    __slots__ = ()

    def __new__(
        cls,
        eom: bytes = b"\n",
        eop: bytes = b"\0",
        eob: bytes = b"\x17",
        bnc: bytes = b"\x05",
        err: bytes | None = b"\x15",
    ) -> Self:
        """Check the combination, which a named tuple can't do in ``__init__``."""
        self = super().__new__(cls, eom, eop, eob, bnc, err)
        for problem in _problems(self):
            raise ConfigError(problem)
        return self

    @property
    def named(self) -> dict[str, bytes]:
        """The markers that are defined, by name."""
        named = zip(MARKER_NAMES, self, strict=True)
        return {name: value for name, value in named if value is not None}

    @property
    def eob_is_apart(self) -> bool:
        """Whether no marker overlaps EOB, so that replies can be searched for it."""
        eob = self.eob
        return not any(
            x in eob or eob in x or _overlap(x, eob) or _overlap(eob, x)
            for name, x in self.named.items()
            if name != "eob"
        )

    def without_err(self) -> Markers:
        """Return these markers without ERR: a worker can't refuse."""
        return self._replace(err=None)

    def environment(self) -> dict[str, str]:
        """Return the environment variables that pass a worker its markers."""
        named = self.named.items()
        return {f"ETLSTAGE_{name.upper()}": escape(value) for name, value in named}

    def to_text(self) -> dict[str, str | None]:
        """Return escaped texts by name, which :meth:`from_text` reads."""
        return dict.fromkeys(MARKER_NAMES) | {
            name: escape(value) for name, value in self.named.items()
        }

    def shown(self, data: bytes) -> str:
        """Return ``data`` as printable ASCII, with the markers by name: ``a<EOM>``."""
        # Long ones first: a marker may begin like one of the other direction.
        named = [(n, m) for n, m in zip(MARKER_NAMES, self, strict=True) if m]
        found = sorted(named, key=lambda item: -len(item[1]))
        text, at = "", 0
        while at < len(data):
            for name, marker in found:
                if data.startswith(marker, at):
                    text += f"<{name.upper()}>"
                    at += len(marker)
                    break
            else:
                text += escape(data[at : at + 1])
                at += 1
        return text

    def unsolicited(self, data: bytes) -> str:
        """Return the error for a worker that wrote ``data`` when no reply was due."""
        replies = data.count(self.eop) + (data.count(self.err) if self.err else 0)
        if replies:
            many = "1 reply" if replies == 1 else f"{replies} replies"
            return f"wrote {many} too many: {self.shown(data)}"
        return (
            f"wrote unsolicited output: {self.shown(data)};"
            " diagnostics belong on stderr"
        )

    @classmethod
    def from_text(cls, **texts: str | None) -> Markers:
        """
        Build from escaped texts by name; a marker that is left out has its default.

        Raises:
            ConfigError: If an escape can't be read, or the combination is refused.

        """
        given = {n: unescape(text) for n, text in texts.items() if text is not None}
        if texts.get("err", "") is None:
            return cls(err=None, **given)
        return cls(**given)


def _problems(markers: Markers) -> Iterator[str]:
    named = markers.named
    for name, value in named.items():
        if not value:
            yield f"marker {name} is empty, expected at least one byte"
    for (a, x), (b, y) in combinations(named.items(), 2):
        if x == y and (a, b) != ("eom", "eop"):
            yield f"markers {a} and {b} are both '{escape(x)}', expected them to differ"
    # Only markers of one direction can be mistaken for each other. To the worker
    # go EOM and EOB; from it come EOM, EOP, BNC and ERR.
    answering = (name for name in named if name != "eob")
    for a, b in ("eom", "eob"), *combinations(answering, 2):
        x, y = named[a], named[b]
        if x != y and (x in y or y in x):
            inner, outer = (a, b) if x in y else (b, a)
            yield (
                f"marker {inner} '{escape(named[inner])}' is a part of {outer}"
                f" '{escape(named[outer])}': a boundary could be read in two ways"
            )
        for first, second in ((a, b), (b, a)):
            if x != y and _overlap(named[first], named[second]):
                yield (
                    f"marker {first} '{escape(named[first])}' ends as {second}"
                    f" '{escape(named[second])}' begins:"
                    " a boundary could be read in two ways"
                )


def _overlap(first: bytes, second: bytes) -> bool:
    shorter = min(len(first), len(second))
    return any(first.endswith(second[:n]) for n in range(1, shorter))


def escape(value: bytes) -> str:
    r"""
    Return ``value`` as printable ASCII, with other bytes as ``\ooo``.

    Octal, because ``printf`` of a POSIX shell, awk, C, PHP and Python all understand
    it; ``\x00`` is unknown to the first.
    """
    return "".join(
        chr(byte) if 32 <= byte < 127 and byte != 92 else f"\\{byte:03o}"
        for byte in value
    )


def unescape(text: str) -> bytes:
    r"""
    Return the bytes that ``text`` stands for; characters beyond ASCII become UTF-8.

    Escapes are ``\n \r \t \a \b \f \v \\``, ``\0`` to ``\377``, ``\xHH``, ``\uHHHH``.

    Raises:
        ConfigError: If a backslash begins none of these, or for a lone surrogate.

    """
    out = bytearray()
    at = 0
    while at < len(text):
        try:
            if text[at] == "\\":
                value, at = _unescape_one(text, at + 1)
            else:
                value, at = text[at].encode("utf-8", "surrogateescape"), at + 1
        except (ValueError, IndexError):
            raise ConfigError(
                f"can't read the escape {text[at : at + 4]!r} of {text!r},"
                r" expected \n, \r, \t, \\, \0 to \377, \xHH or \uHHHH"
            ) from None
        out += value
    return bytes(out)


def _unescape_one(text: str, at: int) -> tuple[bytes, int]:
    kind = text[at]
    if kind == "\\":
        return b"\\", at + 1
    if kind in _SIMPLE:
        return bytes([_SIMPLE[kind]]), at + 1
    if kind in _OCTAL:
        end = at + 1
        while end < min(len(text), at + 3) and text[end] in _OCTAL:
            end += 1
        return bytes([int(text[at:end], 8)]), end
    width = {"x": 2, "u": 4}[kind] if kind in "xu" else 0
    digits = text[at + 1 : at + 1 + width]
    # int() alone would read "+f" and " f" too.
    if len(digits) != width or not _HEXADECIMAL.issuperset(digits):
        raise ValueError(digits)
    code = int(digits, 16)
    value = bytes([code]) if kind == "x" else chr(code).encode()
    return value, at + 1 + width
