"""
The generated parts of the manual: keys, options of commands, kinds of faults.

``python -m tests.reference`` writes them anew; a test fails when that is due.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from typer.main import get_command

from etlstage.cli.app import app
from etlstage.config.schema import pipeline_schema
from etlstage.testing import FaultKind

__all__ = ("PARTS", "commands", "part", "schemas")

PAGES: Final = Path(__file__).parents[1] / "etlstage/docs"


def schemas(schema: Mapping[str, Any], *above: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas of all keys, with their places."""
    for form in (schema, schema.get("items", {}), *schema.get("anyOf", ())):
        for key, inner in form.get("properties", {}).items():
            yield ".".join((*above, key)), inner
            yield from schemas(inner, *above, key)


UNITS: Final = {
    "|m|h|d)": "duration",
    "|kB|": "size",
    "^[0-9]+$|^(": "whole number or share",
    "*%$": "share",
}
"""Parts of patterns, and the units that they show."""


def keys() -> str:
    """Return the table of keys; a key that all stages have is there once."""
    known = dict(schemas(pipeline_schema()))
    lines = ["| key | type | default | example | since | |", f"|{' --- |' * 6}"]
    shown_in_pages = dict(_values(_fenced()))
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
        kind, example = _type(schema), ""
        if not inner or key in OWN:
            one = kind.split(" or ")[0]
            found = OWN.get(key) or shown_in_pages.get(key) or EXAMPLES.get(one)
            example = found or (one.split(",")[0].strip("`") if "`" in one else "")
        example = f"`{example}`" if example else ""
        since = SINCE.get(key, "0.1")
        lines.append(f"| `{key}` | {kind} | {shown} | {example} | {since} | {text} |")
    return "\n".join([*lines, ""])


SINCE: Final[Mapping[str, str]] = {}
"""The version that a key came with, if it was not the first."""

OWN: Final = {
    "spark.remote": "sc://localhost",
    "spark.config": "{spark.executor.memory: 4g}",
    "spark.staging": "/shared/staging",
    "spark.files": "[model.bin]",
    "spark.archives": "[tools.tar.gz#tools]",
    "extract.spark.options": "{header: true}",
    "extract.spark.table": "db.papers",
    "extract.spark.spool": "/var/spool/etlstage",
    "extract.worker": "[python, fetch.py]",
    "extract.files.options": "{header: true}",
    "extract.files.schema": "id long, title string",
    "extract.files.message": "title",
    "extract.files.key": "id",
    "extract.journal.from": "beginning",
    "extract.kinesis.endpoint": "http://localhost:4566",
    "extract.offsets.template": '"{start}-{end}"',
    "transform.worker": "[python, clean.py]",
    "transform.worker.env": "{TZ: UTC}",
    "transform.worker.user": "etl",
    "transform.workers.grow_at": '"2.0"',
    "transform.key": "/user",
    "transform.expect.schema": "paper.schema.json",
    "transform.dialect.event": "clean",
    "load.spark.options": "{compression: zstd}",
    "load.spark.table": "db.papers",
    "load.worker": "[python, load.py]",
    "load.files.options": "{compression: zstd}",
    "load.journal.limit": "20GiB",
    "load.journal.sync": "1s",
    "load.journal.keep": "7d",
    "extract.spark.sort": "id",
    "load.shards.sequence": "/id",
    "load.shards.arrival": "/time",
    "load.shards.table": "etlstage_leases",
    "faults.equals": "poison",
    "faults.worker": "clean-1",
    "dead_letters.spark.table": "db.letters",
    "dead_letters.spark.options": "{compression: zstd}",
    "tests.output_rows": "['{\"id\": 1}']",
    "tests.env": '{OUT: "{folder}/out"}',
    "tests.files": "{names.txt: Ada}",
    "load.commit": "[./commit]",
    "load.abort": "[./abort]",
}
"""Example values for keys of a special form, or that no page shows."""

EXAMPLES: Final = {
    "duration": "30s",
    "size": "64MiB",
    "share": "1%",
    "whole number": "10",
    "whole number or share": "1%",
    "true, false": "true",
}
"""Example values by type, for keys that no page shows."""


def _fenced() -> Iterator[Any]:
    """Yield the pipelines and parts of them that pages show."""
    for page in sorted(PAGES.rglob("*.md")):
        for text in re.findall(
            r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            data = YAML(typ="safe", pure=True).load(text)
            if "apiVersion" not in data:
                yield data


def _values(data: Any, *above: str) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - YAML
    """Yield the short values by key; the entries of a list share a key."""
    parts = data.items() if isinstance(data, Mapping) else ()
    for key, value in parts:
        yield from _values(value, *above, str(key))
        plain = isinstance(value, str) and value.isprintable()
        text = value if plain else json.dumps(value)
        if value is not None and not isinstance(value, Mapping) and 0 < len(text) <= 40:
            yield ".".join((*above, str(key))), text.replace("|", r"\|")
    if not isinstance(data, Mapping | str) and isinstance(data, Iterable):
        for value in data:
            yield from _values(value, *above)


def _type(schema: Mapping[str, Any]) -> str:
    """Return the type of a value in words, leaving out references to variables."""
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
    """Return all commands by their names, as they are typed."""

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
    if shown not in (None, False, ""):
        text += f" Default: {shown}."
    return f"| `{named}` | {text} |"


def faults() -> str:
    """Return the table of faults of workers."""
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
"""The generated part of a page, between two comments with its name."""


def part(page: str) -> re.Pattern[str]:
    """Return the pattern that finds the generated part of a page."""
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
