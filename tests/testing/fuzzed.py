"""Look for cases that make a script fail."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from unittest.mock import patch

from anyio.from_thread import start_blocking_portal

from etlstage.testing import VirtualLoop
from etlstage.testing.fuzzing import fuzz
from etlstage.testing.fuzzing.fuzz import Budget, Found, Fuzzer
from etlstage.testing.fuzzing.oracle import CaseFailed

__all__ = ("searched",)


def searched(
    fuzzer: Fuzzer, examples: int, *, known: Iterable[CaseFailed] = ()
) -> list[Found]:
    """Return what is found; in virtual time, so that none hangs on a busy machine."""
    options = {"loop_factory": VirtualLoop}
    portal = partial(start_blocking_portal, backend_options=options)
    with patch.object(fuzz, "start_blocking_portal", portal), fuzzer.running():
        return fuzzer.search(Budget(examples, seconds=60, seed=1), known=known)
