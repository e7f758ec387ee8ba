"""
The settings of dialect ``cocaine``, and its implementation of ``Dialect``.

Workers do not import this file: dataclasses take longer to import than the dialect.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, Self, TypeAlias

from etlstage.errors import ConfigError, RemoteProtocolError
from etlstage.messages import MOST_TEXT, StageKind, counted, text_flaw
from etlstage.protocol.base import Dialect, Limits, Shape, Side
from etlstage.protocol.cocaine.frame import (
    CocaineVersion,
    Encoding,
    Frames,
    text_of,
)
from etlstage.protocol.cocaine.locator import Locator
from etlstage.protocol.cocaine.session import CocaineSession, Deadlines
from etlstage.settings.definition import (
    Definition,
    Section,
    Setting,
    broken,
    settings_of,
)
from etlstage.settings.kind import Choice, Noun, Text
from etlstage.settings.problem import Problem, refused
from etlstage.settings.units import Count, Duration, as_duration

__all__ = ("CocaineDialect", "Payload", "translated")

_PUSHED: Final = (
    "a Cocaine worker can't ask for messages, they are pushed to it: omit driver; a"
    " batch is one session, and a choke ends it"
)


class CocaineConnector(NamedTuple):
    """Options tell a worker where to connect; it first sends its ``--uuid``."""

    version: CocaineVersion
    """The version of the protocol that a worker's arguments name."""

    def arguments(
        self, *, app: str, identity: str, endpoint: str, locator: str
    ) -> tuple[str, ...]:
        options = {"app": app, "endpoint": endpoint, "locator": locator}
        options["uuid"] = identity
        # Last: some workers stop reading at an option that they do not know.
        if self.version is CocaineVersion.ONE:
            options["protocol"] = "1"
        return tuple(word for name in options for word in (f"--{name}", options[name]))

    def identity(self, data: bytes) -> str | None:
        for frame in Frames(MOST_TEXT).feed(data):
            match frame:
                case (0 | 1, 0, (name, *_), *_):
                    return text_of(name, "the name in a handshake")
            raise RemoteProtocolError("the first frame is not a handshake")
        return None

    def services(self, host: str, port: int) -> Locator:
        return Locator(host, port)


class Payload(Enum):
    """The content of a chunk of a reply."""

    RAW = "raw"
    """The message."""
    MSGPACK = "msgpack"
    """The message, packed as a msgpack string."""


class _Event(Text):
    """The name of an event."""

    def __init__(self) -> None:
        super().__init__(nul=False)

    def read(self, value: object) -> str:
        event = super().read(value)
        if (flaw := text_flaw(event)) is not None:
            raise refused(flaw)
        return event


