"""The JSON Schema of the pipeline file, for editors and validators."""

from __future__ import annotations

import json
from typing import Final

from etlstage.config.model import PipelineKeys
from etlstage.settings.definition import Section
from etlstage.settings.kind import (
    Schema,
)
from etlstage.settings.schema import json_schema

__all__ = ("SCHEMA_FILE", "pipeline_schema", "schema_text")

SCHEMA_FILE: Final = "pipeline.schema.json"
"""What it is called beside a pipeline file."""


def pipeline_schema() -> Schema:
    """Return the schema: each key with its documentation and the default in force."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A pipeline of etlstage",
        **json_schema(Section.of(PipelineKeys)),
    }


def schema_text() -> str:
    """Return the schema as the text of a file."""
    return json.dumps(pipeline_schema(), indent=2) + "\n"
