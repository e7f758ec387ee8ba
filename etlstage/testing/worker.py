"""The command line of a hostile worker."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, Literal

from etlstage.errors import ConfigError
from etlstage.protocol.marker import Mode
from etlstage.testing.fault import FaultPlan

__all__ = ("hostile_worker",)

_PROGRAM: Final = Path(__file__).with_name("hostile")
_DRIVERS: Final = {
    Mode.CYCLIC: "single",
    Mode.SINGLE: "single",
    Mode.BATCH_WORKER: "worker",
    Mode.BATCH_SUPERVISOR: "supervisor",
}


def hostile_worker(
    plan: FaultPlan | None,
    *,
    mode: Mode = Mode.SINGLE,
    batch: int = 3,
    transform: Literal["identity", "upper", "count", "nothing"] = "identity",
) -> tuple[str, ...]:
    """
    Return the command of a worker that misbehaves as ``plan`` says.

    It serves T and L stages, with whatever markers the stage has, and answers the
    requests of an E stage like messages. Otherwise it is a worker like others, in
    Python, and starts in a few hundredths of a second.

    Args:
        plan: What goes wrong; None takes it from the variable ``ETLSTAGE_FAULTS``,
            where :meth:`FaultPlan.to_json` may have put it.
        mode: That of the stage.
        batch: Messages that the worker wants in a batch, in ``Mode.BATCH_WORKER``.
        transform: What it makes of each message: the same; the same in capitals; how
            many messages the process has read; nothing, as a load worker.

    Raises:
        ConfigError: If ``mode`` is plain: nothing is asked there.

    """
    if mode not in _DRIVERS:
        raise ConfigError(f"a hostile worker must be asked, got mode {mode.value}")
    if batch < 1:
        raise ConfigError(f"batch must be 1 or more, got {batch}")
    program = (sys.executable, "-I", "-S", str(_PROGRAM))
    arguments = (_DRIVERS[mode], str(batch), transform)
    return (*program, *arguments, *(() if plan is None else (plan.to_json(),)))
