"""
Tests of a pipeline, as its file has them: what goes in, and what is to come out.

How they are run is in ``cli/test.py``.
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

__all__ = ("CaseKeys", "CasesKeys", "Items", "LetterKeys", "MessageText", "flat")

FORMS: Final = ("text", "json", "regex", "base64")
"""How a message may be written; text is short for itself."""


class MessageText(NamedTuple):
    """A message that goes in, or one that is to come out."""

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
                found: object = json.loads(message)
            except ValueError:
                return False
            return bool(found == json.loads(self.text))
        if self.form == "regex":
            text = message.decode(errors="replace")
            return re.fullmatch(self.text, text, re.DOTALL) is not None
        return message == self.data

    def __str__(self) -> str:
        return self.text if self.form == "text" else f"{self.form} {self.text}"


class _Message(Kind):
    """Text, or a mapping with the one key, which names its kind."""

    def __init__(self, *, pattern: bool = True) -> None:
        self._forms = FORMS if pattern else tuple(f for f in FORMS if f != "regex")

    def read(self, value: Any) -> MessageText:
        if isinstance(value, MessageText):
            return value
        if isinstance(value, str):
            return MessageText("text", value)
        if not isinstance(value, Mapping) or len(value) != 1:
            forms = ", ".join(self._forms)
            raise unexpected(f"text, or a mapping with one key of {forms}", value)
        (form, text) = next(iter(value.items()))
        if form not in self._forms:
            expected = f"unknown key, expected one of {', '.join(self._forms)}"
            raise Invalid(Problem((form,), expected, at_key=True))
        if not isinstance(text, str):
            raise Invalid(Problem((form,), "expected text, got {got}", text))
        try:
            _CHECKS[form](text)
        except (ValueError, re.error, OverflowError, RecursionError) as error:
            raise Invalid(Problem((form,), f"is no {form}: {error}", text)) from None
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
    """Messages; a list among them is a batch, and then all are."""

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
            raise refused(f"is no regular expression: {error}") from None
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class LetterKeys(Definition):
    """A message that a stage can't process."""

    message: Annotated[MessageText | None, Maybe(_Message())] = None
    """The message; without it any."""
    reason: Annotated[str, _Pattern()] = ""
    """A regular expression that is found in its error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseKeys(Definition):
    """One test."""

    name: Name
    """As the outcome calls it."""
    stage: str | None = None
    """The one stage that is tested; without it all, but that the load stage is only
    run where files or output_rows are expected of it."""
    input: Annotated[Items | None, Maybe(_Messages(pattern=False))] = None
    """Messages for the first stage, in place of an extract stage; lists are batches."""
    input_rows: Annotated[
        tuple[MessageText, ...] | None, Maybe(ListOf(_Message(pattern=False)))
    ] = None
    """Rows for an extract stage that is a DataFrame, each a JSON object."""
    output: Annotated[Items | None, Maybe(_Messages())] = None
    """Messages that the last stage makes, or that reach the load stage; lists are
    those of a batch."""
    output_rows: Annotated[
        tuple[MessageText, ...] | None, Maybe(ListOf(_Message()))
    ] = None
    """Rows that a load stage writes that is a DataFrame, each a JSON object, in any
    order."""
    dead_letters: tuple[LetterKeys, ...] = ()
    """Messages that can't be processed, in their order."""
    env: Variables = field(default_factory=dict)
    """Added to the environment of the workers; {folder} is one that only this test
    has."""
    files: Annotated[Mapping[str, MessageText], MapOf(_Message())] = field(
        default_factory=dict
    )
    """Files in that folder, and what is in them."""
    timeout: Duration = 30.0
    """How long the test may take."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return what contradicts itself."""
        if "input" in given and "input_rows" in given:
            yield broken(("input_rows",), "can't be used together with input")
        batches = isinstance(given.get("input"), tuple) and _nested(given["input"])
        if batches and "stage" not in given:
            yield broken(("input",), "needs a stage: batches are of one stage")
        output = given.get("output")
        if isinstance(output, tuple) and _nested(output):
            if not batches:
                yield broken(("output",), "needs an input of as many batches")
            elif len(output) != len(given["input"]):
                text = (
                    f"expected as many batches as the input has, {len(given['input'])}"
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
