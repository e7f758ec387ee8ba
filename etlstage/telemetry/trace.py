"""
Spans, where OpenTelemetry's API is installed, and the trace that workers get in their environment.

A host that has set up OpenTelemetry has set up us: there is nothing to pass on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OpenTelemetrySpan
    from opentelemetry.trace import Tracer

__all__ = ("Span", "current_trace", "span")

_VARIABLES: Final = ("TRACEPARENT", "TRACESTATE")


class Span:
    """Something that takes time; without OpenTelemetry, nothing is kept of it."""

    def __init__(self, span: OpenTelemetrySpan | None = None) -> None:
        self._span = span

    def note(self, **counts: int | str) -> None:
        """Say more about it; names are put behind ``etlstage.``."""
        if self._span is not None:
            for name, value in counts.items():
                self._span.set_attribute(f"etlstage.{name}", value)


@contextmanager
def span(name: str, *, current: bool = False, **attributes: str) -> Iterator[Span]:
    """
    Have a span for a block, within that of who runs it; an error ends it as one.

    Args:
        name: Of the span, without ``etlstage.``.
        current: Whether what the block does is within it. Not for a block that
            yields: it would be taken from others.
        attributes: Likewise, without ``etlstage.``.

    """
    tracer = _tracer()
    if tracer is None:
        yield Span()
        return
    from opentelemetry.trace import use_span

    started = tracer.start_span(f"etlstage.{name}")
    span = Span(started)
    span.note(**attributes)
    try:
        if current:
            with use_span(started):
                yield span
        else:
            yield span
    except Exception as error:
        _fail(started, error)
        raise
    finally:
        started.end()


def current_trace() -> Mapping[str, str]:
    """
    Return the environment variables that tell a process which trace it belongs to.

    They are those of the current span or, where there is none, what this process was
    given itself: `W3C Trace Context <https://www.w3.org/TR/trace-context/>`_.
    """
    inherited = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    if _tracer() is None:
        return inherited
    from opentelemetry.trace.propagation.tracecontext import (
        TraceContextTextMapPropagator,
    )

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return {name.upper(): value for name, value in carrier.items()} or inherited


def _fail(started: OpenTelemetrySpan, error: Exception) -> None:
    from opentelemetry.trace import Status, StatusCode

    if started.is_recording():
        started.record_exception(error)
        started.set_status(Status(StatusCode.ERROR, str(error)))


@cache
def _tracer() -> Tracer | None:
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace.get_tracer("etlstage")
