"""What ``etlstage expect infer`` reads from recordings, in dialects with replies."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.protocol.base import Dialect
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage
from etlstage.testing import (
    RecordedLaunch,
    Recording,
    ScriptedLaunch,
    ScriptedWorker,
    WorkerUnderTest,
)
from etlstage.testing.recording.inference import exchanged, inferred, schema_of
from etlstage.testing.transcript import Channel, Entry
from etlstage.transport import LaunchRequest
from tests.protocol.cocaine.scripted import CocaineWorker


def recorded(*data: bytes, dialect: Dialect | None = None) -> Recording:
    """Return a recording in which stdin and stdout take turns, a second apart."""
    channels = (Channel.STDIN, Channel.STDOUT)
    entries = (Entry(channels[n % 2], part, float(n)) for n, part in enumerate(data))
    spoken = dialect or MarkerDialect()
    return Recording(stage="s", dialect=spoken, entries=(*entries,))


def read(recording: Recording) -> list[tuple[list[bytes], Sequence[bytes]]]:
    """Return messages and outputs of a recording."""
    return [([*one.messages], one.reply.outputs) for one in exchanged(recording)]


def test_replies_are_paired_with_messages() -> None:
    """Cuts don't matter, and a refusal is a reply."""
    recording = recorded(b"a\nb", b"A\n", b"\nc\n", b"\0B\n\0no\x15")
    assert read(recording) == [([b"a"], (b"A",)), ([b"b"], (b"B",)), ([b"c"], ())]
    made = inferred([recording])
    assert (made.replies, made.refused) == (3, 1)
    # The first took three seconds.
    assert made.contract.max_seconds == 30


@pytest.mark.parametrize("mode", [Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER])
def test_batches_have_one_reply(mode: Mode) -> None:
    """Either side may close them; a stage with batches has no expect (issue 26)."""
    data = [b"a\nb\n\x17", b"A\nB\n\0"]
    if mode is Mode.BATCH_WORKER:
        data = [b"a\n", b"\x05", b"b\n", b"A\nB\n\0"]
    recording = recorded(*data, dialect=MarkerDialect(mode=mode))
    assert read(recording) == [([b"a", b"b"], (b"A", b"B"))]
    with pytest.raises(ConfigError) as caught:
        inferred([recording])
    assert str(caught.value) == (
        "stage s: its workers answer a batch as a whole, and expect is for replies to"
        " single messages"
    )


async def test_sessions_are_exchanges() -> None:
    """A session of dialect cocaine is one, from first to last frame (issue 26)."""

    async def upper(worker: ScriptedWorker) -> int:
        async with CocaineWorker(worker) as cocaine:
            async for request in cocaine.requests():
                await cocaine.reply(request, *map(bytes.upper, request.messages))
        return 0

    stage = Stage(name="s", worker=("w",), dialect=CocaineDialect())
    entries: list[Entry] = []

    class Notes:
        def add(self, entry: Entry, /) -> None:
            entries.append(entry)

        def end(self, exit_: int | None, /, *, stopped: bool) -> None:
            pass

    def begin(_request: LaunchRequest) -> Notes:
        return Notes()

    launch = RecordedLaunch(ScriptedLaunch(upper), begin)
    async with WorkerUnderTest(stage, launch=launch) as worker:
        await worker.exchange([b"a", b"b"])
    recording = Recording(stage="s", dialect=stage.dialect, entries=(*entries,))
    assert read(recording) == [([b"a"], (b"A",)), ([b"b"], (b"B",))]


def test_what_holds_for_all_replies_is_proposed() -> None:
    """A promise that one of them breaks is not."""
    one = recorded(b"1\n2\n1\n", b"[1]\n\0[2]\n\0[1]\n\0")
    assert inferred([one]).contract.promised == ("outputs", "json", "max_seconds")
    assert inferred([one]).contract.stateless
    text = inferred([one, recorded(b"3\n", b"x\ny\n\0")]).contract
    assert text.promised == ("max_seconds",)
    other = inferred([one, recorded(b"1\n", b"[3]\n\0")]).contract
    assert not other.stateless
    once = inferred([recorded(b"1\n2\n", b"[1]\n\0[2]\n\0")]).contract
    assert not once.stateless


def test_what_breaks_the_protocol_is_not_read() -> None:
    """Nor is anything after it."""
    recording = recorded(b"a\n", b"A\n\0B\n\0", b"b\n", b"C\n\0")
    assert len(read(recording)) <= 1


def test_schema_has_types_and_what_is_always_there() -> None:
    """This includes objects within others; integers may be numbers."""
    outputs = [{"a": 1, "b": [{"c": None}]}, {"a": 1.5, "b": [], "d": "x"}]
    said = b"".join(json.dumps(one).encode() + b"\n\0" for one in outputs)
    schema = schema_of([recorded(b"1\n2\n", said)])
    assert schema.pop("$schema").startswith("https://json-schema.org/")
    item = {"type": "object", "properties": {"c": {"type": "null"}}, "required": ["c"]}
    assert schema == {
        "type": "object",
        "properties": {
            "a": {"type": "number"},
            "b": {"type": "array", "items": item},
            "d": {"type": "string"},
        },
        "required": ["a", "b"],
    }
    with pytest.raises(ConfigError, match="not all outputs are JSON"):
        schema_of([recorded(b"1\n", b"x\n\0")])


def test_worker_without_replies_is_refused() -> None:
    """It extracts, or has not replied yet."""
    dialect = MarkerDialect(mode=Mode.PLAIN)
    plain = Recording(stage="s", kind=StageKind.EXTRACT, dialect=dialect)
    with pytest.raises(ConfigError, match="stage s: its worker has no replies"):
        inferred([plain])
    with pytest.raises(ConfigError, match="no reply that is not a refusal"):
        inferred([recorded(b"a\n")])
