"""A Kinesis stream in memory, whose shards are processed by record processors."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import anyio
import pytest
from botocore.exceptions import EndpointConnectionError, SSLError
from structlog.testing import capture_logs

from etlstage.errors import ConfigError, NotCommitted, SourceFailed, StateUnusable
from etlstage.messages import StageKind
from etlstage.pipeline import Pipeline
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.shard.holder import LeaseHolder
from etlstage.shard.keeper import LeaseKeeper
from etlstage.shard.kinesis.aggregate import MAGIC, split
from etlstage.shard.kinesis.source import KinesisSource, client_of
from etlstage.shard.lease import Lease
from etlstage.shard.leased import LeasedSink
from etlstage.shard.table import NEWS, LeaseTable, MemoryLeases, News
from etlstage.stage import BatchPolicy, RestartPolicy, Stage
from etlstage.telemetry import PrometheusMeter
from etlstage.testing import MemorySource, ScriptedLaunch, ScriptedWorker
from tests.shard.load import Processors, drained_after, run_all, virtually
from tests.shard.stream import MemoryKinesis, aggregated, refusal

pytestmark = pytest.mark.core

STAGE = Stage(
    name="load",
    worker=("processor",),
    dialect=KclDialect(),
    kind=StageKind.LOAD,
    batch=BatchPolicy(size=3),
    restart=RestartPolicy(policy="temporary"),
)
FIRST = "shardId-000000000000"


def stream_of(shards: int = 1, records: int = 0, **settings: Any) -> MemoryKinesis:  # noqa: ANN401
    """Return a stream with records, in virtual time."""
    stream = MemoryKinesis(shards, anyio.current_time, **settings)
    for n in range(records):
        stream.put(n)
    return stream


def runner(
    stream: MemoryKinesis,
    processors: Callable[[ScriptedWorker], Coroutine[Any, Any, int]],
    table: LeaseTable | None = None,
    name: str = "a",
    **settings: Any,  # noqa: ANN401 - of the source
) -> Pipeline:
    """Return a runner; by default it ends at the end of the stream."""
    leases = table or MemoryLeases()
    meter, limit = settings.pop("meter", None), settings.pop("limit", None)
    settings = {"follow": False, "idle": 0.5, "sync": 5.0, **settings}
    return Pipeline(
        name="p",
        source=KinesisSource("clicks", lambda: stream, **settings),
        sink=LeasedSink(
            STAGE,
            keeper=LeaseKeeper(name, "start", failover=3.0),
            leases=lambda _of: leases,
            launch=ScriptedLaunch(processors),
            meter=meter,
        ),
        limit=limit,
    )


def check_all(processors: Processors, stream: MemoryKinesis, count: int) -> None:
    """Assert that all records were processed, in order, children after parents."""
    done = {shard: [*dict.fromkeys(ns)] for shard, ns in processors.done.items()}
    assert sorted(n for ns in done.values() for n in ns) == [*range(count)]
    for shard, ns in done.items():
        held = [json.loads(record["Data"])["n"] for record in stream.records[shard]]
        assert ns == held
    for each in stream.shards:
        for parent in ("ParentShardId", "AdjacentParentShardId"):
            begin = each["ShardId"], "initialize"
            if parent in each and begin in processors.actions:
                begun = processors.actions.index(begin)
                ended = processors.actions.index((each[parent], "shardEnded"))
                assert ended < begun


@virtually
async def test_stream_is_read_to_where_there_is_no_more() -> None:
    """The next run continues each shard after its checkpoint."""
    stream, table, processors = stream_of(4, 40), MemoryLeases(), Processors()
    (report,) = await run_all(runner(stream, processors, table))
    assert report.status == "done", report.error
    assert "40 messages loaded by this runner; output complete" in str(report)
    check_all(processors, stream, 40)
    assert not any(lease.ended or lease.owner for lease in table.read())
    assert {action for _, action in processors.actions} >= {"shutdownRequested"}

    for n in range(40, 50):
        stream.put(n)
    (report,) = await run_all(runner(stream, processors, table))
    assert report.ledger[0].produced == 10
    check_all(processors, stream, 50)


@pytest.mark.parametrize("limit", range(1, 13))
def test_limited_load_of_a_stream_is_continued(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """
    No shard ends before all its records are processed, be it that the limit cuts the
    last ones that were read (issue 25).
    """

    @virtually
    async def test() -> None:
        stream, table, processors = stream_of(2, 12), MemoryLeases(), Processors()
        stream.split(FIRST)
        one = runner(stream, processors, table, limit=limit, max_records=5)
        (report,) = await run_all(one)
        assert report.status == "done", report.error
        assert report.ledger[-1].made == limit
        (report,) = await run_all(runner(stream, processors, table))
        assert report.status == "done", report.error
        check_all(processors, stream, 12)
        assert sum(map(len, processors.done.values())) == 12

    test(monkeypatch)


@virtually
async def test_metrics_of_a_stream() -> None:
    """There are metrics of the lag, the leases held, and the checkpoints."""
    stream, processors = stream_of(2, 40), Processors()
    meter, seen = PrometheusMeter(), set[str]()
    held = 'etlstage_leases_held{stage="load"} '
    behind = f'etlstage_shard_behind_seconds{{shard="{FIRST}",stage="load"}} '

    async def look() -> None:
        while True:
            await anyio.sleep(0.1)
            lines = meter.render().splitlines()
            seen.update(line for line in lines if line.startswith((held, behind)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look)
        await run_all(runner(stream, processors, meter=meter, max_records=3))
        tasks.cancel_scope.cancel()

    assert {f"{held}2.0", f"{behind}0.0"} <= seen
    assert any(line.startswith(behind) and not line.endswith(" 0.0") for line in seen)
    rendered = meter.render().splitlines()
    assert f"{held}0.0" in rendered
    stored = [line for line in rendered if 'outcome="stored"' in line]
    # The last checkpoint of each shard, at the shutdown, moves nothing.
    assert sum(float(line.split()[-1]) for line in stored) == 20
    assert len(processors.errors) == 22


@virtually
async def test_shard_that_is_handed_over_waits_for_nothing() -> None:
    """Once the shard is handed over, its reported lag is 0 (issue 25)."""
    stream, processors = stream_of(1, 40), Processors(every=1000)
    news = list[News]()

    class Table(MemoryLeases):
        def swap(self, before: Lease, after: Lease, news_: News = NEWS) -> bool:
            news.append(news_)
            return super().swap(before, after, news_)

    await run_all(runner(stream, processors, Table()))
    assert max(one.lag or 0 for one in news) > 0
    assert news[-1].lag == 0


@virtually
async def test_stream_is_split_and_merged_under_load() -> None:
    """Two runners get every record of every generation, parents before children."""
    stream, table, processors = stream_of(2), MemoryLeases(), Processors(pause=0.02)
    runners = [
        runner(stream, processors, table, name, follow=True) for name in ("a", "b")
    ]

    async def produce() -> None:
        for n in range(200):
            stream.put(n)
            await anyio.sleep(0.1)
            if n == 50:
                _, right = stream.split(FIRST)
            if n == 100:
                _, right = stream.split(right)
            if n == 150:
                stream.merge(right, "shardId-000000000001")
        await anyio.sleep(30)
        for one in runners:
            one.drain()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(produce)
        reports = await run_all(*runners)
    assert {report.status for report in reports} == {"drained"}
    check_all(processors, stream, 200)
    assert all(report.ledger[-1].done for report in reports)
    ended = {lease.shard for lease in table.read() if lease.ended}
    assert len(ended) == 4
    assert not any(lease.owner for lease in table.read() if not lease.ended)


@virtually
async def test_shard_is_split_before_it_was_read() -> None:
    """A run that doesn't follow loads its children, too; it lists shards at the end."""
    stream, table, processors = stream_of(1, 20), MemoryLeases(), Processors()

    async def split() -> None:
        await anyio.sleep(0.1)
        stream.split(FIRST)
        for n in range(20, 40):
            stream.put(n)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(split)
        (report,) = await run_all(runner(stream, processors, table, sync=99.0))
    assert report.status == "done", report.error
    check_all(processors, stream, 40)


