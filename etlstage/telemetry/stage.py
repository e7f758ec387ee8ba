"""
The metrics of a stage, and when they change.

``docs/reference/metrics.md`` lists them with their labels, and has to match.

Gauges are moved by differences: those of stages with the same name add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from signal import Signals
from typing import Concatenate, Final, NamedTuple, ParamSpec

from etlstage.errors import FailureCause
from etlstage.telemetry.log import Log
from etlstage.telemetry.meter import Counter, Gauge, GaugeLevel, Histogram, Meter

__all__ = ("StageMetrics",)

_BOUNDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Bounds of buckets, in seconds: from a worker in C to the default deadline."""
_WORKERS: Final = 256
"""Most workers with labels of their own. An extract stage may start one every few
seconds, and a monitoring system keeps each series that it has ever seen."""
_NAMES: Final = 64
"""Most metrics that workers count themselves with labels of their own, likewise."""
_OTHERS: Final = "other"

_P = ParamSpec("_P")

_log = Log()


def _harmless(
    method: Callable[Concatenate[StageMetrics, _P], None],
) -> Callable[Concatenate[StageMetrics, _P], None]:
    """Do nothing without a meter; log the first exception that a meter raises."""

    @wraps(method)
    def guarded(self: StageMetrics, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if self._meter is None:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self._complain(error)

    return guarded


class StageMetrics:
    """
    Updates the metrics of one stage; never raises exceptions of the meter.

    Not thread-safe. Other stages may use the same meter in other threads if the meter
    is thread-safe.

    Args:
        meter: Receives the metrics; None: nothing is counted.
        stage: Name of the stage.

    """

    def __init__(self, meter: Meter | None, stage: str) -> None:
        self._meter = meter
        self._stage = stage
        self._complained = False
        self._workers: dict[str, _WorkerMetrics] = {}
        self._own: set[str] = set()  # names of metrics that workers count
        self._in_flight: dict[str, GaugeLevel] = {}
        self._mismatched: Mapping[str, int] = {}
        self._behind: dict[str, GaugeLevel] = {}
        self._leases: GaugeLevel | None = None
        self._bind()
        if self._complained:
            self._meter = None

    def __repr__(self) -> str:
        return f"<StageMetrics {self._stage!r} meter={self._meter!r}>"

    @_harmless
    def worker_started(self, worker: str) -> None:
        """Count a process that was started."""
        self._worker(worker).starts.add(1)

    @_harmless
    def restarted(self, worker: str) -> None:
        """Count a process that replaces another, in addition to its start."""
        self._worker(worker).restarts.add(1)

    @_harmless
    def worker_exited(self, worker: str, status: int) -> None:
        """Count a process that has exited; it has no messages in flight any more."""
        self._set_in_flight(worker, 0)
        self._rare(
            "etlstage_worker_exits_total",
            "Worker processes that have ended, by exit status or signal.",
            worker=worker,
            status=_name_of(status),
        )

    @_harmless
    def worker_failed(self, worker: str, cause: FailureCause) -> None:
        """Count a failure of a worker."""
        self._rare(
            "etlstage_worker_failures_total",
            "Worker failures, by reason.",
            worker=worker,
            reason=cause,
        )

    @_harmless
    def answered(
        self, worker: str, exchanges: int, messages: int, size: int, reply_size: int
    ) -> None:
        """
        Count exchanges whose outcomes were delivered together.

        Args:
            worker: Name of the worker that answered.
            exchanges: Number of exchanges.
            messages: Number of messages in all of them.
            size: Bytes of these messages.
            reply_size: Bytes of the answers, as read.

        """
        bound = self._worker(worker)
        bound.exchanges.add(exchanges)
        bound.messages.add(messages)
        bound.bytes_in.add(size)
        bound.bytes_out.add(reply_size)

    @_harmless
    def took(self, worker: str, seconds: float) -> None:
        """
        Observe how long an answer took.

        Args:
            worker: Name of the worker that gave it.
            seconds: From the turn of its exchange; of exchanges whose results are
                released together, of the first.

        """
        self._worker(worker).seconds.observe(seconds)

    @_harmless
    def retried(self, count: int) -> None:
        """Count messages that are given to another worker."""
        self._retried.add(count)

    @_harmless
    def failed(self, count: int) -> None:
        """Count messages that ended with an error."""
        self._failed.add(count)

    @_harmless
    def mismatched(self, found: Mapping[str, int]) -> None:
        """Count replies that broke ``expect``; ``found`` has all so far, by key."""
        for promise, count in found.items():
            if more := count - self._mismatched.get(promise, 0):
                self._counter(
                    "etlstage_mismatches_total",
                    "Replies that broke expect, by the first key that was broken.",
                    expect=promise,
                ).add(more)
        self._mismatched = dict(found)

    @_harmless
    def refused(self, worker: str, count: int) -> None:
        """Count exchanges that a worker has refused."""
        self._counter(
            "etlstage_refusals_total",
            "Exchanges that a worker refused.",
            worker=self._label(worker),
        ).add(count)

    @_harmless
    def count_own(self, worker: str, metric: str, count: int) -> None:
        """Add to a metric that a worker counts itself."""
        if len(self._own) < _NAMES:
            self._own.add(metric)
        self._counter(
            "etlstage_worker_counts_total",
            "Metrics counted by the workers themselves, by name.",
            worker=self._label(worker),
            metric=metric if metric in self._own else _OTHERS,
        ).add(count)

    @_harmless
    def waiting(self, count: int) -> None:
        """Set how many messages wait for a worker."""
        self._waiting.set(count)

    @_harmless
    def in_flight(self, worker: str, count: int) -> None:
        """Set how many messages a worker holds."""
        self._set_in_flight(worker, count)

    @_harmless
    def workers(self, running: int) -> None:
        """Set how many workers run."""
        self._running.set(running)

    @_harmless
    def stderr_lines(self, worker: str, count: int) -> None:
        """Count lines that a worker wrote to stderr."""
        self._worker(worker).stderr_lines.add(count)

    @_harmless
    def noise(self, worker: str, count: int) -> None:
        """Count lines of a worker's output that mean nothing in its dialect."""
        self._counter(
            "etlstage_noise_lines_total",
            "Ignored lines of output, which have no meaning in the dialect.",
            worker=self._label(worker),
        ).add(count)

    @_harmless
    def committed(self, worker: str, *, stored: bool) -> None:
        """Count a position that a worker asked to have stored."""
        self._rare(
            "etlstage_checkpoints_total",
            "Positions that workers committed, by outcome.",
            worker=worker,
            outcome="stored" if stored else "refused",
        )

    @_harmless
    def leases(self, count: int) -> None:
        """Set how many shards this runner has leases of."""
        if self._leases is None:
            what = "Shards whose leases a runner holds."
            self._leases = GaugeLevel(self._gauge("etlstage_leases_held", what))
        self._leases.set(count)

    @_harmless
    def behind(self, shard: str, seconds: float) -> None:
        """Set how far the reader of a shard lags behind the shard's end."""
        if (level := self._behind.get(shard)) is None:
            name = "etlstage_shard_behind_seconds"
            what = "How far the reader of a shard lags behind its end."
            level = self._behind[shard] = GaugeLevel(
                self._gauge(name, what, shard=shard)
            )
        level.set(seconds)

    @_harmless
    def close(self) -> None:
        """Remove our share from the gauges, as the stage has ended."""
        for worker in list(self._in_flight):
            self._set_in_flight(worker, 0)
        for level in (self._waiting, self._running, *self._behind.values()):
            level.set(0)
        if self._leases is not None:
            self._leases.set(0)

    @_harmless
    def _bind(self) -> None:
        self._retried = self._counter(
            "etlstage_messages_retried_total", "Messages given to another worker."
        )
        self._failed = self._counter(
            "etlstage_messages_failed_total", "Messages that ended with an error."
        )
        self._waiting = GaugeLevel(
            self._gauge("etlstage_messages_waiting", "Messages that wait for a worker.")
        )
        self._running = GaugeLevel(
            self._gauge("etlstage_workers_running", "Running workers.")
        )

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            # The host's log may be gone, too.
            with suppress(OSError, ValueError):
                _log.warning(
                    "metrics are incomplete: the meter failed",
                    stage=self._stage,
                    error=repr(error),
                )

    def _worker(self, worker: str) -> _WorkerMetrics:
        if bound := self._workers.get(worker):
            return bound
        worker = self._label(worker)
        if worker not in self._workers:
            self._workers[worker] = self._bind_worker(worker)
        return self._workers[worker]

    def _bind_worker(self, worker: str) -> _WorkerMetrics:
        def counter(name: str, description: str) -> Counter:
            return self._counter(f"etlstage_{name}_total", description, worker=worker)

        assert self._meter is not None
        return _WorkerMetrics(
            starts=counter("worker_starts", "Worker processes started."),
            restarts=counter(
                "worker_restarts",
                "Worker processes started to replace one that had ended.",
            ),
            exchanges=counter("exchanges", "Exchanges answered."),
            messages=counter("messages", "Messages answered."),
            bytes_in=counter("input_bytes", "Bytes of the messages answered."),
            bytes_out=counter("output_bytes", "Bytes of the answers, as read."),
            stderr_lines=counter("stderr_lines", "Lines that workers wrote to stderr."),
            seconds=self._meter.histogram(
                "etlstage_first_answer_seconds",
                "Seconds from an exchange's turn to its answer, for the first of those"
                " released together; etlstage_exchanges_total counts all of them.",
                self._labels(worker=worker),
                _BOUNDS,
            ),
        )

    def _set_in_flight(self, worker: str, count: int) -> None:
        level = self._in_flight.get(worker)
        if level is None:
            if not count:
                return
            name = "etlstage_messages_in_flight"
            label = self._label(worker)
            level = GaugeLevel(
                self._gauge(name, "Messages that workers hold.", worker=label)
            )
            self._in_flight[worker] = level
        level.set(count)

    def _rare(self, name: str, description: str, *, worker: str, **more: str) -> None:
        labels = {"worker": self._label(worker), **more}
        self._counter(name, description, **labels).add(1)

    def _counter(self, name: str, description: str, **labels: str) -> Counter:
        assert self._meter is not None
        return self._meter.counter(name, description, self._labels(**labels))

    def _gauge(self, name: str, description: str, **labels: str) -> Gauge:
        assert self._meter is not None
        return self._meter.gauge(name, description, self._labels(**labels))

    def _labels(self, **labels: str) -> dict[str, str]:
        return {"stage": self._stage, **labels}

    def _label(self, worker: str) -> str:
        known = worker in self._workers or len(self._workers) < _WORKERS
        return worker if known else _OTHERS


class _WorkerMetrics(NamedTuple):
    """The instruments of one worker."""

    starts: Counter
    restarts: Counter
    exchanges: Counter
    messages: Counter
    bytes_in: Counter
    bytes_out: Counter
    stderr_lines: Counter
    seconds: Histogram


def _name_of(status: int) -> str:
    """Return an exit status as a label."""
    try:
        return Signals(-status).name if status < 0 else str(status)
    except ValueError:
        return f"signal {-status}"  # a real-time one
