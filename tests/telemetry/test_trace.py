"""Spans in OpenTelemetry's real SDK, and the trace that is passed to workers."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from unittest.mock import patch

import anyio
import pytest
from opentelemetry import trace as api
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from etlstage import AsyncSupervisor, ErrorPolicy, Pipeline, Stage, WorkerProgram
from etlstage.errors import LocalProtocolError, WorkerRefusal
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.telemetry import trace
from etlstage.testing import (
    MemoryEpochs,
    MemoryEpochSink,
    MemorySink,
    MemorySource,
    ScriptedLaunch,
    ScriptedWorker,
)
from tests.pipeline.test_loading import Numbers, Stopped, stop_at

STAGE = Stage(name="t", worker=("none",), on_error=ErrorPolicy(retries=0))
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def tell(worker: ScriptedWorker) -> int:
    """Answer with the trace that the worker was given."""
    async for message in worker.messages():
        if message == b"no":
            await worker.refuse("no")
        else:
            await worker.reply(worker.request.env.get("TRACEPARENT", "").encode())
    return 0


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Return the exporter that collects the spans of a host with the real SDK."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with patch.object(trace, "_tracer", lambda: provider.get_tracer("etlstage")):
        yield exporter


def tracer() -> api.Tracer:
    """Return the tracer for the host's own spans."""
    found = trace._tracer()
    assert found is not None
    return found


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """Return the spans that have ended."""
    return {span.name: span for span in spans.get_finished_spans()}


async def test_submission_is_a_span_of_its_caller(spans: InMemorySpanExporter) -> None:
    """It counts the messages, and those that failed (issue 11)."""
    with tracer().start_as_current_span("request"):
        async with AsyncSupervisor(STAGE, launch=ScriptedLaunch(tell)) as supervisor:
            await supervisor.submit([b"a", b"no", b"b"])
    ended = by_name(spans)
    submit, request = ended["etlstage.submit"], ended["request"]
    assert submit.attributes == {
        "etlstage.stage": "t",
        "etlstage.messages": 3,
        "etlstage.failed": 1,
    }
    assert submit.parent is not None
    assert submit.parent.span_id == request.context.span_id


async def test_worker_is_given_its_trace(spans: InMemorySpanExporter) -> None:
    """It is the trace in which its supervisor was entered; ``env`` may set another."""
    own = Stage(
        name="t", worker=WorkerProgram(command=("none",), env={"TRACEPARENT": PARENT})
    )
    with tracer().start_as_current_span("service") as service:
        async with (
            AsyncSupervisor(STAGE, launch=ScriptedLaunch(tell)) as supervisor,
            AsyncSupervisor(own, launch=ScriptedLaunch(tell)) as other,
        ):
            (told,) = await supervisor.ask(b"a")
            assert await other.ask(b"a") == (PARENT.encode(),)
    context = service.get_span_context()
    within = f"00-{context.trace_id:032x}-{context.span_id:016x}-"
    assert told.decode().startswith(within)
    assert spans.get_finished_spans()


async def test_trace_of_this_process_is_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This needs no span, and no OpenTelemetry."""
    monkeypatch.setenv("TRACEPARENT", PARENT)
    assert trace.current_trace() == {"TRACEPARENT": PARENT}
    with patch.object(trace, "_tracer", lambda: None):
        assert trace.current_trace() == {"TRACEPARENT": PARENT}
        async with AsyncSupervisor(STAGE, launch=ScriptedLaunch(tell)) as supervisor:
            assert await supervisor.ask(b"a") == (PARENT.encode(),)


async def test_error_ends_a_span_as_one(spans: InMemorySpanExporter) -> None:
    """The caller's error is in the trace, too."""
    async with AsyncSupervisor(STAGE, launch=ScriptedLaunch(tell)) as supervisor:

        async def messages() -> AsyncIterator[bytes]:
            yield b"a"
            raise LocalProtocolError("out of order")

        with pytest.raises(LocalProtocolError):
            [result async for result in supervisor.stream(messages())]
    stream = by_name(spans)["etlstage.stream"]
    assert stream.status.status_code is StatusCode.ERROR
    assert stream.status.description == "out of order"
    assert [event.name for event in stream.events] == ["exception"]


async def test_question_that_fails_is_an_error(spans: InMemorySpanExporter) -> None:
    """Refused or not answered in time: its span has the caller's error (issue 22)."""

    async def tells_late(worker: ScriptedWorker) -> int:
        await anyio.sleep(5)
        return await tell(worker)

    async with AsyncSupervisor(STAGE, launch=ScriptedLaunch(tell)) as supervisor:
        await supervisor.ask(b"a")
        with pytest.raises(WorkerRefusal):
            await supervisor.ask(b"no")
    async with AsyncSupervisor(STAGE, launch=ScriptedLaunch(tells_late)) as supervisor:
        with pytest.raises(TimeoutError):
            await supervisor.ask(b"a", timeout=0.01)
    good, refused, late = spans.get_finished_spans()
    assert {span.name for span in (good, refused, late)} == {"etlstage.ask"}
    assert good.status.status_code is StatusCode.UNSET
    for span, error in ((refused, "WorkerRefusal"), (late, "TimeoutError")):
        assert span.status.status_code is StatusCode.ERROR
        (event,) = span.events
        assert str((event.attributes or {})["exception.type"]).endswith(error)
    assert dict(refused.attributes or {}) == {
        "etlstage.stage": "t",
        "etlstage.messages": 1,
        "etlstage.failed": 1,
    }


