"""What a simulated daemon shows of a processor."""

from __future__ import annotations

from etlstage.protocol.kcl.settings import KclDialect
from etlstage.testing.dialect import kit_of
from etlstage.testing.kcl_daemon import _ConversationPrinter
from etlstage.testing.transcript import Channel


def test_a_line_on_stderr_is_shown_whole() -> None:
    """However many writes it took; what is left is shown at the next event."""
    shown: list[str] = []
    log = _ConversationPrinter(kit_of(KclDialect()).reader(), shown.append, "")
    for piece in (b"1", b" ", b"one\n2 two\n", b"3"):
        log.add(Channel.STDERR, piece)
    assert shown == ["! 1 one", "! 2 two"]
    log.add(Channel.EVENT, b"exited with status 0")
    assert shown[2:] == ["! 3", "- exited with status 0"]
