"""The settings of dialect ``cocaine``, and how they reach workers and sessions."""

from __future__ import annotations

import builtins
import math
from typing import Any

import pytest

from etlstage.errors import ConfigError, RemoteProtocolError
from etlstage.messages import StageKind
from etlstage.protocol.base import Limits, Shape, Side
from etlstage.protocol.cocaine import CocaineVersion, Encoding
from etlstage.protocol.cocaine.locator import Locator
from etlstage.protocol.cocaine.settings import CocaineDialect, Payload, translated
from etlstage.protocol.events import (
    Opened,
    Ready,
)
from etlstage.protocol.registry import dialect_from_plain
from etlstage.settings.problem import Invalid
from etlstage.settings.units import DURATION
from etlstage.stage import Stage

KINDS = pytest.mark.parametrize("kind", StageKind)
TRANSFORM = StageKind.TRANSFORM


def test_settings_survive_json() -> None:
    """Dead letters and recordings store them as JSON."""
    dialect = CocaineDialect(
        protocol=CocaineVersion.ZERO,
        event="clean",
        concurrency=3,
        encoding=Encoding.BIN_CHUNKS,
        payload=Payload.MSGPACK,
        concat=True,
        terminate="drain",
        seal=1.5,
        handshake=2.0,
        heartbeat=4.0,
        batches=True,
    )

    assert dialect_from_plain(dialect.plain()) == dialect
    assert dialect_from_plain(CocaineDialect().plain()) == CocaineDialect()


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (7, "expected text, got 7"),
        ("a\0b", "can't contain a NUL byte"),
        ("\ud800", "has a surrogate, expected text that can be encoded as UTF-8"),
        ("x" * 65537, "is 65537 bytes long, expected no more than 65536"),
    ],
)
def test_event_that_can_not_be_sent_is_refused(event: object, text: str) -> None:
    """Otherwise each message would fail with it (issue 22)."""
    assert CocaineDialect(event="x" * 65536).event
    with pytest.raises(ConfigError, match=rf"dialect\.event: {text}"):
        CocaineDialect(event=event)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batches", "shape"), [(False, Shape.MESSAGE), (True, Shape.BATCH)]
)
def test_batch_is_one_session_if_there_is_one(batches: bool, shape: Shape) -> None:
    """By default each message has its own session."""
    made = CocaineDialect.section(TRANSFORM).read({})
    dialect = made.fitted(batches=batches, heartbeat=None)

    assert dialect.shape is shape
    assert dialect.fitted(batches=False, heartbeat=None).shape is Shape.MESSAGE


def test_settings_have_their_keys() -> None:
    """The heartbeat is a timeout of the stage, as for any worker."""
    section = CocaineDialect.section(TRANSFORM)
    made = section.read({"protocol": "1", "event": "clean", "driver": "supervisor"})

    assert made.fitted(batches=True, heartbeat=4.0) == CocaineDialect(
        protocol=CocaineVersion.ONE, event="clean", heartbeat=4.0, batches=True
    )
    assert "driver" not in CocaineDialect.section(StageKind.EXTRACT).keys
    assert not {"heartbeat", "batches"} & section.keys.keys()


def test_batches_that_a_worker_drives_are_refused_with_the_reason() -> None:
    """Sessions are pushed: nothing corresponds to BNC."""
    with pytest.raises(Invalid) as caught:
        CocaineDialect.section(TRANSFORM).read({"driver": "worker"})

    (problem,) = caught.value.problems
    assert problem.loc == ("driver",)
    assert "a Cocaine worker can't ask for messages" in problem.text


@KINDS
def test_any_kind_of_stage_can_speak_it(kind: StageKind) -> None:
    """The event is named after the kind by default."""
    stage = Stage(name="s", worker=("w",), kind=kind, dialect=CocaineDialect())

    assert stage.dialect.problem(kind) is None
    assert stage.dialect.announces
    assert stage.dialect.connection is not None


def test_worker_is_given_where_to_connect() -> None:
    """The version comes last: some workers stop at the first option they don't know."""
    told = {
        "app": "clean",
        "identity": "u-1",
        "endpoint": "/run/clean",
        "locator": "/run/locator",
    }

    words = CocaineDialect().connection.arguments(**told)
    assert words == (
        *("--app", "clean", "--endpoint", "/run/clean", "--locator", "/run/locator"),
        *("--uuid", "u-1", "--protocol", "1"),
    )
    assert (
        CocaineDialect(protocol=CocaineVersion.ONE).connection.arguments(**told)
        == words
    )
    older = CocaineDialect(protocol=CocaineVersion.ZERO)
    assert older.connection.arguments(**told) == words[:-2]


def test_worker_that_connects_identifies_itself() -> None:
    """In its first frame, in any version; later bytes do not matter."""
    dialect = CocaineDialect()
    for version in CocaineVersion:
        worker = CocaineDialect(protocol=version).open(Side.WORKER, Limits())
        worker.send(Ready("u-1"))
        data = b"".join(worker.data_to_send())
        assert dialect.connection.identity(data) == "u-1"
        assert dialect.connection.identity(data[:-5]) is None


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1", b"\xc1", b"\x93\x02\x00\x91\xa1u", b"\x93\x00\x00\x90"]
)
def test_who_sends_something_else_is_no_worker(data: bytes) -> None:
    """Whichever program connects to the socket."""
    with pytest.raises(RemoteProtocolError):
        CocaineDialect().connection.identity(data)


