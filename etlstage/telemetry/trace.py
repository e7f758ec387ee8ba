"""
Spans, if OpenTelemetry's API is installed, and the trace in a worker's environment.

OpenTelemetry as set up by the host is used: there is nothing to pass in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

__all__ = ("Span", "current_trace")

_VARIABLES: Final = ("TRACEPARENT", "TRACESTATE")


class Span:
    """
    A span for a block, a child of the current one; an exception marks it as failed.

    Without OpenTelemetry, it does nothing.

    Args:
        name: Name of the span, without ``etlstage.``.
        current: Whether it is the current span within the block. Not for a block that
            yields: it would replace the current span of other code.
        attributes: Attributes of the span, likewise without ``etlstage.``.

    """

    def __init__(self, name: str, *, current: bool = False, **attributes: str) -> None:
        tracer = _tracer()
        self._span = None if tracer is None else tracer.start_span(f"etlstage.{name}")
        self._within: AbstractContextManager[object] | None = None
        if current and self._span is not None:
            from opentelemetry.trace import use_span

            self._within = use_span(
                self._span, record_exception=False, set_status_on_exception=False
            )
        self.note(**attributes)

    def note(self, **counts: int | str) -> None:
        """Add attributes to the span; names are prefixed with ``etlstage.``."""
        # Most spans are not recorded, as the host has set up nothing.
        if self._span is not None and self._span.is_recording():
            for name, value in counts.items():
                self._span.set_attribute(f"etlstage.{name}", value)

    def fail(self, error: Exception) -> None:
        """Mark the span as failed, with an error that its block does not raise."""
        if self._span is not None and self._span.is_recording():
            from opentelemetry.trace import Status, StatusCode

            self._span.record_exception(error)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))

    def __enter__(self) -> Self:
        """Begin the block."""
        if self._within is not None:
            self._within.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the span."""
        if self._span is None:
            return
        if self._within is not None:
            self._within.__exit__(kind, error, trace)
        if isinstance(error, Exception):
            self.fail(error)
        self._span.end()


def current_trace() -> Mapping[str, str]:
    """
    Return the environment variables that pass the current trace on to a process.

    They are those of the current span or, where there is none, those that this process
    inherited, as `W3C Trace Context <https://www.w3.org/TR/trace-context/>`_ has them.
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


@cache
def _tracer() -> Tracer | None:
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace.get_tracer("etlstage")
