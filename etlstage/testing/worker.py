"""The command line of a hostile worker."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, Literal

from etlstage.errors import ConfigError
from etlstage.protocol.marker import Mode
from etlstage.testing.fault import FaultPlan

__all__ = ("DRIVERS", "hostile_worker")

_PROGRAM: Final = Path(__file__).with_name("hostile")
DRIVERS: Final = {
    Mode.PLAIN: "plain",
    Mode.CYCLIC: "cyclic",
    Mode.SINGLE: "single",
    Mode.BATCH_WORKER: "worker",
    Mode.BATCH_SUPERVISOR: "supervisor",
}
"""What a hostile worker is given of the mode of its stage."""


def hostile_worker(
    plan: FaultPlan | None,
    *,
    mode: Mode = Mode.SINGLE,
    batch: int = 3,
    messages: int = 100,
    transform: Literal["identity", "upper", "count", "nothing"] = "identity",
) -> tuple[str, ...]:
    """
    Return the command of a worker that misbehaves by ``plan``.

    It serves stages of all kinds, with whatever markers they have. What it extracts are
    the numbers from 0, which are their own offsets: those of a range, or, where the
    request is empty, those that it has not given yet. A fault at a message happens
    there when it is about to be passed on. Otherwise it is a worker like others, in
    Python, and starts in a few hundredths of a second.

    Args:
        plan: What goes wrong; None takes it from the variable ``ETLSTAGE_FAULTS``,
            where :meth:`FaultPlan.to_json` may have put it.
        mode: That of the stage.
        batch: Messages that the worker wants in a batch, in ``Mode.BATCH_WORKER``.
        messages: How many there are to extract, in ``Mode.PLAIN`` and ``Mode.CYCLIC``.
        transform: What it makes of each message: the same; the same in capitals; how
            many messages the process has read; nothing, as a load worker.

    Raises:
        ConfigError: If a number is too small, or a fault can only be done from outside.

    """
    for fault in () if plan is None else plan.faults:
        if fault.kind.outside:
            text = f"fault {fault.kind.value} is done from outside: see FaultyLaunch"
            raise ConfigError(text)
    if batch < 1:
        raise ConfigError(f"batch must be 1 or more, got {batch}")
    if messages < 0:
        raise ConfigError(f"messages must be 0 or more, got {messages}")
    size = messages if mode in (Mode.PLAIN, Mode.CYCLIC) else batch
    program = (sys.executable, "-I", "-S", str(_PROGRAM))
    arguments = (DRIVERS[mode], str(size), transform)
    return (*program, *arguments, *(() if plan is None else (plan.to_json(),)))
