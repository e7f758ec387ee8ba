"""
What may be written, as JSON Schema (draft 2020-12).

Texts that contain ``${`` stand for values that are not known before the file is read;
they are allowed for every scalar.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import is_dataclass
from functools import cache

from etlstage.settings.definition import Section, Setting, section_in
from etlstage.settings.kind import ListOf, Maybe, Schema

__all__ = ("documentation", "json_schema")


def json_schema(section: Section) -> Schema:
    """Describe a mapping: its keys, their documentation, and the defaults in force."""
    made: Schema = {
        "type": "object",
        "properties": {key: _of(setting) for key, setting in section.keys.items()},
        "additionalProperties": False,
    }
    required = [key for key, setting in section.keys.items() if setting.required]
    if required:
        made["required"] = required
    made |= section.more
    short = section.short
    return {"anyOf": [*short, made]} if short else made


def _of(setting: Setting) -> Schema:
    made = _body(setting)
    made["description"] = setting.doc or documentation(setting)
    default, inner = setting.default, section_in(setting.kind)
    if setting.required:
        return made
    if inner is None or default in (None, ()):
        made["default"] = setting.kind.written(default)
    elif "anyOf" in made:
        # The class has a short form, which its str() returns.
        made["default"] = str(default)
    return made


def _body(setting: Setting) -> Schema:
    kind, inner = setting.kind, section_in(setting.kind)
    if inner is None:
        return dict(kind.schema())
    made = json_schema(inner)
    if isinstance(kind, ListOf):
        return {"type": "array", "items": made}
    if isinstance(kind, Maybe):
        return {"anyOf": [made, {"type": "null"}]}
    return made


def documentation(setting: Setting) -> str:
    """Return the docstring below a field of its class, on one line."""
    if setting.model is None:
        raise AssertionError("unreachable: a setting that nothing documents")
    classes = filter(is_dataclass, setting.model.__mro__)
    found = (_documented(each).get(setting.name) for each in classes)
    return next(filter(None, found), "")


@cache
def _documented(model: type) -> dict[str, str]:
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.replace("``", "").split())
    return docs
