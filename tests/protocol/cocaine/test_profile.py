"""Profiles and manifests of Cocaine, in our words."""

from __future__ import annotations

import pytest

from etlstage.errors import ConfigError
from etlstage.protocol.cocaine.profile import translated

MANIFEST = {"slave": "clean.py"}


def test_options_have_other_names() -> None:
    """Of both generations of runtimes."""
    keys, dropped = translated(
        {
            "startup-timeout": 10.0,
            "handshake-timeout": 2.5,
            "heartbeat-timeout": 30,
            "request-timeout": 60,
            "idle-timeout": 600.0,
            "seal-timeout": 2.0,
            "terminate-timeout": 8,
            "concurrency": 4,
            "pool-limit": 8,
            "grow-threshold": 5,
        },
        {"slave": "bin/clean", "environment": {"LEVEL": 3}},
    )

    assert dropped == []
    assert keys == {
        "worker": {
            "command": ["bin/clean"],
            "env": {"LEVEL": "3"},
        },
        "dialect": {
            "name": "cocaine",
            "handshake": "2.5s",
            "seal": "2s",
            "concurrency": 4,
        },
        "timeout": {"start": "10s", "heartbeat": "30s", "message": "60s", "stop": "8s"},
        "workers": {"min": 0, "max": 8, "idle": "600s", "grow_at": 5},
    }


def test_what_is_dropped_has_a_reason() -> None:
    """Also what nobody knows."""
    profile = {"crashlog-limit": 50, "idle-timeout": 0, "colour": "red"}

    keys, dropped = translated(profile, {**MANIFEST, "drivers": {}})

    assert keys == {
        "worker": {"command": ["./clean.py"]},
        "dialect": {"name": "cocaine"},
    }
    assert dropped == [
        "crashlog-limit: each error has the last lines of its worker",
        "idle-timeout: 0 is no time here: leave it out",
        "colour: is not known to us",
        "drivers: a stage is fed by its pipeline",
    ]


def test_worker_must_have_time_to_end_its_sessions() -> None:
    """Before it is stopped: the runtime has a minute for that, and we 5 seconds."""
    _, dropped = translated({"seal-timeout": 60}, MANIFEST)

    (note,) = dropped
    assert note == (
        "seal-timeout: 60 s is not less than timeout.stop (5 s), after which a worker"
        " is stopped whatever it has; raise that"
    )


@pytest.mark.parametrize(
    ("profile", "manifest", "text"),
    [
        ({}, {}, "manifest: slave: expected the path of a program"),
        ({}, {"slave": 5}, "manifest: slave: expected the path"),
        ({}, {**MANIFEST, "environment": []}, "environment: expected a mapping"),
        ({"concurrency": "4"}, MANIFEST, "concurrency: expected a number, got '4'"),
        ({"concurrency": True}, MANIFEST, "concurrency: expected a number, got True"),
        ({"pool-limit": -1}, MANIFEST, "pool-limit: expected a number, got -1"),
    ],
)
def test_what_is_none_of_its_kind_is_told(
    profile: dict[str, object], manifest: dict[str, object], text: str
) -> None:
    """With its name."""
    with pytest.raises(ConfigError, match=text):
        translated(profile, manifest)
