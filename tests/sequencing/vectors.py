"""Results recorded from the real package: ``gazette.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

VECTORS: Final[dict[str, Any]] = json.loads(
    Path(__file__).with_name("gazette.json").read_text()
)
