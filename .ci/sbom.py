"""
What the wheel consists of and needs, as a CycloneDX document (PEP 770).

It is made of the metadata alone, so the same source has the same document. Nothing is
vendored: components are what pip installs beside it, of which a range of versions will do.
"""

from __future__ import annotations

from typing import Any

from packaging.requirements import Requirement


def bill_of_materials(
    name: str,
    version: str,
    licence: str,
    requirements: list[str],
    extras: dict[str, list[str]],
) -> dict[str, Any]:
    """Return the document."""
    own = f"pkg:pypi/{name}@{version}"
    needed = {_purl(text): _component(text, "required", "") for text in requirements}
    optional = {
        _purl(text): _component(text, "optional", extra)
        for extra, texts in extras.items()
        for text in texts
    }
    components = {**optional, **needed}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": name,
                "version": version,
                "purl": own,
                "licenses": [{"license": {"id": licence}}],
            }
        },
        "components": [components[purl] for purl in sorted(components)],
        "dependencies": [
            {"ref": own, "dependsOn": sorted(needed)},
            *({"ref": purl} for purl in sorted(components)),
        ],
    }


def _purl(text: str) -> str:
    return f"pkg:pypi/{Requirement(text).name.lower().replace('_', '-')}"


def _component(text: str, scope: str, extra: str) -> dict[str, Any]:
    requirement = Requirement(text)
    properties = {"etlstage:versions": str(requirement.specifier)}
    if extra:
        properties["etlstage:extra"] = extra
    return {
        "type": "library",
        "bom-ref": _purl(text),
        "name": requirement.name,
        "purl": _purl(text),
        "scope": scope,
        "properties": [{"name": n, "value": v} for n, v in properties.items()],
    }
