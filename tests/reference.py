"""
What is generated of the manual: keys of the file, options of commands, kinds of faults.

``python -m tests.reference`` writes it anew; a test says when that is due.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from typer.main import get_command

from etlstage.cli.app import app
from etlstage.config.schema import pipeline_schema
from etlstage.testing import FaultKind

__all__ = ("PARTS", "commands", "part", "schemas")

PAGES: Final = Path(__file__).parents[1] / "etlstage/docs"


def schemas(schema: Mapping[str, Any], *above: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas of all keys, with where they stand."""
    for form in (schema, schema.get("items", {}), *schema.get("anyOf", ())):
        for key, inner in form.get("properties", {}).items():
            yield ".".join((*above, key)), inner
            yield from schemas(inner, *above, key)


UNITS: Final = {
    "|m|h)": "duration",
    "|kB|": "size",
    "^[0-9]+$|^(": "whole number or share",
    "*%$": "share",
}
"""What is in a pattern, and what it is about."""


def keys() -> str:
    """Return the table; a key that all stages have is there once."""
    known = dict(schemas(pipeline_schema()))
    lines = ["| key | type | default | |", "| --- | --- | --- | --- |"]
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
        lines.append(f"| `{key}` | {_type(schema)} | {shown} | {text} |")
    return "\n".join([*lines, ""])


def _type(schema: Mapping[str, Any]) -> str:
    """Return what a value is, in words; a reference may stand for any."""
    if "anyOf" in schema:
        kinds = [_type(form) for form in schema["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind))
    if "enum" in schema:
        return ", ".join(dict.fromkeys(f"`{value}`" for value in schema["enum"]))
    kind, pattern = schema["type"], schema.get("pattern", "")
    for part_of_it, name in UNITS.items():
        if part_of_it in pattern:
            return name
    if kind == "array":
        return f"list of {_type(schema['items'])}"
    if kind in ("object", "null"):
        return {"object": "mapping", "null": "null"}[kind]
    if "integer" in kind:
        return "whole number"
    if "boolean" in kind and "number" not in kind:
        return "true, false"
    return "" if pattern == r"\$\{" else "text"


def commands() -> dict[str, Any]:
    """Return all commands by name, as it is typed."""

    def below(command: Any, *names: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - Typer's own parser has no public type
        yield " ".join(names), command
        for name in getattr(command, "commands", None) or ():
            _, inner, _ = command.resolve_command(None, [name])
            yield from below(inner, *names, name)

    return dict(below(get_command(app), "etlstage"))


def options() -> str:
    """Return a table of options for each command that has some."""
    lines = []
    for name, command in commands().items():
        rows = [row for option in command.params if (row := _row(option))]
        if rows and not getattr(command, "commands", None):
            lines += [f"### {name}", "", "| option | |", "| --- | --- |", *rows, ""]
    return "\n".join([*lines[:-1], ""])


def _row(option: Any) -> str:  # noqa: ANN401 - as above
    """Return an option as a row of a table; nothing for an argument."""
    if not option.opts[0].startswith("-"):
        return ""
    named = ", ".join(option.opts)
    if not option.is_flag:
        named += f" {option.metavar or option.name.upper()}"
    text = option.help.replace("|", r"\|")
    named = named.replace("|", r"\|")
    default = option.default
    shown = getattr(default, "value", default)
    if shown not in (None, False):
        text += f" Default: {shown}."
    return f"| `{named}` | {text} |"


def faults() -> str:
    """Return the table of what can go wrong with a worker."""
    lines = ["| `kind` | what happens | to workers with |", "| --- | --- | --- |"]
    for kind in FaultKind:
        whom = "a process of their own: only `hostile_worker()`" if kind.inside else ""
        meaning = kind.meaning.replace("``", "`").removesuffix(".")
        lines.append(f"| `{kind}` | {meaning} | {whom or kind.about} |")
    return "\n".join([*lines, ""])


PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "reference/keys": keys,
    "reference/commands": options,
    "how-to/faults": faults,
}
"""What is generated of a page, between two comments with its name."""


def part(page: str) -> re.Pattern[str]:
    """Return what finds it."""
    name = page.rpartition("/")[2]
    return re.compile(
        rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", re.DOTALL
    )


def main() -> None:
    """Write each part into its page."""
    for name, made in PARTS.items():
        page = PAGES / f"{name}.md"
        text = made().replace("\\", r"\\")
        page.write_text(part(name).sub(text, page.read_text()))


if __name__ == "__main__":
    main()