@virtually
async def test_checkpoint_that_is_older_than_the_stream() -> None:
    """Reading goes on with what is left, and a warning names the loss (issue 25)."""
    stream, table, processors = stream_of(1, 10), MemoryLeases(), Processors()
    await run_all(runner(stream, processors, table))
    for n in range(10, 20):
        stream.put(n)
    del stream.records[FIRST][:9]
    with capture_logs() as logs:
        await run_all(runner(stream, processors, table))
    assert not [log for log in logs if "may be lost" in log["event"]]
    for n in range(20, 30):
        stream.put(n)
    last = stream.records[FIRST][10]["SequenceNumber"]
    del stream.records[FIRST][:13]
    with capture_logs() as logs:
        (report,) = await run_all(runner(stream, processors, table))
    assert report.status == "done", report.error
    (log,) = [log for log in logs if "may be lost" in log["event"]]
    assert (log["shard"], str(log["checkpoint"])) == (FIRST, last)
    assert processors.done[FIRST] == [*range(20), *range(22, 30)]


@virtually
async def test_api_is_asked_no_more_than_it_allows() -> None:
    """At most five calls a second for each shard, and 2 MiB a second."""
    stream, processors = stream_of(1, 30), Processors(pause=0.0, every=30)
    stream.put_data(json.dumps({"n": 30, "x": "x" * (4 << 20)}).encode(), "30")
    (report,) = await run_all(runner(stream, processors, max_records=4))
    assert report.status == "done", report.error
    check_all(processors, stream, 31)
    at = [time for time, method, _ in stream.calls if method == "get_records"]
    pauses = [after - before for before, after in pairwise(at)]
    assert min(pauses) > 0.199
    assert pauses[:7] == pytest.approx([0.2] * 7, abs=0.1)
    assert pauses[7] >= 2.0