@dataclass(frozen=True, kw_only=True)
class CocaineDialect(Definition, Dialect):
    """The worker protocol of the Cocaine application platform."""

    name: ClassVar[str] = "cocaine"
    label: ClassVar[tuple[str, ...]] = ("dialect",)
    protocol: CocaineVersion = CocaineVersion.AUTO
    """Version of the protocol: 1 since runtime 0.12, 0 before; auto: the worker is
    offered 1, and its answer decides."""
    event: Annotated[str, _Event()] = ""
    """Name of the handler that the worker is to call; by default the kind of the
    stage."""
    concurrency: Count = 10
    """Maximum number of sessions that a worker has at once."""
    encoding: Encoding = Encoding.RAW
    """How strings are encoded: raw, as by the runtimes; bin, for Python workers with
    msgpack 1; bin-chunks, for workers that decode raw strings as UTF-8."""
    payload: Payload = Payload.RAW
    """What a chunk of a reply contains: the message (raw), or the message packed once
    more, as by Python workers of version 0, which do not expect that of their input
    (msgpack)."""
    concat: bool = False
    """Whether all chunks of a reply form one message, instead of one each."""
    terminate: Annotated[Literal["fail", "drain"], Noun("way to terminate")] = "fail"
    """What becomes of the sessions of a worker that sends a terminate: they are lost at
    once (fail), or it may complete them within ``seal`` (drain)."""
    seal: Duration = 3.0
    """How long open sessions may take to end before a worker is sent a terminate, in
    seconds; less than timeout.stop."""
    handshake: Duration | None = None
    """Time from the start of a worker until it identifies itself, in seconds; by
    default only timeout.start applies."""
    heartbeat: Duration = 30.0
    """Time from one heartbeat of a worker, or anything else that it sends, to the next,
    in seconds."""
    batches: bool = False
    """A batch is one session."""

    @classmethod
    def section(cls, kind: StageKind) -> Section:
        """Return the section that reads the settings, without those of every stage."""
        # The heartbeat has a key among the timeouts, and the batch a key of its own.
        keys = {
            name: setting
            for name, setting in settings_of(cls).items()
            if name not in ("heartbeat", "batches")
        }
        if kind is not StageKind.EXTRACT:
            drivers = Choice("driver", {"supervisor": "supervisor", "worker": "worker"})
            doc = "What closes a batch: always the supervisor; a worker can't ask for messages."
            keys["driver"] = Setting(
                "driver", drivers, default="supervisor", model=cls, doc=doc
            )
        return Section(keys, cls._read, rules=_driver_rules)

    @classmethod
    def _read(cls, given: Mapping[str, Any]) -> Self:
        return cls(**{name: given[name] for name in given if name != "driver"})

    def fitted(self, *, batches: bool, heartbeat: float | None) -> Self:
        """Return the settings with those that a stage has in every dialect."""
        heartbeat = self.heartbeat if heartbeat is None else heartbeat
        return replace(self, batches=batches, heartbeat=heartbeat)

    @property
    def shape(self) -> Shape:
        return Shape.BATCH if self.batches else Shape.MESSAGE

    @property
    def announces(self) -> bool:
        """Whether a worker reports that it is ready: with its first heartbeat."""
        return True

    def variables(self) -> Mapping[str, str | None]:
        """Return the time within which a worker has to send a heartbeat, in seconds."""
        return {"heartbeat": f"{self.heartbeat:g}"}

    @property
    def connection(self) -> CocaineConnector:
        return CocaineConnector(self.spoken)

    @property
    def spoken(self) -> CocaineVersion:
        """The version that a worker's arguments name."""
        auto = self.protocol is CocaineVersion.AUTO
        return CocaineVersion.ONE if auto else self.protocol

    def open(
        self,
        side: Side,
        limits: Limits,
        *,
        kind: StageKind = StageKind.TRANSFORM,
        **_others: object,
    ) -> CocaineSession:
        return CocaineSession(
            side,
            self.protocol,
            limits=limits,
            encoding=self.encoding,
            event=self.event or kind.value,
            concurrency=self.concurrency,
            concat=self.concat,
            packed=self.payload is Payload.MSGPACK,
            soft=self.terminate == "drain",
            deadlines=Deadlines(
                handshake=self.handshake, heartbeat=self.heartbeat, seal=self.seal
            ),
        )

    def silence(self, received: int, *, ready: bool = True) -> str:
        if not ready and received:
            return "it sent its handshake but no heartbeat"
        if not ready:
            return "it did not connect and send a handshake with its --uuid"
        if not received:
            return "it wrote nothing; does it know the event?"
        return f"it wrote {counted(received, 'byte')} but did not end a session"

    def failed(
        self, status: int, *, stopped: bool, held: int, unproven: int = 0
    ) -> bool:
        """Return whether an exit is a failure: any is, except a requested one."""
        # Frameworks exit with any status once they are stopped, but not by a signal.
        return not stopped or (unproven > 0 and status < 0)

    def plain(self) -> dict[str, object]:
        return {"name": self.name, **super().plain()}


def _driver_rules(given: Mapping[str, Any]) -> Iterable[Problem]:
    """Yield the problem that a worker can't drive a batch."""
    if given.get("driver") == "worker":
        yield broken(("driver",), _PUSHED)


# --- profiles and manifests -------------------------------------------------------

_Keys: TypeAlias = dict[str, dict[str, object]]


