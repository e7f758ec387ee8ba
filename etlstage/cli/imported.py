"""Print settings of another system as the stage of a pipeline file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from etlstage.protocol.registry import Translation

__all__ = ("written",)

_NOT_ASCII: Final = re.compile(r"[^ -~]")


def written(made: Translation, files: Sequence[Path], stage: str) -> Iterator[str]:
    """
    Yield lines of YAML: what was dropped, and the keys.

    Args:
        made: The keys.
        files: The files that the keys come from.
        stage: Kind of the stage.

    """
    # A name from outside must not become more than a comment.
    names = json.dumps([file.name for file in files])
    yield f"# From {names[1:-1]}."
    for dropped in made.dropped:
        yield f"# Dropped: {json.dumps(dropped)[1:-1]}"
    if made.extract:
        yield "state: state"
        yield from _stage("extract", made.extract)
    yield from _stage(stage, made.keys)


def _stage(stage: str, groups: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    yield f"{stage}:"
    listed = stage == "transform"
    lead, margin = ("  - ", "    ") if listed else ("  ", "  ")
    for group, keys in groups.items():
        yield f"{lead}{group}:"
        lead = margin
        for key, value in keys.items():
            yield f"{margin}  {key}: {_yaml(value)}"


def _yaml(value: object) -> str:
    """Return a value as it is written in a pipeline file, in ASCII."""
    # JSON is YAML, but YAML reads an escaped surrogate pair as two characters.
    text = json.dumps(_literal(value), ensure_ascii=False)
    return _NOT_ASCII.sub(lambda c: c[0].encode("unicode_escape").decode(), text)


def _literal(value: object) -> object:
    """Return a value in which no ``$`` starts a reference."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, Mapping):
        return {name: _literal(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_literal(one) for one in value]
    return value