def test_session_has_the_settings() -> None:
    """Those that concern it."""
    dialect = CocaineDialect(concurrency=3, event="echo", protocol=CocaineVersion.ONE)
    ours, theirs = (dialect.open(side, Limits()) for side in Side)

    theirs.send(Ready("u"))
    ours.receive_data(b"".join(theirs.data_to_send()), 0.0)
    assert ours.room == 3
    ours.send(Opened(1, [], each=False))
    theirs.receive_data(b"".join(ours.data_to_send()), 0.0)
    (_, opened, _) = theirs.events_received()
    assert opened == Opened(1, [], each=False, ended=False, event="echo")


def test_exit_without_our_terminate_is_a_failure() -> None:
    """Workers that are disowned exit with status 0."""
    dialect = CocaineDialect()

    assert dialect.failed(0, stopped=False, held=0)
    assert not dialect.failed(1, stopped=True, held=0)
    assert not dialect.failed(1, stopped=True, held=0, unproven=3)
    assert dialect.failed(-15, stopped=True, held=0, unproven=3)


def test_silence_has_a_hint() -> None:
    """Workers in Node never answer an event that they do not know."""
    dialect = CocaineDialect()

    assert dialect.silence(0) == "it wrote nothing; does it know the event?"
    assert dialect.silence(7) == "it wrote 7 bytes but did not end a session"
    assert dialect.silence(0, ready=False) == (
        "it did not connect and send a handshake with its --uuid"
    )
    assert dialect.silence(41, ready=False) == "it sent its handshake but no heartbeat"


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the extra to install: only this dialect needs it."""
    real = builtins.__import__

    def without(name: str, *args: Any, **keywords: Any) -> Any:  # noqa: ANN401
        if name == "msgpack":
            raise ImportError(name)
        return real(name, *args, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'etlstage\[cocaine\]'"):
        CocaineDialect().open(Side.SUPERVISOR, Limits())


def test_locator_is_that_of_the_dialect() -> None:
    """The transport asks the dialect for it."""
    assert isinstance(CocaineDialect().connection.services("127.0.0.1", 10053), Locator)


# --- profiles and manifests -----------------------------------------------------


MANIFEST = {"slave": "clean.py"}


def test_options_have_other_names() -> None:
    """The names of both generations of runtimes are known."""
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


def test_long_time_is_a_number_of_seconds() -> None:
    """With a unit it would have an exponent, which no duration has (issue 23)."""
    keys, _ = translated({"idle-timeout": 1e9, "request-timeout": 1e-5}, MANIFEST)

    assert keys["workers"]["idle"] == 1e9
    assert keys["timeout"]["message"] == 1e-5
    assert DURATION.read(keys["workers"]["idle"]) == 1e9


def test_time_is_not_rounded() -> None:
    """A short text has six digits (issue 22)."""
    keys, _ = translated({"idle-timeout": 12345.678}, MANIFEST)

    assert DURATION.read(keys["workers"]["idle"]) == 12345.678


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("pool-limit", 2.5, "a whole number"),
        ("pool-limit", math.inf, "a whole number"),
        ("concurrency", 2.5, "a whole number"),
        ("heartbeat-timeout", math.nan, "a number of 0 or more"),
        ("heartbeat-timeout", math.inf, "a number of 0 or more"),
        ("grow-threshold", math.nan, "a number of 0 or more"),
        ("terminate-timeout", 10**400, "a number of 0 or more"),
    ],
)
def test_number_that_no_stage_can_have_is_reported(
    name: str, value: float, wanted: str
) -> None:
    """JSON has NaN, and numbers that are too large for a float (issue 23)."""
    with pytest.raises(
        ConfigError, match=f"^profile: {name}: expected {wanted}, got {value!r}$"
    ):
        translated({name: value}, MANIFEST)


def test_what_is_dropped_has_a_reason() -> None:
    """Unknown options included."""
    profile = {"crashlog-limit": 50, "idle-timeout": 0, "colour": "red"}

    keys, dropped = translated(profile, {**MANIFEST, "drivers": {}})

    assert keys == {
        "worker": {"command": ["./clean.py"]},
        "dialect": {"name": "cocaine"},
    }
    assert dropped == [
        "crashlog-limit: each error has the last lines of its worker",
        "idle-timeout: 0 is not allowed here, so the default applies",
        "colour: unknown option",
        "drivers: a stage is fed by its pipeline",
    ]


def test_worker_must_have_time_to_end_its_sessions() -> None:
    """Before the stop deadline: the runtime allows a minute, etlstage 5 seconds."""
    _, dropped = translated({"seal-timeout": 60}, MANIFEST)

    (note,) = dropped
    assert note == (
        "seal-timeout: 60 s is not less than timeout.stop (5 s), after which a worker"
        " is stopped with its sessions open; raise timeout.stop"
    )


@pytest.mark.parametrize(
    ("profile", "manifest", "text"),
    [
        ({}, {}, "manifest: slave: expected the path of a program"),
        ({}, {"slave": 5}, "manifest: slave: expected the path"),
        ({}, {**MANIFEST, "environment": []}, "environment: expected a mapping"),
        ({"concurrency": "4"}, MANIFEST, "expected a number of 0 or more, got '4'"),
        ({"concurrency": True}, MANIFEST, "expected a number of 0 or more, got True"),
        ({"pool-limit": -1}, MANIFEST, "pool-limit: expected a number of 0 or more,"),
    ],
)
def test_what_is_none_of_its_kind_is_reported(
    profile: dict[str, object], manifest: dict[str, object], text: str
) -> None:
    """With its name."""
    with pytest.raises(ConfigError, match=text):
        translated(profile, manifest)
