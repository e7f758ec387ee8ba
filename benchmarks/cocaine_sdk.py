"""
Is a Cocaine worker made with the SDK as fast as one of the published framework?

Both echo, under the same supervisor: ten sessions of a message at once, and sessions of
a hundred chunks. The framework is installed where its tests install it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import anyio

from benchmarks.cocaine import BATCH, CONCURRENCY, supervised
from benchmarks.harness import Row, messages, paired
from tests.cocaine.framework import WORKER, installed

COUNT = 20_000
CHUNKS = 200_000

SDK = """
from etlstage.worker import cocaine

def echo(request, response):
    for chunk in request:
        response.write(chunk)

cocaine.run({"transform": echo})
"""


def measure() -> list[Row]:
    """Return sessions and chunks per second of both."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "worker.py")
        script.write_text(WORKER)
        framework = (installed(), str(script), "20")
        sdk = (sys.executable, "-c", SDK)
        for what, count, batch in (("sessions", COUNT, 1), ("chunks", CHUNKS, BATCH)):
            run = messages(count)
            ours, theirs = paired(
                lambda run=run, batch=batch: anyio.run(supervised, sdk, run, batch),  # type: ignore[misc]
                lambda run=run, batch=batch: anyio.run(  # type: ignore[misc]
                    supervised, framework, run, batch
                ),
            )
            said = f"SDK worker, {what}, {CONCURRENCY} sessions at once"
            rows.append(Row(said, ours, "cocaine 0.12.14.5", theirs, f"{what}/s", 1.0))
    return rows
