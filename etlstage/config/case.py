"""
Tests in a pipeline file: inputs, and the outputs that are expected.

``cli/test.py`` runs them.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

from etlstage.settings.definition import Definition, broken
from etlstage.settings.kind import Kind, ListOf, MapOf, Maybe, Schema, Text
from etlstage.settings.problem import Invalid, Problem, refused, unexpected
from etlstage.settings.units import Duration, Name, Variables
from etlstage.stage.where import equal

__all__ = ("CaseKeys", "CasesKeys", "Items", "LetterKeys", "MessageText", "flat")

FORMS: Final = ("text", "json", "regex", "base64")
"""The forms of a message; ``text`` may be written without naming the form."""


class MessageText(NamedTuple):
    """An input message, or an expected output."""

    form: str
    text: str

    @property
    def data(self) -> bytes:
        """The message, if it is not a regular expression."""
        if self.form == "base64":
            return base64.b64decode(self.text)
        return self.text.encode()

    def matches(self, message: bytes) -> bool:
        """Return whether a message is this one."""
        if self.form == "json":
            try:
                return equal(json.loads(message), json.loads(self.text))
            except (ValueError, RecursionError):
                return False
        if self.form == "regex":
            text = message.decode(errors="replace")
            return re.fullmatch(self.text, text, re.DOTALL) is not None
        return message == self.data

    def __str__(self) -> str:
        return self.text if self.form == "text" else f"{self.form} {self.text}"


class _Message(Kind):
    """Text, or a mapping with one key, which names the form of its text."""

    def __init__(self, *, pattern: bool = True) -> None:
        self._forms = FORMS if pattern else tuple(f for f in FORMS if f != "regex")

    def read(self, value: Any) -> MessageText:
        if isinstance(value, MessageText):
            return value
        if isinstance(value, str):
            return MessageText("text", value)
        if not isinstance(value, Mapping) or len(value) != 1:
            forms = ", ".join(self._forms)
            raise unexpected(f"text, or a mapping with one of the keys {forms}", value)
        (form, text) = next(iter(value.items()))
        if form not in self._forms:
            expected = f"unknown key, expected one of {', '.join(self._forms)}"
            raise Invalid(Problem((form,), expected, at_key=True))
        if not isinstance(text, str):
            raise Invalid(Problem((form,), "expected text, got {got}", text))
        try:
            _CHECKS[form](text)
        except (ValueError, re.error, OverflowError, RecursionError) as error:
            raise Invalid(
                Problem((form,), f"is not valid {form}: {error}", text)
            ) from None
        return MessageText(form, text)

    def schema(self) -> Schema:
        """Describe the forms."""
        text = Text().schema()
        forms = {
            "type": "object",
            "properties": {form: {"type": "string"} for form in self._forms},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
        }
        return {"anyOf": [text, forms]}


_CHECKS: Final[Mapping[str, Any]] = {
    "text": str,
    "json": json.loads,
    "regex": re.compile,
    "base64": lambda text: base64.b64decode(text, validate=True),
}

Items: TypeAlias = Sequence["MessageText | Sequence[MessageText]"]
"""Messages, or batches of them."""


class _Messages(ListOf):
    """Messages, or lists of messages, each of which is a batch."""

    def __init__(self, *, pattern: bool = True) -> None:
        message = _Message(pattern=pattern)
        super().__init__(message)
        self._batches = ListOf(ListOf(message))

    def read(self, value: Any) -> Any:
        first = value[0] if isinstance(value, list | tuple) and value else None
        if isinstance(first, list | tuple) and not isinstance(first, MessageText):
            return self._batches.read(value)
        return super().read(value)

    def schema(self) -> Schema:
        """Describe both forms."""
        return {"anyOf": [super().schema(), self._batches.schema()]}


class _Pattern(Text):
    """A regular expression."""

    def read(self, value: Any) -> str:
        try:
            re.compile(text := super().read(value))
        except (re.error, OverflowError, RecursionError) as error:
            raise refused(f"is not a regular expression: {error}") from None
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class LetterKeys(Definition):
    """A message that a stage can't process."""

    message: Annotated[MessageText | None, Maybe(_Message())] = None
    """The message; by default any."""
    reason: Annotated[str, _Pattern()] = ""
    """Regular expression to be found in the error of the message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseKeys(Definition):
    """One test."""

    name: Name
    """Name of the test in the results."""
    stage: str | None = None
    """The only stage to test. By default all stages, but the load stage only if files
    or output_rows are expected."""
    input: Annotated[Items | None, Maybe(_Messages(pattern=False))] = None
    """Messages for the first stage, in place of an extract stage; each inner list is a
    batch."""
    input_rows: Annotated[
        tuple[MessageText, ...] | None, Maybe(ListOf(_Message(pattern=False)))
    ] = None
    """Rows for an extract stage that reads a DataFrame or files, each a JSON object."""
    output: Annotated[Items | None, Maybe(_Messages())] = None
    """Expected outputs of the last stage, or messages that reach the load stage; each
    inner list is the outputs of a batch."""
    output_rows: Annotated[
        tuple[MessageText, ...] | None, Maybe(ListOf(_Message()))
    ] = None
    """Expected rows of a load stage that writes a DataFrame or files, each a JSON
    object, in any order."""
    dead_letters: tuple[LetterKeys, ...] = ()
    """Messages that are expected to be dead-lettered, in their order."""
    env: Variables = field(default_factory=dict)
    """Variables added to the environment of the workers; {folder} stands for a folder
    that only this test has."""
    files: Annotated[Mapping[str, MessageText], MapOf(_Message(), Text(nul=False))] = (
        field(default_factory=dict)
    )
    """Files expected in {folder} afterwards, by name, with their contents."""
    timeout: Duration = 30.0
    """How long the test may take."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return the contradictions among the given values."""
        if "input" in given and "input_rows" in given:
            yield broken(("input_rows",), "can't be used together with input")
        batches = isinstance(given.get("input"), tuple) and _nested(given["input"])
        if batches and "stage" not in given:
            yield broken(("input",), "needs a stage: batches are for one stage")
        output = given.get("output")
        if isinstance(output, tuple) and _nested(output):
            if not batches:
                yield broken(("output",), "needs an input with as many batches")
            elif len(output) != len(given["input"]):
                text = (
                    f"expected as many batches as the input has ({len(given['input'])})"
                )
                text = f"{text}, got {len(output)}"
                yield broken(("output",), text, at_key=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class CasesKeys(Definition):
    """A file of tests beside the pipeline."""

    tests: tuple[CaseKeys, ...] = ()
    """The tests."""


def _nested(items: Items) -> bool:
    return bool(items) and not isinstance(items[0], MessageText)


def flat(items: Items) -> Iterator[MessageText]:
    """Yield the messages of all batches."""
    for item in items:
        if isinstance(item, MessageText):
            yield item
        else:
            yield from item
