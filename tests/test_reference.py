"""The reference lists everything that exists."""

from __future__ import annotations

import importlib
import re
from typing import Any, Final, get_args

import jsonschema
import pytest
from ruamel.yaml import YAML

import etlstage
from etlstage import Stage
from etlstage.config.schema import pipeline_schema
from etlstage.errors import FailureCause
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.supervisor.lifecycle import events
from etlstage.supervisor.process import _INHERITED
from tests.manual.fences import DOCS, PAGES, ROOT
from tests.reference import schemas

SOURCE: Final = "\n".join(
    path.read_text()
    for path in (ROOT / "etlstage").rglob("*.py")
    if "examples" not in path.parts
)


def first_cells(page: str) -> list[str]:
    """Return the names in code in the first column of the tables of a page."""
    rows = re.findall(r"^\| (`.*?) \|", PAGES[DOCS / "reference" / page], re.MULTILINE)
    return [name for cell in rows for name in re.findall(r"`([^`]+)`", cell)]


def test_every_metric_has_an_entry() -> None:
    """No entry is for a metric that does not exist (issue 27)."""
    listed = {name for name in first_cells("metrics.md") if name.startswith("etlstage")}
    whole = set(re.findall(r'"(etlstage_\w+_(?:total|seconds|in_flight))"', SOURCE))
    parts = re.findall(r'counter\(\s*"((?!etlstage)\w+)"', SOURCE)
    named = whole | {f"etlstage_{part}_total" for part in parts}
    named |= set(
        re.findall(
            r'"(etlstage_(?:messages_waiting|workers_running|journal_unread_bytes|leases_held))"',
            SOURCE,
        )
    )
    assert listed == named | {"etlstage_stage_messages_total"}


def test_every_reason_of_a_failure_has_an_entry() -> None:
    """The entries are values of the label (issue 27)."""
    names = first_cells("metrics.md")
    assert set(names[-len(get_args(FailureCause)) :]) == set(get_args(FailureCause))


def test_every_event_has_an_entry() -> None:
    """These are the events that a supervisor reports (issue 27)."""
    listed = {name for name in first_cells("events.md") if name[0].isupper()}
    assert listed == {event.__name__ for event in get_args(events.SupervisorEvent)}


PUBLIC: Final = (
    *("errors", "journal", "sequencing", "testing", "worker"),
    *("worker.cocaine", "worker.kcl"),
)
"""Modules with errors of their own."""


@pytest.mark.parametrize("module", PUBLIC)
def test_every_error_has_an_entry(module: str) -> None:
    """Errors of public modules are listed; bases are in a sentence (issue 27)."""
    found = importlib.import_module(f"etlstage.{module}")
    kinds = [getattr(found, name) for name in found.__all__]
    page = PAGES[DOCS / "reference" / "errors.md"]
    assert [
        kind.__name__
        for kind in kinds
        if isinstance(kind, type)
        and issubclass(kind, Exception)
        and f"`{kind.__name__}`" not in page
    ] == []


def test_every_variable_has_an_entry() -> None:
    """These are the variables that workers get, and those that are read (issue 27)."""
    page = PAGES[DOCS / "reference" / "environment.md"]
    ours = set(re.findall(r"\bETLSTAGE_[A-Z]+\b", SOURCE)) - {"ETLSTAGE_NAME"}
    assert [
        name for name in sorted({*ours, *_INHERITED}) if f"`{name}`" not in page
    ] == []


@pytest.mark.parametrize("kind", [CommitRecord, DeadLetter])
def test_every_key_of_a_format_has_an_entry(kind: Any) -> None:  # noqa: ANN401 - a class
    """The formats are those of a state directory (issue 27)."""
    page = PAGES[DOCS / "reference" / "state.md"]
    names = kind.__dataclass_fields__
    assert [name for name in names if f"`{name}`" not in page] == []


def test_errors_name_topics_that_there_are() -> None:
    """Several errors name one, and each is a page (issue 27)."""
    named = set(re.findall(r"etlstage help ([a-z][\w-]+)", SOURCE))
    assert len(named) >= 3
    assert named <= {path.stem for path in PAGES}


def test_names_of_the_python_api_are_there() -> None:
    """Each is in its module; the left column may be a field of a stage (issue 27)."""
    rows = re.findall(
        r"^\| `([\w.]+)` \| (.*?) \|",
        PAGES[DOCS / "reference" / "python.md"],
        re.MULTILINE,
    )
    for module, text in rows:
        names = re.findall(r"`(\w+)`", text)
        if module.startswith("etlstage"):
            found = importlib.import_module(module)
            assert [name for name in names if name not in found.__all__] == []
        else:
            assert module in Stage.__dataclass_fields__
            assert [name for name in names if name not in etlstage.__all__] == []


def test_every_key_has_an_example_that_is_valid() -> None:
    """Only keys that hold other keys have none (issue 27)."""
    rows = re.findall(
        r"^\| `([\w.]+)` \| .*? \| .*? \| (?:`(.*?)`)? \| 0\.\d+ \|",
        PAGES[DOCS / "reference" / "keys.md"],
        re.MULTILINE,
    )
    known = dict(schemas(pipeline_schema()))
    assert len(rows) > 150
    for key, example in rows:
        if not example:
            assert any(other.startswith(f"{key}.") for other in known), key
            continue
        value = YAML(typ="safe", pure=True).load(example.replace(r"\|", "|"))
        jsonschema.Draft202012Validator(known[key]).validate(value)
