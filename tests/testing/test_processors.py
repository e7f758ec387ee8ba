"""What Hypothesis finds in record processors, over one life after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from etlstage.protocol.events import FarewellReason
from etlstage.protocol.kcl.checkpoint import SHUTDOWN
from etlstage.testing import ProcessorMachine, ScriptedWorker
from etlstage.testing.fuzzing.steps import Records
from etlstage.testing.transcript import WorkerMisbehaved
from tests.testing.check.processors import Processor

pytestmark = pytest.mark.core

MANY: Final = settings(
    deadline=None,
    max_examples=20,
    stateful_step_count=6,
    database=None,
    derandomize=True,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
)


def machine(*bugs: str) -> type[ProcessorMachine]:
    """Return a machine for a script with these bugs."""

    async def script(worker: ScriptedWorker) -> int:
        return await Processor(*bugs)(worker)

    class Tested(ProcessorMachine):
        tested = script

    return Tested


def test_sound_processor_passes() -> None:
    """It does so however its lives end (issue 25)."""
    run_state_machine_as_test(machine(), settings=MANY)


def losing(*bugs: str) -> type[ProcessorMachine]:
    """Return a machine whose processors lose their lease in each action."""

    class Losing(machine(*bugs)):  # type: ignore[misc]
        drawn = st.just(Records((b"a",), (SHUTDOWN,)))

    return Losing


def test_processor_that_loses_its_lease_is_replaced() -> None:
    """ShutdownException ends it, and another one gets the records (issue 25)."""
    run_state_machine_as_test(losing(), settings=MANY)


def test_exit_of_a_processor_that_has_lost_its_lease() -> None:
    """Its status is checked as after other ends (issue 25)."""

    class NeverRestarted(losing("exits badly")):  # type: ignore[misc]
        def restart(self, why: FarewellReason) -> None:
            """Be no rule: only the lost lease ends a processor."""
            super().restart(why)

    with pytest.raises(AssertionError, match="exited with status 3"):
        run_state_machine_as_test(NeverRestarted, settings=MANY)


def test_records_given_again_have_their_keys() -> None:
    """A record keeps its partition key over all lives of a processor (issue 25)."""
    keys: dict[str, str] = {}

    class Keyed(Processor):
        async def _process(self, records: Sequence[dict[str, Any]]) -> None:
            for record in records:
                number = f"{record['sequenceNumber']} {record['subSequenceNumber']}"
                key = keys.setdefault(number, record["partitionKey"])
                if key != record["partitionKey"]:
                    self._exit_if("meets another key")

    async def script(worker: ScriptedWorker) -> int:
        return await Keyed("meets another key")(worker)

    class Tested(ProcessorMachine):
        tested = script
        drawn = st.just(Records((b"a",)))

        def __init__(self) -> None:
            keys.clear()  # of other examples
            super().__init__()

    run_state_machine_as_test(Tested, settings=MANY)


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        ("dies of ThrottlingException", "status 3"),
        ("begins at the beginning only", "status 3"),
        ("ignores the end of a shard", "without a checkpoint"),
        ("keeps doubles", "was not delivered"),
    ],
)
def test_bug_is_found(bug: str, said: str) -> None:
    """It is reported as the simulated daemon sees it (issues 25 and 26)."""
    # In one of five runs 20 examples are too few.
    patient = settings(MANY, max_examples=200)
    with pytest.raises(WorkerMisbehaved, match=said):
        run_state_machine_as_test(machine(bug), settings=patient)