@virtually
async def test_api_that_is_busy_or_gone_is_asked_again() -> None:
    """Pauses between attempts grow; nothing is lost, even if an iterator expires."""
    stream, processors = stream_of(1, 12), Processors()
    throttled = refusal("ProvisionedThroughputExceededException")
    gone = EndpointConnectionError(endpoint_url="http://127.0.0.1")
    stream.fails["describe_stream_summary"] = [gone]
    stream.fails["list_shards"] = [refusal("LimitExceededException")]
    stream.fails["get_shard_iterator"] = [refusal("InternalFailure", 500)]
    stream.fails["get_records"] = [
        refusal("ExpiredIteratorException"),
        *[throttled] * 4,
        gone,
        refusal("ExpiredIteratorException"),
    ]
    with capture_logs() as logs:
        (report,) = await run_all(runner(stream, processors, max_records=5))
    assert report.status == "done", report.error
    check_all(processors, stream, 12)
    pauses = [log["seconds"] for log in logs if log["event"] == "retrying shard read"]
    assert pauses == [0.5, 0.5, 1, 2, 4, 8]


def answered(data: bytes) -> SSLError:
    """Return the error of a client to which a server answers without TLS."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(data)

        with ThreadPoolExecutor() as pool:
            pool.submit(answer)
            port = server.getsockname()[1]
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("AWS_ACCESS_KEY_ID", "key")
                patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
                client = client_of("us-east-1", f"https://127.0.0.1:{port}")
            with pytest.raises(SSLError) as caught:
                client.list_shards(StreamName="clicks")
    return caught.value


@virtually
async def test_tls_connection_that_breaks_is_made_again() -> None:
    """Where a retry can't help the run ends, as with a wrong certificate (issue 25)."""
    untrusted = ssl.SSLCertVerificationError("certificate verify failed")
    for broken, why, status in (
        (answered(b""), "EOF", "done"),
        (tls_error(ssl.SSLZeroReturnError("closed")), "closed", "done"),
        (answered(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "WRONG_VERSION", "failed"),
        (tls_error(untrusted), "certificate verify failed", "failed"),
        (tls_error("hostname 'a' doesn't match 'b'"), "doesn't match", "failed"),
        (tls_error(FileNotFoundError("no CA file")), "no CA file", "failed"),
    ):
        assert why in str(broken)
        for method in ("list_shards", "get_shard_iterator", "get_records"):
            stream, processors = stream_of(1, 12), Processors()
            stream.fails[method] = [broken]
            (report,) = await run_all(runner(stream, processors))
            assert report.status == status, report.error
            if status == "done":
                check_all(processors, stream, 12)
            else:
                assert why in str(report.error)


def tls_error(error: Exception | str) -> SSLError:
    """Return an error of botocore about another one."""
    return SSLError(endpoint_url="https://127.0.0.1", error=error)


@virtually
async def test_outage_does_not_end_a_run_that_looks_for_shards() -> None:
    """It is waited for, as one that interrupts reading is (issue 25)."""
    gone = EndpointConnectionError(endpoint_url="http://127.0.0.1")
    for sync in (1.0, 99.0):
        stream, processors = stream_of(1, 20), Processors()

        async def split(stream: MemoryKinesis = stream) -> None:
            await anyio.sleep(0.1)
            stream.fails["list_shards"] = [gone] * 12
            stream.split(FIRST)
            for n in range(20, 40):
                stream.put(n)

        with capture_logs() as logs:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(split)
                (report,) = await run_all(runner(stream, processors, sync=sync))
        assert report.status == "done", report.error
        check_all(processors, stream, 40)
        assert "retrying shard listing" in {one["event"] for one in logs}


@virtually
async def test_stream_that_is_out_of_reach_at_the_start_ends_the_run() -> None:
    """Its address may be wrong (issue 25)."""
    gone = EndpointConnectionError(endpoint_url="http://127.0.0.1")
    stream = stream_of(1, 20)
    stream.fails["list_shards"] = [gone] * 12
    (report,) = await run_all(runner(stream, Processors()))
    assert report.status == "failed"
    assert "can't read stream clicks in Kinesis: Could not connect" in str(report.error)


@virtually
async def test_iterator_expires_while_a_worker_is_slow() -> None:
    """A new iterator begins at the last record read, which isn't given again."""
    stream, processors = stream_of(1, 30), Processors(pause=0.3)

    async def expire() -> None:
        for _ in range(8):
            await anyio.sleep(0.9)
            stream.fails["get_records"].append(refusal("ExpiredIteratorException"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(expire)
        (report,) = await run_all(runner(stream, processors, max_records=4))
    assert report.status == "done", report.error
    assert processors.done == {FIRST: [*range(30)]}


@virtually
async def test_api_that_refuses_ends_the_run() -> None:
    """The run fails with the API's error, and holds no leases."""
    missing = refusal("ResourceNotFoundException")
    for method in (
        "describe_stream_summary",
        "list_shards",
        "get_shard_iterator",
        "get_records",
    ):
        stream, table = stream_of(2, 12), MemoryLeases()
        stream.fails[method] = [missing] * 9
        (report,) = await run_all(runner(stream, Processors(), table))
        assert report.status == "failed"
        assert isinstance(report.error, SourceFailed), report.error
        assert "can't read stream clicks in Kinesis: " in str(report.error)
        assert "ResourceNotFoundException" in str(report.error)
        assert not any(lease.owner for lease in table.read())


@virtually
async def test_run_that_fails_releases_its_leases() -> None:
    """Other runners needn't wait for the failover time."""

    async def hostile(worker: Any) -> int:  # noqa: ANN401
        await worker.read()
        await anyio.sleep_forever()
        return 0

    stream, table = stream_of(2, 12), MemoryLeases()
    one = runner(stream, hostile, table)

    async def fail() -> None:
        await anyio.sleep(2)
        assert any(lease.owner for lease in table.read())
        scope.cancel()

    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            await run_all(one)
    assert not any(lease.owner for lease in table.read())


@virtually
async def test_hanging_processor_does_not_hold_up_other_shards() -> None:
    """Each shard is read independently."""
    stream, processors = stream_of(2, 4000), Processors(pause=0.0, every=50)
    begun: list[Any] = []

    async def hang(worker: Any) -> int:  # noqa: ANN401
        begun.append(worker)
        if len(begun) == 1:
            await worker.read()
            await worker.write(b'{"action":"status","responseFor":"initialize"}\n')
            await anyio.sleep_forever()
        return await processors(worker)

    one = runner(stream, hang, follow=True, max_records=100)

    await drained_after(25, one)
    ((shard, done),) = processors.done.items()
    assert len(done) == len(stream.records[shard]) > 10


@virtually
async def test_children_of_a_failed_shard_do_not_begin() -> None:
    """Other shards are finished; then the run fails, even if it was drained."""
    for follow in (False, True):
        stream, table = stream_of(2, 40), MemoryLeases()
        processors = Processors(at_end=3, fails=99)
        children = stream.split(FIRST)
        for n in range(40, 60):
            stream.put(n)
        one = runner(stream, processors, table, follow=follow)

        report = await drained_after(25, one)
        assert report.status == "failed"
        assert follow or report.seconds < 20
        assert isinstance(report.error, NotCommitted), report.error
        assert FIRST in str(report.error)
        begun = {shard for shard, action in processors.actions if action[0] == "i"}
        assert begun.isdisjoint(children)
        assert len(processors.done["shardId-000000000001"]) == len(
            stream.records["shardId-000000000001"]
        )


@virtually
async def test_shard_that_fails_is_over_at_once() -> None:
    """Reading it stops, and a run that is drained later has failed."""

    async def dies(worker: Any) -> int:  # noqa: ANN401
        await worker.read()
        return 3

    stream = stream_of(1, 12)
    one = runner(stream, dies, follow=True, sync=99.0, max_records=2)

    async def drain() -> None:
        await anyio.sleep(5)
        assert not stream.calls[-1][0] > begun + 4
        one.drain()

    begun = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain)
        (report,) = await run_all(one)
    assert report.status == "failed"
    assert report.ledger[-1].unprocessed == report.ledger[-1].received > 0


@virtually
async def test_stream_is_read_from_a_time() -> None:
    """From now or from a time on; shards that are split off later are read whole."""
    for begin in ("latest", 100.0):
        stream, table, processors = stream_of(2, 20), MemoryLeases(), Processors()
        stream.split(FIRST)
        await anyio.sleep(100.2 - anyio.current_time() % 100)
        begin = begin if begin == "latest" else anyio.current_time() - 0.1
        for n in range(20, 40):
            stream.put(n)
        (report,) = await run_all(runner(stream, processors, table, begin=begin))
        assert report.status == "done", report.error
        done = sorted(n for ns in processors.done.values() for n in ns)
        assert done == [*range(20, 40)]
        if begin == "latest":
            assert (FIRST, "initialize") not in processors.actions
        stream.split("shardId-000000000001")
        for n in range(40, 60):
            stream.put(n)
        await run_all(runner(stream, processors, table, begin=begin))
        done = sorted(n for ns in processors.done.values() for n in ns)
        assert done == [*range(20, 60)]


@virtually
async def test_runner_that_sees_a_new_stream_split_meanwhile() -> None:
    """It reads the children from their beginning, though it only begins at "latest"."""
    stream, table = stream_of(1, 5), MemoryLeases()
    first, second = Processors(), Processors()

    async def later() -> None:
        await anyio.sleep(1)
        stream.put(5)
        stream.split(FIRST)
        stream.put(6)
        await anyio.sleep(2)
        await run_all(runner(stream, second, table, "b", begin="latest"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(later)
        await run_all(runner(stream, first, table, begin="latest", idle=3.0))
    done = {n for one in (first, second) for ns in one.done.values() for n in ns}
    assert done >= {5, 6}


@virtually
async def test_where_a_new_stream_begins_is_decided_once() -> None:
    """The runner that is first to add leases of the closed shards decides."""
    stream = stream_of(1, 5)
    table = MemoryLeases()

    class Raced(MemoryLeases):
        def read(self) -> list[Lease]:
            rows = table.read()
            if not rows:
                table.add([Lease(FIRST, position='["LATEST", 0, 0.0]')])
            return rows

        add = table.add
        swap = table.swap

    stream.split(FIRST)
    processors = Processors()
    await run_all(runner(stream, processors, Raced(), begin="latest"))
    assert [lease.position for lease in table.read()[1:]] == [None, None]


@virtually
async def test_runners_that_start_together_begin_at_one_place() -> None:
    """The second finds all rows of the first, or none (issue 25)."""
    stream, table = stream_of(2, 5), MemoryLeases()
    stream.split(FIRST)

    class Preempted(MemoryLeases):
        """Another runner starts after each request to add leases."""

        def add(self, leases: Iterable[Lease], **how: bool) -> int:
            added = table.add(leases, **how)
            other = KinesisSource("clicks", lambda: stream, begin="latest")
            holder = LeaseHolder("load", LeaseKeeper("b", "start"), lambda _: table)
            holder._table = table
            holder._add(other)
            return added

        read = table.read
        swap = table.swap

    await anyio.sleep(7)
    await run_all(runner(stream, Processors(), Preempted(), begin="latest"))
    assert [(row.position, row.ended) for row in table.read()] == [
        (None, True),
        *[('["LATEST", 0, 7.0]', False)] * 3,
    ]


@virtually
async def test_closed_shard_that_the_first_runner_did_not_see_is_read() -> None:
    """With "latest", too: it began and ended after the first look (issue 25)."""
    stream, table = stream_of(1), MemoryLeases()

    class Raced(MemoryLeases):
        def read(self) -> list[Lease]:
            rows = table.read()
            if not rows:
                table.add([Lease(FIRST, position='["LATEST", 0, 0.0]')])
            return rows

        add = table.add
        swap = table.swap

    child, _ = stream.split(FIRST)
    for n in range(9):
        stream.put(n)
    stream.split(child)
    processors = Processors()
    await run_all(runner(stream, processors, Raced(), begin="latest"))
    check_all(processors, stream, 9)


@virtually
async def test_shard_that_is_gone_is_named() -> None:
    """Its unread records are lost, which must not be taken for the end of the shard."""
    stream, table, processors = stream_of(2, 12), MemoryLeases(), Processors()
    table.add([Lease("shardId-000000000009", position='["7", 0]')])
    (report,) = await run_all(runner(stream, processors, table))
    assert isinstance(report.error, StateUnusable)
    assert "shard shardId-000000000009 is gone from stream clicks" in str(report.error)
    assert table.read() == [Lease("shardId-000000000009", position='["7", 0]')]
    assert not processors.actions


@virtually
async def test_records_that_were_put_as_one_are_given_one_by_one() -> None:
    """They have sub-sequence numbers, after any of which a run can resume."""
    stream, table = stream_of(1), MemoryLeases()
    stream.put_data(
        aggregated(*((b'{"n": %d}' % n, f"key-{n % 2}") for n in range(5))), "a"
    )
    stream.put(5)
    processors = Processors(every=2, pause=1.0)
    with anyio.move_on_after(3.5):
        await run_all(runner(stream, processors, table))
    assert processors.done == {FIRST: [0, 1, 2]}
    (lease,) = table.read()
    number = stream.records[FIRST][0]["SequenceNumber"]
    assert json.loads(lease.position or "") == [number, 1]

    again = Processors(every=1)
    (report,) = await run_all(runner(stream, again, table, "b"))
    assert report.status == "done", report.error
    assert again.done == {FIRST: [2, 3, 4, 5]}
    assert report.ledger[0].produced == 4


def test_what_is_not_exactly_aggregated_is_a_record() -> None:
    """Data may have the magic bytes by chance, be cut off, or have a wrong digest."""
    whole = aggregated((b"one", "a"), (b"two" * 100, "b"), (b"", "a"))
    assert split(whole) == [(b"one", "a"), (b"two" * 100, "b"), (b"", "a")]
    assert split(b"plain") is None
    for size in range(len(whole)):
        assert split(whole[:size]) is None
    assert split(whole[:-1] + bytes([whole[-1] ^ 1])) is None


@pytest.mark.parametrize(
    "message",
    [
        b"\x1a\x02\x08\x00",  # a record without data
        b"\x1a\x02\x1a\x00",  # without the number of its key
        b"\x1a\x04\x08\x07\x1a\x00",  # of a key that is not there
        b"\x0a\x01\xff\x1a\x04\x08\x00\x1a\x00",  # a key that is not text
        b"\x0b",  # a group
        b"\x0a\x05ab",
        b"\x08" + b"\xff" * 11,
        b"\x08",
    ],
)
def test_message_that_is_none_is_a_record(message: bytes) -> None:
    """An invalid aggregate is a plain record, although its digest is right."""
    from hashlib import md5

    digest = md5(message).digest()  # noqa: S324
    assert split(MAGIC + message + digest) is None


def test_fields_that_are_not_known_are_passed_over() -> None:
    """Unknown fields of every wire type are skipped."""
    from hashlib import md5

    message = b"\x0a\x01k\x20\x96\x01\x29" + b"8" * 8 + b"\x35" + b"4" * 4
    message += b"\x1a\x05\x08\x00\x1a\x01d"
    assert split(MAGIC + message + md5(message).digest()) == [(b"d", "k")]  # noqa: S324


def test_source_without_shards_is_refused() -> None:
    """Without a cut there is no rule that divides its messages into shards."""
    keeper = LeaseKeeper("a", "start")
    sink = LeasedSink(STAGE, keeper=keeper, leases=lambda _of: MemoryLeases())
    with pytest.raises(ConfigError, match="has no shards"):
        sink.input_of(MemorySource([]))


@virtually
async def test_trial_reads_one_shard_after_the_other() -> None:
    """A trial run uses no leases, so it leaves nothing."""
    stream = stream_of(2, 20)
    source = KinesisSource("clicks", lambda: stream, follow=False)
    runs = [run async for run in source.runs()]
    assert sum(len(run) for run in runs) == 20


def test_client_is_made_by_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the file's settings; without boto3 the error names the extra."""
    client = client_of("eu-west-1", "http://127.0.0.1:1")
    assert client.meta.region_name == "eu-west-1"
    source = KinesisSource("arn:aws:kinesis:eu-west-1:1:stream/clicks", lambda: client)
    assert source.input == "stream clicks in Kinesis"
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    source = KinesisSource("clicks", lambda: client_of(None, None))
    with pytest.raises(
        SourceFailed, match=r"needs boto3: install 'etlstage\[kinesis\]'"
    ):
        source.shards()
