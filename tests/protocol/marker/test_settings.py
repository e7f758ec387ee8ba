from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from etlstage.columns import Column
from etlstage.messages import StageKind
from etlstage.protocol.base import Limits, Shape, Side
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.protocol.registry import dialect_from_plain
from etlstage.settings.problem import Invalid
from tests.protocol.words import BatchEnd, Messages, tell

ODD = MarkerDialect(
    mode=Mode.BATCH_SUPERVISOR,
    markers=Markers(eom=b"<m>", eop=b"\0\xff"),
    eob_then_eom=True,
    bnc_after_last=True,
)

COUNTING = MarkerDialect(mode=Mode.BATCH_SUPERVISOR, eob_after_full=False)


@pytest.mark.parametrize("mode", Mode)
def test_each_mode_has_a_shape(mode: Mode) -> None:
    """Nothing above the dialect need know the mode."""
    shape = MarkerDialect(mode=mode).shape
    assert shape.batches == mode.batches
    assert (shape is Shape.STREAM) == (mode is Mode.PLAIN)
    assert (shape is Shape.ASKED_BATCH) == (mode is Mode.BATCH_WORKER)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("kind", StageKind)
def test_modes_of_extraction_fit_extract_stages_alone(
    mode: Mode, kind: StageKind
) -> None:
    """All other modes fit the stages that are fed."""
    fits = MarkerDialect(mode=mode).problem(kind) is None
    assert fits == (mode.extracts == (kind is StageKind.EXTRACT))


@pytest.mark.parametrize(
    ("given", "mode"),
    [({}, Mode.PLAIN), ({"mode": "cyclic"}, Mode.CYCLIC)],
)
def test_extraction_has_a_mode(given: dict[str, object], mode: Mode) -> None:
    """Plain by default."""
    read = MarkerDialect.section(StageKind.EXTRACT).read(given)
    assert read == MarkerDialect(mode=mode)


def test_mode_follows_whether_there_are_batches() -> None:
    """The worker closes batches where so configured, otherwise the supervisor."""
    for mode in (Mode.SINGLE, Mode.BATCH_WORKER):
        dialect = MarkerDialect(mode=mode)
        assert dialect.fitted(batches=False, heartbeat=None).mode is Mode.SINGLE
        fitted = dialect.fitted(batches=True, heartbeat=None).mode
        assert fitted is (mode if mode.batches else Mode.BATCH_SUPERVISOR)


def test_session_has_the_settings() -> None:
    """Settings of the dialect, and limits of the stage."""
    session = ODD.open(Side.SUPERVISOR, Limits(max_message_bytes=3))
    tell(session, Messages([b"abc"]))
    assert session.data_to_send() == [b"abc<m>"]
    assert session.mode is Mode.BATCH_SUPERVISOR


def test_session_frames_messages_as_they_are_held() -> None:
    """A column is framed in bulk, with the same bytes as a list."""
    session = ODD.open(Side.SUPERVISOR, Limits())
    tell(session, Messages(Column(pa.array([b"a", b"b"], pa.binary()))))
    tell(session, Messages([b"c"]))
    assert b"".join(session.data_to_send()) == b"a<m>b<m>c<m>"


def test_worker_is_given_the_markers_and_the_mode() -> None:
    """Markers are escaped; what is as usual is not given."""
    assert ODD.variables() == {
        "eom": "<m>",
        "eop": r"\000\377",
        "eob": r"\027",
        "bnc": r"\005",
        "err": r"\025",
        "mode": "supervisor-driven batch",
        "eob_then_eom": "true",
        "bnc_after_eob": None,
        "eob_after_full": None,
        "bnc_after_last": None,
    }


@pytest.mark.parametrize("eob_then_eom", [False, True])
@pytest.mark.parametrize("mode", Mode)
def test_worker_is_given_what_is_unusual_in_its_mode(
    mode: Mode, eob_then_eom: bool
) -> None:
    """An EOM after EOB, a BNC for that, and how a full batch ends (issue 22)."""
    dialect = MarkerDialect(
        mode=mode,
        eob_then_eom=eob_then_eom,
        eob_after_full=False,
        bnc_after_last=True,
    )
    given = {name for name, text in dialect.variables().items() if text is not None}
    after_eob = {"eob_then_eom"} if eob_then_eom else set()
    answer = {"bnc_after_eob"} if eob_then_eom else set()
    wanted = {
        Mode.BATCH_SUPERVISOR: {"eob_after_full"} | after_eob,
        Mode.BATCH_WORKER: {"bnc_after_last"} | after_eob | answer,
    }
    assert given - {"eom", "eop", "eob", "bnc", "err", "mode"} == wanted.get(
        mode, set()
    )
    silent = replace(dialect, bnc_after_eob=False)
    assert silent.variables()["bnc_after_eob"] is None


