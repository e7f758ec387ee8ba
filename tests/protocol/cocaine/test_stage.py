"""A supervisor with workers of dialect ``cocaine``, in memory and on a virtual clock."""

from __future__ import annotations

from typing import Any

import pytest

from etlstage.protocol.base import Limits, Side
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.protocol.events import ExchangesEnded, Farewell, Ready
from etlstage.stage import Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.testing import ScriptedLaunch, ScriptedWorker, run_virtually

pytestmark = pytest.mark.core


def stage(**settings: Any) -> Stage:  # noqa: ANN401 - passed on
    """Return a stage whose workers speak the dialect."""
    return Stage(name="t", command=("w",), dialect=CocaineDialect(**settings))


async def capitals(worker: ScriptedWorker) -> int:
    """Answer each message with its capitals."""
    session = CocaineDialect().open(Side.WORKER, Limits())
    session.send(Ready("u"))
    while True:
        await worker.write(b"".join(session.data_to_send()))
        data = await worker.read()
        session.receive_data(data, 0.0)
        for event in session.events_received():
            if isinstance(event, ExchangesEnded):
                for id_, messages in event.ends:
                    session.send(ExchangesEnded([(id_, (messages[0].upper(),))]))
            if isinstance(event, Farewell):
                session.send(event)
                await worker.write(b"".join(session.data_to_send()))
                return 0


def test_messages_are_sessions() -> None:
    """Two workers have them, ten at once each; the order is that of the messages."""
    scripted = ScriptedLaunch(capitals)

    async def main() -> None:
        async with AsyncSupervisor(stage(), launch=scripted) as supervisor:
            results = await supervisor.submit([b"m%d" % n for n in range(100)])
        assert [r.outputs for r in results] == [(b"M%d" % n,) for n in range(100)]
        assert [w.returncode for w in scripted.workers] == [0]

    run_virtually(main)
