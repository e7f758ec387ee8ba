"""
The command line, with times and pids made plain before lines are broken.

What differs from run to run is longer at times, and would break lines elsewhere.
"""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

from etlstage.cli import main
from etlstage.pipeline.secret import Secrets

conceal = Secrets.conceal


def plain(secrets: Secrets, text: str) -> str:
    """Return a text of which nothing depends on when it is shown."""
    text = re.sub(r"pid \d+", "pid 4711", conceal(secrets, text))
    return re.sub(r"\d+\.\d+ s\b", "0.0 s", text)


def plain_event(secrets: Secrets, event: Any) -> Any:  # noqa: ANN401 - as it is there
    """Return an event like that."""
    told = {k: plain(secrets, v) if isinstance(v, str) else v for k, v in event.items()}
    return {**told, "pid": 4711} if "pid" in told else told


if __name__ == "__main__":
    with (
        patch.object(Secrets, "conceal", plain),
        patch.object(Secrets, "concealed", plain_event),
    ):
        main()
