"""
The command line, with times and pids replaced by constants before lines are wrapped.

Times and pids vary in length between runs, so lines would wrap at different places.
"""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

from etlstage import cli
from etlstage.pipeline.secret import Secrets

conceal = Secrets.conceal


def plain(secrets: Secrets, text: str) -> str:
    """Return a text with constants in place of its pids and durations."""
    text = re.sub(r"pid \d+", "pid 4711", conceal(secrets, text))
    return re.sub(r"\d+\.\d+ s\b", "0.0 s", text)


def plain_event(secrets: Secrets, event: Any) -> Any:  # noqa: ANN401 - as it is there
    """Return an event with the same constants in it."""
    told = {k: plain(secrets, v) if isinstance(v, str) else v for k, v in event.items()}
    return {**told, "pid": 4711} if "pid" in told else told


def main() -> None:
    """Run the command line with these constants."""
    with (
        patch.object(Secrets, "conceal", plain),
        patch.object(Secrets, "concealed", plain_event),
    ):
        cli.main()
