"""The recipes of the published clients, with a stream of a real Kinesis API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from etlstage.pipeline import Pipeline
from etlstage.protocol.events import FarewellReason
from etlstage.shard.keeper import LeaseKeeper
from etlstage.shard.kinesis.source import KinesisSource
from etlstage.shard.leased import LeasedSink
from etlstage.shard.table import SQLiteLeases
from tests.kcl.kinesalite import Kinesalite, kinesalite
from tests.kcl.recipes import COUNT, RECIPES, SHARD, Recipe

pytestmark = [pytest.mark.process, pytest.mark.anyio]


@pytest.fixture(scope="module")
def server() -> Iterator[Kinesalite]:
    """Run one server for all tests of the file."""
    with kinesalite() as found:
        yield found


@pytest.fixture
def stream(server: Kinesalite) -> Iterator[Kinesalite]:
    """Yield the server with a stream of one shard."""
    server.create(1)
    yield server
    server.delete()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
async def test_recipe(tmp_path: Path, stream: Kinesalite, recipe: Recipe) -> None:
    """A shard that has to end is split after its records."""
    stream.put([(b"%d" % n, "a") for n in range(COUNT)])
    if recipe.why is FarewellReason.ENDED:
        stream.split(SHARD)
    launch = recipe.launch()
    pipeline = Pipeline(
        name="p",
        source=KinesisSource(
            stream.stream, lambda: stream.client, follow=False, idle=0.05
        ),
        sink=LeasedSink(
            recipe.stage(tmp_path),
            keeper=LeaseKeeper("r", "start", alone=True, failover=60.0),
            leases=lambda _: SQLiteLeases(tmp_path / "leases.db", "p"),
            launch=launch,
        ),
    )
    with capture_logs() as log:
        report = await pipeline.run()
    recipe.check(report, launch, log)
