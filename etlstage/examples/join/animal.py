"""
Classify a species: a name in, JSON out.

``European starling`` is a starling and a bird. For an unknown one there is no output:
the row goes no further.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from etlstage import worker

MAMMALS = {"coyote", "deer"}
# Names that do not contain the family, and families that count as one.
FAMILIES = {
    "dove": "pigeon",
    "kestrel": "falcon",
    "killdeer": "plover",
    "mallard": "duck",
}


def classify(message: bytes) -> Iterable[bytes]:
    """Return the animal as JSON, or nothing when the species is not known."""
    species = message.decode().casefold()
    if species.startswith("unknown"):
        return []
    # The family comes last: Pacific golden-plover, Blackbirds.
    name = re.split("[ -]", species)[-1].removesuffix("s")
    animal = FAMILIES.get(name, name)
    kind = "mammal" if animal in MAMMALS else "bird"
    return [json.dumps({"animal": animal, "kind": kind}).encode()]


if __name__ == "__main__":
    worker.transform(classify)