async def test_stream_counts_its_messages(spans: InMemorySpanExporter) -> None:
    """As a submission does: those that were yielded, and failed (issue 22)."""
    async with AsyncSupervisor(STAGE, launch=ScriptedLaunch(tell)) as supervisor:
        async for _ in supervisor.stream([b"a", b"no", b"b"]):
            pass
    assert by_name(spans)["etlstage.stream"].attributes == {
        "etlstage.stage": "t",
        "etlstage.messages": 3,
        "etlstage.failed": 1,
    }


async def test_stream_that_is_left_is_no_error(spans: InMemorySpanExporter) -> None:
    """Its span ends when it is closed, and other spans are not disturbed."""
    async with AsyncSupervisor(STAGE, launch=ScriptedLaunch(tell)) as supervisor:
        with tracer().start_as_current_span("first"):
            results = supervisor.stream([b"a"] * 9)
            await anext(results)
        with tracer().start_as_current_span("second") as second:
            await results.aclose()
            assert api.get_current_span() is second
    assert by_name(spans)["etlstage.stream"].status.status_code is StatusCode.UNSET


def test_stages_are_within_their_run(spans: InMemorySpanExporter) -> None:
    """The spans of the stages are children of the run's span."""

    async def main() -> None:
        stage = Stage(name="t", worker=("cat",))
        source, sink = MemorySource([[b"a"]]), MemorySink()
        launch = ScriptedLaunch(tell)
        await Pipeline(
            name="p", source=source, stages=[stage], sink=sink, launch=launch
        ).run()

    anyio.run(main)
    ended = by_name(spans)
    run, stream = ended["etlstage.run"], ended["etlstage.stream"]
    assert run.attributes == {"etlstage.pipeline": "p"}
    assert stream.parent is not None
    assert stream.parent.span_id == run.context.span_id


@pytest.mark.parametrize("end", ["stage", "letters"])
def test_failed_run_ends_its_span_as_one(
    spans: InMemorySpanExporter, tmp_path: Path, end: str
) -> None:
    """The error of its report is in the trace, once (issue 22)."""
    letters = None
    if end == "letters":
        (tmp_path / "letters").write_text("a file in place of the folder")
        letters = DeadLetters(tmp_path / "letters", pipeline="p")
    pipeline = Pipeline(
        name="p",
        source=MemorySource([[b"a", b"no"]]),
        stages=[Stage(name="t", worker=("cat",))],
        sink=MemorySink(),
        dead_letters=letters,
        launch=ScriptedLaunch(tell),
    )
    report = anyio.run(pipeline.run)
    assert report.status == "failed"
    run = by_name(spans)["etlstage.run"]
    assert run.status.status_code is StatusCode.ERROR
    assert run.status.description == str(report.error)
    assert [event.name for event in run.events] == ["exception"]


def test_run_that_is_not_settled_ends_its_span_as_failed(
    spans: InMemorySpanExporter, tmp_path: Path
) -> None:
    """Settling is a part of the run (issue 22)."""
    delivery = Delivery(tmp_path, exactly_once=True)
    delivery.at = stop_at("ended", 1)
    sink = MemoryEpochSink(MemoryEpochs())
    pipeline = Pipeline(name="p", source=Numbers(2, 1), sink=sink, delivery=delivery)
    report = anyio.run(pipeline.run)
    assert isinstance(report.error, Stopped)
    run = by_name(spans)["etlstage.run"]
    assert run.status.status_code is StatusCode.ERROR
    assert [event.name for event in run.events] == ["exception"]


@pytest.mark.parametrize("current", [True, False])
def test_error_of_a_block_is_recorded_once(
    spans: InMemorySpanExporter, *, current: bool
) -> None:
    """Even if the span is the current one (issue 22)."""
    with pytest.raises(ValueError, match="odd"), trace.Span("run", current=current):
        raise ValueError("odd")
    (span,) = spans.get_finished_spans()
    assert span.status.description == "odd"
    assert [event.name for event in span.events] == ["exception"]


def test_library_that_is_not_there_is_not_missed() -> None:
    """Without OpenTelemetry spans do nothing."""
    trace._tracer.cache_clear()
    try:
        with patch.dict("sys.modules", {"opentelemetry": None}):
            with trace.Span("submit", stage="t") as span:
                span.note(messages=3)
                span.fail(ValueError("odd"))
            assert not re.findall("TRACE", str(trace.current_trace()))
    finally:
        trace._tracer.cache_clear()
