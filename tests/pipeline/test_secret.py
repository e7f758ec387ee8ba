from __future__ import annotations

import io
import json
import shlex
from datetime import UTC, datetime
from pathlib import Path

import pytest

from etlstage.cli.progress import show_report
from etlstage.cli.screen import Screen
from etlstage.messages import StageKind
from etlstage.pipeline.interfaces import Output
from etlstage.pipeline.ledger import Account, Ledger
from etlstage.pipeline.report import KeptLetters, Report
from etlstage.pipeline.secret import Secrets

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
SECRETS = Secrets(
    {
        "hunter2": "${TOKEN}",
        'it\'s "me"\\': "${ME}",
        "a//b/": "${PLACE}",
        "-----BEGIN-----\nabcdef\n}": "${file:key.pem}",
        "Bearer hunter2": "$AUTH",
        "abc": "${SHORT}",
        "": "${EMPTY}",
    }
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a hunter2!", "a ${TOKEN}!"),
        ("Bearer hunter2", "$AUTH"),
        ("file:/data/a//b/", "file:/data/${PLACE}"),
        ("abc", "abc"),
        ("line abcdef", "line ${file:key.pem}"),
        ("} is short", "} is short"),
    ],
)
def test_text_is_concealed_wherever_it_stands(text: str, shown: str) -> None:
    """The longest secret first; texts that are too short are not secrets."""
    assert SECRETS.conceal(text) == shown


def test_path_is_concealed_as_it_is_shown() -> None:
    """Paths are normalized, so their secrets must be, too (issue 10)."""
    secrets = Secrets({"secret//place/": "${PLACE}"})
    assert secrets.conceal("/data/secret/place") == "/data/${PLACE}"


def test_text_is_concealed_however_it_is_quoted() -> None:
    """For a shell, in Python or in JSON (issue 10)."""
    text = 'it\'s "me"\\'
    for quoted in (shlex.quote(text), repr(text), json.dumps(text)):
        assert "me" not in SECRETS.conceal(quoted).lower().replace("${me}", "")


def test_values_in_anything_are_concealed() -> None:
    """Keys and numbers are left as they are."""
    event = {
        "hunter2": ["hunter2", 7, None],
        "error": ValueError("hunter2"),
        "path": Path("/hunter2"),
    }
    assert SECRETS.concealed(event) == {
        "hunter2": ["${TOKEN}", 7, None],
        "error": "${TOKEN}",
        "path": "/${TOKEN}",
    }


def test_nothing_is_hidden_by_default() -> None:
    """And nothing is copied; the repr has no secrets."""
    event = {"a": ["hunter2"]}
    assert Secrets().concealed(event) is event
    assert "hunter2" not in repr(SECRETS)


def test_report_as_json_has_no_secrets() -> None:
    """Neither in the error nor in the place of the output (issue 10)."""
    report = Report(
        name="p",
        status="failed",
        run="abc",
        error=ValueError("no hunter2"),
        started=NOON,
        ended=NOON,
        seconds=1.0,
        ledger=Ledger.of_pipeline("e", (), Account("l", StageKind.LOAD)),
        landed="wrote 1 epoch to /data/hunter2",
        output=Output("parquet", "/data/hunter2"),
        dead_letters=KeptLetters(1, "/state/hunter2", "etlstage dlq ls hunter2"),
        secrets=SECRETS,
    )
    assert "hunter2" not in json.dumps(report.to_dict())
    assert report.to_dict()["output"] == {
        "what": "parquet",
        "where": "/data/${TOKEN}",
        "messages": 0,
        "text": "wrote 1 epoch to /data/${TOKEN}",
    }
    assert "hunter2" not in repr(report.secrets)
    screen = io.StringIO()
    show_report(report, Screen(file=screen))
    assert "hunter2" not in screen.getvalue()