# For each of Cocaine's keys our mapping and key, and whether it is in seconds.
_OURS: Final[dict[str, tuple[str, str, bool]]] = {
    "startup-timeout": ("timeout", "start", True),
    "handshake-timeout": ("dialect", "handshake", True),
    "heartbeat-timeout": ("timeout", "heartbeat", True),
    "request-timeout": ("timeout", "message", True),
    "idle-timeout": ("workers", "idle", True),
    "seal-timeout": ("dialect", "seal", True),
    "termination-timeout": ("timeout", "stop", True),
    "terminate-timeout": ("timeout", "stop", True),
    "concurrency": ("dialect", "concurrency", False),
    "pool-limit": ("workers", "max", False),
    "grow-threshold": ("workers", "grow_at", False),
}
_WHOLE: Final = ("concurrency", "pool-limit")
_DROPPED: Final = {
    "spawn-timeout": "there is no isolate; timeout.start begins with the process",
    "queue-limit": "a pipeline reads only as much as its workers can process",
    "crashlog-limit": "each error has the last lines of its worker",
    "log-output": "what a worker prints is in the log",
    "publish-on": "there is no service to announce",
    "unpublish-under": "there is no service to announce",
    "isolate": "workers are local processes; see limits, user and cwd",
    "drivers": "a stage is fed by its pipeline",
    "local": "there is no repository of applications",
}
_SEAL: Final = 3.0  # seconds, by default
_STOP: Final = 5.0


def translated(
    profile: Mapping[str, Any], manifest: Mapping[str, Any]
) -> tuple[_Keys, list[str]]:
    """
    Return a profile and a manifest as the keys of a stage, and what was dropped.

    Raises:
        ConfigError: If a value has the wrong type, or there is no program.

    """
    program = manifest.get("slave")
    if not isinstance(program, str) or not program:
        raise ConfigError("manifest: slave: expected the path of a program")
    # A bare name would be looked for on the PATH.
    command = program if "/" in program else f"./{program}"
    worker: dict[str, object] = {"command": [command]}
    keys: _Keys = {"worker": worker, "dialect": {"name": "cocaine"}}
    environment = manifest.get("environment", {})
    if not isinstance(environment, Mapping):
        raise ConfigError("manifest: environment: expected a mapping")
    if environment:
        worker["env"] = {str(name): str(value) for name, value in environment.items()}
    dropped = [
        reason
        for name, value in profile.items()
        if (reason := _translate(keys, name, value))
    ]
    known = ("slave", "environment")
    dropped += [_drop(name) for name in manifest if name not in known]
    if "workers" in keys:
        # Applications have no worker until there is work.
        keys["workers"] = {"min": 0, "max": 10, **keys["workers"]}
    return keys, [*dropped, *_notes(profile)]


def _translate(keys: _Keys, name: str, value: object) -> str:
    """Add a value to the keys, or return why not."""
    if name not in _OURS:
        return _drop(name)
    fraction = name in _WHOLE and isinstance(value, float)
    if (
        fraction
        or isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= sys.float_info.max
    ):
        wanted = "a whole number" if fraction else "a number of 0 or more"
        raise ConfigError(f"profile: {name}: expected {wanted}, got {value!r}")
    if not value:
        return f"{name}: 0 is not allowed here, so the default applies"
    group, key, seconds = _OURS[name]
    keys.setdefault(group, {})[key] = as_duration(value) if seconds else value
    return ""


def _drop(name: str) -> str:
    return f"{name}: {_DROPPED.get(name, 'unknown option')}"


def _notes(profile: Mapping[str, Any]) -> Iterator[str]:
    """Yield warnings about values that do not fit together here."""
    seal = profile.get("seal-timeout", _SEAL)
    stop = profile.get("terminate-timeout", profile.get("termination-timeout", _STOP))
    if seal >= stop:
        yield (
            f"seal-timeout: {seal:g} s is not less than timeout.stop ({stop:g} s),"
            " after which a worker is stopped with its sessions open; raise timeout.stop"
        )
