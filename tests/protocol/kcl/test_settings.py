"""The settings of dialect ``kcl``, and what others ask of the dialect."""

from __future__ import annotations

import pytest

from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.protocol.base import Limits, Shape, Side
from etlstage.protocol.events import Assignment
from etlstage.protocol.kcl import KclSession, ProcessorSession, Version
from etlstage.protocol.kcl.settings import KclDialect


def test_settings_survive_json() -> None:
    """Dead letters and recordings store them as JSON."""
    dialect = KclDialect(
        version=Version.V1, max_line=5, max_uncommitted=6, commit_overdue=7.0
    )

    assert KclDialect.from_plain(dialect.plain()) == dialect
    assert KclDialect.from_plain(KclDialect().plain()) == KclDialect()
    assert KclDialect().plain()["version"] == "v2"


def test_settings_are_read_as_they_are_written() -> None:
    """By their names, with units."""
    section = KclDialect.section(StageKind.LOAD)

    assert set(section.keys) == {
        *("version", "max_line", "max_uncommitted", "max_uncommitted_bytes"),
        *("commit_overdue", "empty_after"),
    }
    assert section.read({"version": "2014", "max_line": "1MiB"}) == KclDialect(
        version=Version.LEGACY, max_line=1024 * 1024
    )


def test_unknown_version_is_refused() -> None:
    """The error names the setting."""
    with pytest.raises(ConfigError, match="version"):
        KclDialect(version="v3")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [StageKind.EXTRACT, StageKind.TRANSFORM])
def test_record_processors_only_load(kind: StageKind) -> None:
    """They emit only the protocol; the error names the dialect to use instead."""
    problem = KclDialect().problem(kind)

    assert problem is not None
    assert kind.value in problem
    assert "marker" in problem
    assert KclDialect().problem(StageKind.LOAD) is None


def test_sessions_of_both_sides() -> None:
    """With the settings; a supervisor begins at the shard's position."""
    dialect = KclDialect(version=Version.V2, max_uncommitted=3)
    ours = dialect.open(
        Side.SUPERVISOR, Limits(), batch=2, assignment=Assignment("s-1", ["5", 0])
    )

    assert isinstance(ours, KclSession)
    assert b'"s-1","sequenceNumber":"5"' in b"".join(ours.data_to_send())
    assert isinstance(dialect.open(Side.WORKER, Limits()), ProcessorSession)


def test_position_of_something_else_is_refused() -> None:
    """With the shard's name, before a process is started."""
    with pytest.raises(ConfigError, match="shard s-1: 5 is not a position in a shard"):
        KclDialect().open(
            Side.SUPERVISOR, Limits(), assignment=Assignment("s-1", position=5)
        )


def test_what_others_are_given() -> None:
    """The shape of exchanges, and descriptions of failures."""
    dialect = KclDialect()

    assert dialect.shape is Shape.COMMITTED
    assert dialect.announces
    assert dialect.fitted(batches=False, heartbeat=None) == dialect
    assert "does it flush" in dialect.silence(0)
    assert "wrote 5 bytes without a status" in dialect.silence(5)
    assert (
        dialect.silence(0, ready=False)
        == "it wrote nothing instead of its status for initialize"
    )
    assert "wrote 5 bytes" in dialect.silence(5, ready=False)
    assert dialect.failed(0, stopped=False, held=0)
    assert not dialect.failed(0, stopped=True, held=0)
