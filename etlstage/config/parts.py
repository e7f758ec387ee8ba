"""
The parts into which a pipeline is divided at its durable edges.

The half before an edge ends in journals, and the half after it begins with them;
nothing else is special about either. The first part has the state directory of the
whole pipeline, so that the position in the input survives when an edge is added or
removed; later parts have folders in that directory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from etlstage.config.ends.journal import EdgeSinkKeys, EdgeSourceKeys
from etlstage.config.model import ExtractKeys, LoadKeys, PipelineKeys
from etlstage.pipeline.delivery.folder import JOURNALS, edge_folder, edge_name

__all__ = ("parts_of", "uncut")


def uncut(keys: PipelineKeys) -> PipelineKeys:
    """Return a pipeline without its durable edges."""
    stages = tuple(replace(stage, durable=None) for stage in keys.transform)
    return replace(keys, transform=stages)


def parts_of(keys: PipelineKeys) -> list[PipelineKeys]:
    """Return the pipelines, in order; without a durable edge there is one."""
    parts, begin = [], 0
    extract, state, stages = keys.extract, keys.state, uncut(keys).transform
    for number, stage in enumerate(keys.transform, 1):
        if stage.durable is None:
            continue
        folder = edge_folder(str(keys.state), stage.name)
        name, path = edge_name(stage.name), f"{folder}/{JOURNALS}"
        settings = {"partitions": 1, "keep": "read", **stage.durable.given()}
        load = LoadKeys(name=name, end=EdgeSinkKeys(path=path, **settings))
        half: dict[str, Any] = {"extract": extract, "state": state}
        half["transform"] = stages[begin:number]
        parts.append(replace(keys, load=load, **half))
        end = EdgeSourceKeys(path=path)
        extract, state, begin = ExtractKeys(name=name, end=end), folder, number
    rest = stages[begin:]
    return [*parts, replace(keys, extract=extract, transform=rest, state=state)]
