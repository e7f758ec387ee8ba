"""What a stage promises of its replies, and what is wrong with one that breaks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from json import JSONDecoder
from typing import ClassVar

from etlstage.messages import counted
from etlstage.settings.definition import Definition
from etlstage.settings.units import CountOrZero

__all__ = ("ReplyContract",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyContract(Definition):
    """What a stage promises of its replies; a message whose reply breaks it is refused."""

    label: ClassVar[tuple[str, ...]] = ("expect",)
    outputs: CountOrZero | None = None
    """How many outputs there are of each message."""
    json: bool = False
    """Each output is a JSON document."""

    @property
    def given(self) -> bool:
        """Whether there is anything to check."""
        return self.json or self.outputs is not None

    def flaw(self, outputs: Sequence[bytes]) -> str:
        """Return what the reply to a message breaks; an empty text: nothing."""
        found, expected = len(outputs), self.outputs
        if expected is not None and found != expected:
            return f"breaks expect.outputs: {counted(found, 'output')}, not {expected}"
        if self.json:
            for number, output in enumerate(outputs, 1):
                try:
                    _JSON.decode(bytes(output).decode())
                except (ValueError, RecursionError):
                    return f"breaks expect.json: output {number} is no JSON document"
        return ""


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not in JSON")


# Python also takes NaN and Infinity, which no other reader has to.
_JSON = JSONDecoder(parse_constant=_refuse)
