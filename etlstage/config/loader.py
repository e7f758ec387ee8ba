"""
From a pipeline file to a checked model.

All that is wrong with a file is reported at once, each with its line and column,
and what was interpolated is never shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from etlstage.config.document import Document, Loc, read, shortened
from etlstage.config.model import PipelineKeys
from etlstage.config.rules import broken_rules, shipped_files
from etlstage.errors import guess

__all__ = ("load",)


def load(path: str | Path) -> tuple[PipelineKeys, Document]:
    """
    Read and check a pipeline file.

    Returns:
        The model, and the document for the places of what is found wrong later.

    Raises:
        ConfigError: If anything is wrong; one line for each.

    """
    document = read(Path(path))
    model: PipelineKeys | None = None
    try:
        model = PipelineKeys.model_validate(document.data)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            _complain(document, details)
    for rule in broken_rules(document.data):
        document.complain(rule.loc, rule.text, at_key=rule.at_key)
    _look_for_files(document)
    document.check()
    if model is None:
        raise AssertionError("unreachable: errors without a problem")
    return model, document


def _look_for_files(document: Document) -> None:
    """Complain of what is to be sent to executors and can't be."""
    session = document.data.get("spark")
    for loc, path in shipped_files(session if isinstance(session, dict) else {}):
        folder, slash, name = path.rpartition("/")
        place = document.folder / (folder + slash + name.partition("#")[0])
        if place.is_dir():
            document.complain(loc, "is a folder: make an archive of it")
        elif not place.is_file():
            missing = (
                "such file" if document.secret(loc) else f"file {place.absolute()}"
            )
            document.complain(loc, f"there is no {missing}")


def _complain(document: Document, details: ErrorDetails) -> None:
    loc: Loc = details["loc"]
    if loc[-1:] == ("[key]",):
        loc = loc[:-1]
    hidden = document.secret(loc)
    shown = "an interpolated value" if hidden else _shown(details["input"])
    text = _text(details, shown, hidden=hidden)
    document.complain(loc, text, at_key=details["type"] == "extra_forbidden")


def _text(details: ErrorDetails, shown: str, *, hidden: bool) -> str:
    """Say in our words what pydantic found."""
    kind = details["type"]
    context = details.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(details["loc"])
    if kind == "choice":
        return _unknown_word(context, shown, hidden=hidden)
    if kind in EXPECTED:
        return f"expected {EXPECTED[kind].format(**context)}, got {shown}"
    if kind in FIXED:
        return FIXED[kind].format(**context)
    # What is left may quote the value.
    message = "is refused; not shown, as it was interpolated"
    if not hidden:
        message = details["msg"]
    return message[:1].lower() + message[1:]


EXPECTED: Final = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "expected": "{text}",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "{le} or less",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "model_type": "a mapping",
    "string_pattern_mismatch": (
        "a name of up to 64 letters, digits, blanks, dots, dashes and underscores"
    ),
    "string_type": "text",
    "tuple_type": "a list",
}
FIXED: Final = {
    "missing": "missing, but needed",
    "refused": "{text}",
}


def _unknown_word(context: Mapping[str, Any], shown: str, *, hidden: bool) -> str:
    known = context["known"]
    expected = f", expected {' or '.join(map(repr, known))}"
    if context["later"]:
        return f"{shown} is not in this version{expected}"
    if hidden:
        return f"unknown {context['noun']}{expected}"
    close = guess(shown.strip("'"), known)
    return f"unknown {context['noun']} {shown}{close or expected}"


def _unknown_key(loc: Loc) -> str:
    model, key = _model_at(loc[:-1]), str(loc[-1])
    deeper = _deeper(model, key)
    if len(deeper) == 1:
        return f"unknown key (did you mean {deeper[0]!r}?)"
    known = list(_fields(model))
    return f"unknown key{guess(key, known) or ', expected one of ' + ', '.join(known)}"


def _model_at(loc: Loc) -> type[BaseModel]:
    """Return what the mapping at ``loc`` is checked by."""
    model: type[BaseModel] = PipelineKeys
    for step in loc:
        if isinstance(step, str):
            model = _model_in(_fields(model)[step].annotation) or model
    return model


def _deeper(model: type[BaseModel], key: str) -> list[str]:
    """Return where in the mappings of a mapping a key may stand."""
    found = []
    for name, field in _fields(model).items():
        inner = _model_in(field.annotation)
        if inner is not None:
            here = [key] if key in _fields(inner) else []
            found += [f"{name}.{place}" for place in here + _deeper(inner, key)]
    return found


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {f.alias or n: f for n, f in model.model_fields.items()}


def _model_in(annotation: Any) -> type[BaseModel] | None:  # noqa: ANN401
    """Return the model inside ``X | None`` or ``tuple[X, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(inner) for inner in get_args(annotation))
    return next((model for model in found if model), None)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return "null" if value is None else shortened(str(value))
