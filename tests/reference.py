"""
The manual's table of all keys, made from the definition.

``python -m tests.reference`` writes it anew; a test says when that is due.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from etlstage.config.schema import pipeline_schema

__all__ = ("TABLE", "schemas", "table")

PAGE: Final = Path(__file__).parents[1] / "etlstage/docs/reference/keys.md"
TABLE: Final = re.compile(r"(?<=<!-- keys -->\n).*?(?=<!-- end of keys -->)", re.DOTALL)


def schemas(schema: Mapping[str, Any], *above: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas of all keys, with where they stand."""
    for form in (schema, schema.get("items", {}), *schema.get("anyOf", ())):
        for key, inner in form.get("properties", {}).items():
            yield ".".join((*above, key)), inner
            yield from schemas(inner, *above, key)


def table() -> str:
    """Return the table; a key that all stages have is there once."""
    known = dict(schemas(pipeline_schema()))
    lines = ["| key | default | |", "| --- | --- | --- |"]
    for key, schema in known.items():
        end, _, rest = key.partition(".")
        if end in ("extract", "load") and known.get(f"transform.{rest}") == schema:
            continue
        default = schema.get("default")
        inner = any(other.startswith(f"{key}.") for other in known)
        shown = default if isinstance(default, str) and default else json.dumps(default)
        shown = f"`{shown}`" if default is not None else ""
        if "default" not in schema and not inner:
            shown = "required"
        text = schema["description"].replace("|", r"\|").removesuffix(".")
        lines.append(f"| `{key}` | {shown} | {text} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Write the table into its page."""
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))


if __name__ == "__main__":
    main()
