"""
Clean one record: JSON in, JSON out.

Fields get short names, numbers and dates are converted, and unknown values become
null. A record that cannot be used gets no reply and so goes no further.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import date

from etlstage import worker

DAMAGES = ("None", "Minor", "Medium", "Substantial")


def clean(message: bytes) -> Iterable[bytes]:
    """Return the cleaned record, or nothing when it names no level of damage."""
    record = json.loads(message)
    damage = record["Effect Amount of damage"]
    # Some military records have a letter here (the class of a mishap, it seems),
    # which cannot be compared with the levels of all the others.
    if damage not in DAMAGES:
        return []
    cleaned = {
        "date": date.fromisoformat(record["Flight Date"]).isoformat(),
        "airport": text(record["Airport Name"]),
        "state": text(record["Origin State"]),
        "operator": text(record["Aircraft Airline Operator"]),
        "aircraft": text(record["Aircraft Make Model"]),
        "phase": text(record["Phase of flight"]),
        "time_of_day": text(record["Time of day"]),
        "species": text(record["Wildlife Species"]),
        "size": text(record["Wildlife Size"]),
        "speed_knots": speed(record),
        "damage": damage.lower(),
        "cost_usd": int(record["Cost Total $"]),
    }
    return [json.dumps(cleaned, separators=(",", ":")).encode()]


def text(value: str) -> str | None:
    """Return the text without doubled blanks and footnote marks; null if unknown."""
    # The size in "Unknown bird - small" has a field of its own.
    if value.casefold().startswith("unknown"):
        return None
    return " ".join(value.rstrip("*").split())


def speed(record: dict[str, str]) -> int | None:
    """Return the speed; null if it is empty or zero, since nothing flies at 0 knots."""
    # Spark omits empty fields.
    knots = int(record.get("Speed IAS in knots", 0))
    return knots or None


if __name__ == "__main__":
    worker.transform(clean)
