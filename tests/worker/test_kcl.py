"""Processors of the SDK, run in this process over functions that move bytes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import pytest

from etlstage.errors import RemoteProtocolError
from etlstage.protocol.events import (
    Assignment,
    CommitAnswered,
    CommitAsked,
    Event,
    Farewell,
    FarewellReason,
    Opened,
)
from etlstage.protocol.kcl.lines import Version
from etlstage.protocol.kcl.session import KclSession, State
from etlstage.worker import kcl

pytestmark = pytest.mark.core


class Keeper(kcl.Processor):
    """Keeps what it is given, and calls a test's function for each record."""

    def __init__(self, act: Callable[[kcl.Checkpointer, kcl.Record], None]) -> None:
        self.act = act
        self.told: list[object] = []

    def initialize(self, shard: kcl.Shard) -> None:
        """Keep which shard it is."""
        self.told.append(shard)

    def process_records(
        self, records: list[kcl.Record], checkpointer: kcl.Checkpointer
    ) -> None:
        """Keep the data."""
        for record in records:
            self.told.append(record.data)
            self.act(checkpointer, record)

    def lease_lost(self) -> None:
        """Keep that it happened."""
        self.told.append("lost")

    def shutdown_requested(self, checkpointer: kcl.Checkpointer) -> None:
        """Checkpoint everything."""
        self.told.append("requested")
        checkpointer.checkpoint()


class Daemon:
    """
    The other side, which sends only when it is read from.

    Args:
        script: Events that it sends, one after the other, each as soon as it may.
        errors: Names of errors that it answers checkpoints with, in turn.

    """

    def __init__(
        self,
        script: list[Event],
        version: Version = Version.V2,
        errors: Sequence[str] = (),
    ) -> None:
        self.session = KclSession(Assignment("s-1", ["4", 0]), version)
        self.script = script
        self.errors = iter(errors)
        self.asked: list[object] = []

    def read(self) -> bytes:
        """Return what there is to send."""
        for event in self.session.events_received():
            if isinstance(event, CommitAsked):
                self.asked.append(event.position)
                error = next(self.errors, None)
                self.session.send(CommitAnswered(event.position, error), 0.0)
                if self.session.state is State.ENDING and error == "ShutdownException":
                    self.session.send(Farewell(why=FarewellReason.LOST), 0.0)
        if self.session.state is State.READY and self.script:
            self.session.send(self.script.pop(0), 0.0)
        return b"".join(self.session.data_to_send())

    def write(self, data: bytes) -> None:
        """Take what the processor sends."""
        self.session.receive_data(data, 0.0)


def live(
    daemon: Daemon,
    processor: kcl.Processor,
    on_error: kcl.OnError = "exit",
    slept: list[float] | None = None,
) -> None:
    """Run a processor until its session ends."""
    waits = [] if slept is None else slept
    kcl._Life(
        processor,
        read=daemon.read,
        write=daemon.write,
        sleep=waits.append,
        on_error=on_error,
    ).live()


def nothing(checkpointer: kcl.Checkpointer, record: kcl.Record) -> None:
    """Do nothing."""


@pytest.mark.parametrize("version", Version)
def test_a_life_in_each_version(version: Version) -> None:
    """The version is found by what arrives; the processor is the same."""
    keeper = Keeper(nothing)
    daemon = Daemon(
        [Opened(1, [b"a", b"b"]), Farewell(why=FarewellReason.DRAIN)], version
    )
    live(daemon, keeper)

    full = version in (Version.V1, Version.V2)
    asked = [] if version is Version.LEGACY else ["requested"]
    assert keeper.told == [
        kcl.Shard("s-1", "4" if full else None),
        b"a",
        b"b",
        *asked,
        "lost",
    ]
    assert daemon.asked == [("6", 0) for _ in asked]
    assert daemon.session.state is State.ENDED


def test_the_end_of_a_shard_is_checkpointed() -> None:
    """The processor need not do it."""
    daemon = Daemon([Opened(1, [b"a"]), Farewell(why=FarewellReason.ENDED)])
    live(daemon, Keeper(nothing))

    assert daemon.asked == [("SHARD_END", 0)]


def test_checkpoints_by_record_and_by_number() -> None:
    """A record and its number name the same position."""

    def act(checkpointer: kcl.Checkpointer, record: kcl.Record) -> None:
        if record.data == b"a":
            checkpointer.checkpoint(record)
        else:
            checkpointer.checkpoint(record.sequence_number)

    daemon = Daemon([Opened(1, [b"a", b"b"]), Farewell(why=FarewellReason.LOST)])
    live(daemon, Keeper(act))

    assert daemon.asked == [("5", 0), ("6", 0)]


