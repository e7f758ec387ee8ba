"""
Offsets that the supervisor keeps: the end of the input, and the ranges up to it.

On every engine, a range never reaches beyond the offset that the worker reports as
``latest``: messages that come later would be skipped without a trace. The worker is not
asked only if the pipeline file sets an end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress

from etlstage.errors import EtlstageError, SourceFailed
from etlstage.supervisor import AsyncSupervisor

__all__ = ("ask_offset", "fell_back", "steps")


def steps(start: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of offsets to request, from ``start`` up to ``end``."""
    for first in range(start, end, step):
        yield first, min(first + step, end)


async def ask_offset(supervisor: AsyncSupervisor, which: str) -> int:
    """
    Ask the worker for its ``initial`` or ``latest`` offset.

    Raises:
        SourceFailed: If the worker does not answer with one whole number.

    """
    stage = supervisor.stage.name
    key = "start" if which == "initial" else "end"
    request = json.dumps({"offsets": which})
    remedy = f"set {key}, or have the worker answer this request"
    try:
        runs = supervisor.extract_runs(template=request)
        reply = [message async for run in runs for message in run]
    except EtlstageError as error:
        text = f"{error} (after request {request}: {remedy})"
        raise SourceFailed(text, stage=stage) from error
    with suppress(ValueError):
        (number,) = reply
        # Python would also read digits of other scripts, and "1_000" as 1000.
        if re.fullmatch(rb"\s*-?[0-9]+\s*", number):
            return int(number)
    found = f"{len(reply)} messages" if len(reply) != 1 else "no number"
    raise SourceFailed(
        f"stage {stage}: the worker answered request {request} with {found}, expected"
        f" one message, a whole number: {remedy}",
        stage=stage,
    )


def fell_back(stage: str, latest: int, reached: int, remedy: str) -> SourceFailed:
    """Return the error for a latest offset lower than one that was already reached."""
    return SourceFailed(
        f"stage {stage}: the latest offset is {latest}, but {reached} was reached"
        f" before: {remedy} to read from the beginning",
        stage=stage,
    )
