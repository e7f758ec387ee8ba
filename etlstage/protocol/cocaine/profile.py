"""
Profiles and manifests of Cocaine, in our words.

What an application was told by its runtime is told by the keys of a stage here. Where
there is no such key, the reason is told; defaults are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from etlstage.errors import ConfigError

__all__ = ("translated",)


_Keys: TypeAlias = dict[str, dict[str, object]]


def _seconds(value: float) -> str:
    return f"{value:g}s"


def _number(value: float) -> float:
    return value


_OURS: Final[dict[str, tuple[str, str, Callable[[float], object]]]] = {
    "startup-timeout": ("timeout", "start", _seconds),
    "handshake-timeout": ("dialect", "handshake", _seconds),
    "heartbeat-timeout": ("timeout", "heartbeat", _seconds),
    "request-timeout": ("timeout", "message", _seconds),
    "idle-timeout": ("workers", "idle", _seconds),
    "seal-timeout": ("dialect", "seal", _seconds),
    "termination-timeout": ("timeout", "stop", _seconds),
    "terminate-timeout": ("timeout", "stop", _seconds),
    "concurrency": ("dialect", "concurrency", _number),
    "pool-limit": ("workers", "max", _number),
    "grow-threshold": ("workers", "grow_at", _number),
}
_DROPPED: Final = {
    "spawn-timeout": "there is no isolate; timeout.start counts from the start",
    "queue-limit": "a pipeline takes in no more than its workers keep up with",
    "crashlog-limit": "each error has the last lines of its worker",
    "log-output": "what a worker prints is in the log",
    "publish-on": "there is no service to announce",
    "unpublish-under": "there is no service to announce",
    "isolate": "workers are processes of ours; see limits, user and cwd",
    "drivers": "a stage is fed by its pipeline",
    "local": "there is no repository of applications",
}
_SEAL: Final = 3.0  # seconds, if it is not said
_STOP: Final = 5.0


def translated(
    profile: Mapping[str, Any], manifest: Mapping[str, Any]
) -> tuple[_Keys, list[str]]:
    """
    Return a profile and a manifest as the keys of a stage, and what was dropped.

    Raises:
        ConfigError: If a value is none of its kind, or there is no program.

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
    """Add a value to the keys, or say why not."""
    if name not in _OURS:
        return _drop(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ConfigError(f"profile: {name}: expected a number, got {value!r}")
    if not value:
        return f"{name}: 0 is no time here: leave it out"
    group, key, said = _OURS[name]
    keys.setdefault(group, {})[key] = said(value)
    return ""


def _drop(name: str) -> str:
    return f"{name}: {_DROPPED.get(name, 'is not known to us')}"


def _notes(profile: Mapping[str, Any]) -> Iterator[str]:
    """Yield what does not fit together here."""
    seal = profile.get("seal-timeout", _SEAL)
    stop = profile.get("terminate-timeout", profile.get("termination-timeout", _STOP))
    if seal >= stop:
        yield (
            f"seal-timeout: {seal:g} s is not less than timeout.stop ({stop:g} s),"
            " after which a worker is stopped whatever it has; raise that"
        )
