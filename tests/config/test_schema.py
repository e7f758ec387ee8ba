"""The JSON Schema, the manual and the files that come with the package agree."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import MISSING
from importlib import resources
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
from ruamel.yaml import YAML

from etlstage.config.loader import load
from etlstage.config.model import PipelineKeys
from etlstage.config.reading import read
from etlstage.config.schema import pipeline_schema, schema_text
from etlstage.config.stages import stage_of
from etlstage.settings.definition import Section, Setting, section_in
from tests.manual.fences import MANUAL, SECTIONS
from tests.reference import schemas

FILES = [
    block
    for block in re.findall(r"```yaml\n(.*?)```", MANUAL, flags=re.DOTALL)
    # Without files of other tools, and plans of faults, which are files of their own.
    if "apiVersion:" not in block and not block.startswith("# faults.yaml")
]
ENDS = """\
name: p
extract: {worker: {command: [seq, "3"]}}
load: {worker: {command: [cat]}}
"""
SCHEMA = pipeline_schema()


def data_of(text: str) -> Any:  # noqa: ANN401 - what YAML holds
    """Return the data an independent reader finds; an excerpt is completed first."""
    text = text if re.search("^name:", text, flags=re.MULTILINE) else ENDS + text
    return YAML(typ="safe", pure=True).load(text)


def problems(data: object) -> list[str]:
    """Return what an independent validator finds."""
    validator = jsonschema.Draft202012Validator(SCHEMA)
    return [error.json_path for error in validator.iter_errors(data)]


def settings(
    section: Section, *above: str
) -> Iterator[tuple[tuple[str, ...], Setting]]:
    """Yield all settings of a mapping and of those in it, with their keys."""
    for key, setting in section.keys.items():
        yield (*above, key), setting
        inner = section_in(setting.kind)
        if inner is not None:
            yield from settings(inner, *above, key)


def test_schema_is_one() -> None:
    """It is a valid JSON Schema, and the text that is printed."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(schema_text()) == SCHEMA


def test_every_key_is_described() -> None:
    """Descriptions are sentences for readers who write YAML, not Python."""
    described = dict(schemas(SCHEMA))
    assert len(described) > 150
    for key, schema in described.items():
        text = schema["description"]
        assert text.endswith("."), (key, text)
        assert "None" not in text, (key, text)


def test_defaults_are_written_as_people_do() -> None:
    """Defaults have units, and are valid values themselves."""
    described = dict(schemas(SCHEMA))
    wanted = {
        "transform.timeout.message": "5m",
        "transform.timeout.heartbeat": None,
        "transform.max_message": "64MiB",
        "transform.batch.bytes": "1MiB",
        "transform.restart.max": 5,
        "transform.restart.delay": "500ms",
        "transform.on_error.retries": 2,
        "transform.on_error.budget": "1%",
        "transform.recycle.variance": "10%",
        "transform.window": "auto",
        "transform.workers": "1",
        "transform.dialect.eop": r"\000",
        "load.spark.mode": "error",
        "engine": "local",
    }
    assert {key: described[key]["default"] for key in wanted} == wanted
    for schema in described.values():
        if "default" in schema:
            jsonschema.Draft202012Validator(schema).validate(schema["default"])


