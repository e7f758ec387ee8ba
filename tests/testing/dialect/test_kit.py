"""Dialects of other packages, without a kit and with a kit of their own."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from etlstage.errors import ConfigError
from etlstage.protocol.base import Side
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.testing.dialect import GROUP, DialectKit, kit_of
from etlstage.testing.dialect.marker import MarkerKit
from tests.packages import install
from tests.supervisor.toy import ToyDialect

pytestmark = pytest.mark.core


class Loud(DialectKit[ToyDialect]):
    """A kit for the toy dialect, as another package would have it."""

    def shown(self, data: bytes) -> str:
        """Return the bytes in capitals."""
        return data.upper().decode()


def test_dialect_without_a_kit_has_a_plain_one() -> None:
    """Bytes are shown escaped, and a conversation is one piece (issue 22)."""
    kit = kit_of(ToyDialect())

    assert type(kit) is DialectKit
    assert kit.shown(b"x\0\n") == r"x\x00\n"
    assert kit.reader() is None
    assert kit.unsolicited(b"\n") == r"wrote unsolicited output: \n"
    assert kit.cut(Side.WORKER, b"x\n") == [b"x\n"]
    assert kit.exchanges(Side.WORKER, b"x\n") == [b"x\n"]
    assert kit.exchanges(Side.WORKER, b"") == []
    assert (
        kit.raw([b"a"]) == b'["open", 1, [{"hex": "61"}], false, true, "transform"]\n'
    )


def test_kit_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point names it, as for dialects; built-in ones come first (issue 22)."""
    points = [
        EntryPoint("toy", f"{__name__}:Loud", GROUP),
        EntryPoint("marker", f"{__name__}:Loud", GROUP),
    ]
    monkeypatch.setattr(
        "importlib.metadata.entry_points",
        lambda group, name=None: [
            p for p in points if p.group == group and name in (None, p.name)
        ],
    )
    assert kit_of(ToyDialect()).shown(b"a") == "A"
    assert isinstance(kit_of(MarkerDialect()), MarkerKit)
    points[0] = EntryPoint("toy", f"{__name__}:ToyDialect", GROUP)
    with pytest.raises(ConfigError, match="expected a DialectKit of that name"):
        kit_of(ToyDialect())


def test_broken_kit_of_another_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the entry point, its package and the cause (issue 23)."""
    install(tmp_path, "theirs", GROUP, toy="tests.no_such_module:Loud")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        kit_of(ToyDialect())
    assert str(caught.value).startswith(
        f"entry point toy of group {GROUP} (theirs 1.0): can't load"
        " tests.no_such_module:Loud: ModuleNotFoundError"
    )