@pytest.mark.parametrize(
    ("at", "sub", "text"),
    [
        ("abc", None, "'abc', 0 is not a position in a shard, expected a decimal"),
        ("", None, "'', 0 is not"),
        ("-1", None, "'-1', 0 is not"),
        ("5", -1, "'5', -1 is not"),
        (5, None, "sequence=5, sub=0.* expected .sequence number as text, sub"),
    ],
)
def test_number_that_is_none_is_refused_before_it_is_sent(
    at: str, sub: int | None, text: str
) -> None:
    """With the error that the daemon's refusal leads to (issue 25)."""

    def act(checkpointer: kcl.Checkpointer, record: kcl.Record) -> None:
        with pytest.raises(
            kcl.IllegalCheckpoint, match=f"^the checkpoint was not stored: .*{text}"
        ) as caught:
            checkpointer.checkpoint(at, sub)
        assert caught.value.name == "IllegalArgumentException"
        checkpointer.checkpoint(record)

    daemon = Daemon([Opened(1, [b"a"]), Farewell(why=FarewellReason.LOST)])
    live(daemon, Keeper(act))

    assert daemon.asked == [("5", 0)]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("ShutdownException", kcl.LeaseLost),
        ("InvalidStateException", kcl.CheckpointUnavailable),
        ("IllegalArgumentException", kcl.IllegalCheckpoint),
        ("NullPointerException", kcl.CheckpointFailed),
    ],
)
def test_errors_have_classes(name: str, error: type[kcl.CheckpointFailed]) -> None:
    """Each error raises its class, and none of these is tried again."""

    def act(checkpointer: kcl.Checkpointer, record: kcl.Record) -> None:
        with pytest.raises(error) as caught:
            checkpointer.checkpoint()
        assert caught.value.name == name

    daemon = Daemon(
        [Opened(1, [b"a"]), Farewell(why=FarewellReason.LOST)], errors=[name]
    )
    live(daemon, Keeper(act))

    assert len(daemon.asked) == 1


def test_lease_that_is_lost_in_a_batch_ends_it() -> None:
    """An uncaught error ends the batch, which is then answered (issue 25)."""

    def act(checkpointer: kcl.Checkpointer, record: kcl.Record) -> None:
        checkpointer.checkpoint()

    keeper = Keeper(act)
    daemon = Daemon(
        [Opened(1, [b"a", b"b"]), Farewell(why=FarewellReason.LOST)],
        errors=["ShutdownException"],
    )
    live(daemon, keeper)

    assert keeper.told[1:] == [b"a", "lost"]
    assert daemon.session.state is State.ENDED


@pytest.mark.parametrize("why", [FarewellReason.DRAIN, FarewellReason.ENDED])
def test_lease_that_is_lost_in_a_last_action_ends_it(why: FarewellReason) -> None:
    """As in a batch: it is answered, and ``lease_lost`` is called (issue 25)."""
    keeper = Keeper(nothing)
    daemon = Daemon(
        [Opened(1, [b"a"]), Farewell(why=why)], errors=["ShutdownException"]
    )
    live(daemon, keeper)

    assert keeper.told[-1] == "lost"
    assert daemon.session.state is State.ENDED


@pytest.mark.parametrize("failures", [2, 3])
def test_a_store_that_is_throttled_is_asked_again(failures: int) -> None:
    """There are ``tries`` attempts, and each pause is twice the one before."""
    names = ["ThrottlingException", "KinesisClientLibDependencyException"] * 2

    def act(checkpointer: kcl.Checkpointer, record: kcl.Record) -> None:
        if failures == 2:
            checkpointer.checkpoint(tries=3, pause=0.5)
            return
        with pytest.raises(kcl.Throttled):
            checkpointer.checkpoint(tries=3, pause=0.5)

    daemon = Daemon(
        [Opened(1, [b"a"]), Farewell(why=FarewellReason.LOST)], errors=names[:failures]
    )
    slept: list[float] = []
    live(daemon, Keeper(act), slept=slept)

    assert len(daemon.asked) == 3
    assert slept == [0.5, 1.0]


@pytest.mark.parametrize("tries", [0, -1])
def test_checkpoint_is_tried_at_least_once(tries: int) -> None:
    """Else it would seem to be stored (issue 25)."""

    def act(checkpointer: kcl.Checkpointer, record: kcl.Record) -> None:
        with pytest.raises(ValueError, match=f"tries must be 1 or more, got {tries}"):
            checkpointer.checkpoint(record, tries=tries)

    daemon = Daemon([Opened(1, [b"a"]), Farewell(why=FarewellReason.LOST)])
    live(daemon, Keeper(act))

    assert daemon.asked == []


def fail(checkpointer: kcl.Checkpointer, record: kcl.Record) -> None:
    """Fail."""
    raise RuntimeError("no date")


def test_exception_leaves_the_batch_unanswered() -> None:
    """An unanswered batch is delivered again."""
    daemon = Daemon([Opened(1, [b"a", b"b"])])
    with pytest.raises(RuntimeError, match="no date"):
        live(daemon, Keeper(fail))

    assert daemon.session.state is State.PROCESSING