def test_defaults_are_those_in_force(tmp_path: Path) -> None:
    """A stage with every default written out equals one with none written."""
    described = dict(schemas(SCHEMA))
    stage: dict[str, Any] = {"worker": {"command": ["cat"]}}
    plain = json.loads(json.dumps(stage))
    for key, schema in described.items():
        place = key.split(".")
        default = schema.get("default")
        # Writing ``batch`` turns batches on; short forms stand for whole mappings.
        if place[0] != "transform" or default is None or place[1:2] in ([], ["batch"]):
            continue
        if place[1:] == ["dialect"]:
            continue
        if any(at in ("budget", "workers") for at in place[:-1]):
            continue
        if schema["description"].startswith("Dialect "):
            continue  # of another dialect, whose page shows its defaults
        at = stage
        for step in place[1:-1]:
            at = at.setdefault(step, {})
        at[place[-1]] = default
    made = []
    for number, one in enumerate((stage, plain)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(ENDS + f"transform: {json.dumps([one])}")
        made.append(stage_of(load(path)[0].transform[0], tmp_path))
    assert len(stage) > 8
    assert made[0] == made[1]


@pytest.mark.parametrize("block", FILES)
def test_blocks_of_the_manual_are_valid(block: str) -> None:
    """Every pipeline file in the manual fits the schema."""
    assert problems(data_of(block)) == []


@pytest.mark.parametrize("example", ["demo", "start"])
def test_files_of_the_package_are_valid(example: str) -> None:
    """Users copy these files."""
    folder = resources.files("etlstage") / "examples"
    assert {str(p.parent.name) for p in Path(str(folder)).rglob("*.yaml")} == {
        "demo",
        "start",
    }
    text = (folder / example / "pipeline.yaml").read_text()
    assert problems(data_of(text)) == []


@pytest.mark.parametrize(
    ("transform", "place"),
    [
        ("{wokers: 2}", ""),
        ("{workers: 0}", ".workers"),
        ("{workers: {maxx: 2}}", ".workers"),
        ("{timeout: {message: soon}}", ".timeout.message"),
        ("{timeout: {stop: null}}", ".timeout.stop"),
        ("{timeout: 5}", ".timeout"),
        ("{max_message: 1mib}", ".max_message"),
        ("{max_message: 0}", ".max_message"),
        ("{dialect: {driver: superviser}}", ".dialect"),
        ("{order: random}", ".order"),
        ("{on_error: {budget: some}}", ".on_error.budget"),
        ("{on_error: {budget: {share: 1}}}", ".on_error.budget"),
        ("{restart: {never_on: 3}}", ".restart.never_on"),
        ("{recycle: {variance: 0.1}}", ".recycle.variance"),
    ],
)
def test_wrong_shape_is_invalid(transform: str, place: str) -> None:
    """The schema reports the place of the mistake."""
    stage = transform.replace("{", "{worker: {command: [cat]}, ", 1)
    assert problems(data_of(f"transform: [{stage}]")) == [f"$.transform[0]{place}"]


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (ENDS, True),
        ("name: p\nextract: {worker: {command: [a]}}", False),
        (ENDS.replace("load: {", "load: {spark: {path: x}, "), False),
        (ENDS.replace("load: {worker", "load: {spork"), False),
        (ENDS + "x-mine: {anything: [goes]}", True),
        (ENDS + "y-mine: 1", False),
        (
            ENDS + "x-w: &w {command: [a]}\ntransform: [{worker: {<<: *w, cwd: b}}]",
            True,
        ),
        (ENDS + "engine: ${ENGINE}", True),
        (ENDS + "transform: [{worker: {command: [a]}, workers: '${N}'}]", True),
        (ENDS + "transform: [{worker: {command: [a]}, timeout: {stop: 5}}]", True),
        (ENDS + "transform: [{worker: {command: [a]}, max_reply: 1048576}]", True),
        (ENDS + "transform: [{worker: {command: cat}}]", False),
        (ENDS + "transform: {worker: {command: [cat]}}", False),
    ],
)
def test_ends_and_forms(text: str, valid: bool) -> None:
    """Text and numbers are both right; a reference may stand for any value."""
    assert (problems(data_of(text)) == []) is valid


def test_manual_lists_every_key_with_its_default(tmp_path: Path) -> None:
    """Keys that are not in force are there as comments."""
    (fence,) = SECTIONS["reference/keys.md#Pipeline keys"]
    listing = fence.text
    path = tmp_path / "p.yaml"
    keyed = re.sub(r"^( {4,6})# ( *\w+:)", r"\1\2", listing, flags=re.MULTILINE)
    path.write_text(keyed.replace("    workers: 1 ", "    # workers: 1 "))
    assert load_listing(path) == []
    # As it stands, the listing is a pipeline, with one number for the workers.
    path.write_text(ENDS + listing)
    assert load(path)[0].transform[0].stage.pool.max == 1


def load_listing(path: Path) -> list[str]:
    """Return the keys that are missing, or have another value than the default."""
    written = cast("list[Any]", read(path).data["transform"])[0]
    section = section_in(Section.of(PipelineKeys).keys["transform"].kind)
    assert section is not None
    wrong = []
    for place, setting in settings(section):
        value, inside = written, set(place[:-1])
        for step in place:
            value = value.get(step, MISSING) if isinstance(value, dict) else MISSING
        if value is MISSING:
            # One number may stand for count and share.
            wrong += [] if "budget" in inside else [f"{'.'.join(place)} is missing"]
        elif setting.default in (MISSING, None) or "dialect" in inside:
            continue
        elif setting.name == "limits":
            continue  # The listing shows examples: by default there are no limits.
        elif setting.kind.read(value) != setting.kind.read(setting.default):
            wrong.append(f"{'.'.join(place)} is {value!r}")
    return wrong