def test_silence_names_the_marker_that_lacks() -> None:
    """Or that nothing was written at all."""
    assert ODD.silence(12) == (
        r"it wrote 12 bytes without the marker eop '\000\377' after its reply"
        "; if it answers each message with one, set eop to '<m>'"
    )
    lines = MarkerDialect(markers=Markers(eop=b"\n")).silence(12)
    assert lines == r"it wrote 12 bytes without the marker eop '\012' after its reply"
    assert "flush" in ODD.silence(0)


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ({}, ""),
        (
            {"eob_then_eom": True},
            "; if it reads EOB and EOM as one, set bnc_after_eob to false",
        ),
        ({"eob_then_eom": True, "bnc_after_eob": False}, ""),
        (
            {"bnc_after_last": True},
            "; batch.size must be the size at which it ends a batch",
        ),
    ],
)
def test_silence_of_a_worker_that_asks(flags: dict[str, Any], remedy: str) -> None:
    """Its BNC count, and its remedies are those of its batches (issue 22)."""
    dialect = MarkerDialect(mode=Mode.BATCH_WORKER, **flags)
    assert dialect.silence(2) == (
        "it wrote 2 bytes, BNC included, without the marker eop '\\000' after its"
        f" reply{remedy}"
    )


def test_settings_survive_as_json_and_as_a_pickle() -> None:
    """Dead letters store them, and executors get them."""
    plain = json.loads(json.dumps(ODD.plain()))
    assert dialect_from_plain(plain) == ODD
    assert pickle.loads(pickle.dumps(ODD)) == ODD  # noqa: S301 - our own


def test_worker_that_counts_gets_no_eob_behind_a_full_batch() -> None:
    """A batch that is not full still ends with it."""
    session = COUNTING.open(Side.SUPERVISOR, Limits(), batch=2)
    for run in ([b"a", b"b"], [b"a"], []):
        tell(session, Messages(run)) if run else None
        tell(session, BatchEnd())
    assert b"".join(session.data_to_send()) == b"a\nb\na\n\x17\x17"


def test_keys_of_a_batch_belong_to_who_closes_it() -> None:
    """Each setting applies to one driver only."""

    def wrong(driver: Mode, **given: bool) -> list[str]:
        keys = {"driver": driver, **given}
        try:
            MarkerDialect.section(StageKind.TRANSFORM).read(keys)
        except Invalid as error:
            return [problem.text for problem in error.problems]
        return []

    assert wrong(Mode.BATCH_WORKER, bnc_after_last=True) == []
    assert wrong(Mode.BATCH_WORKER, eob_then_eom=True, bnc_after_eob=False) == []
    assert wrong(Mode.BATCH_WORKER, bnc_after_eob=False) == ["needs eob_then_eom: true"]
    assert wrong(Mode.BATCH_SUPERVISOR, eob_after_full=False) == []
    assert wrong(Mode.BATCH_SUPERVISOR, bnc_after_last=True) == ["needs driver: worker"]
    assert wrong(Mode.BATCH_SUPERVISOR, bnc_after_eob=False) == ["needs driver: worker"]
    assert wrong(Mode.BATCH_WORKER, eob_after_full=False) == [
        "needs driver: supervisor"
    ]


@pytest.mark.parametrize(
    "mode", [Mode.SINGLE, Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER]
)
def test_stage_without_batches_has_one_message_at_a_time(mode: Mode) -> None:
    """Whoever drove the batches; an extracting worker has none anyway."""
    fitted = MarkerDialect(mode=mode).fitted(batches=False, heartbeat=None)
    assert fitted == MarkerDialect()
    plain = MarkerDialect(mode=Mode.PLAIN)
    assert plain.fitted(batches=False, heartbeat=None) == plain
