"""Reports events of the workers to the log, the meter and the host's listeners."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from etlstage.errors import Faults, WorkerFailure
from etlstage.messages import StageKind
from etlstage.stage.stage import Stage
from etlstage.supervisor.lifecycle.events import (
    RemainsEnded,
    StartFailed,
    SupervisorEvent,
    WorkerExited,
    WorkerFailed,
    WorkerFailedPermanently,
    WorkerReady,
    WorkerRestarting,
    WorkerSilent,
    WorkerStarted,
    WorkerWorn,
)
from etlstage.telemetry import StageMetrics
from etlstage.telemetry.log import Log

__all__ = ("Observers",)

_MOST: Final = 10_000  # events that wait for one listener; then its stream ends

_FAULTS: Final = 20  # last failures that are kept

_log = Log()


class Observers:
    """Publishes events of the workers of one stage; never fails."""

    def __init__(self, stage: Stage, metrics: StageMetrics | None) -> None:
        self.faults: Faults = Faults()
        self._stage = stage
        self._metrics = metrics
        self._listeners: list[MemoryObjectSendStream[SupervisorEvent]] = []
        self._failed: set[str] = set()  # workers whose failure was reported already
        # Workers whose next start replaces a lost one; other starts are for a new round
        # of extraction, or because there is more work.
        self._restarting: set[str] = set()
        self._in_step = False  # it was logged that the stage goes in lock-step
        # Silence was logged: of a worker that reports progress, of one that does not.
        self._silent: set[bool] = set()
        self._closed = False

    def listen(
        self, before: Iterable[SupervisorEvent]
    ) -> MemoryObjectReceiveStream[SupervisorEvent]:
        """Return a stream of the events ``before``, and of those from now on."""
        send, receive = anyio.create_memory_object_stream[SupervisorEvent](_MOST)
        for event in before:
            send.send_nowait(event)
        if self._closed:
            send.close()
        else:
            self._listeners.append(send)
        return receive

    def publish(self, event: SupervisorEvent, *, alive: int) -> None:
        """Log, count and pass on an event; ``alive`` workers have a process."""
        given_up = isinstance(event, WorkerExited) and event.worker in self._failed
        if isinstance(event, WorkerFailed):
            self._failed.add(event.worker)
        elif isinstance(event, WorkerExited):
            self._failed.discard(event.worker)
        elif isinstance(event, WorkerRestarting):
            self._restarting.add(event.worker)
        self._remember(event, given_up=given_up)
        if self._metrics is not None:
            self._metrics.workers(alive)
            self._count(event, self._metrics, given_up=given_up)
        if isinstance(event, WorkerStarted):
            self._restarting.discard(event.worker)
        # The host's log may be unwritable; workers are stopped all the same.
        with suppress(Exception):
            self._record(event, given_up=given_up)
        for listener in self._listeners:
            # Broken if the reader has closed its end, full if it does not read.
            try:
                listener.send_nowait(event)
            except (anyio.BrokenResourceError, anyio.WouldBlock):
                listener.close()
                self._listeners = [x for x in self._listeners if x is not listener]

    def warn_of_unkeyed(self, count: int, key: str | None) -> None:
        """Log that messages had nothing where their key should be."""
        with suppress(Exception):
            _log.warning(
                "messages without a key were kept in order by one worker",
                stage=self._stage.name,
                key=key,
                messages=count,
            )

    def close(self) -> None:
        """End the streams, and remove our share from the gauges; safe to call twice."""
        self._closed = True
        if self._metrics is not None:
            self._metrics.close()
        for listener in self._listeners:
            listener.close()
        self._listeners = []

    def _remember(self, event: SupervisorEvent, *, given_up: bool) -> None:
        restarts, failures, last = self.faults
        match event:
            case WorkerStarted(worker):
                again = worker in self._restarting
                self.faults = self.faults._replace(restarts=restarts + again)
                return
            case WorkerFailed(error=error) | StartFailed(error=error):
                what = str(error)
            case WorkerExited() if self._died(event) and not given_up:
                what = event.fate
            case _:
                return
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        last = (*last, WorkerFailure(time, event.worker, what))[-_FAULTS:]
        self.faults = Faults(restarts, failures + 1, last)

    def _record(self, event: SupervisorEvent, *, given_up: bool) -> None:
        log = _log.bind(stage=self._stage.name)
        match event:
            case WorkerFailed(error=error, cause=cause):
                log.warning("worker failed", error=str(error))
                if cause == "pairing" and not self._in_step:
                    self._in_step = True
                    log.warning(
                        "stage continues one message at a time",
                        reason="replies can't be matched to messages; see: etlstage help pairing",
                    )
            case StartFailed(worker, error):
                log.warning(
                    "worker could not be started", worker=worker, error=str(error)
                )
            case WorkerFailedPermanently(error=error):
                log.error("worker failed permanently", error=str(error))
            case WorkerStarted(worker, pid, start):
                log.debug("worker started", worker=worker, pid=pid, start=start)
            case WorkerReady(worker, pid):
                log.debug("worker is ready", worker=worker, pid=pid)
            case WorkerWorn(worker, reason):
                log.debug("worker is to be replaced", worker=worker, reason=reason)
            case WorkerExited() if given_up or not self._died(event):
                log.debug(
                    "worker exited",
                    worker=event.worker,
                    pid=event.pid,
                    exit=event.fate,
                    by_itself=not (given_up or event.stopped),
                    in_flight=event.lost,
                    answered=event.answered,
                )
            case WorkerExited():
                log.warning(
                    "worker exited",
                    worker=event.worker,
                    pid=event.pid,
                    **({"cause": event.cause} if event.cause else {}),
                    exit=event.fate,
                    # The loss of an extractor shows in no outcome of a message.
                    in_flight=0
                    if self._stage.kind is StageKind.EXTRACT
                    else event.lost,
                    answered=event.answered,
                )
            case WorkerSilent() if event.progressing not in self._silent:
                self._silent.add(event.progressing)
                log.warning(
                    "worker has not answered",
                    worker=event.worker,
                    pid=event.pid,
                    seconds=round(event.seconds),
                    hint=event.hint,
                )
            case RemainsEnded():
                log.warning(
                    "worker left processes behind",
                    worker=event.worker,
                    pid=event.pid,
                    killed=event.killed,
                    dropped_bytes=event.late,
                )
            case WorkerRestarting(worker, delay):
                log.info("worker is restarted", worker=worker, seconds=round(delay, 3))

    def _count(
        self, event: SupervisorEvent, metrics: StageMetrics, *, given_up: bool
    ) -> None:
        match event:
            case WorkerStarted(worker):
                metrics.worker_started(worker)
                if worker in self._restarting:
                    metrics.restarted(worker)
            case StartFailed(worker):
                metrics.worker_failed(worker, "start")
            case WorkerFailed(worker, cause=cause):
                metrics.worker_failed(worker, cause)
            case WorkerExited(worker):
                metrics.worker_exited(worker, event.status)
                metrics.retried(event.retried)
                if self._died(event) and not given_up:
                    metrics.worker_failed(worker, "died")

    def _died(self, event: WorkerExited) -> bool:
        return self._stage.dialect.failed(
            event.status, stopped=event.stopped, held=event.lost
        )