def test_exception_is_skipped_if_that_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The traceback is printed, and the batch is answered."""
    keeper = Keeper(fail)
    daemon = Daemon([Opened(1, [b"a", b"b"]), Farewell(why=FarewellReason.LOST)])
    live(daemon, keeper, on_error="skip")

    assert keeper.told[1:] == [b"a", "lost"]
    assert "RuntimeError: no date" in capsys.readouterr().err


def test_supervisor_that_breaks_the_protocol() -> None:
    """The error names what was expected."""
    pieces = iter([b'{"action":"leap"}\n'])
    with pytest.raises(RemoteProtocolError, match="expected initialize"):
        kcl._Life(
            Keeper(nothing), read=lambda: next(pieces), write=lambda data: None
        ).live()


def test_end_of_input_in_place_of_an_answer() -> None:
    """Its caller must not continue, even if exceptions are skipped."""

    def act(checkpointer: kcl.Checkpointer, record: kcl.Record) -> None:
        daemon.session.data_to_send()
        daemon.read = bytes  # type: ignore[method-assign]
        checkpointer.checkpoint()

    daemon = Daemon([Opened(1, [b"a"])])
    keeper = Keeper(act)
    life = kcl._Life(
        keeper, read=lambda: daemon.read(), write=daemon.write, on_error="skip"
    )
    with pytest.raises(RemoteProtocolError, match="stdin ended"):
        life.live()


def test_records_have_what_the_daemon_sends() -> None:
    """Columns of a run are members of a record."""
    seen: list[kcl.Record] = []
    daemon = Daemon([Opened(1, [b"a"]), Farewell(why=FarewellReason.LOST)])
    live(daemon, Keeper(lambda _, record: seen.append(record)))

    assert seen == [kcl.Record(b"a", "e8b7be43", "5", 0, 0)]


def test_a_processor_has_to_process() -> None:
    """``process_records`` is the only method without a default."""
    with pytest.raises(NotImplementedError):
        live(Daemon([Opened(1, [b"a"])]), kcl.Processor())
    daemon = Daemon([Farewell(why=FarewellReason.DRAIN)])
    live(daemon, kcl.Processor())
    assert daemon.session.state is State.ENDED


class Lazy(kcl.Processor):
    """Has methods that return before they have done anything."""

    async def initialize(self, shard: kcl.Shard) -> None:  # type: ignore[override]
        """Never run."""

    def process_records(  # type: ignore[override]
        self, records: list[kcl.Record], checkpointer: kcl.Checkpointer
    ) -> Iterator[kcl.Record]:
        """Never run."""
        yield from records

    async def lease_lost(self) -> None:  # type: ignore[override]
        """Never run."""

    def shard_ended(  # type: ignore[override]
        self, checkpointer: kcl.Checkpointer
    ) -> int:
        """Return something."""
        return 0

    async def shutdown_requested(  # type: ignore[override]
        self, checkpointer: kcl.Checkpointer
    ) -> AsyncIterator[int]:
        """Never run."""
        yield 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("event", "method", "kind"),
    [
        (None, "initialize", "coroutine"),
        (Opened(1, [b"a"]), "process_records", "generator"),
        (Farewell(why=FarewellReason.LOST), "lease_lost", "coroutine"),
        (Farewell(why=FarewellReason.ENDED), "shard_ended", "int"),
        (Farewell(why=FarewellReason.DRAIN), "shutdown_requested", "async_generator"),
    ],
)
def test_method_that_returns_something_fails(
    event: Event | None, method: str, kind: str
) -> None:
    """It has done nothing, and its action must not be answered (issue 25)."""
    keeper = Keeper(nothing)
    setattr(keeper, method, getattr(Lazy(), method))
    text = rf"Keeper\.{method}\(\) returned {kind}, expected None: "
    with pytest.raises(TypeError, match=text):
        live(Daemon([event] if event else []), keeper)


def test_on_error_is_one_of_two() -> None:
    """It is checked before stdin and stdout are taken over."""
    with pytest.raises(ValueError, match="'refuse'"):
        kcl.run(kcl.Processor(), on_error="refuse")  # type: ignore[arg-type]


def test_lines_are_json() -> None:
    """Each line that a processor writes is JSON, with a line end before it."""
    daemon = Daemon([Farewell(why=FarewellReason.LOST)])
    written: list[bytes] = []

    def write(data: bytes) -> None:
        written.append(data)
        daemon.write(data)

    kcl._Life(kcl.Processor(), read=daemon.read, write=write).live()
    assert [json.loads(line)["responseFor"] for line in written] == [
        "initialize",
        "leaseLost",
    ]
    assert all(line.startswith(b"\n") for line in written)
