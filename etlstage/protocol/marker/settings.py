"""
The settings of dialect ``marker``, and its implementation of ``Dialect``.

Workers do not import this file: dataclasses take longer to import than the dialect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Self

from etlstage.messages import Run, StageKind, counted
from etlstage.protocol.base import Dialect, Limits, Shape, Side
from etlstage.protocol.marker.blocks import Terms, Window
from etlstage.protocol.marker.framing import LISTS, ByteFraming
from etlstage.protocol.marker.markers import Markers, escape
from etlstage.protocol.marker.protocol import MarkerProtocol
from etlstage.protocol.marker.state import Mode
from etlstage.settings.definition import (
    Definition,
    Section,
    Setting,
    broken,
    settings_of,
)
from etlstage.settings.kind import Choice, Maybe, Text
from etlstage.settings.problem import Problem

__all__ = ("MarkerDialect",)

_SHAPES: Final = {
    Mode.PLAIN: Shape.STREAM,
    Mode.CYCLIC: Shape.MESSAGE,
    Mode.SINGLE: Shape.MESSAGE,
    Mode.BATCH_SUPERVISOR: Shape.BATCH,
    Mode.BATCH_WORKER: Shape.ASKED_BATCH,
}
_EXTRACTING: Final = {"plain": Mode.PLAIN, "cyclic": Mode.CYCLIC}
_DRIVEN: Final = {"worker": Mode.BATCH_WORKER, "supervisor": Mode.BATCH_SUPERVISOR}

_MEANINGS: Final = (
    "End of message",
    "End of process: ends a reply",
    "End of batch",
    "Batch not complete: the worker requests one more message",
    "Error: ends a refusal, after its reason; null: workers can't refuse",
)
_MARKERS: Final = {
    name: Setting(
        name,
        Maybe(Text()) if name == "err" else Text(),
        default=default,
        doc=f"{meaning}.",
    )
    for (name, default), meaning in zip(
        Markers().to_text().items(), _MEANINGS, strict=True
    )
}

_SECTION: Final = Section(
    _MARKERS, lambda given: Markers.from_text(**given), model=Markers
)


@dataclass(frozen=True, kw_only=True)
class MarkerDialect(Definition, Dialect):
    """The stage protocol with EOM, EOP, EOB, BNC and ERR."""

    name: ClassVar[str] = "marker"
    label: ClassVar[tuple[str, ...]] = ("dialect",)
    mode: Mode = Mode.SINGLE
    """Scenario of the protocol that the stage follows."""
    markers: Annotated[Markers, _SECTION] = field(default_factory=Markers)
    r"""What ends a message, a reply and a batch; ``\n``, ``\0``, ``\xHH`` and the like
    are read."""
    eob_then_eom: bool = False
    """Whether EOM is written after EOB, for workers that see EOB only with the next
    EOM."""
    bnc_after_eob: bool = True
    """Whether the worker takes the EOM after EOB for an empty message, and answers it
    with BNC; false for workers that read EOB and EOM as one."""
    bnc_after_last: bool = False
    """Whether the worker writes BNC also after the last message of a full batch."""
    eob_after_full: bool = True
    """Whether EOB is written also after a full batch; false for workers that count
    messages themselves."""

    @classmethod
    def section(cls, kind: StageKind) -> Section:
        """Return the section that reads the markers and the mode in one mapping."""
        own = settings_of(cls)
        if kind is StageKind.EXTRACT:
            mode = own["mode"]._replace(
                kind=Choice("mode", _EXTRACTING),
                default=Mode.PLAIN,
                doc="When the worker writes: once, until it exits (plain), or in reply to each"
                " request (cyclic).",
            )
            return Section({**_MARKERS, "mode": mode}, partial(cls._read, Mode.PLAIN))
        driver = own["mode"]._replace(
            kind=Choice("driver", _DRIVEN),
            default=Mode.BATCH_SUPERVISOR,
            doc="What closes a batch: the supervisor, or the worker, which requests each"
            " message.",
        )
        flags = ("eob_then_eom", "bnc_after_eob", "bnc_after_last", "eob_after_full")
        return Section(
            {**_MARKERS, "driver": driver, **{name: own[name] for name in flags}},
            partial(cls._read, Mode.SINGLE),
            rules=_batch_rules,
        )

    @classmethod
    def _read(cls, mode: Mode, given: Mapping[str, Any]) -> Self:
        """Return the dialect with the settings given; ``mode`` is the default mode."""
        markers = {name: given[name] for name in _MARKERS if name in given}
        others = {name: given[name] for name in given if name not in _MARKERS}
        # A driver "supervisor" does not mean that the stage has batches.
        if others.pop("driver", None) is Mode.BATCH_WORKER:
            mode = Mode.BATCH_WORKER
        mode = others.pop("mode", mode)
        return cls(mode=mode, markers=Markers.from_text(**markers), **others)

    def fitted(self, *, batches: bool, heartbeat: float | None) -> Self:
        """Return the settings with the mode for a stage with or without batches."""
        if batches and self.mode is Mode.SINGLE:
            return replace(self, mode=Mode.BATCH_SUPERVISOR)
        if self.shape.batches and not batches:
            return replace(self, mode=Mode.SINGLE)
        return self

    @property
    def shape(self) -> Shape:
        return _SHAPES[self.mode]

    def open(
        self,
        side: Side,
        limits: Limits,
        *,
        batch: int = 1,
        kind: StageKind = StageKind.TRANSFORM,
        window: int | None = None,
        life: float | None = None,
        **_others: object,
    ) -> MarkerProtocol:
        """Return a fresh session; with ``life``, replies are proven."""
        ours, alone = side is Side.SUPERVISOR, kind is not StageKind.TRANSFORM
        ahead = terms = None
        if ours and self.mode not in (Mode.PLAIN, Mode.BATCH_WORKER):
            ahead = Window(1 if alone and window is None else window)
        if ours and life is not None and self.mode is not Mode.PLAIN:
            loads = kind is StageKind.LOAD
            terms = Terms(first=window or 1, life=life, alone=alone, loads=loads)
        return MarkerProtocol(
            side,
            self.mode,
            self.markers,
            limits=limits,
            eob_then_eom=self.eob_then_eom,
            bnc_after_eob=self.bnc_after_eob,
            eob_after_full=self.eob_after_full,
            bnc_after_last=self.bnc_after_last,
            batch=batch,
            framing_of=_framing_of,
            window=ahead,
            terms=terms,
        )

    def variables(self) -> Mapping[str, str | None]:
        """Return the markers, escaped, the mode, and what differs from the defaults."""
        eob_then_eom = self.eob_then_eom and self.shape.batches
        echoes = eob_then_eom and self.mode is Mode.BATCH_WORKER and self.bnc_after_eob
        counts = self.mode is Mode.BATCH_SUPERVISOR and not self.eob_after_full
        vain = self.mode is Mode.BATCH_WORKER and self.bnc_after_last
        return {
            **self.markers.to_text(),
            "mode": self.mode.value,
            "eob_then_eom": "true" if eob_then_eom else None,
            "bnc_after_eob": "true" if echoes else None,
            "eob_after_full": "false" if counts else None,
            "bnc_after_last": "true" if vain else None,
        }

    def silence(self, received: int, *, ready: bool = True) -> str:
        if not received:
            return (
                "it wrote nothing; does it flush its output after each reply?"
                " see: etlstage help write-a-worker"
            )
        wrote = counted(received, "byte")
        if self.mode is Mode.BATCH_WORKER:
            wrote += ", BNC included,"
        return (
            f"it wrote {wrote} without the marker eop '{escape(self.markers.eop)}'"
            f" after its reply{self._remedy()}"
        )

    def _remedy(self) -> str:
        """Return what to try if a worker writes something, but no EOP."""
        markers = self.markers
        if self.mode is Mode.BATCH_WORKER:
            if self.eob_then_eom and self.bnc_after_eob:
                return "; if it reads EOB and EOM as one, set bnc_after_eob to false"
            if self.bnc_after_last:
                return "; batch.size must be the size at which it ends a batch"
            return ""
        if markers.eop == markers.eom:
            return ""
        eom = escape(markers.eom)
        return f"; if it answers each message with one, set eop to '{eom}'"

    def problem(self, kind: StageKind) -> str | None:
        """Return why the mode does not fit a stage of that kind."""
        if (self.mode in (Mode.PLAIN, Mode.CYCLIC)) == (kind is StageKind.EXTRACT):
            return None
        return f"mode {self.mode.value} does not fit kind {kind.value}"

    def plain(self) -> dict[str, object]:
        return {
            "name": self.name,
            "mode": self.mode.value,
            "markers": self.markers.to_text(),
            "eob_then_eom": self.eob_then_eom,
            "bnc_after_eob": self.bnc_after_eob,
            "bnc_after_last": self.bnc_after_last,
            "eob_after_full": self.eob_after_full,
        }


def _batch_rules(given: Mapping[str, Any]) -> Iterable[Problem]:
    """Yield the contradictions between settings for batches."""
    asked = given.get("driver") is Mode.BATCH_WORKER
    wanted = given.get("bnc_after_last", False) is not False
    if wanted and not asked:
        yield broken(("bnc_after_last",), "needs driver: worker")
    if given.get("bnc_after_eob") is False:
        if not asked:
            yield broken(("bnc_after_eob",), "needs driver: worker")
        elif not given.get("eob_then_eom"):
            yield broken(("bnc_after_eob",), "needs eob_then_eom: true")
    if given.get("eob_after_full") is False and asked:
        yield broken(("eob_after_full",), "needs driver: supervisor")


def _framing_of(messages: Run) -> ByteFraming:
    if isinstance(messages, list):
        return LISTS
    # All other runs are made with PyArrow, so it is installed.
    from etlstage.protocol.marker.columnar import framing_of

    return framing_of(messages)
