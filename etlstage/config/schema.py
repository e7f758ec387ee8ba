"""The JSON Schema of the pipeline file, for editors and validators."""

from __future__ import annotations

import json

from etlstage.config.model import ExtractKeys, LoadKeys, PipelineKeys
from etlstage.config.stages import stage_section
from etlstage.settings.definition import Section
from etlstage.settings.kind import Schema
from etlstage.settings.schema import json_schema

__all__ = ("pipeline_schema", "schema_text")


def pipeline_schema() -> Schema:
    """Return the schema: each key with its documentation and the default in force."""
    section = Section.of(PipelineKeys)
    for model in (ExtractKeys, LoadKeys):
        name = model.kind.value
        kind = stage_section(model, others=True)
        section.keys = {**section.keys, name: section.keys[name]._replace(kind=kind)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A pipeline of etlstage",
        **json_schema(section),
    }


def schema_text() -> str:
    """Return the schema as the text of a file."""
    return json.dumps(pipeline_schema(), indent=2) + "\n"
